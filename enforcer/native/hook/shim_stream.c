/* Waiting for the device, and what goes into streams besides launches. */
#include "shim.h"

#define MISSING(name)                                                                                                  \
    if (!pm_ready() || !pm_real[PM_HOOK_##name])                                                                       \
    return CUDA_ERROR_NOT_FOUND

struct wait {
    struct pm_context *context;
    uint64_t since_ns;
    uint64_t lane_key; /* 0: for everything */
};

static struct wait wait_begins(CUstream stream) {
    struct pm_process *self = pm_self();
    struct wait wait = {.context = self ? pm_current(self) : NULL, .lane_key = stream ? pm_lane_key(stream) : 0};
    if (!wait.context)
        return wait;
    if (stream)
        pm_tracker_close(&wait.context->tracker, stream, wait.lane_key);
    wait.since_ns = pm_tracker_waits(&wait.context->tracker);
    return wait;
}

static void wait_ends(const struct wait *wait) {
    if (wait->context)
        pm_tracker_waited(&wait->context->tracker, wait->since_ns, wait->lane_key);
}

#define WAITING(name, stream, ...)                                                                                     \
    MISSING(name);                                                                                                     \
    struct wait wait = wait_begins(stream);                                                                            \
    CUresult result = PM_REAL(name)(__VA_ARGS__);                                                                      \
    wait_ends(&wait);                                                                                                  \
    return result

PM_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    WAITING(cuStreamSynchronize, pm_stream(stream, PM_LEGACY), stream);
}

PM_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) {
    WAITING(cuStreamSynchronize_ptsz, pm_stream(stream, PM_PER_THREAD), stream);
}

PM_EXPORT CUresult cuCtxSynchronize(void) {
    WAITING(cuCtxSynchronize, NULL, );
}

PM_EXPORT CUresult cuCtxSynchronize_v2(CUcontext of) {
    WAITING(cuCtxSynchronize_v2, NULL, of);
}

PM_EXPORT CUresult cuEventSynchronize(CUevent event) {
    WAITING(cuEventSynchronize, NULL, event);
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
    MISSING(cuStreamDestroy_v2);
    stream_goes(stream);
    return PM_REAL(cuStreamDestroy_v2)(stream);
}

PM_EXPORT CUresult cuStreamDestroy(CUstream stream) {
    MISSING(cuStreamDestroy);
    stream_goes(stream);
    return PM_REAL(cuStreamDestroy)(stream);
}

/* A segment with such a call inside may have waited, or worked for something that is not a kernel. */
#define TAINT(name, null_is, params, ...)                                                                              \
    PM_EXPORT CUresult name params {                                                                                   \
        MISSING(name);                                                                                                 \
        pm_taint(pm_stream(stream, null_is));                                                                          \
        return ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                             \
    }
#define TAINT_BOTH(name, params, ...)                                                                                  \
    TAINT(name, PM_LEGACY, params, __VA_ARGS__)                                                                        \
    TAINT(name##_ptsz, PM_PER_THREAD, params, __VA_ARGS__)

TAINT_BOTH(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), stream, event, flags)
TAINT_BOTH(cuStreamWaitValue32, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags), stream, at, value,
           flags)
TAINT_BOTH(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags), stream, at,
           value, flags)
TAINT_BOTH(cuStreamWaitValue64, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags), stream, at, value,
           flags)
TAINT_BOTH(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags), stream, at,
           value, flags)
TAINT_BOTH(cuLaunchHostFunc, (CUstream stream, CUhostFn f, void *data), stream, f, data)
TAINT_BOTH(cuStreamAddCallback, (CUstream stream, CUstreamCallback f, void *data, unsigned flags), stream, f, data,
           flags)
TAINT_BOTH(cuMemsetD8Async, (CUdeviceptr at, unsigned char value, size_t n, CUstream stream), at, value, n, stream)
TAINT_BOTH(cuMemsetD16Async, (CUdeviceptr at, unsigned short value, size_t n, CUstream stream), at, value, n, stream)
TAINT_BOTH(cuMemsetD32Async, (CUdeviceptr at, unsigned value, size_t n, CUstream stream), at, value, n, stream)

/* ---- copies ------------------------------------------------------------------------------------------------------ */

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE, BETWEEN_DEVICES };

