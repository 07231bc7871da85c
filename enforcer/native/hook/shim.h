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
#undef cuMemAlloc
#undef cuMemAllocPitch
#undef cuMemFree
#undef cuMemGetInfo
#undef cuDeviceTotalMem
#undef cuArrayCreate
#undef cuArray3DCreate
#undef cuGraphInstantiate
#undef cuGraphInstantiate_v2
#undef cuGraphAddNode
#undef cuModuleGetGlobal
#undef cuIpcOpenMemHandle

enum pm_default_stream { PM_LEGACY = 1, PM_PER_THREAD = 2 };

extern uint32_t pm_captures;
extern const struct pm_driver pm_cuda_driver;

/* The state of the calling thread's context; NULL: none, or not to be metered. */
struct pm_context *pm_current(struct pm_process *self);
/* Meter index of a device ordinal. */
uint32_t pm_device_of(struct pm_process *self, CUdevice ordinal);
/* Meter index of the current context's device; PM_NO_DEVICE: none. */
uint32_t pm_current_device(struct pm_process *self);

/* NULL by the name it has in this variant of a call. */
static inline CUstream pm_stream(CUstream stream, enum pm_default_stream null_is) {
    return stream ? stream : (CUstream)(uintptr_t)null_is;
}

static inline uint64_t pm_lane_key(CUstream stream) {
    static __thread char of_this_thread;
    uint64_t key = pm_mix(17, (uint64_t)(uintptr_t)stream);
    return stream == (CUstream)PM_PER_THREAD ? pm_mix(key, (uint64_t)(uintptr_t)&of_this_thread) | 1 : key | 1;
}

/* What goes into the stream becomes part of a graph, and runs later; also where the driver does not say. */
bool pm_capturing(CUstream stream);

/* Other work than a launch went into the stream. */
void pm_taint(CUstream stream);

/* A launch between its two halves; without a tracker it is not metered. */
struct pm_ticket {
    struct pm_launch launch;
    struct pm_counters *counters;
};

/* For work that is charged like a launch and is none: waits for the limit, then begins; ends with the driver's answer.
 */
void pm_ticket_open(struct pm_ticket *ticket, uint64_t kind, CUstream stream);
void pm_ticket_close(struct pm_ticket *ticket, CUresult result);

/* Of an executable graph's launches. */
uint64_t pm_graph_kind(CUgraphExec exec);

/* What a graph about to be launched or uploaded needs of the limit. */
struct pm_graph_need {
    struct pm_process *self; /* NULL: it allocates nothing */
    uint64_t devices;        /* bit by meter index */
};
/* False: it must exceed the limit. */
bool pm_graph_memory_begin(struct pm_graph_need *need, CUgraphExec exec);
/* Takes over what the driver keeps for graphs now. */
void pm_graph_memory_end(const struct pm_graph_need *need, CUresult result);
/* The same for one device, whose graphs' memory may have gone. */
void pm_graph_memory_settle(CUdevice ordinal);
/* A graph gets a memory node: from now on launches look. */
void pm_graph_memory_seen(void);

static inline bool pm_graphs_allocate(void) {
    const struct pm_process *self = pm_process_page;
    return self && pm_peek(&self->graphs_allocate);
}

#endif
