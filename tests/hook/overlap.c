/*
 * A module of 1 MiB is loaded while another thread is inside a call that changes the device's memory by 8 MiB, or while
 * a neighbour takes 8 MiB: overlap NAME WHEN. The driver is a table of functions here, and the card a number. Prints
 * the load's result, the account in MiB when both are done, what the other call alone is worth, and what is left when
 * the module and all of the other's is given back.
 */
#include "fake_cuda.h"

#include "board.h"

/* As the shim has it, which the header does not. */
extern CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device);

#define MIB ((uint64_t)1 << 20)
#define HELD (8 * MIB)
#define AT 0x10000000u
#define PLACE ((void *)(uintptr_t)0x300)

static uint64_t card_free = 1024 * MIB, graphs_keep;

/* Where the other call stands: the steps that it may go, and that it has gone. */
enum { NOT_BEGUN, ASKED, CHANGED, OVER };
static int may = NOT_BEGUN, is = NOT_BEGUN;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

static void step(int *word, int to) {
    pthread_mutex_lock(&lock);
    *word = to;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static void wait_for(const int *word, int at_least) {
    pthread_mutex_lock(&lock);
    while (*word < at_least)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

/* Every call of the driver that changes the card; only the other thread's is held up. */
static __thread bool held_up;

static void card_changes(int64_t by) {
    if (held_up) {
        step(&is, ASKED);
        wait_for(&may, CHANGED);
    }
    __atomic_fetch_add(&card_free, (uint64_t)by, __ATOMIC_SEQ_CST);
    if (held_up) {
        step(&is, CHANGED);
        wait_for(&may, OVER);
    }
}

/* ---- the driver -------------------------------------------------------------------------------------------------- */

static CUresult info(size_t *free_bytes, size_t *total) {
    *free_bytes = __atomic_load_n(&card_free, __ATOMIC_SEQ_CST);
    *total = 1024 * MIB;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *at, size_t bytes) {
    card_changes(-(int64_t)bytes);
    *at = AT;
    return CUDA_SUCCESS;
}

static CUresult free_at(CUdeviceptr at) {
    (void)at;
    card_changes((int64_t)HELD);
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    (void)prop, (void)flags;
    card_changes(-(int64_t)bytes);
    *handle = 0x5000;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    (void)handle;
    card_changes((int64_t)HELD);
    return CUDA_SUCCESS;
}

static CUresult context_create(CUcontext *context, unsigned flags, CUdevice device) {
    (void)flags, (void)device;
    card_changes(-(int64_t)HELD);
    *context = PLACE;
    return CUDA_SUCCESS;
}

static CUresult context_destroy(CUcontext context) {
    (void)context;
    card_changes((int64_t)HELD);
    return CUDA_SUCCESS;
}

static CUresult trim(CUdevice device) {
    (void)device;
    graphs_keep = 0;
    card_changes((int64_t)HELD);
    return CUDA_SUCCESS;
}

static CUresult graph_attribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    (void)device, (void)attribute;
    *(cuuint64_t *)value = graphs_keep;
    return CUDA_SUCCESS;
}

static CUresult get_limit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = __atomic_load_n(&card_free, __ATOMIC_SEQ_CST) < 1020 * MIB ? HELD + MIB : MIB;
    return CUDA_SUCCESS;
}

static CUresult set_limit(CUlimit limit, size_t value) {
    (void)limit;
    card_changes(value > MIB ? -(int64_t)HELD : (int64_t)HELD);
    return CUDA_SUCCESS;
}

static void (*in_load)(void);

static CUresult load(CUmodule *module, const void *image) {
    void (*run)(void) = held_up ? NULL : in_load;
    if (run)
        run();
    card_changes(image ? -(int64_t)MIB : -(int64_t)HELD);
    *module = image ? PLACE : (void *)(uintptr_t)0x400;
    return CUDA_SUCCESS;
}

static CUresult unload(CUmodule module) {
    card_changes(module == PLACE ? (int64_t)MIB : (int64_t)HELD);
    return CUDA_SUCCESS;
}

/* ---- the other's calls ------------------------------------------------------------------------------------------- */

static void take_address(void) {
    CUdeviceptr at;
    done(cuMemAlloc_v2(&at, HELD));
}

static void free_address(void) {
    done(cuMemFree_v2(AT));
}

static void take_handle(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemGenericAllocationHandle handle;
    done(cuMemCreate(&handle, HELD, &prop, 0));
}

static void release_handle(void) {
    done(cuMemRelease(0x5000));
}

static void begin_context(void) {
    CUcontext context;
    done(cuCtxCreate(&context, 0, 0));
}

static void end_context(void) {
    done(cuCtxDestroy_v2(PLACE));
}

static void keep_for_graphs(void) {
    pm_graph_memory_seen();
    graphs_keep = HELD;
    pm_process_settle_graph_memory(pm_self(), 0, HELD);
    card_free -= HELD;
}

static void trim_graphs(void) {
    done(cuDeviceGraphMemTrim(0));
}

static void raise_limit(void) {
    done(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, HELD + MIB));
}

