/*
 * Graphs: what their memory nodes take. The driver keeps the memory of all graphs of a process and device together, and
 * says how much that is; see docs/decisions/graph-memory.md.
 */
#include "claim.h"

#include <stdlib.h>

struct node_memory {
    CUdeviceptr at;
    uint64_t bytes;
    uint32_t device;
    bool freed;
};

struct walk {
    bool failed; /* the driver did not answer somewhere: what is found is less than there is */
    struct node_memory *nodes;
    size_t count, size;
    uint64_t devices;
};

static void add_alloc(struct walk *walk, CUgraphNode node, struct pm_process *self) {
    CUDA_MEM_ALLOC_NODE_PARAMS p;
    if (!pm_need[PM_NEED_cuGraphMemAllocNodeGetParams] ||
        PM_NEED(cuGraphMemAllocNodeGetParams)(node, &p) != CUDA_SUCCESS) {
        walk->failed = true;
        return;
    }
    if (p.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return;
    uint32_t device = pm_device_of(self, p.poolProps.location.id);
    if (device == PM_NO_DEVICE)
        return;
    walk->devices |= 1ull << device;
    if (walk->count == walk->size) {
        size_t size = walk->size ? walk->size * 2 : 16;
        struct node_memory *grown = realloc(walk->nodes, size * sizeof *grown);
        if (!grown)
            return; /* the bound is lower then; what is kept is read all the same */
        walk->nodes = grown;
        walk->size = size;
    }
    walk->nodes[walk->count++] = (struct node_memory){p.dptr, p.bytesize, device, false};
}

static void add_free(struct walk *walk, CUgraphNode node) {
    CUdeviceptr at;
    if (!pm_need[PM_NEED_cuGraphMemFreeNodeGetParams] ||
        PM_NEED(cuGraphMemFreeNodeGetParams)(node, &at) != CUDA_SUCCESS) {
        walk->failed = true;
        return;
    }
    for (size_t i = 0; i < walk->count; i++)
        walk->nodes[i].freed |= walk->nodes[i].at == at;
}

static void each_node(struct walk *walk, CUgraph graph, struct pm_process *self, int depth, bool frees) {
    size_t count = 0;
    if (depth > 64 || PM_NEED(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS) {
        walk->failed = true;
        return;
    }
    if (count == 0)
        return;
    CUgraphNode *nodes = calloc(count, sizeof(CUgraphNode));
    if (!nodes || PM_NEED(cuGraphGetNodes)(graph, nodes, &count) != CUDA_SUCCESS) {
        walk->failed = true;
        count = 0;
    }
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (PM_NEED(cuGraphNodeGetType)(nodes[i], &type) != CUDA_SUCCESS) {
            walk->failed = true;
            continue;
        }
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !frees)
            add_alloc(walk, nodes[i], self);
        else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE && frees)
            add_free(walk, nodes[i]);
        else if (type != CU_GRAPH_NODE_TYPE_GRAPH)
            continue;
        else if (pm_need[PM_NEED_cuGraphChildGraphNodeGetGraph] &&
                 PM_NEED(cuGraphChildGraphNodeGetGraph)(nodes[i], &child) == CUDA_SUCCESS)
            each_node(walk, child, self, depth + 1, frees);
        else
            walk->failed = true;
    }
    free(nodes);
}

/*
 * What a launch of the graph cannot do without on the first of its devices: the largest of its allocations, and all
 * that it leaves allocated. `uses` 0: it has no memory nodes.
 */
static struct pm_holding least_of(CUgraph graph, struct pm_process *self) {
    struct walk walk = {0};
    struct pm_holding least = {.device = PM_NO_DEVICE};
    if (!pm_need[PM_NEED_cuGraphGetNodes] || !pm_need[PM_NEED_cuGraphNodeGetType])
        return least;
    each_node(&walk, graph, self, 0, false);
    if (walk.devices) {
        each_node(&walk, graph, self, 0, true);
        least.device = (uint32_t)__builtin_ctzll(walk.devices);
        least.note = walk.devices;
        least.uses = 1;
    }
    uint64_t largest = 0, left = 0;
    for (size_t i = 0; i < walk.count; i++) {
        if (walk.nodes[i].device != least.device)
            continue;
        largest = walk.nodes[i].bytes > largest ? walk.nodes[i].bytes : largest;
        left += walk.nodes[i].freed ? 0 : walk.nodes[i].bytes;
    }
    least.bytes = left > largest ? left : largest;
    if (walk.failed)
        pm_add(&self->view.header->faults, 1);
    free(walk.nodes);
    return least;
}

/* ---- what is kept ------------------------------------------------------------------------------------------------ */

static CUdevice ordinal_of(const struct pm_process *self, uint32_t device) {
    for (CUdevice ordinal = 0; ordinal < PM_MAX_ORDINALS; ordinal++)
        if (pm_peek(&self->device_of_ordinal[ordinal]) == device + 1)
            return ordinal;
    return -1;
}

