/* Stream-ordered allocation from memory pools. */
#include "share.h"

#include <stdlib.h>
#include <string.h>

enum { POOL_GRAIN = 32 << 20 }; /* pools take the card's memory in such pieces */

static bool pool_valid(const struct CUmemPoolHandle_st *p) {
    return p != NULL && p->magic == MAGIC_POOL;
}

static struct CUmemPoolHandle_st *pool_new(int device, bool is_default) { /* under our lock */
    struct CUmemPoolHandle_st *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    p->magic = MAGIC_POOL;
    p->device = device;
    p->is_default = is_default;
    p->reuse[0] = p->reuse[1] = p->reuse[2] = 1;
    p->next = cuda.pools;
    cuda.pools = p;
    return p;
}

CUresult pool_of_device(int device, struct CUmemPoolHandle_st **out) {
    cuda_lock();
    if (cuda.pool_default[device] == NULL)
        cuda.pool_default[device] = pool_new(device, true);
    if (cuda.pool_current[device] == NULL)
        cuda.pool_current[device] = cuda.pool_default[device];
    *out = cuda.pool_current[device];
    cuda_unlock();
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Gives back what the pool keeps beyond `keep` bytes; under our lock. */
static void pool_trim(struct CUmemPoolHandle_st *p, uint64_t keep) {
    uint64_t needed = (p->used + POOL_GRAIN - 1) / POOL_GRAIN * POOL_GRAIN;
    uint64_t floor = needed > keep ? needed : keep;
    if (p->reserved <= floor)
        return;
    uint64_t bytes = (p->reserved - floor) / POOL_GRAIN * POOL_GRAIN;
    if (bytes == 0)
        return;
    p->reserved -= bytes;
    machine_enter(cuda.m);
    memory_give(cuda.m, cuda.process, (uint32_t)p->device, bytes);
    machine_unlock(cuda.m);
}

void pools_synchronised(void) {
    if (cuda.pools == NULL)
        return;
    cuda_lock();
    for (struct CUmemPoolHandle_st *p = cuda.pools; p != NULL; p = p->next)
        if (p->reserved > p->used)
            pool_trim(p, p->threshold);
    cuda_unlock();
}

static size_t rounded(size_t bytes) {
    return (bytes + 511) & ~(size_t)511;
}

static CUresult pool_alloc(CUdeviceptr *out, size_t bytes, struct CUmemPoolHandle_st *p, struct CUstream_st *s) {
    REQUIRE(bytes <= cuda.m->device[p->device].memory, CUDA_ERROR_OUT_OF_MEMORY);
    size_t size = rounded(bytes);
    cuda_lock();
    if (p->max_size > 0 && p->used + size > p->max_size) {
        cuda_unlock();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (p->used + size > p->reserved) {
        uint64_t more = (p->used + size - p->reserved + POOL_GRAIN - 1) / POOL_GRAIN * POOL_GRAIN;
        machine_enter(cuda.m);
        bool ok = memory_take(cuda.m, cuda.process, (uint32_t)p->device, more);
        machine_unlock(cuda.m);
        if (!ok) {
            cuda_unlock();
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        p->reserved += more;
    }
    p->used += size;
    if (p->used > p->used_high)
        p->used_high = p->used;
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    cuda_unlock();
    CUresult rc = memory_allocate(out, bytes, p->device, s->ctx, ALLOCATION_POOL, 0);
    cuda_lock();
    if (rc == CUDA_SUCCESS)
        allocation_find((uintptr_t)*out)->pool = p;
    else
        p->used -= size;
    cuda_unlock();
    return rc;
}

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, struct CUmemPoolHandle_st *p, CUstream handle) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (p == NULL) {
        rc = pool_of_device(s->ctx->device, &p);
        REQUIRE(rc == CUDA_SUCCESS, rc);
    }
    REQUIRE(pool_valid(p), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!p->imported, CUDA_ERROR_NOT_PERMITTED); /* allocations are made by who owns the pool */
    if (capture_active(s)) {
        struct graph_work work = {.kind = WORK_ALLOC, .alloc_bytes = bytes, .device = p->device};
        rc = memory_allocate(&work.alloc, bytes, p->device, s->ctx, ALLOCATION_GRAPH, 0);
        REQUIRE(rc == CUDA_SUCCESS, rc);
        *out = work.alloc;
        return capture_add(s, &work);
    }
    rc = capture_forbids();
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (bytes == 0) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    return pool_alloc(out, bytes, p, s);
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ENTER(cuMemAllocAsync);
    return alloc_async(out, bytes, NULL, stream);
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ENTER(cuMemAllocFromPoolAsync);
    REQUIRE(pool_valid(pool), CUDA_ERROR_INVALID_VALUE);
    return alloc_async(out, bytes, pool, stream);
}

CUresult pool_free(CUdeviceptr at) {
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->base == (uintptr_t)at && a->kind == ALLOCATION_POOL;
    if (ours)
        a->pool->used -= rounded(a->size);
    cuda_unlock();
    return ours ? memory_release(at) : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr at, CUstream handle) {
    ENTER(cuMemFreeAsync);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (at == 0)
        return CUDA_SUCCESS;
    if (capture_active(s)) {
        struct graph_work work = {.kind = WORK_FREE, .alloc = at};
        return capture_add(s, &work);
    }
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool known = a != NULL && a->base == (uintptr_t)at && a->device >= 0;
    bool pooled = known && a->kind == ALLOCATION_POOL;
    cuda_unlock();
    REQUIRE(known, CUDA_ERROR_INVALID_VALUE);
    return pooled ? pool_free(at) : memory_release(at);
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    ENTER(cuMemPoolCreate);
    REQUIRE(out != NULL && props != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(props->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    int device;
    REQUIRE(device_of(props->location.id, &device), CUDA_ERROR_INVALID_DEVICE);
    cuda_lock();
    *out = pool_new(device, false);
    if (*out != NULL)
        (*out)->max_size = props->maxSize;
    cuda_unlock();
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult pool_import(CUmemoryPool *out, int device) {
    cuda_lock();
    *out = pool_new(device, false);
    if (*out != NULL)
        (*out)->imported = true;
    cuda_unlock();
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool p) {
    ENTER(cuMemPoolDestroy);
    REQUIRE(pool_valid(p) && !p->is_default, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    for (int d = 0; d < SIM_MAX_DEVICES; d++)
        if (cuda.pool_current[d] == p)
            cuda.pool_current[d] = cuda.pool_default[d];
    p->threshold = 0; /* outstanding allocations stay; their memory goes back as they are freed */
    pool_trim(p, 0);
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool p, size_t keep) {
    ENTER(cuMemPoolTrimTo);
    REQUIRE(pool_valid(p), CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    pool_trim(p, keep);
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool p, CUmemPool_attribute attribute, void *value) {
    ENTER(cuMemPoolSetAttribute);
    REQUIRE(pool_valid(p) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        p->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(const int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        p->threshold = *(const cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        REQUIRE(*(const cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
        p->reserved_high = p->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        REQUIRE(*(const cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
        p->used_high = p->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool p, CUmemPool_attribute attribute, void *value) {
    ENTER(cuMemPoolGetAttribute);
    REQUIRE(pool_valid(p) && value != NULL, CUDA_ERROR_INVALID_VALUE);
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = p->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = p->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = p->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = p->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = p->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = p->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool p, const CUmemAccessDesc *map, size_t count) {
    ENTER(cuMemPoolSetAccess);
    REQUIRE(pool_valid(p) && (count == 0 || map != NULL), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool p, CUmemLocation *location) {
    ENTER(cuMemPoolGetAccess);
    REQUIRE(pool_valid(p) && flags != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}

static CUresult give_pool(CUmemoryPool *out, int device, bool current) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    struct CUmemPoolHandle_st *p;
    CUresult rc = pool_of_device(device, &p);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    *out = current ? p : cuda.pool_default[device];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetDefaultMemPool, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    return give_pool(out, device, false);
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetMemPool, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    return give_pool(out, device, true);
}

static CUresult set_pool(int device, CUmemoryPool p) {
    REQUIRE(pool_valid(p) && p->device == device, CUDA_ERROR_INVALID_VALUE);
    struct CUmemPoolHandle_st *made;
    CUresult rc = pool_of_device(device, &made);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    cuda.pool_current[device] = p;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool p) {
    ENTER_DEVICE(cuDeviceSetMemPool, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    return set_pool(device, p);
}

static CUresult location_device(const CUmemLocation *location, CUmemAllocationType type, int *device) {
    REQUIRE(location != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type == CU_MEM_LOCATION_TYPE_DEVICE,
            CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(device_of(location->id, device), CUDA_ERROR_INVALID_DEVICE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER(cuMemGetDefaultMemPool);
    int device;
    CUresult rc = location_device(location, type, &device);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return give_pool(out, device, false);
}

CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER(cuMemGetMemPool);
    int device;
    CUresult rc = location_device(location, type, &device);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return give_pool(out, device, true);
}

CUresult CUDAAPI cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool p) {
    ENTER(cuMemSetMemPool);
    int device;
    CUresult rc = location_device(location, type, &device);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return set_pool(device, p);
}
