/* Copies of boxes between devices, and copies in batches. */
#include "array.h"

static CUresult copy_peer(const CUDA_MEMCPY3D_PEER *p, CUstream stream, bool wait) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(p->srcContext) && context_valid(p->dstContext), CUDA_ERROR_INVALID_CONTEXT);
    struct copy_side from = {p->srcMemoryType, p->srcHost,     p->srcDevice, p->srcArray, p->srcPitch,
                             p->srcHeight,     p->srcXInBytes, p->srcY,      p->srcZ};
    struct copy_side to = {p->dstMemoryType, p->dstHost,     p->dstDevice, p->dstArray, p->dstPitch,
                           p->dstHeight,     p->dstXInBytes, p->dstY,      p->dstZ};
    return copy_box(&from, &to, p->WidthInBytes, p->Height, p->Depth, stream, wait);
}

CUresult CUDAAPI cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *p) {
    ENTER(cuMemcpy3DPeer);
    return copy_peer(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *p, CUstream stream) {
    ENTER(cuMemcpy3DPeerAsync);
    return copy_peer(p, stream, false);
}

static CUresult copy_batch(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t count,
                           size_t *failed, CUstream handle) {
    struct CUstream_st *s;
    if (failed != NULL)
        *failed = SIZE_MAX;
    REQUIRE(to != NULL && from != NULL && sizes != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS && !s->legacy, rc != CUDA_SUCCESS ? rc : CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!capture_active(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    for (size_t i = 0; i < count; i++) {
        rc = copy_submit(s, AT(to[i]), AT(from[i]), sizes[i], false);
        if (rc != CUDA_SUCCESS && failed != NULL)
            *failed = i;
        REQUIRE(rc == CUDA_SUCCESS, rc);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                    CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                    size_t *failed, CUstream stream) {
    ENTER(cuMemcpyBatchAsync);
    REQUIRE(attributes != NULL && indices != NULL && attribute_count > 0, CUDA_ERROR_INVALID_VALUE);
    return copy_batch(to, from, sizes, count, failed, stream);
}

CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                       CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                       CUstream stream) {
    ENTER(cuMemcpyBatchAsync_v2);
    REQUIRE(attributes != NULL && indices != NULL && attribute_count > 0, CUDA_ERROR_INVALID_VALUE);
    return copy_batch(to, from, sizes, count, NULL, stream);
}

static size_t bytes_of(size_t elements, size_t element) { /* as many as no memory has, where they wrap */
    size_t bytes;
    return __builtin_mul_overflow(elements, element, &bytes) ? SIZE_MAX : bytes;
}

static struct copy_side operand(const CUmemcpy3DOperand *o, size_t element) {
    if (o->type == CU_MEMCPY_OPERAND_TYPE_ARRAY)
        return (struct copy_side){.type = CU_MEMORYTYPE_ARRAY,
                                  .array = o->op.array.array,
                                  .x = bytes_of(o->op.array.offset.x, element),
                                  .y = o->op.array.offset.y,
                                  .z = o->op.array.offset.z};
    return (struct copy_side){.type = CU_MEMORYTYPE_DEVICE,
                              .device = o->op.ptr.ptr,
                              .pitch = bytes_of(o->op.ptr.rowLength, element),
                              .height = o->op.ptr.layerHeight};
}

static CUresult copy_batch_3d(size_t count, const CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed, CUstream stream) {
    if (failed != NULL)
        *failed = SIZE_MAX;
    REQUIRE(count > 0 && ops != NULL, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        const CUDA_MEMCPY3D_BATCH_OP *op = &ops[i];
        CUarray array = op->dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY   ? op->dst.op.array.array
                        : op->src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? op->src.op.array.array
                                                                       : NULL;
        size_t element = array != NULL ? array_element_bytes(array) : 1;
        struct copy_side to = operand(&op->dst, element), from = operand(&op->src, element);
        size_t width = bytes_of(op->extent.width, element);
        to.pitch = to.pitch ? to.pitch : width;
        from.pitch = from.pitch ? from.pitch : width;
        to.height = to.height ? to.height : op->extent.height;
        from.height = from.height ? from.height : op->extent.height;
        CUresult rc = copy_box(&from, &to, width, op->extent.height, op->extent.depth, stream, false);
        if (rc != CUDA_SUCCESS && failed != NULL)
            *failed = i;
        REQUIRE(rc == CUDA_SUCCESS, rc);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed,
                                      unsigned long long flags, CUstream stream) {
    ENTER(cuMemcpy3DBatchAsync);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return copy_batch_3d(count, ops, failed, stream);
}

CUresult CUDAAPI cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags,
                                         CUstream stream) {
    ENTER(cuMemcpy3DBatchAsync_v2);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return copy_batch_3d(count, ops, NULL, stream);
}
