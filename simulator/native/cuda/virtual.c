/* Virtual memory management: address ranges, physical memory, mappings. */
#include "share.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULARITY ((size_t)2 << 20)

/* Physical memory; the handle is its address. It lives until it is released and mapped nowhere. */
struct physical {
    uint32_t magic;
    int device; /* -1: the host's */
    size_t bytes;
    unsigned handles, mappings;
    CUmemAllocationProp prop;
    bool imported; /* another process holds the card's memory */
};

struct mapping {
    uintptr_t at;
    size_t bytes;
    struct physical *physical;
    bool open; /* access was given */
    struct mapping *next;
};

static struct mapping *mappings; /* under our lock */

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct physical *p = (struct physical *)(uintptr_t)handle;
    return p != NULL && p->magic == MAGIC_PHYSICAL ? p : NULL;
}

static void physical_release(struct physical *p) { /* under our lock */
    if (p->handles > 0 || p->mappings > 0)
        return;
    if (p->device >= 0 && !p->imported) {
        machine_enter(cuda.m);
        memory_give(cuda.m, cuda.process, (uint32_t)p->device, p->bytes);
        machine_unlock(cuda.m);
    }
    p->magic = 0;
    free(p);
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    ENTER(cuMemGetAllocationGranularity);
    REQUIRE(out != NULL && prop != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            CUDA_ERROR_INVALID_VALUE);
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wish,
                                     unsigned long long flags) {
    ENTER(cuMemAddressReserve);
    (void)wish; /* a hint, which the driver may ignore as well */
    REQUIRE(out != NULL && bytes > 0 && bytes % GRANULARITY == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    size_t align = alignment > GRANULARITY ? alignment : GRANULARITY;
    REQUIRE(bytes < (size_t)1 << 46 && align < (size_t)1 << 46, CUDA_ERROR_OUT_OF_MEMORY);
    char *at = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    char *start = (char *)(((uintptr_t)at + align - 1) / align * align);
    if (start > at)
        munmap(at, (size_t)(start - at));
    if (at + align > start)
        munmap(start + bytes, (size_t)(at + align - start));
    cuda_lock();
    bool ok = allocation_add((struct allocation){
                  .base = (uintptr_t)start, .size = bytes, .kind = ALLOCATION_RESERVED, .device = -1}) != NULL;
    cuda_unlock();
    if (!ok) {
        munmap(start, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUdeviceptr)(uintptr_t)start;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    ENTER(cuMemAddressFree);
    cuda_lock();
    struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->kind == ALLOCATION_RESERVED && a->base == (uintptr_t)at && a->size == bytes;
    for (struct mapping *map = mappings; ours && map != NULL; map = map->next)
        ours = map->at < at || map->at >= at + bytes;
    if (ours)
        allocation_remove(a);
    cuda_unlock();
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    munmap((void *)(uintptr_t)at, bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    ENTER(cuMemCreate); /* needs no current context */
    REQUIRE(out != NULL && prop != NULL && bytes > 0 && bytes % GRANULARITY == 0 && flags == 0,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    int device = -1;
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        REQUIRE(device_of(prop->location.id, &device), CUDA_ERROR_INVALID_DEVICE);
    else
        REQUIRE(prop->location.type == CU_MEM_LOCATION_TYPE_HOST ||
                    prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                    prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
                CUDA_ERROR_INVALID_VALUE);
    struct physical *p = calloc(1, sizeof *p);
    REQUIRE(p != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    if (device >= 0) {
        machine_enter(cuda.m);
        bool ok = memory_take(cuda.m, cuda.process, (uint32_t)device, bytes);
        machine_unlock(cuda.m);
        if (!ok) {
            free(p);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    *p = (struct physical){.magic = MAGIC_PHYSICAL, .device = device, .bytes = bytes, .handles = 1, .prop = *prop};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    return CUDA_SUCCESS;
}

bool physical_mapped(CUmemGenericAllocationHandle handle, int by) {
    struct physical *p = physical_of(handle);
    if (p == NULL)
        return false;
    p->mappings = (unsigned)((int)p->mappings + by);
    physical_release(p);
    return true;
}

bool physical_about(CUmemGenericAllocationHandle handle, int *device, size_t *bytes) {
    const struct physical *p = physical_of(handle);
    if (p == NULL)
        return false;
    *device = p->device;
    *bytes = p->bytes;
    return true;
}

CUresult physical_import(CUmemGenericAllocationHandle *out, int device, size_t bytes) {
    struct physical *p = calloc(1, sizeof *p);
    REQUIRE(p != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *p = (struct physical){.magic = MAGIC_PHYSICAL, .device = device, .bytes = bytes, .handles = 1, .imported = true};
    p->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->prop.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal_of(device)};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease);
    struct physical *p = physical_of(handle);
    REQUIRE(p != NULL && p->handles > 0, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    p->handles--;
    physical_release(p);
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *at) {
    ENTER(cuMemRetainAllocationHandle);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    cuda_lock();
    for (struct mapping *map = mappings; map != NULL; map = map->next)
        if ((uintptr_t)at - map->at < map->bytes) {
            map->physical->handles++;
            *out = (CUmemGenericAllocationHandle)(uintptr_t)map->physical;
            rc = CUDA_SUCCESS;
            break;
        }
    cuda_unlock();
    return rc;
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    const struct physical *p = physical_of(handle);
    REQUIRE(out != NULL && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = p->prop;
    return CUDA_SUCCESS;
}

/*
 * A mapped piece is an allocation of its own, cut out of the reserved range, so that lookups and copies see its card.
 * Its bytes belong to the mapping, not to the physical memory: what is mapped twice, or again, begins as zeros.
 */
CUresult CUDAAPI cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    ENTER(cuMemMap);
    struct physical *p = physical_of(handle);
    REQUIRE(p != NULL && flags == 0 && bytes > 0 && bytes % GRANULARITY == 0 && at % GRANULARITY == 0,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(offset == 0 && bytes == p->bytes,
            CUDA_ERROR_NOT_SUPPORTED); /* parts of an allocation are not mapped by the driver either */
    cuda_lock();
    const struct allocation *range = allocation_find((uintptr_t)at);
    bool ok = range != NULL && range->kind == ALLOCATION_RESERVED && bytes <= range->size - (at - range->base);
    for (struct mapping *map = mappings; ok && map != NULL; map = map->next)
        ok = map->at + map->bytes <= at || map->at >= at + bytes;
    struct mapping *map = ok ? calloc(1, sizeof *map) : NULL;
    if (map != NULL) {
        *map = (struct mapping){.at = (uintptr_t)at, .bytes = bytes, .physical = p, .next = mappings};
        mappings = map;
        p->mappings++;
    }
    cuda_unlock();
    return map != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, size_t bytes) {
    ENTER(cuMemUnmap);
    REQUIRE(bytes <= UINTPTR_MAX - at, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    for (struct mapping **link = &mappings; *link != NULL;) {
        struct mapping *map = *link;
        if (map->at < at || map->at + map->bytes > at + bytes) {
            link = &map->next;
            continue;
        }
        /* Back to a range that holds nothing. */
        mmap((void *)map->at, map->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        *link = map->next;
        map->physical->mappings--;
        physical_release(map->physical);
        free(map);
    }
    cuda_unlock();
    return CUDA_SUCCESS; /* a range that holds no mapping is unmapped already */
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    ENTER(cuMemSetAccess);
    REQUIRE(access != NULL && count > 0 && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    int device = -1;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE)
            REQUIRE(device_of(access[i].location.id, &device), CUDA_ERROR_INVALID_DEVICE);
    size_t covered = 0;
    cuda_lock();
    for (struct mapping *map = mappings; map != NULL; map = map->next)
        if (map->at >= at && map->at + map->bytes <= at + bytes) {
            mprotect((void *)map->at, map->bytes,
                     access[0].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? PROT_NONE : PROT_READ | PROT_WRITE);
            map->open = access[0].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
            covered += map->bytes;
        }
    cuda_unlock();
    return covered == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at) {
    ENTER(cuMemGetAccess);
    REQUIRE(flags != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    cuda_lock();
    for (const struct mapping *map = mappings; map != NULL; map = map->next)
        if (at - map->at < map->bytes) {
            *flags = map->open ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
            rc = CUDA_SUCCESS;
        }
    cuda_unlock();
    return rc;
}

bool virtual_device(uintptr_t at, int *device, size_t *left) { /* under our lock */
    for (const struct mapping *map = mappings; map != NULL; map = map->next)
        if (at - map->at < map->bytes) {
            *device = map->physical->device;
            *left = map->bytes - (at - map->at);
            return map->open;
        }
    return false;
}
