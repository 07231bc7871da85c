/* Graphs: built by calls or by capture, instantiated, launched. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphExec_st {
    uint32_t magic;
    struct CUgraph_st *graph; /* its own copy */
    struct CUctx_st *ctx;
    unsigned long long flags;
    struct sim_op *ops; /* what a launch submits; NULL when it has to be worked out again */
    size_t op_count;
    uint64_t charged; /* card memory of its allocation nodes, kept from the first launch or upload on */
    bool uploaded;
};

static bool graph_valid(const struct CUgraph_st *g) {
    return g != NULL && g->magic == MAGIC_GRAPH;
}
static bool node_valid(const struct CUgraphNode_st *n) {
    return n != NULL && n->magic == MAGIC_NODE;
}
static bool exec_valid(const struct CUgraphExec_st *e) {
    return e != NULL && e->magic == MAGIC_EXEC;
}

/* --- building --------------------------------------------------------------------------------------------------- */

static struct CUgraph_st *graph_new(void) {
    struct CUgraph_st *g = calloc(1, sizeof *g);
    if (g != NULL)
        g->magic = MAGIC_GRAPH;
    return g;
}

static void node_free(struct CUgraphNode_st *n);

static void graph_free(struct CUgraph_st *g) {
    for (size_t i = 0; i < g->count; i++)
        node_free(g->nodes[i]);
    free(g->nodes);
    g->magic = 0;
    free(g);
}

static void node_free(struct CUgraphNode_st *n) {
    if (n->work.child != NULL)
        graph_free(n->work.child);
    n->magic = 0;
    free(n->deps);
    free(n);
}

static CUgraphNodeType node_type(const struct graph_work *work) {
    switch (work->kind) {
    case WORK_KERNEL:
        return CU_GRAPH_NODE_TYPE_KERNEL;
    case WORK_COPY:
        return CU_GRAPH_NODE_TYPE_MEMCPY;
    case WORK_SET:
        return CU_GRAPH_NODE_TYPE_MEMSET;
    case WORK_HOST:
        return CU_GRAPH_NODE_TYPE_HOST;
    case WORK_ALLOC:
        return CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    case WORK_FREE:
        return CU_GRAPH_NODE_TYPE_MEM_FREE;
    case WORK_CHILD:
        return CU_GRAPH_NODE_TYPE_GRAPH;
    case WORK_RECORD:
        return CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    case WORK_WAIT:
        return CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    default:
        return CU_GRAPH_NODE_TYPE_EMPTY;
    }
}

/* The node's own copy of the kernel's parameters: the caller's arrays are gone after the call. */
static void own_parameters(struct CUgraphNode_st *n) {
    if (n->work.kind != WORK_KERNEL)
        return;
    n->work.parameters[0] = n->work.launch.parameter;
    n->work.parameter_pointers[0] = &n->work.parameters[0];
    n->work.kernel.kernelParams =
        n->work.launch.function->length == LENGTH_PARAMETER ? n->work.parameter_pointers : NULL;
    n->work.kernel.extra = NULL;
}

