/*
 * Device, managed and host memory, and copies.
 *
 * An address range is a lazily filled mapping of this process, so data really move. Only the first BACKING_BYTES of an
 * allocation are stored: 80 GB of simulated memory must not take 80 GB of the host. Copies take their time on the
 * stream; their bytes move when they are submitted.
 */
#include "state.h"

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
    cuda_unlock();
    munmap((void *)a.base, mapped_size(a.size));
    give_back(&a);
    return CUDA_SUCCESS;
}

void memory_drop_context(struct CUctx_st *ctx) { /* under our lock */
    for (size_t i = 0; i < cuda.allocation_count;) {
        struct allocation a = cuda.allocations[i];
        if (a.ctx != ctx || a.kind == ALLOCATION_POOL || a.kind == ALLOCATION_RESERVED ||
            a.kind == ALLOCATION_REGISTERED) {
            i++;
            continue;
        }
        allocation_remove(&cuda.allocations[i]);
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
    *pitch = (width + 511) & ~(size_t)511;
    return device_alloc(out, *pitch * height);
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
                a->kind != ALLOCATION_REGISTERED && a->kind != ALLOCATION_RESERVED;
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
    REQUIRE(at != NULL && bytes > 0, CUDA_ERROR_INVALID_VALUE);
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

/* --- copies ----------------------------------------------------------------------------------------------------- */

/* How many bytes from `at` on are stored, at most `bytes`; memory that is not ours is the program's and is all there.
 */
static size_t stored(uintptr_t at, size_t bytes) {
    cuda_lock();
    const struct allocation *a = allocation_find(at);
    size_t n = bytes;
    if (a != NULL && a->kind != ALLOCATION_REGISTERED) {
        size_t offset = at - a->base;
        size_t limit = a->size < BACKING_BYTES ? a->size : BACKING_BYTES;
        size_t room = offset < limit ? limit - offset : 0;
        n = bytes < room ? bytes : room;
    }
    cuda_unlock();
    return n;
}

/* The range must lie inside one allocation when it starts in one, and be mapped when it lies in a reserved range. */
static bool range_ok(uintptr_t at, size_t bytes) {
    cuda_lock();
    const struct allocation *a = allocation_find(at);
    bool ok = a == NULL || at - a->base + bytes <= a->size;
    if (ok && a != NULL && a->kind == ALLOCATION_RESERVED)
        for (size_t done = 0; ok && done < bytes;) {
            int device;
            size_t left;
            ok = virtual_device(at + done, &device, &left);
            done += left;
        }
    cuda_unlock();
    return ok;
}

static bool is_device(uintptr_t at) {
    cuda_lock();
    const struct allocation *a = allocation_find(at);
    bool device = a != NULL && a->device >= 0;
    int owner = -1;
    size_t left;
    if (a != NULL && a->kind == ALLOCATION_RESERVED && virtual_device(at, &owner, &left))
        device = owner >= 0;
    cuda_unlock();
    return device;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    size_t n = stored((uintptr_t)to, bytes);
    size_t readable = stored((uintptr_t)from, bytes);
    size_t both = n < readable ? n : readable;
    memmove(to, from, both);
    if (n > both && !is_device((uintptr_t)to))
        memset((char *)to + both, 0, n - both); /* what was never stored reads as zeros */
}

void fill_bytes(void *to, const void *pattern, size_t width, size_t count) {
    size_t n = stored((uintptr_t)to, width * count) / width;
    for (size_t i = 0; i < n; i++)
        memcpy((char *)to + i * width, pattern, width);
}

uint64_t copy_ns(int device, enum sim_copy kind, size_t bytes) {
    const struct sim_device *d = &cuda.m->device[device];
    uint64_t rate = kind == SIM_COPY_H2D ? d->h2d_bps : kind == SIM_COPY_D2H ? d->d2h_bps : d->d2d_bps;
    return rate ? (uint64_t)((unsigned __int128)bytes * 1000000000u / rate) : 0;
}

enum sim_copy copy_kind(const void *to, const void *from) {
    bool to_device = is_device((uintptr_t)to), from_device = is_device((uintptr_t)from);
    return to_device ? (from_device ? SIM_COPY_D2D : SIM_COPY_H2D) : SIM_COPY_D2H;
}

CUresult copy_submit(struct CUstream_st *s, void *to, const void *from, size_t bytes, bool wait) {
    REQUIRE(bytes == 0 || (to != NULL && from != NULL), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(range_ok((uintptr_t)to, bytes) && range_ok((uintptr_t)from, bytes), CUDA_ERROR_INVALID_VALUE);
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        struct graph_work work = {.kind = WORK_COPY, .to = to, .from = from, .bytes = bytes};
        return capture_add(s, &work);
    }
    enum sim_copy kind = copy_kind(to, from);
    copy_bytes(to, from, bytes);
    struct sim_op op = {
        .kind = SIM_OP_COPY, .copy = kind, .work_ns = copy_ns(s->ctx->device, kind, bytes), .arg = bytes};
    uint64_t target;
    CUresult rc = submit(s, op, &target, false);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return wait ? wait_stream(s, target) : CUDA_SUCCESS;
}

static CUresult copy_now(void *to, const void *from, size_t bytes) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(NULL, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return copy_submit(s, to, from, bytes, true);
}

static CUresult copy_later(void *to, const void *from, size_t bytes, CUstream handle) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return copy_submit(s, to, from, bytes, false);
}

#define AT(device_pointer) ((void *)(uintptr_t)(device_pointer))

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(cuMemcpy);
    return copy_now(AT(to), AT(from), bytes);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyAsync);
    return copy_later(AT(to), AT(from), bytes, stream);
}

CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER(cuMemcpyHtoD_v2);
    REQUIRE(bytes == 0 || is_device((uintptr_t)to), CUDA_ERROR_INVALID_VALUE);
    return copy_now(AT(to), from, bytes);
}

CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyHtoDAsync_v2);
    REQUIRE(bytes == 0 || is_device((uintptr_t)to), CUDA_ERROR_INVALID_VALUE);
    return copy_later(AT(to), from, bytes, stream);
}

CUresult CUDAAPI cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    ENTER(cuMemcpyDtoH_v2);
    REQUIRE(bytes == 0 || is_device((uintptr_t)from), CUDA_ERROR_INVALID_VALUE);
    return copy_now(to, AT(from), bytes);
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoHAsync_v2);
    REQUIRE(bytes == 0 || is_device((uintptr_t)from), CUDA_ERROR_INVALID_VALUE);
    return copy_later(to, AT(from), bytes, stream);
}

CUresult CUDAAPI cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(cuMemcpyDtoD_v2);
    REQUIRE(bytes == 0 || (is_device((uintptr_t)from) && is_device((uintptr_t)to)), CUDA_ERROR_INVALID_VALUE);
    return copy_now(AT(to), AT(from), bytes);
}

CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoDAsync_v2);
    REQUIRE(bytes == 0 || (is_device((uintptr_t)from) && is_device((uintptr_t)to)), CUDA_ERROR_INVALID_VALUE);
    return copy_later(AT(to), AT(from), bytes, stream);
}

CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes) {
    ENTER(cuMemcpyPeer);
    REQUIRE(context_valid(to_ctx) && context_valid(from_ctx), CUDA_ERROR_INVALID_CONTEXT);
    return copy_now(AT(to), AT(from), bytes);
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes,
                                   CUstream stream) {
    ENTER(cuMemcpyPeerAsync);
    REQUIRE(context_valid(to_ctx) && context_valid(from_ctx), CUDA_ERROR_INVALID_CONTEXT);
    return copy_later(AT(to), AT(from), bytes, stream);
}

/* --- pitched copies: every row moves on its own, the time is that of all bytes ----------------------------------- */

struct side {
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    size_t pitch, height, x, y, z;
};

static CUresult side_start(const struct side *s, char **out) {
    REQUIRE(s->type != CU_MEMORYTYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED); /* arrays have no bytes here */
    char *base = s->type == CU_MEMORYTYPE_HOST ? (char *)(uintptr_t)s->host : (char *)AT(s->device);
    *out = base + (s->z * s->height + s->y) * s->pitch + s->x;
    return CUDA_SUCCESS;
}

static CUresult copy_box(const struct side *from, const struct side *to, size_t width, size_t height, size_t depth,
                         CUstream handle, bool wait) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    char *source, *target;
    rc = side_start(from, &source);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    rc = side_start(to, &target);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (width == 0 || height == 0 || depth == 0)
        return CUDA_SUCCESS;
    REQUIRE((height == 1 && depth == 1) || (from->pitch >= width && to->pitch >= width), CUDA_ERROR_INVALID_VALUE);
    size_t bytes = width * height * depth;
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        REQUIRE((from->pitch == width && to->pitch == width) || (height == 1 && depth == 1), CUDA_ERROR_NOT_SUPPORTED);
        struct graph_work work = {.kind = WORK_COPY, .to = target, .from = source, .bytes = bytes};
        return capture_add(s, &work);
    }
    for (size_t z = 0; z < depth; z++)
        for (size_t y = 0; y < height; y++) {
            char *f = source + (z * from->height + y) * from->pitch, *t = target + (z * to->height + y) * to->pitch;
            REQUIRE(range_ok((uintptr_t)f, width) && range_ok((uintptr_t)t, width), CUDA_ERROR_INVALID_VALUE);
            copy_bytes(t, f, width);
        }
    enum sim_copy kind = copy_kind(target, source);
    struct sim_op op = {
        .kind = SIM_OP_COPY, .copy = kind, .work_ns = copy_ns(s->ctx->device, kind, bytes), .arg = bytes};
    uint64_t mark;
    rc = submit(s, op, &mark, false);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return wait ? wait_stream(s, mark) : CUDA_SUCCESS;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct side from = {p->srcMemoryType, p->srcHost, p->srcDevice, p->srcPitch, 0, p->srcXInBytes, p->srcY, 0};
    struct side to = {p->dstMemoryType, p->dstHost, p->dstDevice, p->dstPitch, 0, p->dstXInBytes, p->dstY, 0};
    return copy_box(&from, &to, p->WidthInBytes, p->Height, 1, stream, wait);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *p, CUstream stream, bool wait) {
    REQUIRE(p != NULL, CUDA_ERROR_INVALID_VALUE);
    struct side from = {p->srcMemoryType, p->srcHost,     p->srcDevice, p->srcPitch,
                        p->srcHeight,     p->srcXInBytes, p->srcY,      p->srcZ};
    struct side to = {p->dstMemoryType, p->dstHost,     p->dstDevice, p->dstPitch,
                      p->dstHeight,     p->dstXInBytes, p->dstY,      p->dstZ};
    return copy_box(&from, &to, p->WidthInBytes, p->Height, p->Depth, stream, wait);
}

