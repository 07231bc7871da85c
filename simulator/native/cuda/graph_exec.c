/* Executable graphs: instantiated, launched, changed. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

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
    CUresult rc = bytes > 0 ? graph_memory_take(e->ctx->device, bytes) : CUDA_SUCCESS;
    REQUIRE(rc == CUDA_SUCCESS, rc);
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
    if (e->charged > 0 && context_valid(e->ctx))
        graph_memory_give(e->ctx->device, e->charged);
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
        REQUIRE(set_range_ok(p), CUDA_ERROR_INVALID_VALUE);
        size_t rows = p->height ? p->height : 1;
        for (size_t r = 0; r < rows; r++)
            fill_bytes((char *)(uintptr_t)p->dst + r * p->pitch, &p->value, p->elementSize, p->width);
        size_t bytes = p->width * p->elementSize * rows;
        return submit(s, fill_op(s->ctx->device, bytes), NULL, false);
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
    CUresult rc = graph_set_kernel(exec_node(e, n), p);
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
    CUDA_KERNEL_NODE_PARAMS p2 = kernel_params_from_v1(p);
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
