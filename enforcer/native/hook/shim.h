/* What the shims share: the current context, streams, captures. */
#ifndef PM_SHIM_H
#define PM_SHIM_H

#define CUDA_ENABLE_DEPRECATED /* old launches are interposed like new ones */
#include <cuda.h>

#include "hooks.h"
#include "process.h"

/* Functions whose plain name cuda.h gives to a newer version. */
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuStreamDestroy
#undef cuStreamBeginCapture
#undef cuGetProcAddress
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuGraphExecUpdate
#undef cuGraphExecKernelNodeSetParams
#undef cuStreamWaitValue32
#undef cuStreamWaitValue64
#undef cuDeviceGetUuid
#undef cuEventElapsedTime
#undef cuCtxSynchronize

enum pm_default_stream { PM_LEGACY = 1, PM_PER_THREAD = 2 };

extern uint32_t pm_captures;
extern const struct pm_driver pm_cuda_driver;

/* The state of the calling thread's context; NULL: none, or not to be metered. */
struct pm_context *pm_current(struct pm_process *self);
/* Meter index of a device ordinal. */
uint32_t pm_device_of(struct pm_process *self, CUdevice ordinal);
/* Meter index of the current context's device; PM_NO_DEVICE: none. */
uint32_t pm_current_device(struct pm_process *self);
/* Whether a refusal of ours stands between the program and this device. */
bool pm_device_refused(CUdevice ordinal);

/* NULL by the name it has in this variant of a call. */
static inline CUstream pm_stream(CUstream stream, enum pm_default_stream null_is) {
    return stream ? stream : (CUstream)(uintptr_t)null_is;
}

static inline uint64_t pm_lane_key(CUstream stream) {
    static __thread char of_this_thread;
    uint64_t key = pm_mix(17, (uint64_t)(uintptr_t)stream);
    return stream == (CUstream)PM_PER_THREAD ? pm_mix(key, (uint64_t)(uintptr_t)&of_this_thread) | 1 : key | 1;
}

/* Other work than a launch went into the stream. */
void pm_taint(CUstream stream);

#endif