/* Not while anything is captured: the driver may take the question amiss, and the next launch asks again. */
static void settle(struct pm_process *self, uint32_t device) {
    cuuint64_t bytes = 0;
    CUdevice ordinal = ordinal_of(self, device);
    if (ordinal < 0 || !pm_need[PM_NEED_cuDeviceGetGraphMemAttribute] || pm_load(&pm_captures))
        return;
    pthread_mutex_lock(&self->graph_lock); /* an older answer must not overtake a newer one */
    if (PM_NEED(cuDeviceGetGraphMemAttribute)(ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes) == CUDA_SUCCESS)
        pm_process_settle_graph_memory(self, device, bytes);
    else
        pm_add(&pm_process_counters(self, device)->internal_faults, 1);
    pthread_mutex_unlock(&self->graph_lock);
}

void pm_graph_memory_settle(CUdevice ordinal) {
    struct pm_process *self = pm_graphs_allocate() ? pm_self() : NULL;
    uint32_t device = self ? pm_device_of(self, ordinal) : PM_NO_DEVICE;
    if (device != PM_NO_DEVICE)
        settle(self, device);
}

void pm_graph_memory_seen(void) {
    struct pm_process *self = pm_self();
    if (self)
        pm_poke(&self->graphs_allocate, 1);
}

static struct pm_graph_need need_begins(struct pm_process *self, uint64_t devices) {
    for (uint64_t left = self ? devices : 0; left; left &= left - 1)
        pm_process_change_begins(self, (uint32_t)__builtin_ctzll(left));
    return (struct pm_graph_need){self, devices};
}

static void need_ends(const struct pm_graph_need *need) {
    for (uint64_t left = need->self ? need->devices : 0; left; left &= left - 1)
        pm_process_change_ends(need->self, (uint32_t)__builtin_ctzll(left));
}

/* False: over the limit. */
static bool reserve(struct pm_graph_need *need, struct pm_process *self, const struct pm_holding *least) {
    *need = need_begins(self, least->note);
    if (!self || pm_process_reserve_graph_memory(self, least->device, least->bytes))
        return true;
    need_ends(need);
    return false;
}

bool pm_graph_memory_begin(struct pm_graph_need *need, CUgraphExec exec) {
    struct pm_process *self = pm_self();
    struct pm_holding least;
    *need = (struct pm_graph_need){0};
    return !self || !pm_pointers_get(self->pointers, PM_HOLD_EXEC, pm_key(exec), &least) || reserve(need, self, &least);
}

void pm_graph_memory_end(const struct pm_graph_need *need, CUresult result) {
    for (uint64_t left = need->self ? need->devices : 0; left; left &= left - 1) {
        uint32_t device = (uint32_t)__builtin_ctzll(left);
        settle(need->self, device);
        if (result == CUDA_ERROR_OUT_OF_MEMORY)
            pm_process_denied_by_card(need->self, device, 0);
    }
    need_ends(need);
}

/* ---- memory nodes ------------------------------------------------------------------------------------------------ */

PM_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                          CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    PM_MISSING(cuGraphAddMemAllocNode);
    pm_graph_memory_seen();
    return PM_REAL(cuGraphAddMemAllocNode)(node, graph, after, count, params);
}

PM_EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                  CUgraphNodeParams *params) {
    PM_MISSING(cuGraphAddNode);
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        pm_graph_memory_seen();
    return ((CUresult (*)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
                          CUgraphNodeParams *))pm_real[PM_HOOK_cuGraphAddNode])(node, graph, after, count, params);
}

#define ADD_NODE(name)                                                                                                 \
    PM_EXPORT CUresult name(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,  \
                            size_t count, CUgraphNodeParams *params) {                                                 \
        PM_MISSING(name);                                                                                              \
        if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)                                                    \
            pm_graph_memory_seen();                                                                                    \
        return ((CUresult (*)(CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t,            \
                              CUgraphNodeParams *))pm_real[PM_HOOK_##name])(node, graph, after, edges, count, params); \
    }
ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

/* ---- executable graphs ------------------------------------------------------------------------------------------- */

static void remember(CUgraphExec exec, struct pm_holding least) {
    struct pm_process *self = pm_self();
    least.key = pm_key(exec);
    if (self && least.uses)
        pm_pointers_put(self->pointers, PM_HOLD_EXEC, &least);
}

static struct pm_holding look_at(CUgraph graph) {
    struct pm_process *self = graph && pm_graphs_allocate() ? pm_self() : NULL;
    return self ? least_of(graph, self) : (struct pm_holding){0};
}

#define INSTANTIATE(name, params, ...)                                                                                 \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        struct pm_holding least = look_at(graph);                                                                      \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (result == CUDA_SUCCESS && exec)                                                                            \
            remember(*exec, least);                                                                                    \
        return result;                                                                                                 \
    }
