/* Graphs as a structure: their life, and the edges between their nodes. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

/* --- life --------------------------------------------------------------------------------------------------------- */

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

CUresult graph_add(struct CUgraph_st *g, struct CUgraphNode_st *const *deps, size_t count,
                   const struct graph_work *work, struct CUgraphNode_st **out) {
    REQUIRE(graph_valid(g), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(count == 0 || deps != NULL, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        REQUIRE(node_valid(deps[i]) && deps[i]->graph == g, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(work->kind != WORK_CHILD || work->child != NULL, CUDA_ERROR_OUT_OF_MEMORY); /* it was not copied */
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
    if (n->work.child != NULL)
        n->work.child->owned = true;
    if (count > 0)
        memcpy(n->deps, deps, count * sizeof *n->deps);
    n->dep_count = count;
    node_own_parameters(n);
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

/* --- edges: changed ----------------------------------------------------------------------------------------------- */

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

/* --- nodes and edges: listed -------------------------------------------------------------------------------------- */

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
