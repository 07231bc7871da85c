/* Kernel launches in all their spellings. */
#include "state.h"

#include <string.h>

static bool function_valid(CUfunction f) {
    return f != NULL && f->magic == MAGIC_FUNCTION;
}

CUresult launch_read(struct launch *out, CUfunction f, const unsigned grid[3], const unsigned block[3], unsigned shared,
                     void **params, void **extra) {
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(grid[0] && grid[1] && grid[2] && block[0] && block[1] && block[2], CUDA_ERROR_INVALID_VALUE);
    REQUIRE((uint64_t)block[0] * block[1] * block[2] <= 1024 && block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(shared <= 232448, CUDA_ERROR_INVALID_VALUE);
    out->function = f;
    memcpy(out->grid, grid, sizeof out->grid);
    memcpy(out->block, block, sizeof out->block);
    out->shared = shared;
    out->parameter = 0;
    if (f->length == LENGTH_PARAMETER) {
        if (params != NULL && params[0] != NULL) {
            memcpy(&out->parameter, params[0], sizeof out->parameter);
        } else {
            const void *buffer = NULL;
            for (int i = 0; extra != NULL && extra[i] != CU_LAUNCH_PARAM_END; i += 2)
                if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
                    buffer = extra[i + 1];
            REQUIRE(buffer != NULL, CUDA_ERROR_INVALID_VALUE);
            memcpy(&out->parameter, buffer, sizeof out->parameter);
        }
    }
    return CUDA_SUCCESS;
}

struct sim_op launch_op(const struct launch *l, int device) {
    const struct CUfunc_st *f = l->function;
    uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    uint64_t sms = cuda.m->device[device].sms;
    uint64_t ns = f->length == LENGTH_PARAMETER ? l->parameter : f->ns;
    if (f->waves)
        ns *= (blocks + sms - 1) / sms;
    uint64_t width = f->width_ppm;
    if (width == 0)
        width = blocks >= sms ? 1000000 : blocks * 1000000 / sms;
    uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2];
    uint64_t room = sms * cuda.m->device[device].threads_per_sm;
    uint64_t warps = blocks * threads >= room ? 1000000 : blocks * threads * 1000000 / room;
    return (struct sim_op){.kind = SIM_OP_KERNEL,
                           .work_ns = ns,
                           .width_ppm = (uint32_t)(width ? width : 1),
                           .event = (uint32_t)warps,
                           .kernels = 1};
}

CUresult sim_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared, CUstream handle, void **params, void **extra, bool cooperative) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    struct launch l;
    rc = launch_read(&l, f, (unsigned[3]){gx, gy, gz}, (unsigned[3]){bx, by, bz}, shared, params, extra);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(f->module->ctx == NULL || f->module->ctx == s->ctx, CUDA_ERROR_INVALID_HANDLE);
    if (cooperative) {
        const struct sim_device *d = &cuda.m->device[s->ctx->device];
        uint64_t per_sm = d->threads_per_sm / (bx * by * bz);
        REQUIRE((uint64_t)gx * gy * gz <= d->sms * (per_sm > 32 ? 32 : per_sm),
                CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    if (__builtin_expect(capture_active(s), 0)) {
        struct graph_work work = {.kind = WORK_KERNEL, .launch = l, .device = s->ctx->device};
        work.kernel = (CUDA_KERNEL_NODE_PARAMS){.func = f,
                                                .gridDimX = gx,
                                                .gridDimY = gy,
                                                .gridDimZ = gz,
                                                .blockDimX = bx,
                                                .blockDimY = by,
                                                .blockDimZ = bz,
                                                .sharedMemBytes = shared,
                                                .ctx = s->ctx};
        return capture_add(s, &work);
    }
    return submit(s, context_part(launch_op(&l, s->ctx->device), s->ctx), NULL, true);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params,
                                void **extra) {
    ENTER(cuLaunchKernel);
    return sim_launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra, false);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    ENTER(cuLaunchKernelEx);
    REQUIRE(c != NULL, CUDA_ERROR_INVALID_VALUE);
    bool cooperative = false;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            cooperative = c->attrs[i].value.cooperative != 0;
    return sim_launch(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                      c->sharedMemBytes, c->hStream, params, extra, cooperative);
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                                           unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                                           CUstream stream, void **params) {
    ENTER(cuLaunchCooperativeKernel);
    return sim_launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, NULL, true);
}

CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count,
                                                      unsigned int flags) {
    ENTER(cuLaunchCooperativeKernelMultiDevice);
    (void)flags;
    REQUIRE(list != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        REQUIRE((uintptr_t)p->hStream > 2, CUDA_ERROR_INVALID_HANDLE); /* a stream of its own for each device */
        CUresult rc = sim_launch(p->function, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY,
                                 p->blockDimZ, p->sharedMemBytes, p->hStream, p->kernelParams, NULL, true);
        REQUIRE(rc == CUDA_SUCCESS, rc);
    }
    return CUDA_SUCCESS;
}

/* --- the launches of CUDA 2 and 3: the function carries its block shape and parameters ---------------------------- */

struct old_launch {
    CUfunction f;
    int block[3];
    unsigned shared;
    unsigned char parameters[4096];
};

static __thread struct old_launch old; /* of the function this thread prepared last */

