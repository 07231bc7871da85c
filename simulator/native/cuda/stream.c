/* Streams, events, host functions, and waiting for them. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

static CUresult device_trouble(const struct CUctx_st *ctx) {
    return cuda.m->device[ctx->device].lost ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* --- handles ---------------------------------------------------------------------------------------------------- */

CUresult stream_make(struct CUctx_st *ctx, unsigned flags, int priority, bool legacy, struct CUstream_st **out) {
    struct CUstream_st *s = calloc(1, sizeof *s);
    REQUIRE(s != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    machine_enter(cuda.m);
    s->slot = stream_create(cuda.m, ctx->slot, !(flags & CU_STREAM_NON_BLOCKING) && !legacy, legacy, priority);
    machine_unlock(cuda.m);
    if (s->slot == SIM_NONE) {
        free(s);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->magic = MAGIC_STREAM;
    s->ctx = ctx;
    s->flags = flags;
    s->priority = priority;
    s->legacy = legacy;
    s->id = ++cuda.ids;
    s->next = ctx->streams;
    ctx->streams = s;
    *out = s;
    return CUDA_SUCCESS;
}

static CUresult own_stream(struct CUctx_st *ctx, struct CUstream_st **out) {
    int free_at = -1;
    for (int i = 0; i < SIM_MAX_DEVICES * 2; i++) {
        struct CUstream_st *s = thread_state.own[i];
        if (s != NULL && s->magic == MAGIC_STREAM && s->ctx == ctx && thread_state.own_context[i] == ctx->id) {
            *out = s;
            return CUDA_SUCCESS;
        }
        if (free_at < 0 && (s == NULL || s->magic != MAGIC_STREAM))
            free_at = i;
    }
    REQUIRE(free_at >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    cuda_lock();
    CUresult rc = stream_make(ctx, 0, 0, false, out);
    cuda_unlock();
    if (rc == CUDA_SUCCESS) {
        (*out)->per_thread = true;
        thread_state.own[free_at] = *out;
        thread_state.own_context[free_at] = ctx->id;
    }
    return rc;
}

CUresult stream_resolve(CUstream handle, struct CUstream_st **out) {
    if ((uintptr_t)handle > 2) {
        REQUIRE(handle->magic == MAGIC_STREAM, CUDA_ERROR_INVALID_HANDLE);
        *out = handle;
        return device_trouble(handle->ctx);
    }
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CUresult rc = device_trouble(ctx);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (handle == CU_STREAM_PER_THREAD || (handle == NULL && thread_state.per_thread_default > 0))
        return own_stream(ctx, out);
    if (__builtin_expect(ctx->legacy == NULL, 0)) {
        cuda_lock();
        if (ctx->legacy == NULL)
            rc = stream_make(ctx, 0, 0, true, &ctx->legacy);
        cuda_unlock();
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    *out = ctx->legacy;
    return CUDA_SUCCESS;
}

/* --- submitting and waiting ------------------------------------------------------------------------------------- */

CUresult submit_many(struct CUstream_st *stream, const struct sim_op *ops, size_t count, uint64_t *target) {
    struct sim_machine *m = cuda.m;
    size_t at = 0;
    machine_enter(m);
    for (;;) {
        if (stream->magic != MAGIC_STREAM || m->process[cuda.process].state != SIM_PROCESS_LIVE) {
            machine_unlock(m);
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        while (at < count && !stream_full(m, stream->slot, 1))
            stream_push(m, stream->slot, ops[at++]);
        if (at == count)
            break;
        /* The queue is full: the caller sleeps until an eighth of it has run, as a driver's ring makes it. */
        const struct sim_stream *st = &m->stream[stream->slot];
        uint64_t now = machine_now(m);
        uint64_t until = stream_bound(m, stream->slot, st->head + SIM_QUEUE_DEPTH / 8, now);
        if (until > now + 10000000)
            until = stream_bound(m, stream->slot, st->head + 1, now);
        if (until < now + 20000)
            until = now + 20000;
        machine_unlock(m);
        machine_wait(m, until);
        if (m->device[stream->ctx->device].lost)
            return CUDA_ERROR_UNKNOWN;
        machine_enter(m);
    }
    if (target != NULL)
        *target = m->stream[stream->slot].tail;
    machine_unlock(m);
    return CUDA_SUCCESS;
}

CUresult submit(struct CUstream_st *stream, struct sim_op op, uint64_t *target, bool launch) {
    struct sim_machine *m = cuda.m;
    if (__builtin_expect(cuda.capturing > 0 && stream->legacy, 0) && capture_implicit(stream, true))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (launch && m->launch_ns > 0 && m->clock == SIM_CLOCK_VIRTUAL)
        machine_wait(m, machine_now(m) + m->launch_ns);
    if (launch)
        __atomic_fetch_add(&m->process[cuda.process].account[stream->ctx->device].launches, 1, __ATOMIC_RELAXED);
    return submit_many(stream, &op, 1, target);
}

/* One look; true when it is over (reached, or gone); else `*until` says when to look again. */
static bool look(uint32_t slot, uint32_t generation, uint64_t target, uint64_t *until) {
    struct sim_machine *m = cuda.m;
    machine_enter(m);
    const struct sim_stream *st = &m->stream[slot];
    bool over = !st->used || st->generation != generation || stream_done(m, slot, target);
    if (!over) {
        uint64_t now = machine_now(m);
        *until = stream_bound(m, slot, target, now);
        if (*until < now + 5000)
            *until = now + 5000;
    }
    machine_unlock(m);
    return over;
}

static CUresult wait_entry(struct CUctx_st *ctx, uint32_t slot, uint32_t generation, uint64_t target) {
    uint64_t until = 0;
    while (!look(slot, generation, target, &until)) {
        machine_wait(cuda.m, until);
        if (cuda.m->device[ctx->device].lost)
            return CUDA_ERROR_UNKNOWN;
    }
    pools_synchronised();
    return CUDA_SUCCESS;
}

CUresult wait_stream(struct CUstream_st *stream, uint64_t target) {
    uint32_t generation = cuda.m->stream[stream->slot].generation;
    return wait_entry(stream->ctx, stream->slot, generation, target);
}

CUresult wait_context(struct CUctx_st *ctx) {
    for (;;) {
        /* The streams as they are now; one that comes later is not waited for. */
        uint32_t slots[256], generations[256];
        uint64_t targets[256];
        size_t count = 0;
        machine_enter(cuda.m);
        for (uint32_t s = cuda.m->context[ctx->slot].streams; s != SIM_NONE && count < 256; s = cuda.m->stream[s].next)
            if (cuda.m->stream[s].head != cuda.m->stream[s].tail) {
                slots[count] = s;
                generations[count] = cuda.m->stream[s].generation;
                targets[count++] = cuda.m->stream[s].tail;
            }
        machine_unlock(cuda.m);
        if (count == 0)
            break;
        for (size_t i = 0; i < count; i++) {
            CUresult rc = wait_entry(ctx, slots[i], generations[i], targets[i]);
            if (rc != CUDA_SUCCESS)
                return rc;
        }
        if (count < 256)
            break;
    }
    pools_synchronised();
    return CUDA_SUCCESS;
}

/* --- streams ---------------------------------------------------------------------------------------------------- */

static CUresult stream_new(CUstream *out, unsigned flags, int priority) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((flags & ~(unsigned)CU_STREAM_NON_BLOCKING) == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    if (priority > 0)
        priority = 0;
    if (priority < -5)
        priority = -5;
    cuda_lock();
    CUresult rc = stream_make(current_context(), flags, priority, false, out);
    cuda_unlock();
    return rc;
}

CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned int flags) {
    ENTER(cuStreamCreate);
    return stream_new(out, flags, 0);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
    ENTER(cuStreamCreateWithPriority);
    return stream_new(out, flags, priority);
}

/* The handle dies at once, the work goes on: a reaper entry would be a thread of its own, so the call waits for it. */
static CUresult stream_end(CUstream s) {
    REQUIRE((uintptr_t)s > 2, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(s->magic == MAGIC_STREAM, CUDA_ERROR_INVALID_HANDLE);
    capture_abandon(s);
    wait_stream(s, cuda.m->stream[s->slot].tail);
    cuda_lock();
    stream_drop(s);
    cuda_unlock();
    return CUDA_SUCCESS;
}

void stream_drop(struct CUstream_st *s) {
    struct CUstream_st **at = &s->ctx->streams;
    while (*at != NULL && *at != s)
        at = &(*at)->next;
    if (*at != NULL)
        *at = s->next;
    s->magic = 0;
    machine_enter(cuda.m);
    stream_destroy(cuda.m, s->slot);
    machine_unlock(cuda.m);
}

CUresult CUDAAPI cuStreamDestroy(CUstream s) {
    ENTER(cuStreamDestroy);
    return stream_end(s);
}

CUresult CUDAAPI cuStreamDestroy_v2(CUstream s) {
    ENTER(cuStreamDestroy_v2);
    return stream_end(s);
}

/* Waiting for a stream, or asking it, ends the capture it is under; and any other that this thread may not disturb. */
static CUresult capture_forbids_look(const struct CUstream_st *s) {
    if (__builtin_expect(capture_active(s), 0)) {
        capture_invalidate(s->capture_id);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return capture_forbids();
}

/* The same for an event, which may have been recorded inside a capture. */
static CUresult event_forbids_look(const struct CUevent_st *e) {
    if (__builtin_expect(e->capture_id != 0, 0)) {
        REQUIRE(capture_running(e->capture_id), CUDA_ERROR_INVALID_VALUE);
        capture_invalidate(e->capture_id);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return capture_forbids();
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    ENTER(cuStreamSynchronize);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = capture_forbids_look(s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    /* The legacy stream waits for the blocking ones too: its own queue says nothing about them. */
    if (s->legacy) {
        uint64_t target;
        struct sim_op marker = {.kind = SIM_OP_COPY, .copy = SIM_COPY_SET};
        rc = submit(s, marker, &target, false);
        return rc != CUDA_SUCCESS ? rc : wait_stream(s, target);
    }
    return wait_stream(s, __atomic_load_n(&cuda.m->stream[s->slot].tail, __ATOMIC_ACQUIRE));
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    ENTER(cuStreamQuery);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = capture_forbids_look(s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    machine_enter(cuda.m);
    bool done = cuda.m->stream[s->slot].head == cuda.m->stream[s->slot].tail;
    machine_unlock(cuda.m);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority) {
    ENTER(cuStreamGetPriority);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(priority != NULL, CUDA_ERROR_INVALID_VALUE);
    *priority = s->priority;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    ENTER(cuStreamGetFlags);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = s->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long *id) {
    ENTER(cuStreamGetId);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(id != NULL, CUDA_ERROR_INVALID_VALUE);
    *id = s->id;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *ctx) {
    ENTER(cuStreamGetCtx);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctx = s->ctx;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream handle, CUcontext *ctx, CUgreenCtx *green) {
    ENTER(cuStreamGetCtx_v2);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctx = s->ctx;
    if (green != NULL)
        *green = NULL;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice *dev) {
    ENTER(cuStreamGetDevice);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    *dev = ordinal_of(s->ctx->device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamAttachMemAsync(CUstream handle, CUdeviceptr at, size_t length, unsigned int flags) {
    ENTER(cuStreamAttachMemAsync);
    (void)at;
    (void)length;
    (void)flags; /* managed memory is visible to all streams here */
    struct CUstream_st *s;
    return stream_resolve(handle, &s);
}

/* --- events ----------------------------------------------------------------------------------------------------- */

static bool event_valid(CUevent e) {
    return e != NULL && e->magic == MAGIC_EVENT;
}

CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned int flags) {
    ENTER(cuEventCreate);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)) == 0,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(flags & CU_EVENT_INTERPROCESS) || (flags & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    struct CUevent_st *e = calloc(1, sizeof *e);
    REQUIRE(e != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    e->ctx = current_context();
    machine_enter(cuda.m);
    e->slot = event_create(cuda.m, e->ctx->slot);
    machine_unlock(cuda.m);
    if (e->slot == SIM_NONE) {
        free(e);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    e->magic = MAGIC_EVENT;
    e->flags = flags;
    *out = e;
    return CUDA_SUCCESS;
}

static CUresult event_end(CUevent e) {
    REQUIRE(event_valid(e), CUDA_ERROR_INVALID_HANDLE);
    e->magic = 0;
    machine_enter(cuda.m);
    if (context_valid(e->ctx))
        event_destroy(cuda.m, e->slot);
    machine_unlock(cuda.m);
    free(e->nodes);
    free(e);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent e) {
    ENTER(cuEventDestroy);
    return event_end(e);
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent e) {
    ENTER(cuEventDestroy_v2);
    return event_end(e);
}

static CUresult record(CUevent e, CUstream handle) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(event_valid(e), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(e->ctx == s->ctx, CUDA_ERROR_INVALID_HANDLE);
    if (__builtin_expect(capture_active(s), 0))
        return capture_record(s, e);
    return event_record_on(e, s);
}

CUresult event_record_on(struct CUevent_st *e, struct CUstream_st *s) {
    struct sim_machine *m = cuda.m;
    machine_enter(m);
    ADD(m, m->event[e->slot].submitted, 1);
    uint64_t generation = m->event[e->slot].submitted;
    machine_unlock(m);
    uint64_t target;
    struct sim_op op = {.kind = SIM_OP_RECORD, .event = e->slot, .arg = generation};
    CUresult rc = submit(s, op, &target, false);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    e->recorded = true;
    e->capture_id = 0;
    e->generation = generation;
    e->stream = s;
    e->stream_slot = s->slot;
    e->stream_generation = m->stream[s->slot].generation;
    e->target = target;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent e, CUstream handle) {
    ENTER(cuEventRecord);
    return record(e, handle);
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent e, CUstream handle, unsigned int flags) {
    ENTER(cuEventRecordWithFlags);
    REQUIRE((flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL) == 0, CUDA_ERROR_INVALID_VALUE);
    return record(e, handle);
}

static bool event_reached(CUevent e, uint64_t *time) {
    machine_enter(cuda.m);
    const struct sim_event *se = &cuda.m->event[e->slot];
    bool reached = !e->recorded || se->reached >= e->generation;
    if (time != NULL)
        *time = se->time_ns;
    machine_unlock(cuda.m);
    return reached;
}

CUresult CUDAAPI cuEventQuery(CUevent e) {
    ENTER(cuEventQuery);
    REQUIRE(event_valid(e), CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = event_forbids_look(e);
    REQUIRE(forbidden == CUDA_SUCCESS, forbidden);
    REQUIRE(context_valid(e->ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    REQUIRE(!cuda.m->device[e->ctx->device].lost, CUDA_ERROR_UNKNOWN);
    return event_reached(e, NULL) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent e) {
    ENTER(cuEventSynchronize);
    REQUIRE(event_valid(e), CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = event_forbids_look(e);
    REQUIRE(forbidden == CUDA_SUCCESS, forbidden);
    REQUIRE(context_valid(e->ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (!e->recorded)
        return CUDA_SUCCESS;
    return wait_entry(e->ctx, e->stream_slot, e->stream_generation, e->target);
}

static CUresult elapsed(float *ms, CUevent start, CUevent end) {
    REQUIRE(ms != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(event_valid(start) && event_valid(end), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(start->ctx == end->ctx, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(start->capture_id == 0 && end->capture_id == 0, CUDA_ERROR_CAPTURED_EVENT);
    REQUIRE(start->recorded && end->recorded, CUDA_ERROR_INVALID_HANDLE);
    uint64_t from, to;
    REQUIRE(event_reached(start, &from) && event_reached(end, &to), CUDA_ERROR_NOT_READY);
    *ms = (float)(((double)to - (double)from) / 1e6);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    ENTER(cuEventElapsedTime);
    return elapsed(ms, start, end);
}

CUresult CUDAAPI cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    ENTER(cuEventElapsedTime_v2);
    return elapsed(ms, start, end);
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent e, unsigned int flags) {
    ENTER(cuStreamWaitEvent);
    REQUIRE((flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL) == 0, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(event_valid(e), CUDA_ERROR_INVALID_HANDLE);
    if (__builtin_expect(capture_active(s) || e->capture_id != 0, 0))
        return capture_wait(s, e);
    if (!e->recorded)
        return CUDA_SUCCESS;
    struct sim_op op = {.kind = SIM_OP_WAIT, .event = e->slot, .arg = e->generation};
    return submit(s, op, NULL, false);
}

/* --- host functions --------------------------------------------------------------------------------------------- */

struct ticket {
    struct CUstream_st *stream;
    uint32_t slot, generation;
    uint64_t index; /* of its entry in the stream */
    CUhostFn fn;
    CUstreamCallback callback;
    CUstream handle;
    void *data;
    struct ticket *next;
};

static pthread_mutex_t ticket_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ticket_added = PTHREAD_COND_INITIALIZER;
static struct ticket *tickets, **tickets_end = &tickets;
static bool runner_started;

static bool run_ready(void) {
    struct sim_machine *m = cuda.m;
    pthread_mutex_lock(&ticket_lock);
    struct ticket *ready = NULL;
    machine_enter(m);
    for (struct ticket **at = &tickets; *at != NULL; at = &(*at)->next) {
        const struct sim_stream *st = &m->stream[(*at)->slot];
        bool gone = !st->used || st->generation != (*at)->generation;
        if (gone || (st->head == (*at)->index && st->started)) {
            ready = *at;
            *at = ready->next;
            if (*at == NULL)
                tickets_end = at;
            break;
        }
    }
    machine_unlock(m);
    pthread_mutex_unlock(&ticket_lock);
    if (ready == NULL)
        return false;
    if (ready->callback != NULL)
        ready->callback(ready->handle, CUDA_SUCCESS, ready->data);
    else
        ready->fn(ready->data);
    machine_enter(m);
    if (m->stream[ready->slot].used && m->stream[ready->slot].generation == ready->generation)
        host_op_done(m, ready->slot);
    machine_unlock(m);
    free(ready);
    return true;
}

static void *runner(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&ticket_lock);
        while (tickets == NULL)
            pthread_cond_wait(&ticket_added, &ticket_lock);
        pthread_mutex_unlock(&ticket_lock);
        if (!run_ready())
            machine_wait(cuda.m, machine_now(cuda.m) + 100000);
    }
    return NULL;
}

CUresult host_submit(struct CUstream_st *s, CUhostFn fn, void *data, bool is_callback, CUstreamCallback cb,
                     CUstream handle) {
    struct ticket *t = calloc(1, sizeof *t);
    REQUIRE(t != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    t->stream = s;
    t->slot = s->slot;
    t->generation = cuda.m->stream[s->slot].generation;
    t->fn = fn;
    t->callback = is_callback ? cb : NULL;
    t->handle = handle;
    t->data = data;
    uint64_t target;
    struct sim_op op = {.kind = SIM_OP_HOST};
    CUresult rc = submit(s, op, &target, false); /* may wait for the queue, so without the lock the runner needs */
    if (rc != CUDA_SUCCESS) {
        free(t);
        return rc;
    }
    pthread_mutex_lock(&ticket_lock);
    t->index = target - 1;
    *tickets_end = t;
    tickets_end = &t->next;
    if (!runner_started) {
        pthread_t thread;
        runner_started = pthread_create(&thread, NULL, runner, NULL) == 0;
        if (runner_started)
            pthread_detach(thread);
    }
    pthread_cond_signal(&ticket_added);
    pthread_mutex_unlock(&ticket_lock);
    return runner_started ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *data) {
    ENTER(cuLaunchHostFunc);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(fn != NULL, CUDA_ERROR_INVALID_VALUE);
    if (capture_active(s)) {
        struct graph_work work = {.kind = WORK_HOST, .host = fn, .host_data = data};
        return capture_add(s, &work);
    }
    return host_submit(s, fn, data, false, NULL, handle);
}

CUresult CUDAAPI cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned int flags) {
    ENTER(cuStreamAddCallback);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(callback != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!capture_active(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return host_submit(s, NULL, data, true, callback, handle);
}
