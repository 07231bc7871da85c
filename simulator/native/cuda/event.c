/* Events, waits for them, and host functions in a stream. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

/* The same for an event, which may have been recorded inside a capture. */
static CUresult event_forbids_look(const struct CUevent_st *e) {
    if (__builtin_expect(e->capture_id != 0, 0)) {
        REQUIRE(capture_running(e->capture_id), CUDA_ERROR_INVALID_VALUE);
        capture_invalidate(e->capture_id);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return capture_forbids();
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
    cuda.host_functions--;
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
    cuda.host_functions++;
    uint64_t target;
    struct sim_op op = {.kind = SIM_OP_HOST};
    CUresult rc = submit(s, op, &target, false); /* may wait for the queue, so without the lock the runner needs */
    if (rc != CUDA_SUCCESS) {
        cuda.host_functions--;
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