static struct old_launch *prepare(CUfunction f) {
    if (old.f != f) {
        memset(&old, 0, sizeof old);
        old.f = f;
        old.block[0] = old.block[1] = old.block[2] = 1;
    }
    return &old;
}

CUresult CUDAAPI cuFuncSetBlockShape(CUfunction f, int x, int y, int z) {
    ENTER(cuFuncSetBlockShape);
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(x > 0 && y > 0 && z > 0, CUDA_ERROR_INVALID_VALUE);
    struct old_launch *o = prepare(f);
    o->block[0] = x;
    o->block[1] = y;
    o->block[2] = z;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetSharedSize(CUfunction f, unsigned int bytes) {
    ENTER(cuFuncSetSharedSize);
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    prepare(f)->shared = bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuParamSetSize(CUfunction f, unsigned int bytes) {
    ENTER(cuParamSetSize);
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(bytes <= sizeof old.parameters, CUDA_ERROR_INVALID_VALUE);
    prepare(f);
    return CUDA_SUCCESS;
}

static CUresult old_parameter(CUfunction f, int offset, const void *value, size_t bytes) {
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(offset >= 0 && value != NULL && (size_t)offset + bytes <= sizeof old.parameters, CUDA_ERROR_INVALID_VALUE);
    memcpy(prepare(f)->parameters + offset, value, bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuParamSeti(CUfunction f, int offset, unsigned int value) {
    ENTER(cuParamSeti);
    return old_parameter(f, offset, &value, sizeof value);
}

CUresult CUDAAPI cuParamSetf(CUfunction f, int offset, float value) {
    ENTER(cuParamSetf);
    return old_parameter(f, offset, &value, sizeof value);
}

CUresult CUDAAPI cuParamSetv(CUfunction f, int offset, void *value, unsigned int bytes) {
    ENTER(cuParamSetv);
    return old_parameter(f, offset, value, bytes);
}

static CUresult old_grid(CUfunction f, int x, int y, CUstream stream) {
    REQUIRE(function_valid(f), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(x > 0 && y > 0, CUDA_ERROR_INVALID_VALUE);
    struct old_launch *o = prepare(f);
    void *params[1] = {o->parameters};
    return sim_launch(f, (unsigned)x, (unsigned)y, 1, (unsigned)o->block[0], (unsigned)o->block[1],
                      (unsigned)o->block[2], o->shared, stream, params, NULL, false);
}

CUresult CUDAAPI cuLaunch(CUfunction f) {
    ENTER(cuLaunch);
    return old_grid(f, 1, 1, NULL);
}

CUresult CUDAAPI cuLaunchGrid(CUfunction f, int x, int y) {
    ENTER(cuLaunchGrid);
    return old_grid(f, x, y, NULL);
}

CUresult CUDAAPI cuLaunchGridAsync(CUfunction f, int x, int y, CUstream stream) {
    ENTER(cuLaunchGridAsync);
    return old_grid(f, x, y, stream);
}

/* --- occupancy -------------------------------------------------------------------------------------------------- */

static CUresult occupancy(int *blocks, CUfunction f, int block, size_t shared) {
    REQUIRE(blocks != NULL && block > 0 && function_valid(f), CUDA_ERROR_INVALID_VALUE);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    uint64_t by_threads = cuda.m->device[ctx->device].threads_per_sm / (unsigned)block;
    uint64_t by_shared = shared == 0 ? 32 : shared <= 232448 ? 233472 / (shared + 1024) : 0;
    uint64_t least = by_threads < by_shared ? by_threads : by_shared;
    *blocks = (int)(least > 32 ? 32 : least);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int block, size_t shared) {
    ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    return occupancy(blocks, f, block, shared);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int block,
                                                                      size_t shared, unsigned int flags) {
    ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
    (void)flags;
    return occupancy(blocks, f, block, shared);
}

static CUresult potential(int *grid, int *block, CUfunction f, CUoccupancyB2DSize size_of, size_t shared, int limit) {
    REQUIRE(grid != NULL && block != NULL && function_valid(f), CUDA_ERROR_INVALID_VALUE);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    int best = limit > 0 && limit < 1024 ? limit : 1024;
    int per_sm = 0;
    CUresult rc = occupancy(&per_sm, f, best, size_of != NULL ? size_of(best) : shared);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    *block = best;
    *grid = per_sm * (int)cuda.m->device[ctx->device].sms;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction f, CUoccupancyB2DSize size_of,
                                                  size_t shared, int limit) {
    ENTER(cuOccupancyMaxPotentialBlockSize);
    return potential(grid, block, f, size_of, shared, limit);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction f,
                                                           CUoccupancyB2DSize size_of, size_t shared, int limit,
                                                           unsigned int flags) {
    ENTER(cuOccupancyMaxPotentialBlockSizeWithFlags);
    (void)flags;
    return potential(grid, block, f, size_of, shared, limit);
}

CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction f, int blocks, int block) {
    ENTER(cuOccupancyAvailableDynamicSMemPerBlock);
    REQUIRE(bytes != NULL && blocks > 0 && block > 0 && function_valid(f), CUDA_ERROR_INVALID_VALUE);
    size_t each = 233472 / (size_t)blocks;
    *bytes = each > 1024 ? (each - 1024 > 232448 ? 232448 : each - 1024) : 0;
    return CUDA_SUCCESS;
}
