/* Allocations against the limit of all processes, and what the program is shown of the device's memory. */
#include "shim.h"

#include <stdint.h>

#include "memory.h"

#define MISSING(name)                                                                                                  \
    if (!pm_ready() || !pm_real[PM_HOOK_##name])                                                                       \
    return CUDA_ERROR_NOT_FOUND

/* An allocation on its way: taken from the limit before the driver is asked, given back when the driver refuses. */
struct claim {
    struct pm_process *self;
    uint32_t device;
    uint32_t kind;
    uint64_t bytes;
};

/* False: over the limit. A claim without `self` is not accounted. */
static bool claim_begin(struct claim *claim, uint32_t device, uint32_t kind, uint64_t bytes) {
    *claim = (struct claim){NULL, device, kind, bytes};
    struct pm_process *self = pm_self();
    if (!self || device == PM_NO_DEVICE)
        return true;
    claim->self = self;
    if (pm_process_take(self, device, kind, bytes))
        return true;
    claim->self = NULL;
    return false;
}

static bool claim_here(struct claim *claim, uint32_t kind, uint64_t bytes) {
    struct pm_process *self = pm_self();
    return claim_begin(claim, self ? pm_current_device(self) : PM_NO_DEVICE, kind, bytes);
}

static void claim_undo(struct claim *claim, CUresult result) {
    if (!claim->self)
        return;
    pm_process_give_back(claim->self, claim->device, claim->kind, claim->bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        pm_process_denied_by_card(claim->self, claim->device, claim->bytes);
}

static void claim_end(struct claim *claim, CUresult result, enum pm_holding_class of, uint64_t key, uint64_t other) {
    if (!claim->self)
        return;
    struct pm_holding holding = {key, claim->bytes, other, claim->device, (uint16_t)claim->kind, 1};
    if (result != CUDA_SUCCESS)
        claim_undo(claim, result);
    else if (!pm_pointers_put(claim->self->pointers, of, &holding)) {
        /* it could never be given back by name, and would stay reserved for ever */
        pm_process_give_back(claim->self, claim->device, claim->kind, claim->bytes);
        pm_add(&pm_process_counters(claim->self, claim->device)->internal_faults, 1);
    }
}

static uint64_t this_context(void) {
    CUcontext handle = NULL;
    if (pm_need[PM_NEED_cuCtxGetCurrent])
        PM_NEED(cuCtxGetCurrent)(&handle);
    return (uint64_t)(uintptr_t)handle;
}

PM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
    MISSING(cuMemAlloc_v2);
    struct claim claim;
    if (at && !claim_here(&claim, PM_MEMORY_DEVICE, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAlloc_v2)(at, bytes);
    if (at)
        claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, this_context());
    return result;
}

PM_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned flags) {
    MISSING(cuMemAllocManaged);
    struct claim claim;
    if (at && !claim_here(&claim, PM_MEMORY_MANAGED, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAllocManaged)(at, bytes, flags);
    if (at)
        claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, this_context());
    return result;
}

PM_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned element) {
    MISSING(cuMemAllocPitch_v2);
    struct claim claim;
    if (!at || !pitch || (height && width > SIZE_MAX / 2 / height))
        return PM_REAL(cuMemAllocPitch_v2)(at, pitch, width, height, element);
    /* The driver chooses the pitch, so the first claim is a guess from below and is corrected by what came out. */
    size_t row = (width + PM_MEMORY_UNIT - 1) / PM_MEMORY_UNIT * PM_MEMORY_UNIT;
    if (!claim_here(&claim, PM_MEMORY_DEVICE, row * height))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemAllocPitch_v2)(at, pitch, width, height, element);
    if (result == CUDA_SUCCESS && claim.self && *pitch != row) {
        struct pm_process *self = claim.self;
        uint32_t device = claim.device;
        pm_process_give_back(self, device, claim.kind, claim.bytes);
        if (!claim_begin(&claim, device, PM_MEMORY_DEVICE, (uint64_t)*pitch * height)) {
            ((CUresult (*)(CUdeviceptr))pm_real[PM_HOOK_cuMemFree_v2])(*at);
            *at = 0;
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, this_context());
    return result;
}

/* Takes the holding out before the driver frees: afterwards the address may be another thread's new allocation. */
static bool holding_out(enum pm_holding_class of, uint64_t key, struct pm_holding *holding) {
    struct pm_process *self = pm_self();
    return self && pm_pointers_take(self->pointers, of, key, holding);
}

static void holding_gone(bool had, enum pm_holding_class of, const struct pm_holding *holding, CUresult result) {
    struct pm_process *self = pm_self();
    if (!had || !self)
        return;
    if (result == CUDA_SUCCESS)
        pm_process_give_back(self, holding->device, holding->kind, holding->bytes);
    else
        pm_pointers_put(self->pointers, of, holding);
}

PM_EXPORT CUresult cuMemFree_v2(CUdeviceptr at) {
    MISSING(cuMemFree_v2);
    struct pm_holding holding;
    bool had = holding_out(PM_HOLD_ADDRESS, at, &holding);
    CUresult result = PM_REAL(cuMemFree_v2)(at);
    holding_gone(had, PM_HOLD_ADDRESS, &holding, result);
    return result;
}

/* ---- stream-ordered ---------------------------------------------------------------------------------------------- */

