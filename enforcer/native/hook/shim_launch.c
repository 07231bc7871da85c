#include "claim.h"

#include <string.h>

#define LOOK_EVERY 16u /* short launches to one look at the grant */

/* The usual launch goes without: nothing limits, or there is device time left and its kind is known. */
static bool must_ask(struct pm_process *self, const struct pm_context *context, const struct pm_estimate *entry) {
    static __thread uint32_t launches;
    const struct pm_limiter *limiter = &self->limiters[context->device];
    bool look = ++launches % LOOK_EVERY == 0 || !entry || pm_peek(&entry->ns) == 0 || pm_peek(&entry->ns) > PM_LONG_NS;
    if (look && pm_load(&self->grant->generation) != pm_load(&self->grant_generation))
        return true;
    if (!pm_peek(&limiter->active))
        return false;
    return pm_bucket_balance(limiter->bucket) <= 0 || pm_peek(&limiter->suspended) || pm_peek(&limiter->soft) ||
           !entry || pm_peek(&entry->ns) == 0;
}

/* What is launched may be a function or a kernel of a library; the driver names each only by its own call. */
static const char *name_of(CUfunction f) {
    const char *name = NULL;
    if (pm_need[PM_NEED_cuFuncGetName] && PM_NEED(cuFuncGetName)(&name, f) == CUDA_SUCCESS && name)
        return name;
    if (pm_need[PM_NEED_cuKernelGetName] && PM_NEED(cuKernelGetName)(&name, (CUkernel)f) == CUDA_SUCCESS)
        return name;
    return NULL;
}

/*
 * Kernels of collectives wait on the device for their peers, and are handed over between a group's start and end:
 * holding one back would keep the others spinning, so they are charged and never held.
 */
static bool collective(struct pm_estimate *entry, CUfunction f) {
    if (!entry || !f)
        return false;
    if (!(pm_peek(&entry->flags) & PM_KIND_NAMED)) {
        const char *name = name_of(f);
        bool found = name && strncmp(name, "ncclDevKernel", 13) == 0;
        pm_poke(&entry->flags, PM_KIND_NAMED | (found ? PM_KIND_COLLECTIVE : 0));
    }
    return pm_peek(&entry->flags) & PM_KIND_COLLECTIVE;
}

static void ticket_open(struct pm_ticket *ticket, uint64_t kind, CUfunction f, CUstream stream) {
    ticket->launch.tracker = NULL;
    ticket->counters = NULL;
    struct pm_process *self = pm_self();
    if (!self || pm_capturing(stream)) /* what is captured runs later, as a graph */
        return;
    struct pm_context *context = pm_current(self);
    if (!context)
        return;
    uint64_t lane_key = pm_lane_key(stream);
    /* Changed by locked instructions, which wait for their line; it may as well be fetched beside the others. */
    __builtin_prefetch(&context->tracker.lanes[lane_key % PM_LANES], 1);
    struct pm_counters *counters = ticket->counters = context->tracker.counters;
    __builtin_prefetch(&counters->launches, 1);
    __builtin_prefetch(&counters->pending_ns, 1);
    struct pm_estimate *entry = pm_estimate_find(self->estimates, kind ? kind : 1);
    if (must_ask(self, context, entry) && !collective(entry, f))
        pm_limiter_wait(self, context, entry, PM_PER_THREAD, lane_key);
    pm_launch_begin(&ticket->launch, &context->tracker, entry, stream, lane_key);
}

static void ticket_close(struct pm_ticket *ticket, CUresult result, bool graph) {
    if (!ticket->launch.tracker)
        return;
    if (result == CUDA_SUCCESS)
        pm_add(graph ? &ticket->counters->graph_launches : &ticket->counters->launches, 1);
    pm_launch_end(&ticket->launch, result == CUDA_SUCCESS);
}

void pm_ticket_open(struct pm_ticket *ticket, uint64_t kind, CUstream stream) {
    ticket_open(ticket, kind, NULL, stream);
}

void pm_ticket_close(struct pm_ticket *ticket, CUresult result) {
    if (ticket->launch.tracker)
        pm_launch_end(&ticket->launch, result == CUDA_SUCCESS);
}

static uint64_t kind_of(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared) {
    uint64_t kind = pm_mix(3, (uint64_t)(uintptr_t)function);
    kind = pm_mix(kind, (uint64_t)gx << 32 ^ (uint64_t)gy << 16 ^ gz);
    return pm_mix(kind, (uint64_t)bx << 48 ^ (uint64_t)by << 36 ^ (uint64_t)bz << 24 ^ shared);
}

