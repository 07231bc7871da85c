/* Nodes of a graph by kind: the work each stands for, added and read back. */
#include "graph.h"

#include <string.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* The node's own copy of the kernel's parameters: the caller's arrays are gone after the call. */
void node_own_parameters(struct CUgraphNode_st *n) {
    if (n->work.kind != WORK_KERNEL)
        return;
    n->work.parameters[0] = n->work.launch.parameter;
    n->work.parameter_pointers[0] = &n->work.parameters[0];
    n->work.kernel.kernelParams =
        n->work.launch.function->length == LENGTH_PARAMETER ? n->work.parameter_pointers : NULL;
    n->work.kernel.extra = NULL;
}

/* What every version of a kernel node's parameters has. */
#define KERNEL_NODE_FIELDS(p)                                                                                          \
    .func = (p).func, .gridDimX = (p).gridDimX, .gridDimY = (p).gridDimY, .gridDimZ = (p).gridDimZ,                    \
    .blockDimX = (p).blockDimX, .blockDimY = (p).blockDimY, .blockDimZ = (p).blockDimZ,                                \
    .sharedMemBytes = (p).sharedMemBytes, .kernelParams = (p).kernelParams, .extra = (p).extra

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
    return (CUDA_KERNEL_NODE_PARAMS){KERNEL_NODE_FIELDS(*p)};
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
    *p = (CUDA_KERNEL_NODE_PARAMS_v1){KERNEL_NODE_FIELDS(k)};
    return CUDA_SUCCESS;
}

