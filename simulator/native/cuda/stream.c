/* Streams: handles, submitting work, waiting for it. */
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
    struct CUstream_st *legacy = __atomic_load_n(&ctx->legacy, __ATOMIC_ACQUIRE);
    if (__builtin_expect(legacy == NULL, 0)) {
        cuda_lock();
        legacy = ctx->legacy;
        if (legacy == NULL)
            rc = stream_make(ctx, 0, 0, true, &legacy);
        if (rc == CUDA_SUCCESS)
            __atomic_store_n(&ctx->legacy, legacy, __ATOMIC_RELEASE);
        cuda_unlock();
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    *out = legacy;
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
        /* A host function begins when its turn comes, which on a virtual clock must not be jumped over. */
        if (m->clock == SIM_CLOCK_VIRTUAL && cuda.host_functions > 0)
            for (uint32_t d = 0; d < m->devices; d++)
                if (m->device[d].next_ns < *until)
                    *until = m->device[d].next_ns;
        if (*until <= now || (m->clock == SIM_CLOCK_REAL && *until < now + 5000))
            *until = now + 5000;
    }
    machine_unlock(m);
    return over;
}

CUresult wait_entry(struct CUctx_st *ctx, uint32_t slot, uint32_t generation, uint64_t target) {
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
