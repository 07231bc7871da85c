/* Contexts: primary ones, created ones, each thread's stack of current ones. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

CUresult context_make(struct CUctx_st **out, int device, unsigned flags, bool primary) {
    struct CUctx_st *ctx = calloc(1, sizeof *ctx);
    REQUIRE(ctx != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    machine_enter(cuda.m);
    uint32_t mode = cuda.m->device[device].compute_mode;
    uint32_t slot =
        mode == CU_COMPUTEMODE_PROHIBITED ? SIM_NONE : context_create(cuda.m, cuda.process, (uint32_t)device);
    machine_unlock(cuda.m);
    if (slot == SIM_NONE) {
        free(ctx);
        return mode == CU_COMPUTEMODE_PROHIBITED ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_ERROR_OUT_OF_MEMORY;
    }
    ctx->magic = MAGIC_CONTEXT;
    ctx->slot = slot;
    ctx->device = device;
    ctx->flags = flags;
    ctx->primary = primary;
    ctx->version = 3020;
    ctx->id = ++cuda.ids;
    ctx->limits[CU_LIMIT_STACK_SIZE] = 1024;
    ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 7 << 20;
    ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    ctx->limits[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
    ctx->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    ctx->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    ctx->next = cuda.contexts;
    cuda.contexts = ctx;
    *out = ctx;
    return CUDA_SUCCESS;
}

/* The structure stays allocated with its mark gone: a stale handle in somebody's hands is refused, not followed. */
void context_drop(struct CUctx_st *ctx) {
    struct CUctx_st **at = &cuda.contexts;
    while (*at != NULL && *at != ctx)
        at = &(*at)->next;
    if (*at != NULL)
        *at = ctx->next;
    ctx->magic = 0;
    for (struct CUstream_st *s = ctx->streams; s != NULL; s = s->next)
        s->magic = 0;
    ctx->streams = NULL;
    ctx->legacy = NULL;
    memory_drop_context(ctx);
    if (ctx->primary)
        graph_memory_drop(ctx->device);
    machine_enter(cuda.m);
    context_destroy(cuda.m, ctx->slot);
    machine_unlock(cuda.m);
    struct thread_state *t = &thread_state;
    if (t->depth > 0 && t->stack[t->depth - 1] == ctx)
        t->depth--;
}

bool context_valid(const struct CUctx_st *ctx) {
    return ctx != NULL && ctx->magic == MAGIC_CONTEXT;
}

/* --- primary contexts ------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice dev) {
    ENTER_DEVICE(cuDevicePrimaryCtxRetain, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    CUresult rc = CUDA_SUCCESS;
    if (cuda.primary[device] == NULL)
        rc = context_make(&cuda.primary[device], device, cuda.primary_flags[device], true);
    if (rc == CUDA_SUCCESS) {
        cuda.primary_refs[device]++;
        *out = cuda.primary[device];
    }
    cuda_unlock();
    return rc;
}

static CUresult primary_release(CUdevice dev, bool all) {
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    cuda_lock();
    CUresult rc = CUDA_SUCCESS;
    if (cuda.primary[device] == NULL) {
        rc = all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    } else if (all || --cuda.primary_refs[device] == 0) {
        struct CUctx_st *ctx = cuda.primary[device];
        cuda.primary[device] = NULL;
        cuda.primary_refs[device] = 0;
        context_drop(ctx);
    }
    cuda_unlock();
    return rc;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
    ENTER_DEVICE(cuDevicePrimaryCtxRelease, dev);
    return primary_release(dev, false);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    ENTER_DEVICE(cuDevicePrimaryCtxRelease_v2, dev);
    return primary_release(dev, false);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev) {
    ENTER_DEVICE(cuDevicePrimaryCtxReset, dev);
    return primary_release(dev, true);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    ENTER_DEVICE(cuDevicePrimaryCtxReset_v2, dev);
    return primary_release(dev, true);
}

static CUresult primary_flags(CUdevice dev, unsigned flags) {
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE((flags & ~(unsigned)CU_CTX_FLAGS_MASK) == 0, CUDA_ERROR_INVALID_VALUE);
    cuda.primary_flags[device] = flags;
    if (cuda.primary[device] != NULL)
        cuda.primary[device]->flags = flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags) {
    ENTER_DEVICE(cuDevicePrimaryCtxSetFlags, dev);
    return primary_flags(dev, flags);
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
    ENTER_DEVICE(cuDevicePrimaryCtxSetFlags_v2, dev);
    return primary_flags(dev, flags);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    ENTER_DEVICE(cuDevicePrimaryCtxGetState, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(flags != NULL && active != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = cuda.primary_flags[device];
    *active = cuda.primary[device] != NULL;
    return CUDA_SUCCESS;
}

/* --- created contexts ------------------------------------------------------------------------------------------- */

static CUresult create(CUcontext *out, unsigned flags, CUdevice dev) {
    int device;
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(thread_state.depth < 64, CUDA_ERROR_OUT_OF_MEMORY);
    cuda_lock();
    CUresult rc = context_make(out, device, flags, false);
    cuda_unlock();
    if (rc == CUDA_SUCCESS)
        thread_state.stack[thread_state.depth++] = *out;
    return rc;
}