/* In a capture an allocation is a node of the graph and takes nothing yet. */
static bool captured(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (pm_peek(&pm_captures) == 0 || !pm_need[PM_NEED_cuStreamIsCapturing])
        return false;
    return PM_NEED(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

#define ALLOC_ASYNC(name, null_is)                                                                                     \
    PM_EXPORT CUresult name(CUdeviceptr *at, size_t bytes, CUstream stream) {                                          \
        MISSING(name);                                                                                                 \
        if (!at || captured(pm_stream(stream, null_is)))                                                               \
            return PM_REAL(name)(at, bytes, stream);                                                                   \
        struct claim claim;                                                                                            \
        if (!claim_here(&claim, PM_MEMORY_POOL, bytes))                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, bytes, stream);                                                            \
        claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, this_context());                  \
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
        MISSING(name);                                                                                                 \
        if (!at || captured(pm_stream(stream, null_is)))                                                               \
            return PM_REAL(name)(at, bytes, pool, stream);                                                             \
        struct claim claim;                                                                                            \
        if (!claim_begin(&claim, pool_device(pool), PM_MEMORY_POOL, bytes))                                            \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, bytes, pool, stream);                                                      \
        claim_end(&claim, result, PM_HOLD_ADDRESS, result == CUDA_SUCCESS ? *at : 0, this_context());                  \
        return result;                                                                                                 \
    }
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, PM_LEGACY)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, PM_PER_THREAD)

#define FREE_ASYNC(name, null_is)                                                                                      \
    PM_EXPORT CUresult name(CUdeviceptr at, CUstream stream) {                                                         \
        MISSING(name);                                                                                                 \
        if (captured(pm_stream(stream, null_is)))                                                                      \
            return PM_REAL(name)(at, stream);                                                                          \
        struct pm_holding holding;                                                                                     \
        bool had = holding_out(PM_HOLD_ADDRESS, at, &holding);                                                         \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        CUresult result = PM_REAL(name)(at, stream);                                                                   \
        holding_gone(had, PM_HOLD_ADDRESS, &holding, result);                                                          \
        return result;                                                                                                 \
    }
FREE_ASYNC(cuMemFreeAsync, PM_LEGACY)
FREE_ASYNC(cuMemFreeAsync_ptsz, PM_PER_THREAD)

PM_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    MISSING(cuMemPoolCreate);
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
    MISSING(cuMemPoolDestroy);
    struct pm_holding made;
    holding_out(PM_HOLD_POOL, (uint64_t)(uintptr_t)pool, &made);
    return PM_REAL(cuMemPoolDestroy)(pool);
}

/* ---- physical memory and its mappings ---------------------------------------------------------------------------- */

PM_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                               unsigned long long flags) {
    MISSING(cuMemCreate);
    struct pm_process *self = pm_self();
    /* needs no current context; memory of the host is none of the device's */
    if (!self || !handle || !prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return PM_REAL(cuMemCreate)(handle, bytes, prop, flags);
    struct claim claim;
    if (!claim_begin(&claim, pm_device_of(self, prop->location.id), PM_MEMORY_VMM, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = PM_REAL(cuMemCreate)(handle, bytes, prop, flags);
    claim_end(&claim, result, PM_HOLD_HANDLE, result == CUDA_SUCCESS ? (uint64_t)*handle : 0, 0);
    return result;
}

/* The memory goes with its last handle and mapping. */
static void unuse_handle(uint64_t handle) {
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, -1, &holding) && holding.uses == 0)
        pm_process_give_back(self, holding.device, holding.kind, holding.bytes);
}

PM_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    MISSING(cuMemRelease);
    CUresult result = PM_REAL(cuMemRelease)(handle);
    if (result == CUDA_SUCCESS)
        unuse_handle(handle);
    return result;
}

PM_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at) {
    MISSING(cuMemRetainAllocationHandle);
    CUresult result = PM_REAL(cuMemRetainAllocationHandle)(handle, at);
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && result == CUDA_SUCCESS && handle)
        pm_pointers_use(self->pointers, PM_HOLD_HANDLE, *handle, 1, &holding);
    return result;
}

PM_EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
    MISSING(cuMemMap);
    CUresult result = PM_REAL(cuMemMap)(at, bytes, offset, handle, flags);
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && result == CUDA_SUCCESS && pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, 1, &holding)) {
        struct pm_holding mapping = {.key = at, .bytes = bytes, .other = handle, .uses = 1};
        if (!pm_pointers_put(self->pointers, PM_HOLD_MAPPING, &mapping))
            unuse_handle(handle);
    }
    return result;
}

PM_EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    MISSING(cuMemUnmap);
    CUresult result = PM_REAL(cuMemUnmap)(at, bytes);
    struct pm_process *self = pm_self();
    struct pm_holding mapping;
    for (CUdeviceptr next = at; self && result == CUDA_SUCCESS && next < at + bytes; next += mapping.bytes) {
        if (!pm_pointers_take(self->pointers, PM_HOLD_MAPPING, next, &mapping) || mapping.bytes == 0)
            break; /* mapped before we were there, or imported */
        unuse_handle(mapping.other);
    }
    return result;
}

/* ---- what is shown ----------------------------------------------------------------------------------------------- */

PM_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    MISSING(cuMemGetInfo_v2);
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
    MISSING(cuDeviceTotalMem_v2);
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
