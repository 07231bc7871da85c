/*
 * Arrays and mipmapped arrays. How much memory one takes is the driver's choice, and it tells only of arrays whose
 * memory is mapped later; so it is asked about such a twin, which takes none, before the array is made.
 */
#include "claim.h"

#define LATER (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)
#define PLAIN 0 /* levels of an array that is not mipmapped */

static uint64_t element_bytes(CUarray_format format) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default: /* 16 bits; compressed and packed formats take less than that a channel */
        return 2;
    }
}

/* From below: no padding but that of the smallest piece. */
static uint64_t estimate(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned levels) {
    unsigned __int128 sum = 0;
    uint64_t width = of->Width, height = of->Height ? of->Height : 1, depth = of->Depth ? of->Depth : 1;
    for (unsigned i = 0; i < (levels ? levels : 1) && i < 32; i++) {
        sum += (unsigned __int128)width * height * depth * of->NumChannels * element_bytes(of->Format);
        width = width > 1 ? width / 2 : 1;
        height = height > 1 ? height / 2 : 1;
        depth = depth > 1 && !(of->Flags & CUDA_ARRAY3D_LAYERED) ? depth / 2 : depth;
    }
    return sum > PM_UNLIMITED / 2 ? PM_UNLIMITED / 2 : (uint64_t)sum;
}

/* 0: the driver does not say. */
static uint64_t told(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned levels) {
    CUDA_ARRAY3D_DESCRIPTOR twin = *of;
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {.size = 0};
    CUdevice ordinal;
    twin.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    if (!pm_need[PM_NEED_cuCtxGetDevice] || PM_NEED(cuCtxGetDevice)(&ordinal) != CUDA_SUCCESS)
        return 0;
    if (levels == PLAIN) {
        CUarray array;
        if (!pm_need[PM_NEED_cuArrayGetMemoryRequirements] || !pm_real[PM_HOOK_cuArray3DCreate_v2] ||
            !pm_real[PM_HOOK_cuArrayDestroy] || PM_REAL(cuArray3DCreate_v2)(&array, &twin) != CUDA_SUCCESS)
            return 0;
        if (PM_NEED(cuArrayGetMemoryRequirements)(&needs, array, ordinal) != CUDA_SUCCESS)
            needs.size = 0;
        PM_REAL(cuArrayDestroy)(array);
    } else {
        CUmipmappedArray array;
        if (!pm_need[PM_NEED_cuMipmappedArrayGetMemoryRequirements] || !pm_real[PM_HOOK_cuMipmappedArrayDestroy] ||
            PM_REAL(cuMipmappedArrayCreate)(&array, &twin, levels) != CUDA_SUCCESS)
            return 0;
        if (PM_NEED(cuMipmappedArrayGetMemoryRequirements)(&needs, array, ordinal) != CUDA_SUCCESS)
            needs.size = 0;
        PM_REAL(cuMipmappedArrayDestroy)(array);
    }
    return needs.size;
}

/* False: over the limit. What is mapped later is counted when the memory for it is made. */
static bool begin(struct pm_claim *claim, const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned levels) {
    *claim = (struct pm_claim){NULL, PM_NO_DEVICE, PM_MEMORY_ARRAY, 0};
    struct pm_process *self = pm_self();
    uint32_t device = self && of && !(of->Flags & LATER) ? pm_current_device(self) : PM_NO_DEVICE;
    if (device == PM_NO_DEVICE)
        return true;
    uint64_t bytes = told(of, levels);
    return pm_claim_begin(claim, device, PM_MEMORY_ARRAY, bytes ? bytes : estimate(of, levels));
}

static CUresult end(struct pm_claim *claim, CUresult result, const void *array) {
    pm_claim_end(claim, result, PM_HOLD_ARRAY, result == CUDA_SUCCESS ? pm_key(array) : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *of) {
    PM_MISSING(cuArray3DCreate_v2);
    struct pm_claim claim;
    if (!begin(&claim, out ? of : NULL, PLAIN))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuArray3DCreate_v2)(out, of);
    return end(&claim, result, result == CUDA_SUCCESS && out ? *out : NULL);
}

PM_EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *of) {
    PM_MISSING(cuArrayCreate_v2);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    struct pm_claim claim;
    if (of)
        shape = (CUDA_ARRAY3D_DESCRIPTOR){
            .Width = of->Width, .Height = of->Height, .Format = of->Format, .NumChannels = of->NumChannels};
    if (!begin(&claim, out && of ? &shape : NULL, PLAIN))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuArrayCreate_v2)(out, of);
    return end(&claim, result, result == CUDA_SUCCESS && out ? *out : NULL);
}

/* As CUDA 2 had them, with 32-bit lengths. */
struct old_shape {
    unsigned width, height;
    CUarray_format format;
    unsigned channels;
};

struct old_shape_3d {
    unsigned width, height, depth;
    CUarray_format format;
    unsigned channels, flags;
};

PM_EXPORT CUresult cuArrayCreate(CUarray *out, const struct old_shape *of) {
    PM_MISSING(cuArrayCreate);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    struct pm_claim claim;
    if (of)
        shape = (CUDA_ARRAY3D_DESCRIPTOR){
            .Width = of->width, .Height = of->height, .Format = of->format, .NumChannels = of->channels};
    if (!begin(&claim, out && of ? &shape : NULL, PLAIN))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ((CUresult (*)(CUarray *, const struct old_shape *))pm_real[PM_HOOK_cuArrayCreate])(out, of);
    return end(&claim, result, result == CUDA_SUCCESS && out ? *out : NULL);
}

