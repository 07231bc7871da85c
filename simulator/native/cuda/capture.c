/* Stream capture: what is launched becomes a graph, and what a capture does not bear. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

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
    rc = graph_add(s->capture_graph, s->frontier, s->frontier_count, work, &n);
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
