/* What one process's libcuda keeps for itself; the machine file holds what processes share. */
#ifndef POOLMETER_SIM_CUDA_STATE_H
#define POOLMETER_SIM_CUDA_STATE_H

/* Every version of every entry point is declared, so the compiler checks each signature we define. */
#define __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_PUSH_VISIBILITY_DEFAULT
#include <cuda.h>
#include <pthread.h>
#include <sys/types.h>

#include "calls.h"
#include "machine.h"

enum magic {
    MAGIC_CONTEXT = 0x43545831,
    MAGIC_STREAM = 0x53545231,
    MAGIC_EVENT = 0x45564e31,
    MAGIC_MODULE = 0x4d4f4431,
    MAGIC_FUNCTION = 0x46554e31,
    MAGIC_GRAPH = 0x47525031,
    MAGIC_NODE = 0x4e4f4431,
    MAGIC_EXEC = 0x45584331,
    MAGIC_POOL = 0x504f4c31,
    MAGIC_ARRAY = 0x41525231,
    MAGIC_MIPMAP = 0x4d495031,
    MAGIC_PHYSICAL = 0x50485931,
    MAGIC_EXTERNAL = 0x45585431,
    MAGIC_GREEN = 0x47524e31,
};

struct CUctx_st {
    uint32_t magic;
    uint32_t slot; /* of the machine */
    int device;    /* of the machine, not the visible ordinal */
    unsigned flags;
    bool primary;
    unsigned version;
    uint64_t id;
    struct CUstream_st *legacy;
    struct CUstream_st *streams; /* all of them */
    size_t limits[CU_LIMIT_MAX];
    struct CUmod_st *modules;
    struct CUctx_st *next;
    CUfunc_cache cache;
    unsigned sms;           /* a part of the card's processors; 0: all */
    struct CUctx_st *owner; /* of a green context: the primary one, which its memory belongs to */
};

struct CUstream_st {
    uint32_t magic;
    uint32_t slot;
    struct CUctx_st *ctx;
    unsigned flags;
    int priority;
    uint64_t id;
    bool legacy, per_thread;
    struct CUstream_st *next;
    /* capture */
    CUstreamCaptureStatus capture;
    CUstreamCaptureMode capture_mode;
    uint64_t capture_id;
    bool capture_origin;
    pthread_t capture_thread;
    struct CUgraph_st *capture_graph;
    struct CUgraphNode_st **frontier; /* what the next captured node depends on */
    size_t frontier_count, frontier_size;
    uint64_t tickets; /* host functions submitted */
};

struct CUevent_st {
    uint32_t magic;
    uint32_t slot;
    struct CUctx_st *ctx;
    unsigned flags;
    bool recorded;
    uint64_t generation;        /* of the newest record */
    struct CUstream_st *stream; /* of the newest record, while it lives */
    uint32_t stream_slot;
    uint32_t stream_generation;
    uint64_t target; /* the stream's entry count with the record in */
    /* recorded inside a capture */
    uint64_t capture_id;
    struct CUgraphNode_st **nodes;
    size_t node_count;
    struct CUgraph_st *capture_graph;
};

enum length_kind { LENGTH_FIXED, LENGTH_PARAMETER };

struct CUfunc_st {
    uint32_t magic;
    char name[128];
    struct CUmod_st *module;
    enum length_kind length;
    uint64_t ns;
    bool waves;         /* the length is that of one wave of blocks, one block per SM */
    uint32_t width_ppm; /* 0: by blocks over SMs */
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
    struct CUfunc_st *next;
};

struct module_global {
    char name[128];
    size_t bytes;
    CUdeviceptr at;
    struct module_global *next;
};

/* A module of a context, or a library (context-independent: `ctx` is NULL and it is a CUlibrary). */
struct CUmod_st {
    uint32_t magic;
    struct CUctx_st *ctx;
    struct CUfunc_st *functions;
    struct module_global *globals;
    unsigned function_count;
    size_t code; /* bytes of the card for its code, once it is loaded */
    CUdeviceptr code_at;
    struct CUmod_st *next;
};

enum allocation_kind {
    ALLOCATION_DEVICE,
    ALLOCATION_MANAGED,
    ALLOCATION_HOST,       /* ours, pinned */
    ALLOCATION_REGISTERED, /* the program's own, registered */
    ALLOCATION_POOL,
    ALLOCATION_GRAPH,
    ALLOCATION_RESERVED, /* an address range */
    ALLOCATION_GLOBAL,
    ALLOCATION_ARRAY, /* no address of it reaches the program */
    ALLOCATION_CODE,
    ALLOCATION_IMPORTED, /* of another process, which holds the card's memory */
};

/* Of an allocation this much is really stored; what lies beyond reads as zeros. */
#define BACKING_BYTES (64ull << 20)

