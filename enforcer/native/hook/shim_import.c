/*
 * Memory of other processes. It is charged to the one that exported it, and to nobody else: what comes in through these
 * calls is in no table of ours, so that giving it back changes no account. Only what would be taken for our own is
 * remembered here.
 */
#include "claim.h"

/* Memory that this process made and exported itself keeps one more handle. */
PM_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                                  CUmemAllocationHandleType type) {
    PM_MISSING(cuMemImportFromShareableHandle);
    CUresult result = PM_REAL(cuMemImportFromShareableHandle)(handle, os_handle, type);
    struct pm_process *self = pm_self();
    struct pm_holding holding;
    if (self && result == CUDA_SUCCESS && handle)
        pm_pointers_use(self->pointers, PM_HOLD_HANDLE, *handle, 1, &holding);
    return result;
}

/* What is allocated from another's pool, where a driver allows it, is charged to nobody here. */
PM_EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
                                                      unsigned long long flags) {
    PM_MISSING(cuMemPoolImportFromShareableHandle);
    CUresult result = PM_REAL(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    struct pm_process *self = pm_self();
    if (self && result == CUDA_SUCCESS && pool) {
        struct pm_holding imported = {.key = pm_key(*pool), .device = PM_NO_DEVICE, .uses = 1};
        pm_pointers_put(self->pointers, PM_HOLD_POOL, &imported);
    }
    return result;
}