INSTANTIATE(cuGraphInstantiate, (CUgraphExec * exec, CUgraph graph, CUgraphNode *node, char *log, size_t size), exec,
            graph, node, log, size)
INSTANTIATE(cuGraphInstantiate_v2, (CUgraphExec * exec, CUgraph graph, CUgraphNode *node, char *log, size_t size), exec,
            graph, node, log, size)
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags), exec, graph,
            flags)

/* May upload as well, and then takes what a launch would. */
#define INSTANTIATE_PARAMS(name)                                                                                       \
    PM_EXPORT CUresult name(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {                 \
        PM_MISSING(name);                                                                                              \
        struct pm_holding least = look_at(graph);                                                                      \
        bool uploads = least.uses && params && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;                     \
        struct pm_graph_need need;                                                                                     \
        if (!reserve(&need, uploads ? pm_self() : NULL, &least))                                                       \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        CUresult result = PM_REAL(name)(exec, graph, params);                                                          \
        pm_graph_memory_end(&need, result);                                                                            \
        if (result == CUDA_SUCCESS && exec)                                                                            \
            remember(*exec, least);                                                                                    \
        return result;                                                                                                 \
    }
INSTANTIATE_PARAMS(cuGraphInstantiateWithParams)
INSTANTIATE_PARAMS(cuGraphInstantiateWithParams_ptsz)

#define UPLOAD(name)                                                                                                   \
    PM_EXPORT CUresult name(CUgraphExec exec, CUstream stream) {                                                       \
        PM_MISSING(name);                                                                                              \
        struct pm_graph_need need = {0};                                                                               \
        if (pm_graphs_allocate() && !pm_graph_memory_begin(&need, exec))                                               \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        CUresult result = PM_REAL(name)(exec, stream);                                                                 \
        pm_graph_memory_end(&need, result);                                                                            \
        return result;                                                                                                 \
    }
UPLOAD(cuGraphUpload)
UPLOAD(cuGraphUpload_ptsz)

PM_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
    PM_MISSING(cuDeviceGraphMemTrim);
    struct pm_process *self = pm_self();
    uint32_t index = self ? pm_device_of(self, device) : PM_NO_DEVICE;
    pm_process_change_begins(self, index);
    CUresult result = PM_REAL(cuDeviceGraphMemTrim)(device);
    pm_graph_memory_settle(device);
    pm_process_change_ends(self, index);
    return result;
}

uint64_t pm_graph_kind(CUgraphExec exec) {
    return pm_mix(5, pm_key(exec)) | 1;
}

static void graph_changed(CUgraphExec exec) {
    struct pm_process *self = pm_self();
    struct pm_estimate *entry = self && exec ? pm_estimate_find(self->estimates, pm_graph_kind(exec)) : NULL;
    if (entry)
        pm_estimate_reset(entry);
}

PM_EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    PM_MISSING(cuGraphExecDestroy);
    graph_changed(exec); /* its address may be the next one's */
    struct pm_holding least = {0};
    struct pm_process *self = pm_graphs_allocate() ? pm_self() : NULL;
    bool had = self && pm_pointers_take(self->pointers, PM_HOLD_EXEC, pm_key(exec), &least);
    struct pm_graph_need need = need_begins(had ? self : NULL, least.note);
    CUresult result = PM_REAL(cuGraphExecDestroy)(exec);
    if (had && result != CUDA_SUCCESS)
        pm_pointers_put(self->pointers, PM_HOLD_EXEC, &least);
    pm_graph_memory_end(&need, CUDA_SUCCESS);
    return result;
}

PM_EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node,
                                     CUgraphExecUpdateResult *outcome) {
    PM_MISSING(cuGraphExecUpdate);
    graph_changed(exec);
    return ((CUresult (*)(CUgraphExec, CUgraph, CUgraphNode *,
                          CUgraphExecUpdateResult *))pm_real[PM_HOOK_cuGraphExecUpdate])(exec, graph, node, outcome);
}

PM_EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
    PM_MISSING(cuGraphExecUpdate_v2);
    graph_changed(exec);
    return PM_REAL(cuGraphExecUpdate_v2)(exec, graph, info);
}

/* The parameters' type differs by version; they only pass through. */
#define CHANGED(name, type)                                                                                            \
    PM_EXPORT CUresult name(CUgraphExec exec, CUgraphNode node, type params) {                                         \
        PM_MISSING(name);                                                                                              \
        graph_changed(exec);                                                                                           \
        return PM_REAL(name)(exec, node, params);                                                                      \
    }
CHANGED(cuGraphExecKernelNodeSetParams, const CUDA_KERNEL_NODE_PARAMS *)
CHANGED(cuGraphExecKernelNodeSetParams_v2, const CUDA_KERNEL_NODE_PARAMS *)
CHANGED(cuGraphExecNodeSetParams, CUgraphNodeParams *)
CHANGED(cuGraphExecChildGraphNodeSetParams, CUgraph)
CHANGED(cuGraphNodeSetEnabled, unsigned)