struct allocation {
    uintptr_t base;
    size_t size;
    size_t charged; /* bytes of the card */
    enum allocation_kind kind;
    int device; /* of the machine; -1 for host memory */
    struct CUctx_st *ctx;
    struct CUmemPoolHandle_st *pool;
    unsigned flags;
    uint64_t id;
};

struct CUmemPoolHandle_st {
    uint32_t magic;
    int device;
    bool is_default, imported;
    uint64_t reserved, used, reserved_high, used_high, threshold, max_size;
    int reuse[3];
    struct CUmemPoolHandle_st *next;
};

struct cuda_state {
    pthread_mutex_t lock; /* guards everything below and what hangs from it; taken before the machine's mutex */
    struct sim_machine *m;
    bool initialised;
    bool child_of_user; /* forked from a process that had initialised: CUDA refuses to work */
    uint32_t process;
    pid_t pid;                    /* that attached; a child made by a raw clone has another */
    int visible[SIM_MAX_DEVICES]; /* ordinal -> device of the machine */
    int visible_count;
    struct CUctx_st *primary[SIM_MAX_DEVICES];
    unsigned primary_refs[SIM_MAX_DEVICES];
    unsigned primary_flags[SIM_MAX_DEVICES];
    struct CUctx_st *contexts;
    struct CUmod_st *libraries;
    struct CUmemPoolHandle_st *pool_default[SIM_MAX_DEVICES];
    struct CUmemPoolHandle_st *pool_current[SIM_MAX_DEVICES];
    struct CUmemPoolHandle_st *pools;
    struct allocation *allocations; /* sorted by base */
    size_t allocation_count, allocation_size;
    uint64_t ids;
    _Atomic int host_functions; /* submitted and not yet run */
    _Atomic int capturing;      /* streams under capture, to keep the usual path short */
};

extern struct cuda_state cuda;

struct thread_state {
    struct CUctx_st *stack[64];
    int depth;
    int per_thread_default; /* inside a _ptsz or _ptds entry point */
    CUstreamCaptureMode capture_mode;
    bool capture_mode_set;
    bool joined;
    struct CUstream_st *own[SIM_MAX_DEVICES * 2]; /* per-thread default streams */
    uint64_t own_context[SIM_MAX_DEVICES * 2];
};

extern __thread struct thread_state thread_state;

/* Counts the call and answers with a scripted code, or with what stands in the way of any call. */
int sim_enter(uint32_t call, bool needs_init);
int sim_enter_device(uint32_t call, CUdevice dev);
CUresult sim_unimplemented(uint32_t call, const char *name);
void sim_leave_thread(void);

#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        int code_ = sim_enter(CALL_##name, true);                                                                      \
        if (code_ != 0)                                                                                                \
            return (CUresult)code_;                                                                                    \
    } while (0)

#define ENTER_EARLY(name) /* may be called before cuInit */                                                            \
    do {                                                                                                               \
        int code_ = sim_enter(CALL_##name, false);                                                                     \
        if (code_ != 0)                                                                                                \
            return (CUresult)code_;                                                                                    \
    } while (0)

#define ENTER_DEVICE(name, dev)                                                                                        \
    do {                                                                                                               \
        int code_ = sim_enter_device(CALL_##name, dev);                                                                \
        if (code_ != 0)                                                                                                \
            return (CUresult)code_;                                                                                    \
    } while (0)

#define REQUIRE(condition, code)                                                                                       \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return (code);                                                                                             \
    } while (0)

static inline void cuda_lock(void) {
    pthread_mutex_lock(&cuda.lock);
}
static inline void cuda_unlock(void) {
    pthread_mutex_unlock(&cuda.lock);
}

/* contexts */
static inline struct CUctx_st *current_context(void) {
    return thread_state.depth > 0 ? thread_state.stack[thread_state.depth - 1] : NULL;
}
CUresult context_make(struct CUctx_st **out, int device, unsigned flags, bool primary);
void context_drop(struct CUctx_st *ctx);
bool context_valid(const struct CUctx_st *ctx);
int ordinal_of(int device);
bool device_of(CUdevice ordinal, int *device);

/* streams */
CUresult stream_resolve(CUstream handle, struct CUstream_st **out); /* NULL, legacy and per-thread handles too */
CUresult stream_make(struct CUctx_st *ctx, unsigned flags, int priority, bool legacy, struct CUstream_st **out);
void stream_drop(struct CUstream_st *stream);
CUresult submit(struct CUstream_st *stream, struct sim_op op, uint64_t *target, bool launch);
CUresult submit_many(struct CUstream_st *stream, const struct sim_op *ops, size_t count, uint64_t *target);
CUresult event_record_on(struct CUevent_st *event, struct CUstream_st *stream);
CUresult wait_stream(struct CUstream_st *stream, uint64_t target);
CUresult wait_context(struct CUctx_st *ctx);
CUresult wait_entry(struct CUctx_st *ctx, uint32_t slot, uint32_t generation,
                    uint64_t target); /* of the machine's stream */
void pools_synchronised(void);        /* cached pool memory above the threshold goes back */

/* launches */
struct launch {
    struct CUfunc_st *function;
    unsigned grid[3], block[3], shared;
    uint64_t parameter; /* the first kernel parameter, when it is the length */
};
CUresult launch_read(struct launch *out, CUfunction f, const unsigned grid[3], const unsigned block[3], unsigned shared,
                     void **params, void **extra);
struct sim_op context_part(struct sim_op op, const struct CUctx_st *ctx);
struct sim_op launch_op(const struct launch *launch, int device);
CUresult sim_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared, CUstream stream, void **params, void **extra, bool cooperative);