#define METERED(name, kind, f, stream, graph, ...)                                                                     \
    PM_MISSING(name);                                                                                                  \
    struct pm_ticket ticket;                                                                                           \
    ticket_open(&ticket, kind, f, stream);                                                                             \
    CUresult result = PM_REAL(name)(__VA_ARGS__);                                                                      \
    ticket_close(&ticket, result, graph);                                                                              \
    return result

#define LAUNCH_KERNEL(name, null_is)                                                                                   \
    PM_EXPORT PM_HOT CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,      \
                                   unsigned bz, unsigned shared, CUstream stream, void **params, void **extra) {       \
        METERED(name, kind_of(f, gx, gy, gz, bx, by, bz, shared), f, pm_stream(stream, null_is), false, f, gx, gy, gz, \
                bx, by, bz, shared, stream, params, extra);                                                            \
    }
LAUNCH_KERNEL(cuLaunchKernel, PM_LEGACY)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, PM_PER_THREAD)

#define LAUNCH_COOPERATIVE(name, null_is)                                                                              \
    PM_EXPORT CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,             \
                            unsigned bz, unsigned shared, CUstream stream, void **params) {                            \
        METERED(name, kind_of(f, gx, gy, gz, bx, by, bz, shared), f, pm_stream(stream, null_is), false, f, gx, gy, gz, \
                bx, by, bz, shared, stream, params);                                                                   \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, PM_LEGACY)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, PM_PER_THREAD)

#define LAUNCH_EX(name, null_is)                                                                                       \
    PM_EXPORT PM_HOT CUresult name(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {               \
        METERED(name,                                                                                                  \
                c ? kind_of(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,        \
                            c->sharedMemBytes)                                                                         \
                  : 1,                                                                                                 \
                f, pm_stream(c ? c->hStream : NULL, null_is), false, c, f, params, extra);                             \
    }
LAUNCH_EX(cuLaunchKernelEx, PM_LEGACY)
LAUNCH_EX(cuLaunchKernelEx_ptsz, PM_PER_THREAD)

PM_EXPORT CUresult cuLaunch(CUfunction f) {
    METERED(cuLaunch, kind_of(f, 1, 1, 1, 0, 0, 0, 0), f, (CUstream)PM_LEGACY, false, f);
}

PM_EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    METERED(cuLaunchGrid, kind_of(f, (unsigned)width, (unsigned)height, 1, 0, 0, 0, 0), f, (CUstream)PM_LEGACY, false,
            f, width, height);
}

PM_EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    METERED(cuLaunchGridAsync, kind_of(f, (unsigned)width, (unsigned)height, 1, 0, 0, 0, 0), f,
            pm_stream(stream, PM_LEGACY), false, f, width, height, stream);
}

/*
 * One launch on several devices at once: each part waits for its device's limit, is begun and is ended in the context
 * that its stream belongs to. Devices are waited for one after the other; what a bucket lets go meanwhile is its own.
 */
struct part {
    struct pm_ticket ticket;
    CUcontext context; /* NULL: not metered */
};

static void part_open(struct pm_process *self, struct part *part, const CUDA_LAUNCH_PARAMS *of) {
    *part = (struct part){0};
    if (!pm_need[PM_NEED_cuStreamGetCtx] || PM_NEED(cuStreamGetCtx)(of->hStream, &part->context) != CUDA_SUCCESS ||
        pm_cuda_driver.context_enter(part->context) != 0) {
        part->context = NULL;
        pm_add(&self->view.header->faults, 1);
        return;
    }
    uint64_t kind = kind_of(of->function, of->gridDimX, of->gridDimY, of->gridDimZ, of->blockDimX, of->blockDimY,
                            of->blockDimZ, of->sharedMemBytes);
    ticket_open(&part->ticket, kind, of->function, pm_stream(of->hStream, PM_LEGACY));
    pm_cuda_driver.context_leave();
}

static void part_close(struct part *part, CUresult result) {
    if (!part->context || pm_cuda_driver.context_enter(part->context) != 0)
        return;
    ticket_close(&part->ticket, result, false);
    pm_cuda_driver.context_leave();
}

