/* Graphs as the program builds and reads them. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

/* --- building --------------------------------------------------------------------------------------------------- */

struct CUgraph_st *graph_new(void) {
    struct CUgraph_st *g = calloc(1, sizeof *g);
    if (g != NULL)
        g->magic = MAGIC_GRAPH;
    return g;
}

static void node_free(struct CUgraphNode_st *n);

void graph_free(struct CUgraph_st *g) {
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

CUresult graph_add(struct CUgraph_st *g, struct CUgraphNode_st *const *deps, size_t count,
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

struct CUgraph_st *graph_copy(struct CUgraph_st *g) {
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
        if (graph_add(to, NULL, 0, &work, &g->nodes[i]->copy) != CUDA_SUCCESS) {
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

CUDA_KERNEL_NODE_PARAMS kernel_params_from_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
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
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphAddKernelNode);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p2 = kernel_params_from_v1(p);
    struct graph_work work;
    CUresult rc = kernel_work(&work, &p2);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return graph_add(g, deps, count, &work, out);
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

CUresult graph_set_kernel(struct CUgraphNode_st *n, const CUDA_KERNEL_NODE_PARAMS *p) {
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
    return graph_set_kernel(n, p);
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    ENTER(cuGraphKernelNodeSetParams);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p2 = kernel_params_from_v1(p);
    return graph_set_kernel(n, &p2);
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
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count) {
    ENTER(cuGraphAddEmptyNode);
    struct graph_work work = {.kind = WORK_EMPTY};
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                          CUgraph child) {
    ENTER(cuGraphAddChildGraphNode);
    REQUIRE(graph_valid(child), CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_CHILD, .child = graph_copy(child)};
    REQUIRE(work.child != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    work.child->owned = true;
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                         CUevent event) {
    ENTER(cuGraphAddEventWaitNode);
    REQUIRE(event != NULL && event->magic == MAGIC_EVENT, CUDA_ERROR_INVALID_HANDLE);
    struct graph_work work = {.kind = WORK_WAIT, .event = event};
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
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
    return graph_add(g, deps, count, &work, out);
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
