/*
 * Device, managed and host memory, and copies.
 *
 * An address range is a lazily filled mapping of this process, so data really move. Only the first BACKING_BYTES of an
 * allocation are stored: 80 GB of simulated memory must not take 80 GB of the host. Copies take their time on the
 * stream; their bytes move when they are submitted.
 */
#include "share.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* --- the table of allocations ----------------------------------------------------------------------------------- */

static size_t first_above(uintptr_t at) {
    size_t low = 0, high = cuda.allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (cuda.allocations[middle].base <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct allocation *allocation_find(uintptr_t at) {
    size_t i = first_above(at);
    if (i == 0)
        return NULL;
    struct allocation *a = &cuda.allocations[i - 1];
    return at - a->base < a->size ? a : NULL;
}

struct allocation *allocation_add(struct allocation a) {
    if (cuda.allocation_count == cuda.allocation_size) {
        size_t size = cuda.allocation_size ? cuda.allocation_size * 2 : 256;
        struct allocation *grown = realloc(cuda.allocations, size * sizeof *grown);
        if (grown == NULL)
            return NULL;
        cuda.allocations = grown;
        cuda.allocation_size = size;
    }
    size_t i = first_above(a.base);
    memmove(&cuda.allocations[i + 1], &cuda.allocations[i], (cuda.allocation_count - i) * sizeof a);
    a.id = ++cuda.ids;
    cuda.allocations[i] = a;
    cuda.allocation_count++;
    return &cuda.allocations[i];
}

void allocation_remove(struct allocation *a) {
    size_t i = (size_t)(a - cuda.allocations);
    memmove(a, a + 1, (cuda.allocation_count - i - 1) * sizeof *a);
    cuda.allocation_count--;
}

/* --- allocating ------------------------------------------------------------------------------------------------- */

/* What a request takes of the card: small ones share 2 MiB pages, large ones take whole ones. */
size_t charge_of(size_t bytes) {
    size_t grain = bytes < (1u << 20) ? 512 : 2u << 20;
    return (bytes + grain - 1) / grain * grain;
}

static size_t mapped_size(size_t bytes) {
    return (bytes + 4095) & ~(size_t)4095;
}

CUresult memory_allocate(CUdeviceptr *out, size_t bytes, int device, struct CUctx_st *ctx, enum allocation_kind kind,
                         size_t charged) {
    REQUIRE(bytes < (size_t)1 << 46, CUDA_ERROR_OUT_OF_MEMORY);
    if (charged > 0) {
        machine_enter(cuda.m);
        bool ok = memory_take(cuda.m, cuda.process, (uint32_t)device, charged);
        machine_unlock(cuda.m);
        REQUIRE(ok, CUDA_ERROR_OUT_OF_MEMORY);
    }
    void *at =
        mmap(NULL, mapped_size(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool ok = at != MAP_FAILED;
    if (ok) {
        cuda_lock();
        ok = allocation_add((struct allocation){.base = (uintptr_t)at,
                                                .size = bytes,
                                                .charged = charged,
                                                .kind = kind,
                                                .device = device,
                                                .ctx = ctx}) != NULL;
        cuda_unlock();
        if (!ok)
            munmap(at, mapped_size(bytes));
    }
    if (!ok) {
        if (charged > 0) {
            machine_enter(cuda.m);
            memory_give(cuda.m, cuda.process, (uint32_t)device, charged);
            machine_unlock(cuda.m);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

static void give_back(const struct allocation *a) {
    if (a->charged == 0 || a->device < 0)
        return;
    machine_enter(cuda.m);
    memory_give(cuda.m, cuda.process, (uint32_t)a->device, a->charged);
    machine_unlock(cuda.m);
}

CUresult memory_release(CUdeviceptr at) {
    cuda_lock();
    struct allocation *found = allocation_find((uintptr_t)at);
    if (found == NULL || found->base != (uintptr_t)at) {
        cuda_unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct allocation a = *found;
    allocation_remove(found);
    export_drop(a.id);
    cuda_unlock();
    munmap((void *)a.base, mapped_size(a.size));
    give_back(&a);
    return CUDA_SUCCESS;
}

void memory_drop_context(struct CUctx_st *ctx) { /* under our lock */
    for (size_t i = 0; i < cuda.allocation_count;) {
        struct allocation a = cuda.allocations[i];
        bool its = a.ctx == ctx || (a.ctx != NULL && a.ctx->owner == ctx);
        if (!its || a.kind == ALLOCATION_POOL || a.kind == ALLOCATION_RESERVED || a.kind == ALLOCATION_REGISTERED) {
            i++;
            continue;
        }
        allocation_remove(&cuda.allocations[i]);
        export_drop(a.id);
        munmap((void *)a.base, mapped_size(a.size));
        give_back(&a);
    }
}

static CUresult device_alloc(CUdeviceptr *out, size_t bytes) {
    REQUIRE(out != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CUresult rc = capture_forbids();
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return memory_allocate(out, bytes, ctx->device, ctx, ALLOCATION_DEVICE, charge_of(bytes));
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    ENTER(cuMemAlloc_v2);
    return device_alloc(out, bytes);
}

static CUresult pitch_alloc(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    REQUIRE(out != NULL && pitch != NULL && width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    size_t bytes;
    REQUIRE(!__builtin_add_overflow(width, 511, pitch), CUDA_ERROR_OUT_OF_MEMORY);
    *pitch &= ~(size_t)511;
    REQUIRE(!__builtin_mul_overflow(*pitch, height, &bytes), CUDA_ERROR_OUT_OF_MEMORY);
    return device_alloc(out, bytes);
}

CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
                                    unsigned int element) {
    ENTER(cuMemAllocPitch_v2);
    return pitch_alloc(out, pitch, width, height, element);
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
    ENTER(cuMemAllocManaged);
    REQUIRE(out != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    /* Resident on the card as far as there is room, else on the host: managed memory may exceed the card. */
    CUresult rc = memory_allocate(out, bytes, ctx->device, ctx, ALLOCATION_MANAGED, charge_of(bytes));
    if (rc == CUDA_ERROR_OUT_OF_MEMORY)
        rc = memory_allocate(out, bytes, ctx->device, ctx, ALLOCATION_MANAGED, 0);
    return rc;
}

static CUresult device_free(CUdeviceptr at) {
    if (at == 0)
        return CUDA_SUCCESS;
    CUresult forbidden = capture_forbids();
    REQUIRE(forbidden == CUDA_SUCCESS, forbidden);
    cuda_lock();
    struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->base == (uintptr_t)at && a->kind != ALLOCATION_HOST &&
                a->kind != ALLOCATION_REGISTERED && a->kind != ALLOCATION_RESERVED && a->kind != ALLOCATION_ARRAY &&
                a->kind != ALLOCATION_CODE && (a->kind != ALLOCATION_IMPORTED || a->flags == 0);
    enum allocation_kind kind = ours ? a->kind : ALLOCATION_DEVICE;
    struct CUctx_st *ctx = ours ? a->ctx : NULL;
    cuda_unlock();
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    if (context_valid(ctx) && cuda.capturing == 0)
        wait_context(ctx); /* a free waits for the work that may use the memory */
    if (kind == ALLOCATION_POOL)
        return pool_free(at);
    return memory_release(at);
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr at) {
    ENTER(cuMemFree_v2);
    return device_free(at);
}

static CUresult info(size_t *free_bytes, size_t *total) {
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(free_bytes != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    machine_enter(cuda.m);
    process_reap(cuda.m, false);
    *free_bytes = memory_free(cuda.m, (uint32_t)ctx->device);
    machine_unlock(cuda.m);
    *total = cuda.m->device[ctx->device].memory - cuda.m->device[ctx->device].reserved;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(cuMemGetInfo_v2);
    return info(free_bytes, total);
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    ENTER(cuMemGetAddressRange_v2);
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    if (a != NULL) {
        if (base != NULL)
            *base = (CUdeviceptr)a->base;
        if (size != NULL)
            *size = a->size;
    }
    cuda_unlock();
    return a != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* --- host memory ------------------------------------------------------------------------------------------------ */

static CUresult host_alloc(void **out, size_t bytes, unsigned flags) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    if (bytes == 0) {
        *out = NULL;
        return CUDA_SUCCESS;
    }
    CUdeviceptr at;
    CUresult rc = memory_allocate(&at, bytes, -1, current_context(), ALLOCATION_HOST, 0);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    cuda_lock();
    allocation_find((uintptr_t)at)->flags = flags;
    cuda_unlock();
    *out = (void *)(uintptr_t)at;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocHost_v2(void **out, size_t bytes) {
    ENTER(cuMemAllocHost_v2);
    return host_alloc(out, bytes, 0);
}

CUresult CUDAAPI cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
    ENTER(cuMemHostAlloc);
    return host_alloc(out, bytes, flags);
}

CUresult CUDAAPI cuMemFreeHost(void *at) {
    ENTER(cuMemFreeHost);
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->base == (uintptr_t)at && a->kind == ALLOCATION_HOST;
    cuda_unlock();
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    return memory_release((CUdeviceptr)(uintptr_t)at);
}

CUresult CUDAAPI cuMemHostRegister_v2(void *at, size_t bytes, unsigned int flags) {
    ENTER(cuMemHostRegister_v2);
    REQUIRE(at != NULL && bytes > 0 && bytes <= UINTPTR_MAX - (uintptr_t)at, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    cuda_lock();
    bool taken = allocation_find((uintptr_t)at) != NULL;
    bool ok = !taken && allocation_add((struct allocation){.base = (uintptr_t)at,
                                                           .size = bytes,
                                                           .kind = ALLOCATION_REGISTERED,
                                                           .device = -1,
                                                           .ctx = current_context(),
                                                           .flags = flags}) != NULL;
    cuda_unlock();
    return taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemHostUnregister(void *at) {
    ENTER(cuMemHostUnregister);
    cuda_lock();
    struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->base == (uintptr_t)at && a->kind == ALLOCATION_REGISTERED;
    if (ours)
        allocation_remove(a);
    cuda_unlock();
    return ours ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned int flags) {
    ENTER(cuMemHostGetDevicePointer_v2);
    REQUIRE(out != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    bool known = allocation_find((uintptr_t)at) != NULL;
    cuda_unlock();
    REQUIRE(known, CUDA_ERROR_INVALID_VALUE);
    *out = (CUdeviceptr)(uintptr_t)at; /* one address space */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned int *flags, void *at) {
    ENTER(cuMemHostGetFlags);
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->device < 0;
    if (ours && flags != NULL)
        *flags = a->flags;
    cuda_unlock();
    REQUIRE(ours && flags != NULL, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

/* --- pointer attributes ----------------------------------------------------------------------------------------- */

static CUresult pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr at) {
    REQUIRE(data != NULL, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    const struct allocation *found = allocation_find((uintptr_t)at);
    struct allocation a = found != NULL ? *found : (struct allocation){0};
    size_t left;
    if (found != NULL && a.kind == ALLOCATION_RESERVED)
        virtual_device((uintptr_t)at, &a.device, &left);
    cuda_unlock();
    REQUIRE(found != NULL, CUDA_ERROR_INVALID_VALUE);
    bool host = a.device < 0;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = a.ctx;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = at;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        REQUIRE(host || a.kind == ALLOCATION_MANAGED, CUDA_ERROR_INVALID_VALUE);
        *(void **)data = (void *)(uintptr_t)at;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = a.id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = a.kind == ALLOCATION_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = host ? (context_valid(a.ctx) ? ordinal_of(a.ctx->device) : -2) : ordinal_of(a.device);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = (CUdeviceptr)a.base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = a.size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = a.pool;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at) {
    ENTER(cuPointerGetAttribute);
    return pointer_attribute(data, attribute, at);
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                        CUdeviceptr at) {
    ENTER(cuPointerGetAttributes);
    REQUIRE(attributes != NULL && data != NULL, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        CUresult rc = pointer_attribute(data[i], attributes[i], at);
        if (rc == CUDA_ERROR_INVALID_VALUE && data[i] != NULL) /* no pointer of ours: zeros, as the driver answers */
            memset(data[i], 0,
                   attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                           attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED ||
                           attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
                       ? 4
                       : 8);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr at) {
    ENTER(cuPointerSetAttribute);
    (void)value;
    (void)at;
    return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