PM_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags) {
    PM_MISSING(cuLaunchCooperativeKernelMultiDevice);
    struct part parts[PM_MAX_DEVICES];
    struct pm_process *self = pm_self();
    unsigned open = list && self && count <= PM_MAX_DEVICES ? count : 0;
    for (unsigned i = 0; i < open; i++)
        part_open(self, &parts[i], &list[i]);
    CUresult result = PM_REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    for (unsigned i = 0; i < open; i++)
        part_close(&parts[i], result);
    return result;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

#define LAUNCH_GRAPH(name, null_is)                                                                                    \
    PM_EXPORT CUresult name(CUgraphExec exec, CUstream stream) {                                                       \
        PM_MISSING(name);                                                                                              \
        struct pm_graph_need need = {0};                                                                               \
        if (__builtin_expect(pm_graphs_allocate(), 0) && !pm_capturing(pm_stream(stream, null_is)) &&                  \
            !pm_graph_memory_begin(&need, exec))                                                                       \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        struct pm_ticket ticket;                                                                                       \
        ticket_open(&ticket, pm_graph_kind(exec), NULL, pm_stream(stream, null_is));                                   \
        CUresult result = PM_REAL(name)(exec, stream);                                                                 \
        ticket_close(&ticket, result, true);                                                                           \
        if (__builtin_expect(need.self != NULL, 0))                                                                    \
            pm_graph_memory_end(&need, result);                                                                        \
        return result;                                                                                                 \
    }
LAUNCH_GRAPH(cuGraphLaunch, PM_LEGACY)
LAUNCH_GRAPH(cuGraphLaunch_ptsz, PM_PER_THREAD)

/* ---- captures ---------------------------------------------------------------------------------------------------- */

/*
 * Asking about an event invalidates a capture that any thread has under way in the global mode. So a capture is counted
 * before it begins, and every tracker's lock taken once: nobody is asking any more when the driver starts it.
 */
static void capture_begins(void) {
    __atomic_fetch_add(&pm_captures, 1, __ATOMIC_SEQ_CST);
    struct pm_process *self = pm_self();
    for (uint32_t i = 0; self && i < pm_load(&self->context_count); i++) {
        struct pm_context *context = pm_load(&self->contexts[i]);
        if (pm_load(&context->handle)) {
            pthread_mutex_lock(&context->tracker.lock);
            pthread_mutex_unlock(&context->tracker.lock);
        }
    }
}

static void capture_ends(void) {
    uint32_t now = pm_load(&pm_captures);
    while (now && !__atomic_compare_exchange_n(&pm_captures, &now, now - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

#define BEGIN_CAPTURE(name, params, ...)                                                                               \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        capture_begins();                                                                                              \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (result != CUDA_SUCCESS)                                                                                    \
            capture_ends();                                                                                            \
        return result;                                                                                                 \
    }
BEGIN_CAPTURE(cuStreamBeginCapture, (CUstream stream), stream)
BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, (CUstream stream), stream)
BEGIN_CAPTURE(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), stream, mode)
BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, (CUstream stream, CUstreamCaptureMode mode), stream, mode)
#define TO_GRAPH                                                                                                       \
    (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,             \
     CUstreamCaptureMode mode)
BEGIN_CAPTURE(cuStreamBeginCaptureToGraph, TO_GRAPH, stream, graph, nodes, edges, count, mode)
BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, TO_GRAPH, stream, graph, nodes, edges, count, mode)

/* Newer than the header that this is built with. */
#define RECAPTURE (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data)
BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph, RECAPTURE, stream, mode, graph, callback, data)
BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz, RECAPTURE, stream, mode, graph, callback, data)
BEGIN_CAPTURE(cuStreamBeginCaptureToCig, (CUstream stream, void *params), stream, params)
BEGIN_CAPTURE(cuStreamBeginCaptureToCig_ptsz, (CUstream stream, void *params), stream, params)

/* A capture that has become invalid ends with an error; one that was never begun, or is ended in the wrong place, does
 * not end. */
static bool capture_ended(CUresult result) {
    return result != CUDA_ERROR_ILLEGAL_STATE && result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD &&
           result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED && result != CUDA_ERROR_INVALID_VALUE;
}

#define END_CAPTURE(name)                                                                                              \
    PM_EXPORT CUresult name(CUstream stream, CUgraph *graph) {                                                         \
        PM_MISSING(name);                                                                                              \
        CUresult result = ((CUresult (*)(CUstream, CUgraph *))pm_real[PM_HOOK_##name])(stream, graph);                 \
        if (capture_ended(result))                                                                                     \
            capture_ends();                                                                                            \
        return result;                                                                                                 \
    }
END_CAPTURE(cuStreamEndCapture)
END_CAPTURE(cuStreamEndCapture_ptsz)

#define END_CAPTURE_CIG(name)                                                                                          \
    PM_EXPORT CUresult name(CUstream stream) {                                                                         \
        PM_MISSING(name);                                                                                              \
        CUresult result = ((CUresult (*)(CUstream))pm_real[PM_HOOK_##name])(stream);                                   \
        if (capture_ended(result))                                                                                     \
            capture_ends();                                                                                            \
        return result;                                                                                                 \
    }
END_CAPTURE_CIG(cuStreamEndCaptureToCig)
END_CAPTURE_CIG(cuStreamEndCaptureToCig_ptsz)