/* memory */
#define AT(device_pointer) ((void *)(uintptr_t)(device_pointer))
struct allocation *allocation_find(uintptr_t at);       /* locked; the one that holds the address */
struct allocation *allocation_add(struct allocation a); /* locked */
void allocation_remove(struct allocation *a);           /* locked */
CUresult memory_allocate(CUdeviceptr *out, size_t bytes, int device, struct CUctx_st *ctx, enum allocation_kind kind,
                         size_t charged);
CUresult memory_release(CUdeviceptr at);
void memory_drop_context(struct CUctx_st *ctx);
size_t charge_of(size_t bytes);
CUresult pool_of_device(int device, struct CUmemPoolHandle_st **out);
CUresult pool_free(CUdeviceptr at);
bool virtual_device(uintptr_t at, int *device, size_t *left); /* locked; of a mapped address range */
bool memory_range_ok(uintptr_t at, size_t bytes);             /* within one allocation, and mapped */
bool set_range_ok(const CUDA_MEMSET_NODE_PARAMS *p);          /* on a card, as above */
void copy_bytes(void *to, const void *from, size_t bytes);    /* stored parts only */
void fill_bytes(void *to, const void *pattern, size_t width, size_t count);
CUresult copy_submit(struct CUstream_st *stream, void *to, const void *from, size_t bytes, bool wait);
struct sim_op copy_op(int device, enum sim_copy kind, size_t bytes); /* takes its time on a copy engine */
struct sim_op fill_op(int device, size_t bytes);                     /* takes its time in the context's turn */
enum sim_copy copy_kind(const void *to, const void *from);
CUresult graph_memory_take(int device, uint64_t bytes); /* of the card, for an executable graph */
void graph_memory_give(int device, uint64_t bytes);     /* stays with the graphs' pool until that is trimmed */
void graph_memory_drop(int device);                     /* the primary context goes */

/* graphs and capture */
struct graph_work {
    enum {
        WORK_KERNEL,
        WORK_COPY,
        WORK_SET,
        WORK_HOST,
        WORK_EMPTY,
        WORK_ALLOC,
        WORK_FREE,
        WORK_CHILD,
        WORK_RECORD,
        WORK_WAIT
    } kind;
    struct launch launch;
    CUDA_KERNEL_NODE_PARAMS kernel;
    uint64_t parameters[1];
    void *parameter_pointers[1];
    void *to;
    const void *from;
    size_t bytes;
    unsigned pattern, width;
    CUhostFn host;
    void *host_data;
    CUdeviceptr alloc;
    size_t alloc_bytes;
    CUDA_MEMCPY3D copy3d;
    CUDA_MEMSET_NODE_PARAMS set;
    struct CUgraph_st *child;
    struct CUevent_st *event;
    int device;
};

struct CUgraphNode_st {
    uint32_t magic;
    struct CUgraph_st *graph;
    CUgraphNodeType type;
    struct graph_work work;
    struct CUgraphNode_st **deps;
    size_t dep_count;
    struct CUgraphNode_st *copy; /* while a graph is being cloned, and after it: the clone */
    struct CUgraphNode_st *original;
    uint32_t level;
    bool disabled;
};

struct CUgraph_st {
    uint32_t magic;
    struct CUgraphNode_st **nodes;
    size_t count, size;
    bool owned; /* by a child node or an executable: not the program's to destroy */
};
CUresult capture_add(struct CUstream_st *stream, const struct graph_work *work);
bool capture_active(const struct CUstream_st *stream);
CUresult capture_record(struct CUstream_st *stream, struct CUevent_st *event);
CUresult capture_wait(struct CUstream_st *stream, struct CUevent_st *event);
void capture_invalidate(uint64_t id);
bool capture_running(uint64_t id); /* begun and neither ended nor invalid */
CUresult capture_forbids_context(struct CUctx_st *ctx);
void capture_abandon(struct CUstream_st *stream); /* the stream goes away */
bool capture_implicit(const struct CUstream_st *legacy,
                      bool invalidate); /* would make a capturing stream depend on the legacy one */
CUresult capture_forbids(void);         /* a call that may not be made while this thread captures in global mode */

CUresult host_submit(struct CUstream_st *stream, CUhostFn fn, void *data, bool callback, CUstreamCallback cb,
                     CUstream handle);

#endif
