/* Arrays and mipmapped arrays: memory of the card with a shape. Copies fill and read them; nothing
 * samples them. One whose memory is mapped later, or that is sparse, takes none of the card. */
#include "array.h"
#include "share.h"

#include <stdlib.h>
#include <string.h>

struct CUmipmappedArray_st {
    uint32_t magic;
    int device;
    size_t bytes;
    CUdeviceptr at; /* of the first level; the others follow */
    struct CUctx_st *ctx;
    unsigned flags;
    unsigned levels;
    struct CUarray_st *level[16];
};

static size_t element_bytes(CUarray_format format) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 0;
    }
}

size_t array_row(const struct CUarray_st *a) {
    return a->shape.Width * element_bytes(a->shape.Format) * a->shape.NumChannels;
}

size_t array_element_bytes(const struct CUarray_st *a) {
    return element_bytes(a->shape.Format) * a->shape.NumChannels;
}

bool array_deferred(CUarray a) {
    return array_valid(a) && a->shape.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING;
}

/* Of the current context, and gone with it. */
static CUresult take(CUdeviceptr *at, size_t bytes, unsigned flags) {
    struct CUctx_st *ctx = current_context();
    bool later = flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING);
    return memory_allocate(at, bytes, ctx->device, ctx, ALLOCATION_ARRAY, later ? 0 : bytes);
}

static size_t shape_pitch(const CUDA_ARRAY3D_DESCRIPTOR *s) {
    return (s->Width * element_bytes(s->Format) * s->NumChannels + 511) & ~(size_t)511;
}

/* Rows are padded to 512 bytes and the whole to a page of the card, as its memory requirement says. */
static size_t shape_bytes(const CUDA_ARRAY3D_DESCRIPTOR *s) {
    size_t bytes = shape_pitch(s) * (s->Height ? s->Height : 1) * (s->Depth ? s->Depth : 1);
    return (bytes + 65535) & ~(size_t)65535;
}

