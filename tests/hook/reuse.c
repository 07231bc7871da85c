/*
 * Memory whose handle or address is another's as soon as the driver has freed it, before its call returns: reuse NAME
 * CODE. The driver is a table of functions here; the one that frees lets another thread allocate, and is given the same
 * handle. Prints how much the account holds: before, after the call that returned CODE, and when all is given back.
 */
#include "fake_cuda.h"

#define HANDLE 0x5000u
#define AT 0x10000000u
#define PIECE ((size_t)2 << 20)

/* The parts that the linked files want, and nothing here reaches. */
void pm_graph_memory_settle(CUdevice ordinal) {
    (void)ordinal;
}

void pm_graph_memory_seen(void) {}

static CUresult code; /* of the call that frees */
static void *(*other)(void *);

static CUresult frees(void) {
    pthread_t thread;
    if (other && code == CUDA_SUCCESS) { /* once */
        void *(*start)(void *) = other;
        other = NULL;
        if (pthread_create(&thread, NULL, start, NULL) != 0 || pthread_join(thread, NULL) != 0)
            abort();
    }
    return code;
}

/* ---- the driver -------------------------------------------------------------------------------------------------- */

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    (void)bytes, (void)prop, (void)flags;
    *handle = HANDLE;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    (void)handle;
    return frees();
}

static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
    (void)at, (void)bytes, (void)offset, (void)handle, (void)flags;
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t bytes) {
    (void)at, (void)bytes;
    return frees();
}

static CUresult map_array(CUarrayMapInfo *maps, unsigned count, CUstream stream) {
    (void)stream;
    return maps[count - 1].memOperationType == CU_MEM_OPERATION_TYPE_UNMAP ? frees() : CUDA_SUCCESS;
}

static CUresult destroy(CUarray array) {
    (void)array;
    return frees();
}

static CUresult allocate(CUdeviceptr *at, size_t bytes) {
    (void)bytes;
    *at = AT;
    return CUDA_SUCCESS;
}

static CUresult free_at(CUdeviceptr at) {
    (void)at;
    return frees();
}

/* ---- what is tried ----------------------------------------------------------------------------------------------- */

static void create_one(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemGenericAllocationHandle handle;
    done(cuMemCreate(&handle, PIECE, &prop, 0));
}

static CUresult tile(uint32_t level, CUmemOperationType operation) {
    CUarrayMapInfo maps[2] = {0};
    for (uint32_t i = 0; i < 2; i++) {
        maps[i].resourceType = CU_RESOURCE_TYPE_ARRAY;
        maps[i].resource.array = (CUarray)(uintptr_t)0x200;
        maps[i].subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
        maps[i].subresource.sparseLevel.level = level + i;
        maps[i].memOperationType = operation;
        maps[i].memHandle.memHandle = HANDLE;
    }
    return cuMemMapArrayAsync(maps, 2, NULL);
}

static void *other_handle(void *argument) {
    create_one();
    return argument;
}

static void *other_mapping(void *argument) {
    create_one();
    done(cuMemMap(AT, PIECE / 2, 0, HANDLE, 0));
    return argument;
}

static void *other_tile(void *argument) {
    create_one();
    done(tile(0, CU_MEM_OPERATION_TYPE_MAP));
    return argument;
}

static void *other_address(void *argument) {
    CUdeviceptr at;
    done(cuMemAlloc_v2(&at, PIECE));
    return argument;
}

/* Two mappings keep the memory; with the second it goes. */
static void prepare_mappings(void) {
    create_one();
    done(cuMemMap(AT, PIECE / 2, 0, HANDLE, 0));
    done(cuMemMap(AT + PIECE / 2, PIECE / 2, PIECE / 2, HANDLE, 0));
    done(cuMemRelease(HANDLE));
}

static CUresult unmap_both(void) {
    return cuMemUnmap(AT, PIECE);
}

static void end_mapping(void) {
    done(cuMemRelease(HANDLE));
    done(cuMemUnmap(AT, PIECE / 2));
}

static void prepare_tiles(void) {
    create_one();
    done(tile(0, CU_MEM_OPERATION_TYPE_MAP));
    done(cuMemRelease(HANDLE));
}

static CUresult unmap_tiles(void) {
    return tile(0, CU_MEM_OPERATION_TYPE_UNMAP);
}

static CUresult destroy_array(void) {
    return cuArrayDestroy((CUarray)(uintptr_t)0x200);
}

static void end_tiles(void) {
    done(cuMemRelease(HANDLE));
    done(tile(0, CU_MEM_OPERATION_TYPE_UNMAP));
}

static CUresult release_one(void) {
    return cuMemRelease(HANDLE);
}

static void end_handle(void) {
    done(cuMemRelease(HANDLE));
}

static void prepare_address(void) {
    other_address(NULL);
}

static CUresult free_address(void) {
    return cuMemFree_v2(AT);
}

static void end_address(void) {
    done(cuMemFree_v2(AT));
}

static const struct {
    const char *name;
    void (*prepare)(void);
    CUresult (*call)(void);
    void *(*other)(void *);
    void (*end)(void);
} tried[] = {
    {"release", create_one, release_one, other_handle, end_handle},
    {"unmap", prepare_mappings, unmap_both, other_mapping, end_mapping},
    {"unmap_tiles", prepare_tiles, unmap_tiles, other_tile, end_tiles},
    {"destroy_array", prepare_tiles, destroy_array, other_tile, end_tiles},
    {"free", prepare_address, free_address, other_address, end_address},
};

static unsigned long long held(void) {
    return pm_memory_used(&pm_self()->view, 0) / PIECE;
}

int main(int argc, char **argv) {
    if (argc < 3 || !pm_self())
        return 2;
    pm_real[PM_HOOK_cuMemCreate] = create;
    pm_real[PM_HOOK_cuMemRelease] = release;
    pm_real[PM_HOOK_cuMemMap] = map;
    pm_real[PM_HOOK_cuMemUnmap] = unmap;
    pm_real[PM_HOOK_cuMemMapArrayAsync] = map_array;
    pm_real[PM_HOOK_cuArrayDestroy] = destroy;
    pm_real[PM_HOOK_cuMemAlloc_v2] = allocate;
    pm_real[PM_HOOK_cuMemFree_v2] = free_at;
    fake_needs();
    for (size_t i = 0; i < sizeof tried / sizeof *tried; i++) {
        if (strcmp(argv[1], tried[i].name) != 0)
            continue;
        tried[i].prepare();
        unsigned long long before = held();
        code = (CUresult)atoi(argv[2]);
        other = tried[i].other;
        bool same = tried[i].call() == code;
        code = CUDA_SUCCESS;
        other = NULL;
        unsigned long long after = held();
        if (atoi(argv[2]) == 0)
            tried[i].end();
        else
            done(tried[i].call());
        printf("[%d, %llu, %llu, %llu]\n", same, before, after, held());
        return 0;
    }
    return 2;
}
