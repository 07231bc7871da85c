/* Limits of a context that make the driver keep more device memory: counted as overhead, as far as their size is known.
 */
#include "claim.h"

/* Bytes of the device for each unit of the limit; 0: not known, or none. */
static uint64_t bytes_of(CUlimit limit) {
    CUdevice ordinal;
    int processors = 0, threads = 0;
    switch ((int)limit) {
    case CU_LIMIT_PRINTF_FIFO_SIZE:
    case CU_LIMIT_MALLOC_HEAP_SIZE:
        return 1;
    case CU_LIMIT_STACK_SIZE: /* of every thread that can be on the device at once */
        if (!pm_need[PM_NEED_cuCtxGetDevice] || !pm_need[PM_NEED_cuDeviceGetAttribute] ||
            PM_NEED(cuCtxGetDevice)(&ordinal) != CUDA_SUCCESS ||
            PM_NEED(cuDeviceGetAttribute)(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal) !=
                CUDA_SUCCESS ||
            PM_NEED(cuDeviceGetAttribute)(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, ordinal) !=
                CUDA_SUCCESS)
            return 0;
        return (uint64_t)processors * (uint64_t)threads;
    default:
        return 0;
    }
}

static uint64_t beyond(uint64_t value, uint64_t first, uint64_t unit) {
    unsigned __int128 bytes = value > first ? (unsigned __int128)(value - first) * unit : 0;
    return bytes > PM_UNLIMITED / 2 ? PM_UNLIMITED / 2 : (uint64_t)bytes;
}

PM_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    PM_MISSING(cuCtxSetLimit);
    struct pm_process *self = pm_self();
    uint32_t device = self ? pm_current_device(self) : PM_NO_DEVICE;
    uint64_t context = pm_memory_context(), key = pm_mix(pm_mix(31, context), (uint64_t)limit) | 1;
    uint64_t unit = device != PM_NO_DEVICE && pm_need[PM_NEED_cuCtxGetLimit] ? bytes_of(limit) : 0;
    size_t now = 0;
    bool counts = limit == CU_LIMIT_STACK_SIZE || unit;
    if (unit == 0 || PM_NEED(cuCtxGetLimit)(&now, limit) != CUDA_SUCCESS) {
        if (counts && device != PM_NO_DEVICE)
            pm_add(&pm_process_counters(self, device)->internal_faults, 1);
        return PM_REAL(cuCtxSetLimit)(limit, value);
    }
    struct pm_holding held;
    if (!pm_pointers_take(self->pointers, PM_HOLD_LIMIT, key, &held))
        held = (struct pm_holding){key, 0, context, device, PM_MEMORY_OVERHEAD, 1, now};
    /* What it began with is part of what a context takes anyway. */
    struct pm_claim claim = {self, device, PM_MEMORY_OVERHEAD, held.bytes};
    uint64_t wanted = beyond(value, held.note, unit);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pm_process_change_begins(self, device);
    if (wanted <= claim.bytes || pm_claim_change(&claim, wanted)) {
        result = PM_REAL(cuCtxSetLimit)(limit, value);
        if (PM_NEED(cuCtxGetLimit)(&now, limit) == CUDA_SUCCESS) { /* the driver may round, or have refused */
            if (!pm_claim_change(&claim, beyond(now, held.note, unit)))
                pm_add(&pm_process_counters(self, device)->internal_faults, 1);
        }
    }
    held.bytes = claim.bytes;
    if (!pm_pointers_put(self->pointers, PM_HOLD_LIMIT, &held))
        pm_process_give_back(self, device, PM_MEMORY_OVERHEAD, held.bytes);
    pm_process_change_ends(self, device);
    return result;
}