static enum direction direction_of(CUdeviceptr to, CUdeviceptr from) {
    CUmemorytype to_type = 0, from_type = 0;
    int to_device = -1, from_device = -1;
    if (!pm_need[PM_NEED_cuPointerGetAttribute])
        return ON_DEVICE;
    /* an error means plain host memory */
    bool device_to = PM_NEED(cuPointerGetAttribute)(&to_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, to) == CUDA_SUCCESS &&
                     to_type == CU_MEMORYTYPE_DEVICE;
    bool device_from =
        PM_NEED(cuPointerGetAttribute)(&from_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, from) == CUDA_SUCCESS &&
        from_type == CU_MEMORYTYPE_DEVICE;
    if (!device_to || !device_from)
        return device_to ? TO_DEVICE : TO_HOST;
    bool known =
        PM_NEED(cuPointerGetAttribute)(&to_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, to) == CUDA_SUCCESS &&
        PM_NEED(cuPointerGetAttribute)(&from_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, from) == CUDA_SUCCESS;
    return known && to_device != from_device ? BETWEEN_DEVICES : ON_DEVICE;
}

static void count_copy(struct pm_context *context, enum direction direction, size_t bytes) {
    struct pm_counters *counters = context->tracker.counters;
    uint64_t *by[] = {&counters->copy_h2d_bytes, &counters->copy_d2h_bytes, &counters->copy_d2d_bytes,
                      &counters->copy_p2p_bytes};
    pm_add(by[direction], bytes);
    pm_add(&counters->copies, 1);
}

static struct pm_context *copy_context(CUstream stream) {
    struct pm_process *self = pm_self();
    struct pm_context *context = self ? pm_current(self) : NULL;
    if (context)
        pm_tracker_taint(&context->tracker, pm_lane_key(stream));
    return context;
}

/* `direction` is worked out before the call: afterwards another thread may have freed the memory. */
#define COPY_ASYNC(name, null_is, toward, params, ...)                                                                 \
    PM_EXPORT CUresult name params {                                                                                   \
        MISSING(name);                                                                                                 \
        struct pm_context *context = pm_peek(&pm_captures) ? NULL : copy_context(pm_stream(stream, null_is));          \
        enum direction way = context ? (toward) : ON_DEVICE;                                                           \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (context && result == CUDA_SUCCESS)                                                                         \
            count_copy(context, way, bytes);                                                                           \
        return result;                                                                                                 \
    }
#define COPY_SYNC(name, null_is, toward, params, ...)                                                                  \
    PM_EXPORT CUresult name params {                                                                                   \
        MISSING(name);                                                                                                 \
        struct pm_context *context = pm_peek(&pm_captures) ? NULL : copy_context((CUstream)null_is);                   \
        enum direction way = context ? (toward) : ON_DEVICE;                                                           \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (context && result == CUDA_SUCCESS)                                                                         \
            count_copy(context, way, bytes);                                                                           \
        if (context)                                                                                                   \
            pm_tracker_poll(&context->tracker);                                                                        \
        return result;                                                                                                 \
    }
#define ANY_TO_ANY direction_of(to, from)

#define COPY_SYNC_BOTH(name, toward, params, ...)                                                                      \
    COPY_SYNC(name, PM_LEGACY, toward, params, __VA_ARGS__)                                                            \
    COPY_SYNC(name##_ptds, PM_PER_THREAD, toward, params, __VA_ARGS__)
#define COPY_ASYNC_BOTH(name, toward, params, ...)                                                                     \
    COPY_ASYNC(name, PM_LEGACY, toward, params, __VA_ARGS__)                                                           \
    COPY_ASYNC(name##_ptsz, PM_PER_THREAD, toward, params, __VA_ARGS__)

COPY_SYNC_BOTH(cuMemcpy, ANY_TO_ANY, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC_BOTH(cuMemcpyAsync, ANY_TO_ANY, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from,
                bytes, stream)
COPY_SYNC_BOTH(cuMemcpyHtoD_v2, TO_DEVICE, (CUdeviceptr to, const void *from, size_t bytes), to, from, bytes)
COPY_ASYNC_BOTH(cuMemcpyHtoDAsync_v2, TO_DEVICE, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to,
                from, bytes, stream)
COPY_SYNC_BOTH(cuMemcpyDtoH_v2, TO_HOST, (void *to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC_BOTH(cuMemcpyDtoHAsync_v2, TO_HOST, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from,
                bytes, stream)
COPY_SYNC_BOTH(cuMemcpyDtoD_v2, ON_DEVICE, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY_ASYNC_BOTH(cuMemcpyDtoDAsync_v2, ON_DEVICE, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to,
                from, bytes, stream)
COPY_SYNC_BOTH(cuMemcpyPeer, BETWEEN_DEVICES,
               (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes), to, there, from, here,
               bytes)
COPY_ASYNC_BOTH(cuMemcpyPeerAsync, BETWEEN_DEVICES,
                (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes, CUstream stream), to,
                there, from, here, bytes, stream)
