/* Allocations against the limit of all processes, and what the program is shown of the device's memory. */
#include "claim.h"

#include <stdint.h>

#include "memory.h"

PM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
    PM_MISSING(cuMemAlloc_v2);
    struct pm_claim claim;
    if (at && !pm_claim_here(&claim, PM_MEMORY_DEVICE, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAlloc_v2)(at, bytes);
    if (at)
        pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned flags) {
    PM_MISSING(cuMemAllocManaged);
    struct pm_claim claim;
    if (at && !pm_claim_here(&claim, PM_MEMORY_MANAGED, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAllocManaged)(at, bytes, flags);
    if (at)
        pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned element) {
    PM_MISSING(cuMemAllocPitch_v2);
    struct pm_claim claim;
    if (!at || !pitch || (height && width > SIZE_MAX / 2 / height))
        return PM_REAL(cuMemAllocPitch_v2)(at, pitch, width, height, element);
    /* The driver chooses the pitch, so the first claim is a guess from below and is corrected by what came out. */
    size_t row = (width + PM_MEMORY_UNIT - 1) / PM_MEMORY_UNIT * PM_MEMORY_UNIT;
    if (!pm_claim_here(&claim, PM_MEMORY_DEVICE, row * height))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAllocPitch_v2)(at, pitch, width, height, element);
    if (result == CUDA_SUCCESS && !pm_claim_change(&claim, (uint64_t)*pitch * height)) {
        PM_REAL(cuMemFree_v2)(*at);
        *at = 0;
        pm_claim_undo(&claim, CUDA_SUCCESS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuMemFree_v2(CUdeviceptr at) {
    PM_MISSING(cuMemFree_v2);
    struct pm_holding holding;
    bool had = pm_holding_out(PM_HOLD_ADDRESS, at, &holding);
    CUresult result = PM_REAL(cuMemFree_v2)(at);
    pm_holding_gone(had, PM_HOLD_ADDRESS, &holding, result);
    return result;
}

/* As CUDA 2 had them, with 32-bit addresses and lengths. */

PM_EXPORT CUresult cuMemAlloc(uint32_t *at, unsigned bytes) {
    PM_MISSING(cuMemAlloc);
    struct pm_claim claim;
    if (at && !pm_claim_here(&claim, PM_MEMORY_DEVICE, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ((CUresult (*)(uint32_t *, unsigned))pm_real[PM_HOOK_cuMemAlloc])(at, bytes);
    if (at)
        pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuMemAllocPitch(uint32_t *at, unsigned *pitch, unsigned width, unsigned height, unsigned element) {
    PM_MISSING(cuMemAllocPitch);
    CUresult (*real)(uint32_t *, unsigned *, unsigned, unsigned, unsigned) =
        (CUresult (*)(uint32_t *, unsigned *, unsigned, unsigned, unsigned))pm_real[PM_HOOK_cuMemAllocPitch];
    struct pm_claim claim;
    if (!at || !pitch)
        return real(at, pitch, width, height, element);
    uint64_t row = ((uint64_t)width + PM_MEMORY_UNIT - 1) / PM_MEMORY_UNIT * PM_MEMORY_UNIT;
    if (!pm_claim_here(&claim, PM_MEMORY_DEVICE, row * height))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(at, pitch, width, height, element);
    if (result == CUDA_SUCCESS && !pm_claim_change(&claim, (uint64_t)*pitch * height)) {
        PM_REAL(cuMemFree_v2)(*at);
        *at = 0;
        pm_claim_undo(&claim, CUDA_SUCCESS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());
    return result;
}

PM_EXPORT CUresult cuMemFree(uint32_t at) {
    PM_MISSING(cuMemFree);
    struct pm_holding holding;
    bool had = pm_holding_out(PM_HOLD_ADDRESS, at, &holding);
    CUresult result = ((CUresult (*)(uint32_t))pm_real[PM_HOOK_cuMemFree])(at);
    pm_holding_gone(had, PM_HOLD_ADDRESS, &holding, result);
    return result;
}

/* ---- stream-ordered ---------------------------------------------------------------------------------------------- */

/* In a capture an allocation is a node of the graph and takes nothing yet. */
#define ALLOC_ASYNC(name, null_is)                                                                                     \
    PM_EXPORT CUresult name(CUdeviceptr *at, size_t bytes, CUstream stream) {                                          \
        PM_MISSING(name);                                                                                              \
        if (!at || pm_capturing(pm_stream(stream, null_is))) {                                                         \
            pm_graph_memory_seen();                                                                                    \
            return PM_REAL(name)(at, bytes, stream);                                                                   \
        }                                                                                                              \
        struct pm_claim claim;                                                                                         \
        if (!pm_claim_here(&claim, PM_MEMORY_POOL, bytes))                                                             \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, bytes, stream);                                                            \
        pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());          \
        return result;                                                                                                 \
    }
ALLOC_ASYNC(cuMemAllocAsync, PM_LEGACY)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, PM_PER_THREAD)

/* The device a pool lives on: of its making, or the current one for a pool made unseen. A host or imported pool is not
 * charged. */
static uint32_t pool_device(CUmemoryPool pool) {
    struct pm_process *self = pm_self();
    struct pm_holding known;
    if (!self)
        return PM_NO_DEVICE;
    if (pm_pointers_get(self->pointers, PM_HOLD_POOL, (uint64_t)(uintptr_t)pool, &known))
        return known.device;
    return pm_current_device(self);
}

#define ALLOC_FROM_POOL(name, null_is)                                                                                 \
    PM_EXPORT CUresult name(CUdeviceptr *at, size_t bytes, CUmemoryPool pool, CUstream stream) {                       \
        PM_MISSING(name);                                                                                              \
        if (!at || pm_capturing(pm_stream(stream, null_is))) {                                                         \
            pm_graph_memory_seen();                                                                                    \
            return PM_REAL(name)(at, bytes, pool, stream);                                                             \
        }                                                                                                              \
        struct pm_claim claim;                                                                                         \
        if (!pm_claim_begin(&claim, pool_device(pool), PM_MEMORY_POOL, bytes))                                         \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, bytes, pool, stream);                                                      \
        pm_claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, pm_memory_context());          \
        return result;                                                                                                 \
    }
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, PM_LEGACY)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, PM_PER_THREAD)

