/* Waiting for the device, and what goes into streams besides launches. */
#include "claim.h"

struct wait {
    struct pm_context *context;
    struct pm_wait began;
    uint64_t lane_key; /* 0: for everything */
};

/* `all`: for all that the context has. */
static struct wait wait_begins(CUstream stream, bool all) {
    struct pm_process *self = pm_self();
    struct wait wait = {.context = self ? pm_current(self) : NULL, .lane_key = stream ? pm_lane_key(stream) : 0};
    if (!wait.context)
        return wait;
    if (stream)
        pm_tracker_close(&wait.context->tracker, stream, wait.lane_key);
    else if (all)
        pm_tracker_close_all(&wait.context->tracker, pm_lane_key((CUstream)PM_PER_THREAD), PM_PER_THREAD);
    wait.began = pm_tracker_waits(&wait.context->tracker);
    return wait;
}

static void wait_ends(const struct wait *wait) {
    if (wait->context)
        pm_tracker_waited(&wait->context->tracker, &wait->began, wait->lane_key);
}

#define WAITING(name, stream, all, ...)                                                                                \
    PM_MISSING(name);                                                                                                  \
    struct wait wait = wait_begins(stream, all);                                                                       \
    CUresult result = PM_REAL(name)(__VA_ARGS__);                                                                      \
    wait_ends(&wait);                                                                                                  \
    return result

PM_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    WAITING(cuStreamSynchronize, pm_stream(stream, PM_LEGACY), false, stream);
}

PM_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    WAITING(cuStreamSynchronize_ptsz, pm_stream(stream, PM_PER_THREAD), false, stream);
}

PM_EXPORT CUresult cuCtxSynchronize(void) {
    WAITING(cuCtxSynchronize, NULL, true, );
}

PM_EXPORT CUresult cuCtxSynchronize_v2(CUcontext of) {
    WAITING(cuCtxSynchronize_v2, NULL, !of || pm_this_context() == pm_key(of), of);
}

PM_EXPORT CUresult cuEventSynchronize(CUevent event) {
    WAITING(cuEventSynchronize, NULL, false, event);
}

static void stream_goes(CUstream stream) {
    struct pm_process *self = pm_self();
    if (!self || !stream)
        return;
    uint64_t key = pm_lane_key(stream); /* its context need not be the current one */
    for (uint32_t i = 0; i < pm_load(&self->context_count); i++)
        if (pm_load(&self->contexts[i]->handle))
            pm_tracker_drop_lane(&self->contexts[i]->tracker, key);
}

PM_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    PM_MISSING(cuStreamDestroy_v2);
    stream_goes(stream);
    return PM_REAL(cuStreamDestroy_v2)(stream);
}

PM_EXPORT CUresult cuStreamDestroy(CUstream stream) {
    PM_MISSING(cuStreamDestroy);
    stream_goes(stream);
    return PM_REAL(cuStreamDestroy)(stream);
}

/* A segment with such a call inside may have waited, or worked for something that is not a kernel. */
PM_TAINTING_STREAM(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), stream, event, flags)
PM_TAINTING_STREAM(cuStreamWaitValue32, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags), stream, at,
                   value, flags)
PM_TAINTING_STREAM(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags), stream,
                   at, value, flags)
PM_TAINTING_STREAM(cuStreamWaitValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags), stream, at,
                   value, flags)
PM_TAINTING_STREAM(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags), stream,
                   at, value, flags)
PM_TAINTING_STREAM(cuLaunchHostFunc, (CUstream stream, CUhostFn f, void *data), stream, f, data)
PM_TAINTING_STREAM(cuStreamAddCallback, (CUstream stream, CUstreamCallback f, void *data, unsigned flags), stream, f,
                   data, flags)

/* Newer than the header that this is built with. */
PM_TAINTING_STREAM(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn f, void *data, unsigned mode), stream, f, data, mode)