CUresult CUDAAPI cuMemcpy2D_v2(const CUDA_MEMCPY2D *p) {
    ENTER(cuMemcpy2D_v2);
    return copy_2d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) {
    ENTER(cuMemcpy2DUnaligned_v2);
    return copy_2d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream stream) {
    ENTER(cuMemcpy2DAsync_v2);
    return copy_2d(p, stream, false);
}

CUresult CUDAAPI cuMemcpy3D_v2(const CUDA_MEMCPY3D *p) {
    ENTER(cuMemcpy3D_v2);
    return copy_3d(p, NULL, true);
}

CUresult CUDAAPI cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream stream) {
    ENTER(cuMemcpy3DAsync_v2);
    return copy_3d(p, stream, false);
}

/* --- memsets ---------------------------------------------------------------------------------------------------- */

static CUresult set_submit(CUstream handle, CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t columns,
                           size_t rows, bool wait) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    size_t row = columns * width;
    size_t bytes = rows > 1 ? pitch * (rows - 1) + row : row;
    REQUIRE(bytes == 0 || (is_device((uintptr_t)to) && range_ok((uintptr_t)to, bytes)), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(to % width == 0, CUDA_ERROR_INVALID_VALUE);
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        struct graph_work work = {.kind = WORK_SET,
                                  .set = {.dst = to,
                                          .pitch = pitch,
                                          .value = value,
                                          .elementSize = (unsigned)width,
                                          .width = columns,
                                          .height = rows}};
        return capture_add(s, &work);
    }
    for (size_t r = 0; r < rows; r++)
        fill_bytes((char *)AT(to) + r * pitch, &value, width, columns);
    struct sim_op op = {.kind = SIM_OP_COPY,
                        .copy = SIM_COPY_SET,
                        .work_ns = copy_ns(s->ctx->device, SIM_COPY_D2D, row * rows),
                        .arg = row * rows};
    uint64_t target;
    rc = submit(s, op, &target, false);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    (void)wait; /* a memset of device memory does not wait for its end */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n) {
    ENTER(cuMemsetD8_v2);
    return set_submit(NULL, to, 0, value, 1, n, 1, true);
}

CUresult CUDAAPI cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t n) {
    ENTER(cuMemsetD16_v2);
    return set_submit(NULL, to, 0, value, 2, n, 1, true);
}

CUresult CUDAAPI cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t n) {
    ENTER(cuMemsetD32_v2);
    return set_submit(NULL, to, 0, value, 4, n, 1, true);
}

CUresult CUDAAPI cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
    ENTER(cuMemsetD2D8_v2);
    return set_submit(NULL, to, pitch, value, 1, width, height, true);
}

CUresult CUDAAPI cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
    ENTER(cuMemsetD2D16_v2);
    return set_submit(NULL, to, pitch, value, 2, width, height, true);
}

CUresult CUDAAPI cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
    ENTER(cuMemsetD2D32_v2);
    return set_submit(NULL, to, pitch, value, 4, width, height, true);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    ENTER(cuMemsetD8Async);
    return set_submit(stream, to, 0, value, 1, n, 1, false);
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
    ENTER(cuMemsetD16Async);
    return set_submit(stream, to, 0, value, 2, n, 1, false);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream) {
    ENTER(cuMemsetD32Async);
    return set_submit(stream, to, 0, value, 4, n, 1, false);
}

CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                   CUstream stream) {
    ENTER(cuMemsetD2D8Async);
    return set_submit(stream, to, pitch, value, 1, width, height, false);
}

CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                    CUstream stream) {
    ENTER(cuMemsetD2D16Async);
    return set_submit(stream, to, pitch, value, 2, width, height, false);
}

CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                    CUstream stream) {
    ENTER(cuMemsetD2D32Async);
    return set_submit(stream, to, pitch, value, 4, width, height, false);
}

/* --- advice, which changes nothing here ------------------------------------------------------------------------- */

CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr at, size_t bytes, CUmem_advise advice, CUmemLocation location) {
    ENTER(cuMemAdvise_v2);
    (void)advice;
    (void)location;
    return range_ok((uintptr_t)at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemPrefetchAsync_v2(CUdeviceptr at, size_t bytes, CUmemLocation location, unsigned int flags,
                                       CUstream stream) {
    ENTER(cuMemPrefetchAsync_v2);
    (void)location;
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(stream, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return range_ok((uintptr_t)at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