#define FREE_ASYNC(name, null_is)                                                                                      \
    PM_EXPORT CUresult name(CUdeviceptr at, CUstream stream) {                                                         \
        PM_MISSING(name);                                                                                              \
        if (pm_capturing(pm_stream(stream, null_is)))                                                                  \
            return PM_REAL(name)(at, stream);                                                                          \
        struct pm_holding holding;                                                                                     \
        bool had = pm_holding_out(PM_HOLD_ADDRESS, at, &holding);                                                      \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, stream);                                                                   \
        pm_holding_gone(had, PM_HOLD_ADDRESS, &holding, result);                                                       \
        return result;                                                                                                 \
    }
FREE_ASYNC(cuMemFreeAsync, PM_LEGACY)
FREE_ASYNC(cuMemFreeAsync_ptsz, PM_PER_THREAD)

PM_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    PM_MISSING(cuMemPoolCreate);
    CUresult result = PM_REAL(cuMemPoolCreate)(pool, props);
    struct pm_process *self = pm_self();
    if (self && result == CUDA_SUCCESS && pool && props) {
        bool on_device = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        struct pm_holding made = {.key = (uint64_t)(uintptr_t)*pool,
                                  .device = on_device ? pm_device_of(self, props->location.id) : PM_NO_DEVICE,
                                  .uses = 1};
        pm_pointers_put(self->pointers, PM_HOLD_POOL, &made);
    }
    return result;
}

PM_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    PM_MISSING(cuMemPoolDestroy);
    struct pm_process *self = pm_self();
    struct pm_holding made;
    if (self)
        pm_pointers_take(self->pointers, PM_HOLD_POOL, pm_key(pool), &made);
    return PM_REAL(cuMemPoolDestroy)(pool);
}

/* ---- physical memory and its mappings ---------------------------------------------------------------------------- */

PM_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                               unsigned long long flags) {
    PM_MISSING(cuMemCreate);
    struct pm_process *self = pm_self();
    /* needs no current context; memory of the host is none of the device's */
    if (!self || !handle || !prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return PM_REAL(cuMemCreate)(handle, bytes, prop, flags);
    struct pm_claim claim;
    if (!pm_claim_begin(&claim, pm_device_of(self, prop->location.id), PM_MEMORY_VMM, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemCreate)(handle, bytes, prop, flags);
    pm_claim_end(&claim, result, PM_HOLD_HANDLE, result == CUDA_SUCCESS ? (uint64_t)*handle : 0, 0);
    return result;
}

PM_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    PM_MISSING(cuMemRelease);
    struct pm_holding holding;
    bool had = pm_handle_out(handle, &holding);
    CUresult result = PM_REAL(cuMemRelease)(handle);
    pm_handle_gone(had, &holding, result);
    return result;
}

PM_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at) {
    PM_MISSING(cuMemRetainAllocationHandle);
    CUresult result = PM_REAL(cuMemRetainAllocationHandle)(handle, at);
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && result == CUDA_SUCCESS && handle)
        pm_pointers_use(self->pointers, PM_HOLD_HANDLE, *handle, 1, &holding);
    return result;
}

