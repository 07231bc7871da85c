/* What the files about graphs share: structure, nodes, executing, capturing. */
#ifndef POOLMETER_SIM_GRAPH_H
#define POOLMETER_SIM_GRAPH_H

#include "state.h"

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

static inline bool graph_valid(const struct CUgraph_st *g) {
    return g != NULL && g->magic == MAGIC_GRAPH;
}
static inline bool node_valid(const struct CUgraphNode_st *n) {
    return n != NULL && n->magic == MAGIC_NODE;
}
static inline bool exec_valid(const struct CUgraphExec_st *e) {
    return e != NULL && e->magic == MAGIC_EXEC;
}

struct CUgraph_st *graph_new(void);
struct CUgraph_st *graph_copy(struct CUgraph_st *g);
void graph_free(struct CUgraph_st *g);
CUresult graph_add(struct CUgraph_st *g, struct CUgraphNode_st *const *deps, size_t count,
                   const struct graph_work *work, struct CUgraphNode_st **out);
void node_own_parameters(struct CUgraphNode_st *n);
CUresult graph_set_kernel(struct CUgraphNode_st *n, const CUDA_KERNEL_NODE_PARAMS *p);
CUDA_KERNEL_NODE_PARAMS kernel_params_from_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *p);

#endif