static CUresult node_add(struct CUgraph_st *g, struct CUgraphNode_st *const *deps, size_t count,
                         const struct graph_work *work, struct CUgraphNode_st **out) {
    REQUIRE(graph_valid(g), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(count == 0 || deps != NULL, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        REQUIRE(node_valid(deps[i]) && deps[i]->graph == g, CUDA_ERROR_INVALID_VALUE);
    struct CUgraphNode_st *n = calloc(1, sizeof *n);
    REQUIRE(n != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    n->deps = count > 0 ? malloc(count * sizeof *n->deps) : NULL;
    if (g->count == g->size) {
        size_t size = g->size ? g->size * 2 : 16;
        struct CUgraphNode_st **grown = realloc(g->nodes, size * sizeof *grown);
        if (grown == NULL) {
            free(n->deps);
            free(n);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        g->nodes = grown;
        g->size = size;
    }
    n->magic = MAGIC_NODE;
    n->graph = g;
    n->type = node_type(work);
    n->work = *work;
    if (count > 0)
        memcpy(n->deps, deps, count * sizeof *n->deps);
    n->dep_count = count;
    own_parameters(n);
    g->nodes[g->count++] = n;
    if (out != NULL)
        *out = n;
    return CUDA_SUCCESS;
}

static struct CUgraph_st *graph_copy(struct CUgraph_st *g) {
    struct CUgraph_st *to = graph_new();
    if (to == NULL)
        return NULL;
    for (size_t i = 0; i < g->count; i++)
        g->nodes[i]->copy = NULL;
    /* Nodes are in order of creation, so what a node depends on is usually copied before it; edges may break that. */
    for (size_t i = 0; i < g->count; i++) {
        struct graph_work work = g->nodes[i]->work;
        if (work.child != NULL)
            work.child = graph_copy(work.child);
        if (node_add(to, NULL, 0, &work, &g->nodes[i]->copy) != CUDA_SUCCESS) {
            graph_free(to);
            return NULL;
        }
        g->nodes[i]->copy->original = g->nodes[i];
        g->nodes[i]->copy->disabled = g->nodes[i]->disabled;
    }
    for (size_t i = 0; i < g->count; i++) {
        struct CUgraphNode_st *n = g->nodes[i]->copy;
        n->dep_count = g->nodes[i]->dep_count;
        n->deps = n->dep_count > 0 ? malloc(n->dep_count * sizeof *n->deps) : NULL;
        for (size_t d = 0; d < n->dep_count; d++)
            n->deps[d] = g->nodes[i]->deps[d]->copy;
    }
    return to;
}

CUresult CUDAAPI cuGraphCreate(CUgraph *out, unsigned int flags) {
    ENTER(cuGraphCreate);
    REQUIRE(out != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    *out = graph_new();
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph g) {
    ENTER(cuGraphDestroy);
    REQUIRE(graph_valid(g) && !g->owned, CUDA_ERROR_INVALID_VALUE);
    graph_free(g);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphClone(CUgraph *out, CUgraph g) {
    ENTER(cuGraphClone);
    REQUIRE(out != NULL && graph_valid(g), CUDA_ERROR_INVALID_VALUE);
    *out = graph_copy(g);
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone) {
    ENTER(cuGraphNodeFindInClone);
    REQUIRE(out != NULL && node_valid(original) && graph_valid(clone), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < clone->count; i++)
        if (clone->nodes[i]->original == original) {
            *out = clone->nodes[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult kernel_work(struct graph_work *work, const CUDA_KERNEL_NODE_PARAMS *p) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(work, 0, sizeof *work);
    work->kind = WORK_KERNEL;
    work->kernel = *p;
    if (work->kernel.func == NULL)
        work->kernel.func = (CUfunction)p->kern;
    CUresult rc = launch_read(&work->launch, work->kernel.func, (unsigned[3]){p->gridDimX, p->gridDimY, p->gridDimZ},
                              (unsigned[3]){p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes,
                              p->kernelParams, p->extra);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return CUDA_SUCCESS;
}

static CUDA_KERNEL_NODE_PARAMS from_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    return (CUDA_KERNEL_NODE_PARAMS){.func = p->func,
                                     .gridDimX = p->gridDimX,
                                     .gridDimY = p->gridDimY,
                                     .gridDimZ = p->gridDimZ,
                                     .blockDimX = p->blockDimX,
                                     .blockDimY = p->blockDimY,
                                     .blockDimZ = p->blockDimZ,
                                     .sharedMemBytes = p->sharedMemBytes,
                                     .kernelParams = p->kernelParams,
                                     .extra = p->extra};
}

CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                         const CUDA_KERNEL_NODE_PARAMS *p) {
    ENTER(cuGraphAddKernelNode_v2);
    struct graph_work work;
    CUresult rc = kernel_work(&work, p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphAddKernelNode);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p2 = from_v1(p);
    struct graph_work work;
    CUresult rc = kernel_work(&work, &p2);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return node_add(g, deps, count, &work, out);
}

static CUresult get_kernel(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS *p) {
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_KERNEL && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = n->work.kernel;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeGetParams_v2(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS *p) {
    ENTER(cuGraphKernelNodeGetParams_v2);
    return get_kernel(n, p);
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphKernelNodeGetParams);
    CUDA_KERNEL_NODE_PARAMS k;
    CUresult rc = get_kernel(n, &k);
    REQUIRE(rc == CUDA_SUCCESS && p != NULL, rc);
    *p = (CUDA_KERNEL_NODE_PARAMS_v1){.func = k.func,
                                      .gridDimX = k.gridDimX,
                                      .gridDimY = k.gridDimY,
                                      .gridDimZ = k.gridDimZ,
                                      .blockDimX = k.blockDimX,
                                      .blockDimY = k.blockDimY,
                                      .blockDimZ = k.blockDimZ,
                                      .sharedMemBytes = k.sharedMemBytes,
                                      .kernelParams = k.kernelParams,
                                      .extra = k.extra};
    return CUDA_SUCCESS;
}

static CUresult set_kernel(struct CUgraphNode_st *n, const CUDA_KERNEL_NODE_PARAMS *p) {
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work;
    CUresult rc = kernel_work(&work, p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    work.device = n->work.device;
    n->work = work;
    own_parameters(n);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeSetParams_v2(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
    ENTER(cuGraphKernelNodeSetParams_v2);
    return set_kernel(n, p);
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphKernelNodeSetParams);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p2 = from_v1(p);
    return set_kernel(n, &p2);
}

/* A linear copy between two unpitched pointers; arrays and pitched layouts are refused loudly by their own calls. */
static CUresult copy_work(struct graph_work *work, const CUDA_MEMCPY3D *p) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(p->srcMemoryType != CU_MEMORYTYPE_ARRAY && p->dstMemoryType != CU_MEMORYTYPE_ARRAY,
            CUDA_ERROR_NOT_SUPPORTED);
    memset(work, 0, sizeof *work);
    work->kind = WORK_COPY;
    work->copy3d = *p;
    work->from = p->srcMemoryType == CU_MEMORYTYPE_HOST ? p->srcHost : (const void *)(uintptr_t)p->srcDevice;
    work->to = p->dstMemoryType == CU_MEMORYTYPE_HOST ? p->dstHost : (void *)(uintptr_t)p->dstDevice;
    work->from = (const char *)work->from + p->srcXInBytes;
    work->to = (char *)work->to + p->dstXInBytes;
    work->bytes = p->WidthInBytes * (p->Height ? p->Height : 1) * (p->Depth ? p->Depth : 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                      const CUDA_MEMCPY3D *p, CUcontext ctx) {
    ENTER(cuGraphAddMemcpyNode);
    (void)ctx;
    struct graph_work work;
    CUresult rc = copy_work(&work, p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphMemcpyNodeGetParams(CUgraphNode n, CUDA_MEMCPY3D *p) {
    ENTER(cuGraphMemcpyNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_MEMCPY && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = n->work.copy3d;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                      const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx) {
    ENTER(cuGraphAddMemsetNode);
    (void)ctx;
    REQUIRE(p != NULL && (p->elementSize == 1 || p->elementSize == 2 || p->elementSize == 4), CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_SET, .set = *p};
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode n, CUDA_MEMSET_NODE_PARAMS *p) {
    ENTER(cuGraphMemsetNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_MEMSET && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = n->work.set;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                    const CUDA_HOST_NODE_PARAMS *p) {
    ENTER(cuGraphAddHostNode);
    REQUIRE(p != NULL && p->fn != NULL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_HOST, .host = p->fn, .host_data = p->userData};
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count) {
    ENTER(cuGraphAddEmptyNode);
    struct graph_work work = {.kind = WORK_EMPTY};
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                          CUgraph child) {
    ENTER(cuGraphAddChildGraphNode);
    REQUIRE(graph_valid(child), CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_CHILD, .child = graph_copy(child)};
    REQUIRE(work.child != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    work.child->owned = true;
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph *out) {
    ENTER(cuGraphChildGraphNodeGetGraph);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_GRAPH && out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = n->work.child;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddEventRecordNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                           CUevent event) {
    ENTER(cuGraphAddEventRecordNode);
    REQUIRE(event != NULL && event->magic == MAGIC_EVENT, CUDA_ERROR_INVALID_HANDLE);
    struct graph_work work = {.kind = WORK_RECORD, .event = event};
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                         CUevent event) {
    ENTER(cuGraphAddEventWaitNode);
    REQUIRE(event != NULL && event->magic == MAGIC_EVENT, CUDA_ERROR_INVALID_HANDLE);
    struct graph_work work = {.kind = WORK_WAIT, .event = event};
    return node_add(g, deps, count, &work, out);
}

/* The address exists from now on; the card's memory is taken by the first upload or launch. */
static CUresult alloc_node(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                           CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    REQUIRE(p != NULL && p->bytesize > 0 && p->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE,
            CUDA_ERROR_INVALID_VALUE);
    int device;
    REQUIRE(device_of(p->poolProps.location.id, &device), CUDA_ERROR_INVALID_DEVICE);
    struct graph_work work = {.kind = WORK_ALLOC, .alloc_bytes = p->bytesize, .device = device};
    CUresult rc = memory_allocate(&work.alloc, p->bytesize, device, current_context(), ALLOCATION_GRAPH, 0);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    p->dptr = work.alloc;
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                        CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    ENTER(cuGraphAddMemAllocNode);
    return alloc_node(out, g, deps, count, p);
}

CUresult CUDAAPI cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                       CUdeviceptr at) {
    ENTER(cuGraphAddMemFreeNode);
    struct graph_work work = {.kind = WORK_FREE, .alloc = at};
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode n, CUdeviceptr *at) {
    ENTER(cuGraphMemFreeNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_MEM_FREE && at != NULL, CUDA_ERROR_INVALID_VALUE);
    *at = n->work.alloc;
    return CUDA_SUCCESS;
}

static CUresult add_node(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count, CUgraphNodeParams *p) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_EMPTY};
    CUresult rc = CUDA_SUCCESS;
    switch ((int)p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        CUDA_KERNEL_NODE_PARAMS k = {.func = p->kernel.func,
                                     .gridDimX = p->kernel.gridDimX,
                                     .gridDimY = p->kernel.gridDimY,
                                     .gridDimZ = p->kernel.gridDimZ,
                                     .blockDimX = p->kernel.blockDimX,
                                     .blockDimY = p->kernel.blockDimY,
                                     .blockDimZ = p->kernel.blockDimZ,
                                     .sharedMemBytes = p->kernel.sharedMemBytes,
                                     .kernelParams = p->kernel.kernelParams,
                                     .extra = p->kernel.extra,
                                     .kern = p->kernel.kern,
                                     .ctx = p->kernel.ctx};
        rc = kernel_work(&work, &k);
        break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        rc = copy_work(&work, &p->memcpy.copyParams);
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        work.kind = WORK_SET;
        work.set = (CUDA_MEMSET_NODE_PARAMS){.dst = p->memset.dst,
                                             .pitch = p->memset.pitch,
                                             .value = p->memset.value,
                                             .elementSize = p->memset.elementSize,
                                             .width = p->memset.width,
                                             .height = p->memset.height};
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
        work.kind = WORK_HOST;
        work.host = p->host.fn;
        work.host_data = p->host.userData;
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        REQUIRE(graph_valid(p->graph.graph), CUDA_ERROR_INVALID_VALUE);
        work.kind = WORK_CHILD;
        work.child = graph_copy(p->graph.graph);
        break;
    case CU_GRAPH_NODE_TYPE_EMPTY:
        break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        work.kind = WORK_RECORD;
        work.event = p->eventRecord.event;
        break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        work.kind = WORK_WAIT;
        work.event = p->eventWait.event;
        break;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
        CUDA_MEM_ALLOC_NODE_PARAMS a = {.poolProps = p->alloc.poolProps, .bytesize = p->alloc.bytesize};
        rc = alloc_node(out, g, deps, count, &a);
        p->alloc.dptr = a.dptr;
        return rc;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        work.kind = WORK_FREE;
        work.alloc = p->free.dptr;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return node_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                CUgraphNodeParams *p) {
    ENTER(cuGraphAddNode);
    return add_node(out, g, deps, count, p);
}

CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, const CUgraphEdgeData *edges,
                                   size_t count, CUgraphNodeParams *p) {
    ENTER(cuGraphAddNode_v2);
    (void)edges;
    return add_node(out, g, deps, count, p);
}

static CUresult add_edges(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    REQUIRE(graph_valid(g) && (count == 0 || (from != NULL && to != NULL)), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(node_valid(from[i]) && node_valid(to[i]) && from[i] != to[i], CUDA_ERROR_INVALID_VALUE);
        struct CUgraphNode_st **grown = realloc(to[i]->deps, (to[i]->dep_count + 1) * sizeof *grown);
        REQUIRE(grown != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        to[i]->deps = grown;
        to[i]->deps[to[i]->dep_count++] = from[i];
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    ENTER(cuGraphAddDependencies);
    return add_edges(g, from, to, count);
}

CUresult CUDAAPI cuGraphAddDependencies_v2(CUgraph g, const CUgraphNode *from, const CUgraphNode *to,
                                           const CUgraphEdgeData *edges, size_t count) {
    ENTER(cuGraphAddDependencies_v2);
    (void)edges;
    return add_edges(g, from, to, count);
}

CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode n) {
    ENTER(cuGraphDestroyNode);
    REQUIRE(node_valid(n), CUDA_ERROR_INVALID_VALUE);
    struct CUgraph_st *g = n->graph;
    size_t kept = 0;
    for (size_t i = 0; i < g->count; i++) {
        struct CUgraphNode_st *other = g->nodes[i];
        if (other == n)
            continue;
        size_t deps = 0;
        for (size_t d = 0; d < other->dep_count; d++)
            if (other->deps[d] != n)
                other->deps[deps++] = other->deps[d];
        other->dep_count = deps;
        g->nodes[kept++] = other;
    }
    g->count = kept;
    node_free(n);
    return CUDA_SUCCESS;
}

/* --- looking ---------------------------------------------------------------------------------------------------- */

static CUresult give_list(CUgraphNode *out, size_t *count, CUgraphNode *found, size_t n) {
    if (out == NULL) {
        *count = n;
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < *count; i++)
        out[i] = i < n ? found[i] : NULL;
    if (*count > n)
        *count = n;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph g, CUgraphNode *out, size_t *count) {
    ENTER(cuGraphGetNodes);
    REQUIRE(graph_valid(g) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    return give_list(out, count, g->nodes, g->count);
}

CUresult CUDAAPI cuGraphGetRootNodes(CUgraph g, CUgraphNode *out, size_t *count) {
    ENTER(cuGraphGetRootNodes);
    REQUIRE(graph_valid(g) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    CUgraphNode *roots = malloc((g->count ? g->count : 1) * sizeof *roots);
    REQUIRE(roots != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    size_t n = 0;
    for (size_t i = 0; i < g->count; i++)
        if (g->nodes[i]->dep_count == 0)
            roots[n++] = g->nodes[i];
    CUresult rc = give_list(out, count, roots, n);
    free(roots);
    return rc;
}

static CUresult edges(CUgraph g, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    REQUIRE(graph_valid(g) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    size_t n = 0;
    for (size_t i = 0; i < g->count; i++)
        for (size_t d = 0; d < g->nodes[i]->dep_count; d++, n++)
            if (from != NULL && to != NULL && n < *count) {
                from[n] = g->nodes[i]->deps[d];
                to[n] = g->nodes[i];
            }
    if (from == NULL || n < *count)
        *count = n;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph g, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    ENTER(cuGraphGetEdges);
    return edges(g, from, to, count);
}

CUresult CUDAAPI cuGraphGetEdges_v2(CUgraph g, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                                    size_t *count) {
    ENTER(cuGraphGetEdges_v2);
    CUresult rc = edges(g, from, to, count);
    if (rc == CUDA_SUCCESS && data != NULL)
        memset(data, 0, *count * sizeof *data);
    return rc;
}

CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode n, CUgraphNode *out, size_t *count) {
    ENTER(cuGraphNodeGetDependencies);
    REQUIRE(node_valid(n) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    return give_list(out, count, n->deps, n->dep_count);
}

CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode n, CUgraphNode *out, CUgraphEdgeData *data, size_t *count) {
    ENTER(cuGraphNodeGetDependencies_v2);
    REQUIRE(node_valid(n) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = give_list(out, count, n->deps, n->dep_count);
    if (rc == CUDA_SUCCESS && data != NULL)
        memset(data, 0, *count * sizeof *data);
    return rc;
}

static CUresult dependents(CUgraphNode n, CUgraphNode *out, size_t *count) {
    REQUIRE(node_valid(n) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct CUgraph_st *g = n->graph;
    CUgraphNode *found = malloc((g->count ? g->count : 1) * sizeof *found);
    REQUIRE(found != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    size_t many = 0;
    for (size_t i = 0; i < g->count; i++)
        for (size_t d = 0; d < g->nodes[i]->dep_count; d++)
            if (g->nodes[i]->deps[d] == n) {
                found[many++] = g->nodes[i];
                break;
            }
    CUresult rc = give_list(out, count, found, many);
    free(found);
    return rc;
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode n, CUgraphNode *out, size_t *count) {
    ENTER(cuGraphNodeGetDependentNodes);
    return dependents(n, out, count);
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes_v2(CUgraphNode n, CUgraphNode *out, CUgraphEdgeData *data,
                                                 size_t *count) {
    ENTER(cuGraphNodeGetDependentNodes_v2);
    CUresult rc = dependents(n, out, count);
    if (rc == CUDA_SUCCESS && data != NULL)
        memset(data, 0, *count * sizeof *data);
    return rc;
}

static CUresult remove_edges(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    REQUIRE(graph_valid(g) && (count == 0 || (from != NULL && to != NULL)), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(node_valid(from[i]) && node_valid(to[i]), CUDA_ERROR_INVALID_VALUE);
        size_t kept = 0, before = to[i]->dep_count;
        for (size_t d = 0; d < before; d++)
            if (to[i]->deps[d] != from[i])
                to[i]->deps[kept++] = to[i]->deps[d];
        to[i]->dep_count = kept;
        REQUIRE(kept < before, CUDA_ERROR_INVALID_VALUE); /* there was no such edge */
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphRemoveDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    ENTER(cuGraphRemoveDependencies);
    return remove_edges(g, from, to, count);
}

CUresult CUDAAPI cuGraphRemoveDependencies_v2(CUgraph g, const CUgraphNode *from, const CUgraphNode *to,
                                              const CUgraphEdgeData *edges, size_t count) {
    ENTER(cuGraphRemoveDependencies_v2);
    (void)edges;
    return remove_edges(g, from, to, count);
}

CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode n, CUDA_HOST_NODE_PARAMS *p) {
    ENTER(cuGraphHostNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_HOST && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = (CUDA_HOST_NODE_PARAMS){.fn = n->work.host, .userData = n->work.host_data};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode n, CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    ENTER(cuGraphMemAllocNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && p != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(p, 0, sizeof *p);
    p->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p->poolProps.location.id = ordinal_of(n->work.device);
    p->bytesize = n->work.alloc_bytes;
    p->dptr = n->work.alloc;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphEventRecordNodeGetEvent(CUgraphNode n, CUevent *event) {
    ENTER(cuGraphEventRecordNodeGetEvent);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD && event != NULL, CUDA_ERROR_INVALID_VALUE);
    *event = n->work.event;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphEventWaitNodeGetEvent(CUgraphNode n, CUevent *event) {
    ENTER(cuGraphEventWaitNodeGetEvent);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && event != NULL, CUDA_ERROR_INVALID_VALUE);
    *event = n->work.event;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType *type) {
    ENTER(cuGraphNodeGetType);
    REQUIRE(node_valid(n) && type != NULL, CUDA_ERROR_INVALID_VALUE);
    *type = n->type;
    return CUDA_SUCCESS;
}

/* --- instantiating and launching -------------------------------------------------------------------------------- */

static int by_level(const void *a, const void *b) {
    const struct CUgraphNode_st *x = *(struct CUgraphNode_st *const *)a, *y = *(struct CUgraphNode_st *const *)b;
    return x->level < y->level ? -1 : x->level > y->level;
}

/* Levels by longest path; false when the edges make a cycle. Afterwards the nodes lie in an order that respects the
 * edges. */
static bool level_nodes(struct CUgraph_st *g) {
    for (size_t i = 0; i < g->count; i++)
        g->nodes[i]->level = 0;
    for (size_t round = 0; round <= g->count; round++) {
        bool changed = false;
        for (size_t i = 0; i < g->count; i++)
            for (size_t d = 0; d < g->nodes[i]->dep_count; d++)
                if (g->nodes[i]->level <= g->nodes[i]->deps[d]->level) {
                    g->nodes[i]->level = g->nodes[i]->deps[d]->level + 1;
                    changed = true;
                }
        if (!changed) {
            if (g->count > 1)
                qsort(g->nodes, g->count, sizeof *g->nodes, by_level);
            return true;
        }
    }
    return false;
}

struct plan {
    struct sim_op *ops;
    size_t count, size;
};

static struct sim_op *plan_add(struct plan *plan, struct sim_op op) {
    if (plan->count == plan->size) {
        size_t size = plan->size ? plan->size * 2 : 16;
        struct sim_op *grown = realloc(plan->ops, size * sizeof *grown);
        if (grown == NULL)
            return NULL;
        plan->ops = grown;
        plan->size = size;
    }
    plan->ops[plan->count] = op;
    return &plan->ops[plan->count++];
}

/*
 * The entries that a launch puts into the stream. Kernels of one level run at once on their parts of the card, levels
 * one after the other; neighbouring kernel levels become one entry. Host nodes stand in the list with their node in
 * `arg`, and are submitted by the launch itself.
 */
static bool plan_graph(struct plan *plan, struct CUgraph_st *g, int device) {
    if (!level_nodes(g))
        return false;
    for (size_t i = 0; i < g->count;) {
        uint32_t level = g->nodes[i]->level;
        uint64_t longest = 0;
        unsigned __int128 area = 0;
        uint64_t width = 0, warps = 0;
        uint32_t kernels = 0;
        size_t end = i;
        for (; end < g->count && g->nodes[end]->level == level; end++) {
            const struct CUgraphNode_st *n = g->nodes[end];
            if (n->disabled || n->work.kind != WORK_KERNEL)
                continue;
            struct sim_op op = launch_op(&n->work.launch, device);
            longest = op.work_ns > longest ? op.work_ns : longest;
            area += (unsigned __int128)op.work_ns * op.width_ppm;
            width += op.width_ppm;
            warps += op.event;
            kernels++;
        }
        if (kernels > 0) {
            uint64_t shared = (uint64_t)(area / 1000000u);
            uint64_t work = shared > longest ? shared : longest;
            uint32_t filled = warps > 1000000 ? 1000000 : (uint32_t)warps;
            uint32_t part = width > 1000000 ? 1000000 : (uint32_t)width;
            struct sim_op *last = plan->count > 0 ? &plan->ops[plan->count - 1] : NULL;
            if (last != NULL && last->kind == SIM_OP_KERNEL) {
                uint64_t sum = last->work_ns + work;
                if (sum > 0)
                    last->width_ppm = (uint32_t)(((unsigned __int128)last->work_ns * last->width_ppm +
                                                  (unsigned __int128)work * part) /
                                                 sum);
                if (sum > 0)
                    last->event =
                        (uint32_t)(((unsigned __int128)last->work_ns * last->event + (unsigned __int128)work * filled) /
                                   sum);
                last->work_ns = sum;
                last->kernels += kernels;
            } else if (plan_add(plan, (struct sim_op){.kind = SIM_OP_KERNEL,
                                                      .work_ns = work,
                                                      .width_ppm = part ? part : 1,
                                                      .event = filled,
                                                      .kernels = kernels}) == NULL) {
                return false;
            }
        }
        for (size_t k = i; k < end; k++) {
            struct CUgraphNode_st *n = g->nodes[k];
            if (n->disabled)
                continue;
            struct sim_op op = {.kind = SIM_OP_HOST, .arg = (uintptr_t)n};
            switch (n->work.kind) {
            case WORK_CHILD:
                if (!plan_graph(plan, n->work.child, device))
                    return false;
                continue;
            case WORK_COPY:
            case WORK_SET:
            case WORK_HOST:
            case WORK_RECORD:
            case WORK_WAIT:
                if (plan_add(plan, op) == NULL)
                    return false;
                continue;
            default:
                continue;
            }
        }
        i = end;
    }
    return true;
}

static uint64_t graph_bytes(const struct CUgraph_st *g) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < g->count; i++) {
        if (g->nodes[i]->work.kind == WORK_ALLOC)
            bytes += charge_of(g->nodes[i]->work.alloc_bytes);
        if (g->nodes[i]->work.child != NULL)
            bytes += graph_bytes(g->nodes[i]->work.child);
    }
    return bytes;
}

static CUresult replan(struct CUgraphExec_st *e) {
    struct plan plan = {0};
    if (!plan_graph(&plan, e->graph, e->ctx->device)) {
        free(plan.ops);
        return CUDA_ERROR_INVALID_VALUE;
    }
    free(e->ops);
    e->ops = plan.ops;
    e->op_count = plan.count;
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph g, unsigned long long flags) {
    REQUIRE(out != NULL && graph_valid(g), CUDA_ERROR_INVALID_VALUE);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    struct CUgraphExec_st *e = calloc(1, sizeof *e);
    REQUIRE(e != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    e->magic = MAGIC_EXEC;
    e->ctx = ctx;
    e->flags = flags;
    e->graph = graph_copy(g);
    CUresult rc = e->graph != NULL ? replan(e) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc != CUDA_SUCCESS) {
        if (e->graph != NULL)
            graph_free(e->graph);
        free(e);
        return rc;
    }
    e->graph->owned = true;
    *out = e;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph g, unsigned long long flags) {
    ENTER(cuGraphInstantiateWithFlags);
    return instantiate(out, g, flags);
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *out, CUgraph g, CUgraphNode *error, char *log, size_t size) {
    ENTER(cuGraphInstantiate);
    if (error != NULL)
        *error = NULL;
    if (log != NULL && size > 0)
        log[0] = 0;
    return instantiate(out, g, 0);
}

CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *out, CUgraph g, CUgraphNode *error, char *log, size_t size) {
    ENTER(cuGraphInstantiate_v2);
    if (error != NULL)
        *error = NULL;
    if (log != NULL && size > 0)
        log[0] = 0;
    return instantiate(out, g, 0);
}

static CUresult take_memory(struct CUgraphExec_st *e) {
    if (e->uploaded)
        return CUDA_SUCCESS;
    uint64_t bytes = graph_bytes(e->graph);
    if (bytes > 0) {
        machine_enter(cuda.m);
        bool ok = memory_take(cuda.m, cuda.process, (uint32_t)e->ctx->device, bytes);
        machine_unlock(cuda.m);
        REQUIRE(ok, CUDA_ERROR_OUT_OF_MEMORY);
    }
    e->charged = bytes;
    e->uploaded = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p) {
    ENTER(cuGraphInstantiateWithParams);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = instantiate(out, g, p->flags);
    p->hErrNode_out = NULL;
    p->result_out = rc == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    if (rc == CUDA_SUCCESS && (p->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
        rc = take_memory(*out);
    return rc;
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec e, cuuint64_t *flags) {
    ENTER(cuGraphExecGetFlags);
    REQUIRE(exec_valid(e) && flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = e->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec e) {
    ENTER(cuGraphExecDestroy);
    REQUIRE(exec_valid(e), CUDA_ERROR_INVALID_VALUE);
    if (e->charged > 0 && context_valid(e->ctx)) {
        machine_enter(cuda.m);
        memory_give(cuda.m, cuda.process, (uint32_t)e->ctx->device, e->charged);
        machine_unlock(cuda.m);
    }
    e->magic = 0;
    graph_free(e->graph);
    free(e->ops);
    free(e);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec e, CUstream handle) {
    ENTER(cuGraphUpload);
    REQUIRE(exec_valid(e), CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return take_memory(e);
}

/* Submits one host-side entry of a graph: copies and memsets move their bytes now and take their time in the stream. */
static CUresult launch_node(struct CUstream_st *s, const struct CUgraphNode_st *n) {
    switch (n->work.kind) {
    case WORK_COPY:
        return copy_submit(s, n->work.to, n->work.from, n->work.bytes, false);
    case WORK_SET: {
        const CUDA_MEMSET_NODE_PARAMS *p = &n->work.set;
        size_t rows = p->height ? p->height : 1;
        for (size_t r = 0; r < rows; r++)
            fill_bytes((char *)(uintptr_t)p->dst + r * p->pitch, &p->value, p->elementSize, p->width);
        size_t bytes = p->width * p->elementSize * rows;
        struct sim_op op = {.kind = SIM_OP_COPY,
                            .copy = SIM_COPY_SET,
                            .arg = bytes,
                            .work_ns = copy_ns(s->ctx->device, SIM_COPY_D2D, bytes)};
        return submit(s, op, NULL, false);
    }
    case WORK_HOST:
        return host_submit(s, n->work.host, n->work.host_data, false, NULL, NULL);
    case WORK_RECORD:
        return event_record_on(n->work.event, s);
    case WORK_WAIT:
        if (!n->work.event->recorded)
            return CUDA_SUCCESS;
        return submit(
            s, (struct sim_op){.kind = SIM_OP_WAIT, .event = n->work.event->slot, .arg = n->work.event->generation},
            NULL, false);
    default:
        return CUDA_SUCCESS;
    }
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec e, CUstream handle) {
    ENTER(cuGraphLaunch);
    REQUIRE(exec_valid(e), CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (capture_active(s)) { /* becomes a child of the graph being captured */
        struct graph_work work = {.kind = WORK_CHILD, .child = graph_copy(e->graph)};
        REQUIRE(work.child != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        return capture_add(s, &work);
    }
    rc = take_memory(e);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    size_t from = 0;
    for (size_t i = 0; i < e->op_count; i++) {
        if (e->ops[i].kind != SIM_OP_HOST)
            continue;
        if (i > from)
            rc = submit_many(s, &e->ops[from], i - from, NULL);
        if (rc == CUDA_SUCCESS)
            rc = launch_node(s, (const struct CUgraphNode_st *)(uintptr_t)e->ops[i].arg);
        REQUIRE(rc == CUDA_SUCCESS, rc);
        from = i + 1;
    }
    struct sim_op last = {.kind = SIM_OP_COPY, .copy = SIM_COPY_SET};
    if (from < e->op_count) {
        last = e->ops[e->op_count - 1];
        if (e->op_count - 1 > from)
            rc = submit_many(s, &e->ops[from], e->op_count - 1 - from, NULL);
    }
    REQUIRE(rc == CUDA_SUCCESS, rc);
    last.flags |= SIM_OP_GRAPH_END;
    return submit_many(s, &last, 1, NULL);
}

/* --- changing an executable ------------------------------------------------------------------------------------- */

static CUresult update(CUgraphExec e, CUgraph g, CUgraphExecUpdateResult *result, CUgraphNode *node) {
    REQUIRE(exec_valid(e) && graph_valid(g), CUDA_ERROR_INVALID_VALUE);
    *result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    *node = NULL;
    REQUIRE(level_nodes(g), CUDA_ERROR_INVALID_VALUE);
    if (g->count != e->graph->count)
        *result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; *result == CU_GRAPH_EXEC_UPDATE_SUCCESS && i < g->count; i++) {
        if (g->nodes[i]->type != e->graph->nodes[i]->type)
            *result = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        else if (g->nodes[i]->dep_count != e->graph->nodes[i]->dep_count)
            *result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        if (*result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
            *node = g->nodes[i];
    }
    REQUIRE(*result == CU_GRAPH_EXEC_UPDATE_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    struct CUgraph_st *fresh = graph_copy(g);
    REQUIRE(fresh != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    fresh->owned = true;
    struct CUgraph_st *before = e->graph;
    e->graph = fresh;
    CUresult rc = replan(e);
    graph_free(before);
    return rc;
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec e, CUgraph g, CUgraphNode *node, CUgraphExecUpdateResult *result) {
    ENTER(cuGraphExecUpdate);
    CUgraphNode n;
    CUgraphExecUpdateResult r = CU_GRAPH_EXEC_UPDATE_ERROR;
    CUresult rc = update(e, g, &r, &n);
    if (result != NULL)
        *result = r;
    if (node != NULL && rc != CUDA_ERROR_INVALID_VALUE)
        *node = n;
    return rc;
}

CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec e, CUgraph g, CUgraphExecUpdateResultInfo *info) {
    ENTER(cuGraphExecUpdate_v2);
    REQUIRE(info != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(info, 0, sizeof *info);
    return update(e, g, &info->result, &info->errorNode);
}

/* The executable's node that was made from `n`. */
static struct CUgraphNode_st *exec_node(struct CUgraphExec_st *e, CUgraphNode n) {
    for (size_t i = 0; i < e->graph->count; i++)
        if (e->graph->nodes[i]->original == n)
            return e->graph->nodes[i];
    return NULL;
}

static CUresult exec_set_kernel(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
    REQUIRE(exec_valid(e), CUDA_ERROR_INVALID_VALUE);
    CUresult rc = set_kernel(exec_node(e, n), p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return replan(e);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
    ENTER(cuGraphExecKernelNodeSetParams_v2);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    return exec_set_kernel(e, n, p);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphExecKernelNodeSetParams);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p2 = from_v1(p);
    return exec_set_kernel(e, n, &p2);
}

CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec e, CUgraphNode n, unsigned int enabled) {
    ENTER(cuGraphNodeSetEnabled);
    REQUIRE(exec_valid(e), CUDA_ERROR_INVALID_VALUE);
    struct CUgraphNode_st *own = exec_node(e, n);
    REQUIRE(own != NULL, CUDA_ERROR_INVALID_VALUE);
    own->disabled = !enabled;
    return replan(e);
}

CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec e, CUgraphNode n, unsigned int *enabled) {
    ENTER(cuGraphNodeGetEnabled);
    REQUIRE(exec_valid(e) && enabled != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct CUgraphNode_st *own = exec_node(e, n);
    REQUIRE(own != NULL, CUDA_ERROR_INVALID_VALUE);
    *enabled = !own->disabled;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice dev) {
    ENTER_DEVICE(cuDeviceGraphMemTrim, dev);
    return CUDA_SUCCESS; /* an executable's memory is returned with the executable */
}

/* --- capture ---------------------------------------------------------------------------------------------------- */

bool capture_active(const struct CUstream_st *s) {
    return s->capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

static CUresult capture_trouble(const struct CUstream_st *s) {
    return s->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static bool frontier_add(struct CUstream_st *s, struct CUgraphNode_st *n) {
    for (size_t i = 0; i < s->frontier_count; i++)
        if (s->frontier[i] == n)
            return true;
    if (s->frontier_count == s->frontier_size) {
        size_t size = s->frontier_size ? s->frontier_size * 2 : 8;
        struct CUgraphNode_st **grown = realloc(s->frontier, size * sizeof *grown);
        if (grown == NULL)
            return false;
        s->frontier = grown;
        s->frontier_size = size;
    }
    s->frontier[s->frontier_count++] = n;
    return true;
}

static CUresult capture_node(struct CUstream_st *s, const struct graph_work *work, struct CUgraphNode_st **out) {
    CUresult rc = capture_trouble(s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    struct CUgraphNode_st *n;
    rc = node_add(s->capture_graph, s->frontier, s->frontier_count, work, &n);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    s->frontier_count = 0;
    REQUIRE(frontier_add(s, n), CUDA_ERROR_OUT_OF_MEMORY);
    if (out != NULL)
        *out = n;
    return CUDA_SUCCESS;
}

CUresult capture_add(struct CUstream_st *s, const struct graph_work *work) {
    return capture_node(s, work, NULL);
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, CUgraph into, const CUgraphNode *deps, size_t count) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(!s->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(s->capture == CU_STREAM_CAPTURE_STATUS_NONE, CUDA_ERROR_ILLEGAL_STATE);
    struct CUgraph_st *g = into != NULL ? into : graph_new();
    REQUIRE(graph_valid(g), g == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    s->capture_graph = g;
    s->capture_mode = mode;
    s->capture_id = ++cuda.ids;
    s->capture_origin = true;
    s->capture_thread = pthread_self();
    s->frontier_count = 0;
    for (size_t i = 0; i < count; i++)
        frontier_add(s, deps[i]);
    s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    cuda.capturing++;
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream) {
    ENTER(cuStreamBeginCapture);
    return begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0);
}

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(cuStreamBeginCapture_v2);
    REQUIRE(mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    return begin(stream, mode, NULL, NULL, 0);
}

CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream stream, CUgraph g, const CUgraphNode *deps,
                                             const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode) {
    ENTER(cuStreamBeginCaptureToGraph);
    (void)data;
    REQUIRE(graph_valid(g) && mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    return begin(stream, mode, g, deps, count);
}

static bool reaches(const struct CUgraphNode_st *from, const struct CUgraphNode_st *to, int depth) {
    if (from == to)
        return true;
    for (size_t i = 0; depth > 0 && i < from->dep_count; i++)
        if (reaches(from->deps[i], to, depth - 1))
            return true;
    return false;
}

static void leave_capture(struct CUstream_st *s) {
    s->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    s->capture_graph = NULL;
    s->capture_id = 0;
    s->capture_origin = false;
    s->frontier_count = 0;
    cuda.capturing--;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *out) {
    ENTER(cuStreamEndCapture);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(s->capture != CU_STREAM_CAPTURE_STATUS_NONE, CUDA_ERROR_ILLEGAL_STATE);
    REQUIRE(s->capture_origin, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    REQUIRE(s->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED || pthread_equal(s->capture_thread, pthread_self()),
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    cuda_lock();
    rc = capture_trouble(s);
    struct CUgraph_st *g = s->capture_graph;
    uint64_t id = s->capture_id;
    /* Streams that joined must have been joined back: what they did last must lie before the origin's end. */
    for (struct CUctx_st *c = cuda.contexts; c != NULL; c = c->next)
        for (struct CUstream_st *o = c->streams; o != NULL; o = o->next) {
            if (o == s || o->capture_id != id)
                continue;
            for (size_t f = 0; rc == CUDA_SUCCESS && f < o->frontier_count; f++) {
                bool joined = false;
                for (size_t i = 0; i < s->frontier_count; i++)
                    joined |= reaches(s->frontier[i], o->frontier[f], 4096);
                if (!joined)
                    rc = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
            }
            leave_capture(o);
        }
    leave_capture(s);
    cuda_unlock();
    if (rc != CUDA_SUCCESS) {
        graph_free(g);
        *out = NULL;
        return rc;
    }
    *out = g;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    ENTER(cuStreamIsCapturing);
    REQUIRE(status != NULL, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(!(s->legacy && capture_implicit(s, false)), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = s->capture;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                             const CUgraphNode **deps, size_t *count) {
    REQUIRE(status != NULL, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(!(s->legacy && capture_implicit(s, false)), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = s->capture;
    if (s->capture != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id != NULL)
        *id = s->capture_id;
    if (graph != NULL)
        *graph = s->capture_graph;
    if (deps != NULL)
        *deps = s->frontier;
    if (count != NULL)
        *count = s->frontier_count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id) {
    ENTER(cuStreamGetCaptureInfo);
    return capture_info(handle, status, id, NULL, NULL, NULL);
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **deps, size_t *count) {
    ENTER(cuStreamGetCaptureInfo_v2);
    return capture_info(handle, status, id, graph, deps, count);
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **deps, const CUgraphEdgeData **data,
                                           size_t *count) {
    ENTER(cuStreamGetCaptureInfo_v3);
    if (data != NULL)
        *data = NULL;
    return capture_info(handle, status, id, graph, deps, count);
}

static CUresult set_frontier(CUstream handle, CUgraphNode *deps, size_t count, unsigned flags) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE, CUDA_ERROR_ILLEGAL_STATE);
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        s->frontier_count = 0;
    for (size_t i = 0; i < count; i++)
        REQUIRE(node_valid(deps[i]) && frontier_add(s, deps[i]), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *deps, size_t count,
                                                   unsigned int flags) {
    ENTER(cuStreamUpdateCaptureDependencies);
    return set_frontier(handle, deps, count, flags);
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *deps, const CUgraphEdgeData *data,
                                                      size_t count, unsigned int flags) {
    ENTER(cuStreamUpdateCaptureDependencies_v2);
    (void)data;
    return set_frontier(handle, deps, count, flags);
}

CUresult capture_record(struct CUstream_st *s, struct CUevent_st *e) {
    CUresult rc = capture_trouble(s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    struct CUgraphNode_st **nodes = malloc((s->frontier_count ? s->frontier_count : 1) * sizeof *nodes);
    REQUIRE(nodes != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(nodes, s->frontier, s->frontier_count * sizeof *nodes);
    free(e->nodes);
    e->nodes = nodes;
    e->node_count = s->frontier_count;
    e->capture_id = s->capture_id;
    e->capture_graph = s->capture_graph;
    return CUDA_SUCCESS;
}

CUresult capture_wait(struct CUstream_st *s, struct CUevent_st *e) {
    if (e->capture_id == 0) {
        if (!e->recorded)
            return CUDA_SUCCESS;
        capture_invalidate(s->capture_id);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    REQUIRE(capture_running(e->capture_id), CUDA_ERROR_INVALID_VALUE);
    CUresult rc = capture_trouble(s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (!capture_active(s)) {
        /* The stream joins the capture of the event, if that still goes on. */
        struct CUstream_st *origin = NULL;
        cuda_lock();
        for (struct CUctx_st *c = cuda.contexts; c != NULL; c = c->next)
            for (struct CUstream_st *o = c->streams; o != NULL; o = o->next)
                if (o->capture_id == e->capture_id && o->capture_origin)
                    origin = o;
        if (origin != NULL && !s->legacy) {
            s->capture_graph = origin->capture_graph;
            s->capture_mode = origin->capture_mode;
            s->capture_id = origin->capture_id;
            s->capture_thread = origin->capture_thread;
            s->capture_origin = false;
            s->frontier_count = 0;
            s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
            cuda.capturing++;
        }
        cuda_unlock();
        REQUIRE(origin != NULL, CUDA_ERROR_CAPTURED_EVENT);
        REQUIRE(!s->legacy, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    REQUIRE(e->capture_id == s->capture_id, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    for (size_t i = 0; i < e->node_count; i++)
        REQUIRE(frontier_add(s, e->nodes[i]), CUDA_ERROR_OUT_OF_MEMORY);
    return CUDA_SUCCESS;
}

void capture_invalidate(uint64_t id) {
    cuda_lock();
    for (struct CUctx_st *c = cuda.contexts; c != NULL; c = c->next)
        for (struct CUstream_st *o = c->streams; o != NULL; o = o->next)
            if (o->capture_id == id && capture_active(o))
                o->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    cuda_unlock();
}

bool capture_running(uint64_t id) {
    bool running = false;
    cuda_lock();
    for (struct CUctx_st *c = cuda.contexts; c != NULL; c = c->next)
        for (struct CUstream_st *o = c->streams; o != NULL; o = o->next)
            running |= o->capture_id == id && o->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    cuda_unlock();
    return running;
}

/* Waiting for a whole context is refused while anything in it is captured, in whatever mode. */
CUresult capture_forbids_context(struct CUctx_st *ctx) {
    if (__builtin_expect(cuda.capturing == 0, 1))
        return CUDA_SUCCESS;
    bool found = false;
    cuda_lock();
    for (struct CUstream_st *o = ctx->streams; o != NULL; o = o->next)
        if (capture_active(o)) {
            o->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
            found = true;
        }
    cuda_unlock();
    return found ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

void capture_abandon(struct CUstream_st *s) {
    if (!capture_active(s))
        return;
    capture_invalidate(s->capture_id);
    cuda_lock();
    struct CUgraph_st *g = s->capture_origin ? s->capture_graph : NULL;
    leave_capture(s);
    cuda_unlock();
    if (g != NULL)
        graph_free(g);
}

bool capture_implicit(const struct CUstream_st *legacy, bool invalidate) {
    if (cuda.capturing == 0)
        return false;
    bool found = false;
    cuda_lock();
    for (struct CUstream_st *o = legacy->ctx->streams; o != NULL; o = o->next)
        if (capture_active(o) && !(o->flags & CU_STREAM_NON_BLOCKING)) {
            found = true;
            if (invalidate)
                o->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        }
    cuda_unlock();
    return found;
}

CUresult capture_forbids(void) {
    if (__builtin_expect(cuda.capturing == 0, 1))
        return CUDA_SUCCESS;
    CUstreamCaptureMode mine =
        thread_state.capture_mode_set ? thread_state.capture_mode : CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (mine == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    bool forbidden = false;
    cuda_lock();
    for (struct CUctx_st *c = cuda.contexts; c != NULL; c = c->next)
        for (struct CUstream_st *o = c->streams; o != NULL; o = o->next) {
            if (!o->capture_origin || !capture_active(o) || o->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
                continue;
            bool own = pthread_equal(o->capture_thread, pthread_self());
            if (own || (o->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && mine == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
                forbidden = true;
                o->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
            }
        }
    cuda_unlock();
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    REQUIRE(mode != NULL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before =
        thread_state.capture_mode_set ? thread_state.capture_mode : CU_STREAM_CAPTURE_MODE_GLOBAL;
    thread_state.capture_mode = *mode;
    thread_state.capture_mode_set = true;
    *mode = before;
    return CUDA_SUCCESS;
}