PM_EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
    PM_MISSING(cuMemMap);
    CUresult result = PM_REAL(cuMemMap)(at, bytes, offset, handle, flags);
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && result == CUDA_SUCCESS && pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, 1, &holding)) {
        struct pm_holding mapping = {.key = at, .bytes = bytes, .other = handle, .uses = 1};
        if (!pm_pointers_put(self->pointers, PM_HOLD_MAPPING, &mapping))
            pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, -1, &holding);
    }
    return result;
}

PM_EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    PM_MISSING(cuMemUnmap);
    struct pm_process *self = pm_self();
    struct pm_uses uses = {0};
    struct pm_holding mapping;
    for (CUdeviceptr next = at; self && next < at + bytes; next += mapping.bytes) {
        if (!pm_pointers_take(self->pointers, PM_HOLD_MAPPING, next, &mapping) || mapping.bytes == 0)
            break; /* mapped before we were there, or imported */
        pm_uses_add(&uses, &mapping, mapping.other);
    }
    CUresult result = PM_REAL(cuMemUnmap)(at, bytes);
    pm_uses_gone(&uses, PM_HOLD_MAPPING, result);
    return result;
}

/* ---- what is shown ----------------------------------------------------------------------------------------------- */

PM_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    PM_MISSING(cuMemGetInfo_v2);
    CUresult result = PM_REAL(cuMemGetInfo_v2)(free_bytes, total);
    struct pm_process *self = pm_self();
    uint32_t device = self && result == CUDA_SUCCESS ? pm_current_device(self) : PM_NO_DEVICE;
    if (device == PM_NO_DEVICE)
        return result;
    struct pm_limits limits = pm_process_limits(self, device);
    if (limits.memory_limit == PM_UNLIMITED || !limits.show_memory)
        return result;
    uint64_t used = pm_memory_used(&self->view, device);
    uint64_t left = limits.memory_limit > used ? limits.memory_limit - used : 0;
    if (free_bytes && *free_bytes > left)
        *free_bytes = left;
    if (total && *total > limits.memory_limit)
        *total = limits.memory_limit;
    return result;
}

PM_EXPORT CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice ordinal) {
    PM_MISSING(cuDeviceTotalMem_v2);
    CUresult result = PM_REAL(cuDeviceTotalMem_v2)(total, ordinal);
    struct pm_process *self = pm_self();
    uint32_t device = self && result == CUDA_SUCCESS && total ? pm_device_of(self, ordinal) : PM_NO_DEVICE;
    if (device == PM_NO_DEVICE)
        return result;
    struct pm_limits limits = pm_process_limits(self, device);
    if (limits.show_memory && *total > limits.memory_limit)
        *total = limits.memory_limit;
    return result;
}

static uint32_t least_of(uint32_t a, uint64_t b) {
    return a < b ? a : (uint32_t)b;
}

PM_EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    PM_MISSING(cuMemGetInfo);
    CUresult result = ((CUresult (*)(unsigned *, unsigned *))pm_real[PM_HOOK_cuMemGetInfo])(free_bytes, total);
    struct pm_process *self = pm_self();
    uint32_t device = self && result == CUDA_SUCCESS ? pm_current_device(self) : PM_NO_DEVICE;
    if (device == PM_NO_DEVICE)
        return result;
    struct pm_limits limits = pm_process_limits(self, device);
    if (limits.memory_limit == PM_UNLIMITED || !limits.show_memory)
        return result;
    uint64_t used = pm_memory_used(&self->view, device);
    if (free_bytes)
        *free_bytes = least_of(*free_bytes, limits.memory_limit > used ? limits.memory_limit - used : 0);
    if (total)
        *total = least_of(*total, limits.memory_limit);
    return result;
}

PM_EXPORT CUresult cuDeviceTotalMem(unsigned *total, CUdevice ordinal) {
    PM_MISSING(cuDeviceTotalMem);
    CUresult result = ((CUresult (*)(unsigned *, CUdevice))pm_real[PM_HOOK_cuDeviceTotalMem])(total, ordinal);
    struct pm_process *self = pm_self();
    uint32_t device = self && result == CUDA_SUCCESS && total ? pm_device_of(self, ordinal) : PM_NO_DEVICE;
    if (device == PM_NO_DEVICE)
        return result;
    struct pm_limits limits = pm_process_limits(self, device);
    if (limits.show_memory)
        *total = least_of(*total, limits.memory_limit);
    return result;
}
