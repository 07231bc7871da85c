/* Copies and fills: one-dimensional, pitched, three-dimensional, of arrays, in batches. */
#include "copy.h"

/* Prototypes by version: the plain names are those of CUDA 12, with an index of what failed. */
#undef cuMemcpyBatchAsync
#undef cuMemcpy3DBatchAsync

/* `add` tells the bytes and ways; `copy` names the pm_copy there. */
#define COPY(name, queue, waits, add, params, ...)                                                                     \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        struct pm_copy copy;                                                                                           \
        pm_copy_begin(&copy, queue, waits);                                                                            \
        if (copy.context) {                                                                                            \
            add;                                                                                                       \
        }                                                                                                              \
        pm_copy_go(&copy);                                                                                             \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        pm_copy_end(&copy, result, waits);                                                                             \
        return result;                                                                                                 \
    }
#define COPY_SYNC(name, add, params, ...)                                                                              \
    COPY(name, (CUstream)PM_LEGACY, true, add, params, __VA_ARGS__)                                                    \
    COPY(name##_ptds, (CUstream)PM_PER_THREAD, true, add, params, __VA_ARGS__)
#define COPY_ASYNC(name, add, params, ...)                                                                             \
    COPY(name, pm_stream(stream, PM_LEGACY), false, add, params, __VA_ARGS__)                                          \
    COPY(name##_ptsz, pm_stream(stream, PM_PER_THREAD), false, add, params, __VA_ARGS__)
#define ADD(way) pm_copy_add(&copy, way, bytes)

/* ---- one-dimensional --------------------------------------------------------------------------------------------- */

COPY_SYNC(cuMemcpy, ADD(pm_direction_of(to, from)), (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC(cuMemcpyAsync, ADD(pm_direction_of(to, from)),
           (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
COPY_SYNC(cuMemcpyHtoD_v2, ADD(PM_TO_DEVICE), (CUdeviceptr to, const void *from, size_t bytes), to, from, bytes)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, ADD(PM_TO_DEVICE), (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
           to, from, bytes, stream)
COPY_SYNC(cuMemcpyDtoH_v2, ADD(PM_TO_HOST), (void *to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, ADD(PM_TO_HOST), (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from,
           bytes, stream)
COPY_SYNC(cuMemcpyDtoD_v2, ADD(PM_ON_DEVICE), (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, ADD(PM_ON_DEVICE), (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
           to, from, bytes, stream)
COPY_SYNC(cuMemcpyPeer, ADD(PM_BETWEEN_DEVICES),
          (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes), to, there, from, here,
          bytes)
COPY_ASYNC(cuMemcpyPeerAsync, ADD(PM_BETWEEN_DEVICES),
           (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes, CUstream stream), to,
           there, from, here, bytes, stream)
/* Newer than the header that this is built with. */
COPY_ASYNC(cuMemcpyWithAttributesAsync, ADD(pm_direction_of(to, from)),
           (CUdeviceptr to, CUdeviceptr from, size_t bytes, void *attributes, CUstream stream), to, from, bytes,
           attributes, stream)

/* As CUDA 2 had them, with 32-bit addresses and lengths. */
#define OLD_SYNC(name, way, params, ...) COPY(name, (CUstream)PM_LEGACY, true, ADD(way), params, __VA_ARGS__)
#define OLD_ASYNC(name, way, params, ...) COPY(name, pm_stream(stream, PM_LEGACY), false, ADD(way), params, __VA_ARGS__)
#undef cuMemcpyHtoD
#undef cuMemcpyDtoH
#undef cuMemcpyDtoD
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyDtoDAsync
#undef cuMemcpyDtoA
#undef cuMemcpyAtoD
#undef cuMemcpyHtoA
#undef cuMemcpyAtoH
#undef cuMemcpyAtoA
#undef cuMemcpyHtoAAsync
#undef cuMemcpyAtoHAsync
OLD_SYNC(cuMemcpyHtoD, PM_TO_DEVICE, (uint32_t to, const void *from, unsigned bytes), to, from, bytes)
OLD_SYNC(cuMemcpyDtoH, PM_TO_HOST, (void *to, uint32_t from, unsigned bytes), to, from, bytes)
OLD_SYNC(cuMemcpyDtoD, PM_ON_DEVICE, (uint32_t to, uint32_t from, unsigned bytes), to, from, bytes)
OLD_ASYNC(cuMemcpyHtoDAsync, PM_TO_DEVICE, (uint32_t to, const void *from, unsigned bytes, CUstream stream), to, from,
          bytes, stream)
OLD_ASYNC(cuMemcpyDtoHAsync, PM_TO_HOST, (void *to, uint32_t from, unsigned bytes, CUstream stream), to, from, bytes,
          stream)
OLD_ASYNC(cuMemcpyDtoDAsync, PM_ON_DEVICE, (uint32_t to, uint32_t from, unsigned bytes, CUstream stream), to, from,
          bytes, stream)
OLD_SYNC(cuMemcpyDtoA, PM_ON_DEVICE, (CUarray to, unsigned at, uint32_t from, unsigned bytes), to, at, from, bytes)
OLD_SYNC(cuMemcpyAtoD, PM_ON_DEVICE, (uint32_t to, CUarray from, unsigned at, unsigned bytes), to, from, at, bytes)
OLD_SYNC(cuMemcpyHtoA, PM_TO_DEVICE, (CUarray to, unsigned at, const void *from, unsigned bytes), to, at, from, bytes)
OLD_SYNC(cuMemcpyAtoH, PM_TO_HOST, (void *to, CUarray from, unsigned at, unsigned bytes), to, from, at, bytes)
OLD_SYNC(cuMemcpyAtoA, PM_ON_DEVICE, (CUarray to, unsigned at, CUarray from, unsigned there, unsigned bytes), to, at,
         from, there, bytes)
OLD_ASYNC(cuMemcpyHtoAAsync, PM_TO_DEVICE, (CUarray to, unsigned at, const void *from, unsigned bytes, CUstream stream),
          to, at, from, bytes, stream)
OLD_ASYNC(cuMemcpyAtoHAsync, PM_TO_HOST, (void *to, CUarray from, unsigned at, unsigned bytes, CUstream stream), to,
          from, at, bytes, stream)

/* ---- of arrays --------------------------------------------------------------------------------------------------- */

COPY_SYNC(cuMemcpyDtoA_v2, ADD(PM_ON_DEVICE), (CUarray to, size_t at, CUdeviceptr from, size_t bytes), to, at, from,
          bytes)
COPY_SYNC(cuMemcpyAtoD_v2, ADD(PM_ON_DEVICE), (CUdeviceptr to, CUarray from, size_t at, size_t bytes), to, from, at,
          bytes)
COPY_SYNC(cuMemcpyHtoA_v2, ADD(PM_TO_DEVICE), (CUarray to, size_t at, const void *from, size_t bytes), to, at, from,
          bytes)
COPY_SYNC(cuMemcpyAtoH_v2, ADD(PM_TO_HOST), (void *to, CUarray from, size_t at, size_t bytes), to, from, at, bytes)
COPY_SYNC(cuMemcpyAtoA_v2, ADD(PM_ON_DEVICE), (CUarray to, size_t at, CUarray from, size_t there, size_t bytes), to, at,
          from, there, bytes)
COPY_ASYNC(cuMemcpyHtoAAsync_v2, ADD(PM_TO_DEVICE),
           (CUarray to, size_t at, const void *from, size_t bytes, CUstream stream), to, at, from, bytes, stream)
COPY_ASYNC(cuMemcpyAtoHAsync_v2, ADD(PM_TO_HOST), (void *to, CUarray from, size_t at, size_t bytes, CUstream stream),
           to, from, at, bytes, stream)

/* ---- two and three dimensions ------------------------------------------------------------------------------------ */

/* A descriptor of any of the versions: they have the same names. */
#define ADD_PITCHED(depth)                                                                                             \
    if (p)                                                                                                             \
    pm_copy_add(&copy, pm_direction_between(p->dstMemoryType, p->dstDevice, p->srcMemoryType, p->srcDevice),           \
                (uint64_t)p->WidthInBytes * p->Height * (depth))
#define ADD_PEER                                                                                                       \
    if (p)                                                                                                             \
    pm_copy_add(&copy, PM_BETWEEN_DEVICES, (uint64_t)p->WidthInBytes * p->Height * p->Depth)

struct old_2d { /* CUDA_MEMCPY2D_v1 */
    unsigned srcXInBytes, srcY;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    uint32_t srcDevice;
    CUarray srcArray;
    unsigned srcPitch, dstXInBytes, dstY;
    CUmemorytype dstMemoryType;
    void *dstHost;
    uint32_t dstDevice;
    CUarray dstArray;
    unsigned dstPitch, WidthInBytes, Height;
};

struct old_3d { /* CUDA_MEMCPY3D_v1 */
    unsigned srcXInBytes, srcY, srcZ, srcLOD;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    uint32_t srcDevice;
    CUarray srcArray;
    void *reserved0;
    unsigned srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    CUmemorytype dstMemoryType;
    void *dstHost;
    uint32_t dstDevice;
    CUarray dstArray;
    void *reserved1;
    unsigned dstPitch, dstHeight, WidthInBytes, Height, Depth;
};

#undef cuMemcpy2D
#undef cuMemcpy2DUnaligned
#undef cuMemcpy2DAsync
#undef cuMemcpy3D
#undef cuMemcpy3DAsync
COPY_SYNC(cuMemcpy2D_v2, ADD_PITCHED(1), (const CUDA_MEMCPY2D *p), p)
COPY_SYNC(cuMemcpy2DUnaligned_v2, ADD_PITCHED(1), (const CUDA_MEMCPY2D *p), p)
COPY_ASYNC(cuMemcpy2DAsync_v2, ADD_PITCHED(1), (const CUDA_MEMCPY2D *p, CUstream stream), p, stream)
COPY_SYNC(cuMemcpy3D_v2, ADD_PITCHED(p->Depth), (const CUDA_MEMCPY3D *p), p)
COPY_ASYNC(cuMemcpy3DAsync_v2, ADD_PITCHED(p->Depth), (const CUDA_MEMCPY3D *p, CUstream stream), p, stream)
COPY_SYNC(cuMemcpy3DPeer, ADD_PEER, (const CUDA_MEMCPY3D_PEER *p), p)
COPY_ASYNC(cuMemcpy3DPeerAsync, ADD_PEER, (const CUDA_MEMCPY3D_PEER *p, CUstream stream), p, stream)
COPY(cuMemcpy2D, (CUstream)PM_LEGACY, true, ADD_PITCHED(1), (const struct old_2d *p), p)
COPY(cuMemcpy2DUnaligned, (CUstream)PM_LEGACY, true, ADD_PITCHED(1), (const struct old_2d *p), p)
COPY(cuMemcpy2DAsync, pm_stream(stream, PM_LEGACY), false, ADD_PITCHED(1), (const struct old_2d *p, CUstream stream), p,
     stream)
COPY(cuMemcpy3D, (CUstream)PM_LEGACY, true, ADD_PITCHED(p->Depth), (const struct old_3d *p), p)
COPY(cuMemcpy3DAsync, pm_stream(stream, PM_LEGACY), false, ADD_PITCHED(p->Depth),
     (const struct old_3d *p, CUstream stream), p, stream)

/* ---- batches ----------------------------------------------------------------------------------------------------- */

static void add_batch(struct pm_copy *copy, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes,
                      size_t count) {
    for (size_t i = 0; to && from && sizes && i < count; i++)
        pm_copy_add(copy, pm_direction_of(to[i], from[i]), sizes[i]);
}

/* Bytes of an element are told by the array; a copy between pointers counts its width in bytes. */
static uint64_t extent_bytes(const CUDA_MEMCPY3D_BATCH_OP *op) {
    CUarray array = op->dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY   ? op->dst.op.array.array
                    : op->src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? op->src.op.array.array
                                                                   : NULL;
    uint64_t element = array ? pm_array_element_bytes(array) : 1;
    return (uint64_t)op->extent.width * op->extent.height * op->extent.depth * element;
}

static void add_batch_3d(struct pm_copy *copy, const CUDA_MEMCPY3D_BATCH_OP *ops, size_t count) {
    for (size_t i = 0; ops && i < count; i++) {
        bool to_array = ops[i].dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY;
        bool from_array = ops[i].src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY;
        pm_copy_add(copy,
                    pm_direction_between(to_array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED,
                                         to_array ? 0 : ops[i].dst.op.ptr.ptr,
                                         from_array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED,
                                         from_array ? 0 : ops[i].src.op.ptr.ptr),
                    extent_bytes(&ops[i]));
    }
}

COPY_ASYNC(cuMemcpyBatchAsync, add_batch(&copy, to, from, sizes, count),
           (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
            size_t *indices, size_t attribute_count, size_t *failed, CUstream stream),
           to, from, sizes, count, attributes, indices, attribute_count, failed, stream)
COPY_ASYNC(cuMemcpyBatchAsync_v2, add_batch(&copy, to, from, sizes, count),
           (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
            size_t *indices, size_t attribute_count, CUstream stream),
           to, from, sizes, count, attributes, indices, attribute_count, stream)
COPY_ASYNC(cuMemcpy3DBatchAsync, add_batch_3d(&copy, ops, count),
           (size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed, unsigned long long flags, CUstream stream),
           count, ops, failed, flags, stream)
COPY_ASYNC(cuMemcpy3DBatchAsync_v2, add_batch_3d(&copy, ops, count),
           (size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags, CUstream stream), count, ops, flags,
           stream)
/* Newer than the header that this is built with. */
COPY_ASYNC(cuMemcpy3DWithAttributesAsync, add_batch_3d(&copy, op, 1),
           (CUDA_MEMCPY3D_BATCH_OP * op, unsigned long long flags, CUstream stream), op, flags, stream)