CUresult CUDAAPI cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice dev) {
    ENTER_DEVICE(cuCtxCreate, dev);
    return create(out, flags, dev);
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice dev) {
    ENTER_DEVICE(cuCtxCreate_v2, dev);
    return create(out, flags, dev);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *params, int count, unsigned int flags,
                                CUdevice dev) {
    ENTER_DEVICE(cuCtxCreate_v3, dev);
    REQUIRE(params == NULL && count == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return create(out, flags, dev);
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice dev) {
    ENTER_DEVICE(cuCtxCreate_v4, dev);
    REQUIRE(params == NULL || (params->numExecAffinityParams == 0 && params->cigParams == NULL),
            CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    return create(out, flags, dev);
}

static CUresult destroy(CUcontext ctx) {
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(!ctx->primary, CUDA_ERROR_INVALID_CONTEXT);
    cuda_lock();
    context_drop(ctx);
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDestroy(CUcontext ctx) {
    ENTER(cuCtxDestroy);
    return destroy(ctx);
}

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext ctx) {
    ENTER(cuCtxDestroy_v2);
    return destroy(ctx);
}

CUresult CUDAAPI cuCtxAttach(CUcontext *out, unsigned int flags) {
    ENTER(cuCtxAttach);
    REQUIRE(out != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(current_context() != NULL, CUDA_ERROR_INVALID_CONTEXT);
    *out = current_context();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDetach(CUcontext ctx) {
    ENTER(cuCtxDetach);
    return destroy(ctx);
}

static CUresult push(CUcontext ctx) {
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(thread_state.depth < 64, CUDA_ERROR_OUT_OF_MEMORY);
    thread_state.stack[thread_state.depth++] = ctx;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    ENTER(cuCtxPushCurrent);
    return push(ctx);
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx) {
    ENTER(cuCtxPushCurrent_v2);
    return push(ctx);
}

static CUresult pop(CUcontext *out) {
    REQUIRE(thread_state.depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    thread_state.depth--;
    if (out != NULL)
        *out = thread_state.stack[thread_state.depth];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *out) {
    ENTER(cuCtxPopCurrent);
    return pop(out);
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *out) {
    ENTER(cuCtxPopCurrent_v2);
    return pop(out);
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    ENTER(cuCtxSetCurrent);
    if (ctx == NULL) {
        if (thread_state.depth > 0)
            thread_state.depth--;
        return CUDA_SUCCESS;
    }
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    if (thread_state.depth == 0)
        thread_state.depth = 1;
    thread_state.stack[thread_state.depth - 1] = ctx;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *out) {
    ENTER(cuCtxGetCurrent);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = current_context();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *dev) {
    ENTER(cuCtxGetDevice);
    REQUIRE(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    *dev = ordinal_of(current_context()->device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *dev, CUcontext ctx) {
    ENTER(cuCtxGetDevice_v2);
    REQUIRE(dev != NULL, CUDA_ERROR_INVALID_VALUE);
    if (ctx == NULL)
        ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    *dev = ordinal_of(ctx->device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    CUresult rc = capture_forbids_context(current_context());
    return rc != CUDA_SUCCESS ? rc : wait_context(current_context());
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx) {
    ENTER(cuCtxSynchronize_v2);
    if (ctx == NULL)
        ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CUresult rc = capture_forbids_context(ctx);
    return rc != CUDA_SUCCESS ? rc : wait_context(ctx);
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags) {
    ENTER(cuCtxGetFlags);
    REQUIRE(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    *flags = current_context()->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetFlags(unsigned int flags) {
    ENTER(cuCtxSetFlags);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    current_context()->flags = flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetId(CUcontext ctx, unsigned long long *id) {
    ENTER(cuCtxGetId);
    REQUIRE(id != NULL, CUDA_ERROR_INVALID_VALUE);
    if (ctx == NULL)
        ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    *id = ctx->id;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext ctx, unsigned int *version) {
    ENTER(cuCtxGetApiVersion);
    REQUIRE(version != NULL, CUDA_ERROR_INVALID_VALUE);
    if (ctx == NULL)
        ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    *version = ctx->version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    ENTER(cuCtxSetLimit);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE((int)limit >= 0 && limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    current_context()->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) {
    ENTER(cuCtxGetLimit);
    REQUIRE(value != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE((int)limit >= 0 && limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = current_context()->limits[limit];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache *config) {
    ENTER(cuCtxGetCacheConfig);
    REQUIRE(config != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    *config = current_context()->cache;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache config) {
    ENTER(cuCtxSetCacheConfig);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    current_context()->cache = config;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetSharedMemConfig(CUsharedconfig *config) {
    ENTER(cuCtxGetSharedMemConfig);
    REQUIRE(config != NULL, CUDA_ERROR_INVALID_VALUE);
    *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetSharedMemConfig(CUsharedconfig config) {
    ENTER(cuCtxSetSharedMemConfig);
    (void)config; /* has had no effect since Kepler */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange);
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxResetPersistingL2Cache(void) {
    ENTER(cuCtxResetPersistingL2Cache);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    ENTER(cuCtxEnablePeerAccess);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()) && context_valid(peer), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(peer->device != current_context()->device, CUDA_ERROR_INVALID_DEVICE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER(cuCtxDisablePeerAccess);
    REQUIRE(context_valid(peer), CUDA_ERROR_INVALID_CONTEXT);
    return CUDA_SUCCESS;
}