static CUresult shape_ok(const CUDA_ARRAY3D_DESCRIPTOR *s) {
    REQUIRE(s != NULL && s->Width > 0 && element_bytes(s->Format) > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(s->NumChannels == 1 || s->NumChannels == 2 || s->NumChannels == 4, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(s->Width <= 1u << 17 && s->Height <= 1u << 17 && s->Depth <= 1u << 14, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

static CUresult make(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = shape_ok(shape);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    struct CUarray_st *a = calloc(1, sizeof *a);
    REQUIRE(a != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *a = (struct CUarray_st){.magic = MAGIC_ARRAY,
                             .device = current_context()->device,
                             .bytes = shape_bytes(shape),
                             .pitch = shape_pitch(shape),
                             .ctx = current_context(),
                             .shape = *shape};
    rc = take(&a->at, a->bytes, shape->Flags);
    if (rc != CUDA_SUCCESS) {
        free(a);
        return rc;
    }
    *out = a;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    ENTER(cuArray3DCreate_v2);
    return make(out, shape);
}

CUresult CUDAAPI cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *flat) {
    ENTER(cuArrayCreate_v2);
    REQUIRE(flat != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_ARRAY3D_DESCRIPTOR shape = {
        .Width = flat->Width, .Height = flat->Height, .Format = flat->Format, .NumChannels = flat->NumChannels};
    return make(out, &shape);
}

CUresult CUDAAPI cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *old) {
    ENTER(cuArray3DCreate);
    REQUIRE(old != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = old->Width,
                                     .Height = old->Height,
                                     .Depth = old->Depth,
                                     .Format = old->Format,
                                     .NumChannels = old->NumChannels,
                                     .Flags = old->Flags};
    return make(out, &shape);
}

CUresult CUDAAPI cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *old) {
    ENTER(cuArrayCreate);
    REQUIRE(old != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_ARRAY3D_DESCRIPTOR shape = {
        .Width = old->Width, .Height = old->Height, .Format = old->Format, .NumChannels = old->NumChannels};
    return make(out, &shape);
}

CUresult CUDAAPI cuArrayDestroy(CUarray a) {
    ENTER(cuArrayDestroy);
    REQUIRE(a != NULL && a->magic == MAGIC_ARRAY && a->owner == NULL, CUDA_ERROR_INVALID_HANDLE);
    if (array_deferred(a))
        array_unmapped(a);
    if (context_valid(a->ctx))
        memory_release(a->at);
    a->magic = 0; /* stays allocated: a stale handle is refused, not followed */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *out, CUarray a) {
    ENTER(cuArray3DGetDescriptor_v2);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(a != NULL && a->magic == MAGIC_ARRAY, CUDA_ERROR_INVALID_HANDLE);
    *out = a->shape;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *out, CUarray a) {
    ENTER(cuArrayGetDescriptor_v2);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(a != NULL && a->magic == MAGIC_ARRAY, CUDA_ERROR_INVALID_HANDLE);
    *out = (CUDA_ARRAY_DESCRIPTOR){.Width = a->shape.Width,
                                   .Height = a->shape.Height,
                                   .Format = a->shape.Format,
                                   .NumChannels = a->shape.NumChannels};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray a, CUdevice dev) {
    ENTER_DEVICE(cuArrayGetMemoryRequirements, dev);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(a != NULL && a->magic == MAGIC_ARRAY, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(array_deferred(a), CUDA_ERROR_INVALID_VALUE); /* told of no others */
    memset(out, 0, sizeof *out);
    out->size = a->bytes;
    out->alignment = 65536;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape,
                                        unsigned int levels) {
    ENTER(cuMipmappedArrayCreate);
    REQUIRE(out != NULL && levels >= 1 && levels <= 16, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = shape_ok(shape);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    struct CUmipmappedArray_st *mip = calloc(1, sizeof *mip);
    REQUIRE(mip != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    mip->magic = MAGIC_MIPMAP;
    mip->device = current_context()->device;
    mip->ctx = current_context();
    mip->flags = shape->Flags;
    CUDA_ARRAY3D_DESCRIPTOR level = *shape;
    bool ok = true;
    for (unsigned i = 0; ok && i < levels; i++) {
        struct CUarray_st *a = calloc(1, sizeof *a);
        ok = a != NULL;
        if (!ok)
            break;
        *a = (struct CUarray_st){.magic = MAGIC_ARRAY,
                                 .device = mip->device,
                                 .bytes = shape_bytes(&level),
                                 .pitch = shape_pitch(&level),
                                 .ctx = current_context(),
                                 .shape = level,
                                 .owner = mip};
        mip->level[mip->levels++] = a;
        mip->bytes += a->bytes;
        level.Width = level.Width > 1 ? level.Width / 2 : 1;
        level.Height = level.Height > 1 ? level.Height / 2 : level.Height;
        level.Depth = level.Depth > 1 ? level.Depth / 2 : level.Depth;
    }
    rc = ok ? take(&mip->at, mip->bytes, mip->flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc != CUDA_SUCCESS) {
        for (unsigned i = 0; i < mip->levels; i++)
            free(mip->level[i]);
        free(mip);
        return rc;
    }
    CUdeviceptr at = mip->at;
    for (unsigned i = 0; i < mip->levels; at += mip->level[i]->bytes, i++)
        mip->level[i]->at = at;
    *out = mip;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray mip, unsigned int level) {
    ENTER(cuMipmappedArrayGetLevel);
    REQUIRE(mip != NULL && mip->magic == MAGIC_MIPMAP, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out != NULL && level < mip->levels, CUDA_ERROR_INVALID_VALUE);
    *out = mip->level[level];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray mip,
                                                       CUdevice dev) {
    ENTER_DEVICE(cuMipmappedArrayGetMemoryRequirements, dev);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(mip != NULL && mip->magic == MAGIC_MIPMAP, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(mip->flags & CUDA_ARRAY3D_DEFERRED_MAPPING, CUDA_ERROR_INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->size = mip->bytes;
    out->alignment = 65536;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray mip) {
    ENTER(cuMipmappedArrayDestroy);
    REQUIRE(mip != NULL && mip->magic == MAGIC_MIPMAP, CUDA_ERROR_INVALID_HANDLE);
    if (context_valid(mip->ctx))
        memory_release(mip->at);
    for (unsigned i = 0; i < mip->levels; i++)
        mip->level[i]->magic = 0;
    mip->magic = 0; /* as above */
    return CUDA_SUCCESS;
}