static void lower_limit(void) {
    done(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, MIB));
}

static void load_module(void) {
    CUmodule module;
    done(cuModuleLoadData(&module, NULL));
}

static void unload_module(void) {
    done(cuModuleUnload((CUmodule)(uintptr_t)0x400));
}

static void nothing(void) {}

static void neighbour(void) {
    pm_board_change(pm_self()->boards[0]);
    card_free -= 12 * MIB;
    pm_board_change(pm_self()->boards[0]);
}

static void unseen(void) {
    card_free -= 12 * MIB;
}

static void half(void) {
    card_free -= 12 * MIB;
    pm_board_change(pm_self()->boards[0]);
}

static void sit_beside(void) {
    pm_board_sit(pm_self()->boards[0], 77);
}

static const struct {
    const char *name;
    void (*prepare)(void), (*call)(void), (*undo)(void);
    uint64_t worth; /* bytes that the account holds of it afterwards */
} others[] = {
    {"alloc", nothing, take_address, free_address, HELD},
    {"free", take_address, free_address, nothing, 0},
    {"create", nothing, take_handle, release_handle, HELD},
    {"release", take_handle, release_handle, nothing, 0},
    {"context", nothing, begin_context, end_context, 0},
    {"context_goes", begin_context, end_context, nothing, 0},
    {"trim", keep_for_graphs, trim_graphs, nothing, 0},
    {"limit", nothing, raise_limit, lower_limit, HELD},
    {"limit_back", raise_limit, lower_limit, nothing, 0},
    {"module", nothing, load_module, unload_module, HELD},
    {"module_goes", load_module, unload_module, nothing, 0},
    {"neighbour", sit_beside, neighbour, nothing, 0},
    {"quiet", sit_beside, nothing, nothing, 0},
    {"half", sit_beside, half, nothing, 0},
    {"sibling", nothing, neighbour, nothing, 0},
    {"unseen", nothing, unseen, nothing, 0},
};

static size_t chosen;
static pthread_t thread;

static void *other(void *argument) {
    held_up = true;
    others[chosen].call();
    step(&is, OVER);
    return argument;
}

static void begins(int until) {
    if (pthread_create(&thread, NULL, other, NULL) != 0)
        abort();
    step(&may, until);
    wait_for(&is, until);
}

static void goes_on(int until) {
    step(&may, until);
    wait_for(&is, until);
}

static void begin_asked(void) {
    begins(ASKED);
}

static void begin_changed(void) {
    begins(CHANGED);
}

static void begin_whole(void) {
    begins(OVER);
}

static void end(void) {
    goes_on(OVER);
}

static unsigned long long account(void) {
    return pm_memory_used(&pm_self()->view, 0) / MIB;
}

int main(int argc, char **argv) {
    if (argc < 3 || !pm_self())
        return 2;
    pm_real[PM_HOOK_cuMemGetInfo_v2] = info;
    pm_real[PM_HOOK_cuMemAlloc_v2] = allocate;
    pm_real[PM_HOOK_cuMemFree_v2] = free_at;
    pm_real[PM_HOOK_cuMemCreate] = create;
    pm_real[PM_HOOK_cuMemRelease] = release;
    pm_real[PM_HOOK_cuCtxCreate] = context_create;
    pm_real[PM_HOOK_cuCtxDestroy_v2] = context_destroy;
    pm_real[PM_HOOK_cuDeviceGraphMemTrim] = trim;
    pm_real[PM_HOOK_cuCtxSetLimit] = set_limit;
    pm_real[PM_HOOK_cuModuleLoadData] = load;
    pm_real[PM_HOOK_cuModuleUnload] = unload;
    pm_need[PM_NEED_cuDeviceGetGraphMemAttribute] = graph_attribute;
    pm_need[PM_NEED_cuCtxGetLimit] = get_limit;
    fake_needs();
    while (strcmp(argv[1], others[chosen].name) != 0)
        if (++chosen == sizeof others / sizeof *others)
            return 2;
    others[chosen].prepare();
    bool beside = strcmp(argv[2], "beside") == 0; /* no call of ours */
    if (strcmp(argv[2], "first") == 0) {          /* under way when the load begins, not when it ends */
        begin_asked();
        in_load = end;
    } else if (strcmp(argv[2], "first_changed") == 0) {
        begin_changed();
        in_load = end;
    } else if (strcmp(argv[2], "second") == 0) /* under way when it ends */
        in_load = begin_asked;
    else if (strcmp(argv[2], "second_changed") == 0)
        in_load = begin_changed;
    else /* both while it runs */
        in_load = beside ? others[chosen].call : begin_whole;
    CUmodule module = NULL;
    CUresult result = cuModuleLoadData(&module, "image");
    if (!beside) {
        goes_on(OVER);
        pthread_join(thread, NULL);
    }
    unsigned long long after = account();
    in_load = NULL;
    if (result == CUDA_SUCCESS)
        done(cuModuleUnload(module));
    others[chosen].undo();
    printf("[%d, %llu, %llu, %llu]\n", (int)result, after, (unsigned long long)(others[chosen].worth / MIB), account());
    return 0;
}
