/* Copies of boxes and of arrays: every row moves on its own, the time is that of all bytes. */
#include "array.h"

/* How far a place lies from where the memory begins; false when that wraps. */
static bool side_offset(const struct copy_side *s, size_t x, size_t y, size_t z, size_t *out) {
    return !__builtin_mul_overflow(z, s->height, out) && !__builtin_add_overflow(*out, y, out) &&
           !__builtin_mul_overflow(*out, s->pitch, out) && !__builtin_add_overflow(*out, x, out);
}

/* Where the box begins, all of which must lie in the memory. An array has its pitch and height itself. */
static CUresult side_start(struct copy_side *s, size_t width, size_t height, size_t depth, char **out) {
    char *base = s->type == CU_MEMORYTYPE_HOST ? (char *)(uintptr_t)s->host : (char *)AT(s->device);
    if (s->type == CU_MEMORYTYPE_ARRAY) {
        const struct CUarray_st *a = s->array;
        REQUIRE(array_valid(a), CUDA_ERROR_INVALID_VALUE);
        size_t rows = a->shape.Height ? a->shape.Height : 1, planes = a->shape.Depth ? a->shape.Depth : 1;
        size_t row = array_row(a);
        REQUIRE(width <= row && s->x <= row - width && height <= rows && s->y <= rows - height && depth <= planes &&
                    s->z <= planes - depth,
                CUDA_ERROR_INVALID_VALUE);
        base = AT(a->at);
        s->pitch = a->pitch;
        s->height = rows;
    }
    *out = base;
    if (width == 0 || height == 0 || depth == 0)
        return CUDA_SUCCESS;
    size_t start, length, end;
    REQUIRE(side_offset(s, s->x, s->y, s->z, &start) && side_offset(s, width, height - 1, depth - 1, &length) &&
                !__builtin_add_overflow(start, length, &end) && memory_range_ok((uintptr_t)base, end),
            CUDA_ERROR_INVALID_VALUE);
    *out = base + start;
    return CUDA_SUCCESS;
}

CUresult copy_box(struct copy_side *from, struct copy_side *to, size_t width, size_t height, size_t depth,
                  CUstream handle, bool wait) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    char *source, *target;
    rc = side_start(from, width, height, depth, &source);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    rc = side_start(to, width, height, depth, &target);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (width == 0 || height == 0 || depth == 0)
        return CUDA_SUCCESS;
    REQUIRE((height == 1 && depth == 1) || (from->pitch >= width && to->pitch >= width), CUDA_ERROR_INVALID_VALUE);
    size_t bytes = width * height * depth;
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        REQUIRE((from->pitch == width && to->pitch == width) || (height == 1 && depth == 1), CUDA_ERROR_NOT_SUPPORTED);
        struct graph_work work = {.kind = WORK_COPY, .to = target, .from = source, .bytes = bytes};
        return capture_add(s, &work);
    }
    for (size_t z = 0; z < depth; z++)
        for (size_t y = 0; y < height; y++) {
            char *f = source + (z * from->height + y) * from->pitch, *t = target + (z * to->height + y) * to->pitch;
            copy_bytes(t, f, width);
        }
    enum sim_copy kind = copy_kind(target, source);
    uint64_t mark;
    rc = submit(s, copy_op(s->ctx->device, kind, bytes), &mark, false);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return wait ? wait_stream(s, mark) : CUDA_SUCCESS;
}

/* --- boxes -------------------------------------------------------------------------------------------------------- */

