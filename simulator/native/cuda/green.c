/*
 * Contexts on a part of the processors. Kernels in one have no more of the card than that part, and take longer by what
 * they would have filled beyond it. To the machine it is a context like others: it takes turns with them, where a real
 * one runs beside those of its own process.
 */
#include "state.h"

#include <stdlib.h>
#include <string.h>

struct CUgreenCtx_st {
    uint32_t magic;
    uint64_t id;
    struct CUctx_st *ctx;
    CUdevResource part;
};

struct CUdevResourceDesc_st {
    uint32_t magic;
    CUdevResource part;
};

static bool green_valid(CUgreenCtx g) {
    return g != NULL && g->magic == MAGIC_GREEN && context_valid(g->ctx);
}

static CUdevResource processors(unsigned count) {
    CUdevResource part;
    memset(&part, 0, sizeof part);
    part.type = CU_DEV_RESOURCE_TYPE_SM;
    part.sm.smCount = count;
    part.sm.minSmPartitionSize = 8;
    part.sm.smCoscheduledAlignment = 8;
    return part;
}

CUresult CUDAAPI cuDeviceGetDevResource(CUdevice dev, CUdevResource *out, CUdevResourceType type) {
    ENTER_DEVICE(cuDeviceGetDevResource, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    *out = processors(cuda.m->device[device].sms);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevSmResourceSplitByCount(CUdevResource *out, unsigned int *groups, const CUdevResource *input,
                                             CUdevResource *remaining, unsigned int flags, unsigned int least) {
    ENTER(cuDevSmResourceSplitByCount);
    (void)flags;
    REQUIRE(groups != NULL && input != NULL && input->type == CU_DEV_RESOURCE_TYPE_SM && least > 0,
            CUDA_ERROR_INVALID_VALUE);
    unsigned each = (least + 7) / 8 * 8, most = input->sm.smCount / each;
    REQUIRE(most > 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    if (out == NULL) {
        *groups = most;
        return CUDA_SUCCESS;
    }
    *groups = *groups < most ? *groups : most;
    for (unsigned i = 0; i < *groups; i++)
        out[i] = processors(each);
    if (remaining != NULL)
        *remaining = processors(input->sm.smCount - *groups * each);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *parts, unsigned int count) {
    ENTER(cuDevResourceGenerateDesc);
    REQUIRE(out != NULL && parts != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    unsigned sum = 0;
    for (unsigned i = 0; i < count; i++) {
        REQUIRE(parts[i].type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
        sum += parts[i].sm.smCount;
    }
    struct CUdevResourceDesc_st *desc = calloc(1, sizeof *desc);
    REQUIRE(desc != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *desc = (struct CUdevResourceDesc_st){MAGIC_GREEN, processors(sum)};
    *out = desc;
    return CUDA_SUCCESS;
}

/* One reference to the primary context less. */
static void let_go(struct CUctx_st *primary) { /* under our lock */
    int device = primary->device;
    if (primary != cuda.primary[device] || --cuda.primary_refs[device] > 0) /* a reset took all references at once */
        return;
    cuda.primary[device] = NULL;
    context_drop(primary);
}

/* What was allocated and loaded in a green context is the primary context's. */
static void pass_on(struct CUctx_st *from, struct CUctx_st *to) { /* under our lock */
    for (size_t i = 0; i < cuda.allocation_count; i++)
        if (cuda.allocations[i].ctx == from)
            cuda.allocations[i].ctx = to;
    struct CUmod_st **end = &from->modules;
    for (; *end != NULL; end = &(*end)->next)
        (*end)->ctx = to;
    *end = to->modules;
    to->modules = from->modules;
    from->modules = NULL;
}

CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags) {
    ENTER_DEVICE(cuGreenCtxCreate, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(out != NULL && desc != NULL && desc->magic == MAGIC_GREEN && flags == CU_GREEN_CTX_DEFAULT_STREAM,
            CUDA_ERROR_INVALID_VALUE);
    struct CUgreenCtx_st *g = calloc(1, sizeof *g);
    REQUIRE(g != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    cuda_lock();
    CUresult rc = CUDA_SUCCESS;
    if (cuda.primary[device] == NULL)
        rc = context_make(&cuda.primary[device], device, cuda.primary_flags[device], true);
    if (rc == CUDA_SUCCESS) {
        cuda.primary_refs[device]++;
        rc = context_make(&g->ctx, device, 0, false);
        if (rc != CUDA_SUCCESS)
            let_go(cuda.primary[device]);
    }
    if (rc == CUDA_SUCCESS) {
        g->ctx->sms = desc->part.sm.smCount;
        g->ctx->owner = cuda.primary[device];
        g->id = ++cuda.ids;
    }
    cuda_unlock();
    if (rc != CUDA_SUCCESS) {
        free(g);
        return rc;
    }
    g->magic = MAGIC_GREEN;
    g->part = desc->part;
    *out = g;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx g) {
    ENTER(cuGreenCtxDestroy);
    REQUIRE(green_valid(g), CUDA_ERROR_INVALID_HANDLE);
    cuda_lock();
    struct CUctx_st *primary = g->ctx->owner;
    if (primary == cuda.primary[primary->device])
        pass_on(g->ctx, primary);
    context_drop(g->ctx);
    let_go(primary);
    cuda_unlock();
    g->magic = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx g) {
    ENTER(cuCtxFromGreenCtx);
    REQUIRE(green_valid(g), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = g->ctx;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxGetDevResource(CUgreenCtx g, CUdevResource *out, CUdevResourceType type) {
    ENTER(cuGreenCtxGetDevResource);
    REQUIRE(green_valid(g), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    *out = g->part;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxGetId(CUgreenCtx g, unsigned long long *id) {
    ENTER(cuGreenCtxGetId);
    REQUIRE(green_valid(g), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(id != NULL, CUDA_ERROR_INVALID_VALUE);
    *id = g->id;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx g, unsigned int flags, int priority) {
    ENTER(cuGreenCtxStreamCreate);
    REQUIRE(green_valid(g), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out != NULL && flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    cuda_lock();
    CUresult rc = stream_make(g->ctx, flags, priority, false, &s);
    cuda_unlock();
    if (rc == CUDA_SUCCESS)
        *out = s;
    return rc;
}

/* What the kernel may have of the card here, and how long it takes then. */
struct sim_op context_part(struct sim_op op, const struct CUctx_st *ctx) {
    uint64_t all = cuda.m->device[ctx->device].sms;
    uint64_t most = ctx->sms ? (uint64_t)ctx->sms * 1000000 / all : 1000000;
    if (op.width_ppm > most) {
        op.work_ns = op.work_ns * op.width_ppm / most;
        op.width_ppm = (uint32_t)most;
    }
    return op;
}