PM_EXPORT CUresult cuArray3DCreate(CUarray *out, const struct old_shape_3d *of) {
    PM_MISSING(cuArray3DCreate);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    struct pm_claim claim;
    if (of)
        shape = (CUDA_ARRAY3D_DESCRIPTOR){.Width = of->width,
                                          .Height = of->height,
                                          .Depth = of->depth,
                                          .Format = of->format,
                                          .NumChannels = of->channels,
                                          .Flags = of->flags};
    if (!begin(&claim, out && of ? &shape : NULL, PLAIN))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ((CUresult (*)(CUarray *, const struct old_shape_3d *))pm_real[PM_HOOK_cuArray3DCreate])(out, of);
    return end(&claim, result, result == CUDA_SUCCESS && out ? *out : NULL);
}

PM_EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned levels) {
    PM_MISSING(cuMipmappedArrayCreate);
    struct pm_claim claim;
    if (!begin(&claim, out && levels ? of : NULL, levels))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMipmappedArrayCreate)(out, of, levels);
    return end(&claim, result, result == CUDA_SUCCESS && out ? *out : NULL);
}

/* ---- memory that is mapped into an array ------------------------------------------------------------------------- */

static uint64_t tile_key(const CUarrayMapInfo *map, uint64_t array) {
    uint64_t key = pm_mix(29, array);
    if (map->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL) {
        key = pm_mix(key, (uint64_t)map->subresource.sparseLevel.level << 32 | map->subresource.sparseLevel.layer);
        key = pm_mix(key, (uint64_t)map->subresource.sparseLevel.offsetX << 32 | map->subresource.sparseLevel.offsetY);
        return pm_mix(key, map->subresource.sparseLevel.offsetZ) | 1;
    }
    return pm_mix(key, map->subresource.miptail.offset ^ (uint64_t)map->subresource.miptail.layer << 40) | 1;
}

static uint64_t array_of(const CUarrayMapInfo *map) {
    return map->resourceType == CU_RESOURCE_TYPE_ARRAY ? pm_key(map->resource.array) : pm_key(map->resource.mipmap);
}

static void tile_out(struct pm_uses *uses, uint64_t key) {
    struct pm_process *self = pm_self();
    struct pm_holding tile;
    if (self && pm_pointers_take(self->pointers, PM_HOLD_TILE, key, &tile))
        pm_uses_add(uses, &tile, tile.bytes);
}

/* A part of an array keeps the memory that it is mapped to, as a mapping of addresses does. */
static void tile_in(struct pm_uses *uses, const CUarrayMapInfo *map) {
    struct pm_process *self = pm_self();
    uint64_t key = tile_key(map, array_of(map)), handle = map->memHandle.memHandle;
    struct pm_holding memory, tile = {.key = key, .bytes = handle, .other = array_of(map), .uses = 1};
    bool maps_memory = map->memOperationType == CU_MEM_OPERATION_TYPE_MAP;
    bool known = self && maps_memory && pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, 1, &memory);
    tile_out(uses, key); /* one call may map a part twice */
    if (known && !pm_pointers_put(self->pointers, PM_HOLD_TILE, &tile))
        pm_uses_add(uses, &tile, handle);
}

#define MAP_ARRAY(name, null_is)                                                                                       \
    PM_EXPORT CUresult name(CUarrayMapInfo *maps, unsigned count, CUstream stream) {                                   \
        PM_MISSING(name);                                                                                              \
        struct pm_uses uses = {0};                                                                                     \
        for (unsigned i = 0; maps && i < count; i++)                                                                   \
            tile_out(&uses, tile_key(&maps[i], array_of(&maps[i])));                                                   \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(maps, count, stream);                                                          \
        for (unsigned i = 0; result == CUDA_SUCCESS && maps && i < count; i++)                                         \
            tile_in(&uses, &maps[i]);                                                                                  \
        pm_uses_gone(&uses, PM_HOLD_TILE, result);                                                                     \
        return result;                                                                                                 \
    }
MAP_ARRAY(cuMemMapArrayAsync, PM_LEGACY)
MAP_ARRAY(cuMemMapArrayAsync_ptsz, PM_PER_THREAD)

static void tiles_out(struct pm_uses *uses, uint64_t array) {
    struct pm_process *self = pm_self();
    struct pm_holding tile;
    for (size_t at = 0; self && array && pm_pointers_take_any(self->pointers, PM_HOLD_TILE, array, &at, &tile);)
        pm_uses_add(uses, &tile, tile.bytes);
}

#define DESTROY(name, type)                                                                                            \
    PM_EXPORT CUresult name(type array) {                                                                              \
        PM_MISSING(name);                                                                                              \
        struct pm_holding holding;                                                                                     \
        struct pm_uses uses = {0};                                                                                     \
        bool had = pm_holding_out(PM_HOLD_ARRAY, pm_key(array), &holding);                                             \
        if (!had)                                                                                                      \
            tiles_out(&uses, pm_key(array));                                                                           \
        CUresult result = PM_REAL(name)(array);                                                                        \
        pm_holding_gone(had, PM_HOLD_ARRAY, &holding, result);                                                         \
        pm_uses_gone(&uses, PM_HOLD_TILE, result);                                                                     \
        return result;                                                                                                 \
    }
DESTROY(cuArrayDestroy, CUarray)
DESTROY(cuMipmappedArrayDestroy, CUmipmappedArray)

uint64_t pm_array_element_bytes(CUarray array) {
    CUDA_ARRAY3D_DESCRIPTOR of;
    if (!pm_need[PM_NEED_cuArray3DGetDescriptor_v2] || PM_NEED(cuArray3DGetDescriptor_v2)(&of, array) != CUDA_SUCCESS)
        return 1;
    return of.NumChannels * element_bytes(of.Format);
}