/* The two sides of a CUDA_MEMCPY2D or, with a height and a depth, of a CUDA_MEMCPY3D. */
#define SIDE(p, which, height_, z_)                                                                                    \
    {.type = (p)->which##MemoryType,                                                                                   \
     .host = (p)->which##Host,                                                                                         \
     .device = (p)->which##Device,                                                                                     \
     .array = (p)->which##Array,                                                                                       \
     .pitch = (p)->which##Pitch,                                                                                       \
     .height = (height_),                                                                                              \
     .x = (p)->which##XInBytes,                                                                                        \
     .y = (p)->which##Y,                                                                                               \
     .z = (z_)}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct copy_side from = SIDE(p, src, 0, 0), to = SIDE(p, dst, 0, 0);
    return copy_box(&from, &to, p->WidthInBytes, p->Height, 1, stream, wait);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *p, CUstream stream, bool wait) {
    REQUIRE(p != NULL && p->srcLOD == 0 && p->dstLOD == 0, CUDA_ERROR_INVALID_VALUE);
    struct copy_side from = SIDE(p, src, p->srcHeight, p->srcZ), to = SIDE(p, dst, p->dstHeight, p->dstZ);
    return copy_box(&from, &to, p->WidthInBytes, p->Height, p->Depth, stream, wait);
}

CUresult CUDAAPI cuMemcpy2D_v2(const CUDA_MEMCPY2D *p) {
    ENTER(cuMemcpy2D_v2);
    return copy_2d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) {
    ENTER(cuMemcpy2DUnaligned_v2);
    return copy_2d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream stream) {
    ENTER(cuMemcpy2DAsync_v2);
    return copy_2d(p, stream, false);
}

CUresult CUDAAPI cuMemcpy3D_v2(const CUDA_MEMCPY3D *p) {
    ENTER(cuMemcpy3D_v2);
    return copy_3d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream stream) {
    ENTER(cuMemcpy3DAsync_v2);
    return copy_3d(p, stream, false);
}

/* --- arrays of one dimension -------------------------------------------------------------------------------------- */

/* One row, from or to an array of one dimension; offsets are in bytes. */
static CUresult copy_row(struct copy_side from, struct copy_side to, size_t bytes, CUstream stream, bool wait) {
    REQUIRE(from.type != CU_MEMORYTYPE_ARRAY || (array_valid(from.array) && from.array->shape.Height == 0),
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(to.type != CU_MEMORYTYPE_ARRAY || (array_valid(to.array) && to.array->shape.Height == 0),
            CUDA_ERROR_INVALID_VALUE);
    return copy_box(&from, &to, bytes, 1, 1, stream, wait);
}

#define IN_ARRAY(a, offset) ((struct copy_side){.type = CU_MEMORYTYPE_ARRAY, .array = (a), .x = (offset)})
#define ON_HOST(pointer) ((struct copy_side){.type = CU_MEMORYTYPE_HOST, .host = (pointer)})
#define ON_DEVICE(pointer) ((struct copy_side){.type = CU_MEMORYTYPE_DEVICE, .device = (pointer)})

CUresult CUDAAPI cuMemcpyHtoA_v2(CUarray to, size_t offset, const void *from, size_t bytes) {
    ENTER(cuMemcpyHtoA_v2);
    return copy_row(ON_HOST(from), IN_ARRAY(to, offset), bytes, NULL, true);
}

CUresult CUDAAPI cuMemcpyAtoH_v2(void *to, CUarray from, size_t offset, size_t bytes) {
    ENTER(cuMemcpyAtoH_v2);
    return copy_row(IN_ARRAY(from, offset), ON_HOST(to), bytes, NULL, true);
}

CUresult CUDAAPI cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyHtoAAsync_v2);
    return copy_row(ON_HOST(from), IN_ARRAY(to, offset), bytes, stream, false);
}

CUresult CUDAAPI cuMemcpyAtoHAsync_v2(void *to, CUarray from, size_t offset, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyAtoHAsync_v2);
    return copy_row(IN_ARRAY(from, offset), ON_HOST(to), bytes, stream, false);
}

CUresult CUDAAPI cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
    ENTER(cuMemcpyDtoA_v2);
    return copy_row(ON_DEVICE(from), IN_ARRAY(to, offset), bytes, NULL, true);
}

CUresult CUDAAPI cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
    ENTER(cuMemcpyAtoD_v2);
    return copy_row(IN_ARRAY(from, offset), ON_DEVICE(to), bytes, NULL, true);
}

CUresult CUDAAPI cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes) {
    ENTER(cuMemcpyAtoA_v2);
    return copy_row(IN_ARRAY(from, from_offset), IN_ARRAY(to, to_offset), bytes, NULL, true);
}