CUresult graph_set_kernel(struct CUgraphNode_st *n, const CUDA_KERNEL_NODE_PARAMS *p) {
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work;
    CUresult rc = kernel_work(&work, p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    work.device = n->work.device;
    n->work = work;
    node_own_parameters(n);
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

/* --- copies and fills --------------------------------------------------------------------------------------------- */

/* Where a side of a linear copy begins, if all of it lies in the memory. */
static bool side_ok(uintptr_t base, size_t x, size_t bytes, uintptr_t *out) {
    size_t end;
    *out = base + x;
    return !__builtin_add_overflow(x, bytes, &end) && memory_range_ok(base, end);
}

/* A linear copy between two unpitched pointers; arrays and pitched layouts are refused loudly by their own calls. */
static CUresult copy_work(struct graph_work *work, const CUDA_MEMCPY3D *p) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(p->srcMemoryType != CU_MEMORYTYPE_ARRAY && p->dstMemoryType != CU_MEMORYTYPE_ARRAY,
            CUDA_ERROR_NOT_SUPPORTED);
    uintptr_t from = p->srcMemoryType == CU_MEMORYTYPE_HOST ? (uintptr_t)p->srcHost : (uintptr_t)p->srcDevice;
    uintptr_t to = p->dstMemoryType == CU_MEMORYTYPE_HOST ? (uintptr_t)p->dstHost : (uintptr_t)p->dstDevice;
    size_t bytes;
    REQUIRE(!__builtin_mul_overflow(p->WidthInBytes, p->Height ? p->Height : 1, &bytes) &&
                !__builtin_mul_overflow(bytes, p->Depth ? p->Depth : 1, &bytes) &&
                side_ok(from, p->srcXInBytes, bytes, &from) && side_ok(to, p->dstXInBytes, bytes, &to),
            CUDA_ERROR_INVALID_VALUE);
    *work = (struct graph_work){
        .kind = WORK_COPY, .copy3d = *p, .from = (const void *)from, .to = (void *)to, .bytes = bytes};
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

static CUresult set_work(struct graph_work *work, const CUDA_MEMSET_NODE_PARAMS *p) {
    REQUIRE(p != NULL && (p->elementSize == 1 || p->elementSize == 2 || p->elementSize == 4), CUDA_ERROR_INVALID_VALUE);
    *work = (struct graph_work){.kind = WORK_SET, .set = *p};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                      const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx) {
    ENTER(cuGraphAddMemsetNode);
    (void)ctx;
    struct graph_work work;
    CUresult rc = set_work(&work, p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode n, CUDA_MEMSET_NODE_PARAMS *p) {
    ENTER(cuGraphMemsetNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_MEMSET && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = n->work.set;
    return CUDA_SUCCESS;
}

/* --- host functions, child graphs, events ------------------------------------------------------------------------- */

static CUresult host_work(struct graph_work *work, CUhostFn fn, void *data) {
    REQUIRE(fn != NULL, CUDA_ERROR_INVALID_VALUE);
    *work = (struct graph_work){.kind = WORK_HOST, .host = fn, .host_data = data};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                    const CUDA_HOST_NODE_PARAMS *p) {
    ENTER(cuGraphAddHostNode);
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work;
    CUresult rc = host_work(&work, p->fn, p->userData);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode n, CUDA_HOST_NODE_PARAMS *p) {
    ENTER(cuGraphHostNodeGetParams);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_HOST && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = (CUDA_HOST_NODE_PARAMS){.fn = n->work.host, .userData = n->work.host_data};
    return CUDA_SUCCESS;
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
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph *out) {
    ENTER(cuGraphChildGraphNodeGetGraph);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_GRAPH && out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = n->work.child;
    return CUDA_SUCCESS;
}

static CUresult event_work(struct graph_work *work, bool record, CUevent event) {
    REQUIRE(event != NULL && event->magic == MAGIC_EVENT, CUDA_ERROR_INVALID_HANDLE);
    *work = (struct graph_work){.kind = record ? WORK_RECORD : WORK_WAIT, .event = event};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddEventRecordNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                           CUevent event) {
    ENTER(cuGraphAddEventRecordNode);
    struct graph_work work;
    CUresult rc = event_work(&work, true, event);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphEventRecordNodeGetEvent(CUgraphNode n, CUevent *event) {
    ENTER(cuGraphEventRecordNodeGetEvent);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD && event != NULL, CUDA_ERROR_INVALID_VALUE);
    *event = n->work.event;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count,
                                         CUevent event) {
    ENTER(cuGraphAddEventWaitNode);
    struct graph_work work;
    CUresult rc = event_work(&work, false, event);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return graph_add(g, deps, count, &work, out);
}

CUresult CUDAAPI cuGraphEventWaitNodeGetEvent(CUgraphNode n, CUevent *event) {
    ENTER(cuGraphEventWaitNodeGetEvent);
    REQUIRE(node_valid(n) && n->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && event != NULL, CUDA_ERROR_INVALID_VALUE);
    *event = n->work.event;
    return CUDA_SUCCESS;
}

/* --- allocations and frees ---------------------------------------------------------------------------------------- */

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

/* --- any kind ----------------------------------------------------------------------------------------------------- */

static CUresult add_node(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t count, CUgraphNodeParams *p) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct graph_work work = {.kind = WORK_EMPTY};
    CUresult rc = CUDA_SUCCESS;
    switch ((int)p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        CUDA_KERNEL_NODE_PARAMS k = {KERNEL_NODE_FIELDS(p->kernel), .kern = p->kernel.kern, .ctx = p->kernel.ctx};
        rc = kernel_work(&work, &k);
        break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        rc = copy_work(&work, &p->memcpy.copyParams);
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        rc = set_work(&work, &(CUDA_MEMSET_NODE_PARAMS){.dst = p->memset.dst,
                                                        .pitch = p->memset.pitch,
                                                        .value = p->memset.value,
                                                        .elementSize = p->memset.elementSize,
                                                        .width = p->memset.width,
                                                        .height = p->memset.height});
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
        rc = host_work(&work, p->host.fn, p->host.userData);
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        REQUIRE(graph_valid(p->graph.graph), CUDA_ERROR_INVALID_VALUE);
        work.kind = WORK_CHILD;
        work.child = graph_copy(p->graph.graph);
        break;
    case CU_GRAPH_NODE_TYPE_EMPTY:
        break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        rc = event_work(&work, true, p->eventRecord.event);
        break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        rc = event_work(&work, false, p->eventWait.event);
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

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType *type) {
    ENTER(cuGraphNodeGetType);
    REQUIRE(node_valid(n) && type != NULL, CUDA_ERROR_INVALID_VALUE);
    *type = n->type;
    return CUDA_SUCCESS;
}
