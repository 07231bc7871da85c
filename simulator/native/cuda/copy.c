/* Copies, memsets, advice. Bytes move when a copy is submitted; only the stored part of an allocation has any. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

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

/* The range must lie inside one allocation when it starts in one, and be mapped when it lies in a reserved range. No
 * range goes past the last address. */
bool memory_range_ok(uintptr_t at, size_t bytes) {
    cuda_lock();
    const struct allocation *a = allocation_find(at);
    bool ok = bytes <= (a != NULL ? a->size - (at - a->base) : UINTPTR_MAX - at);
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

static uint64_t copy_ns(int device, enum sim_copy kind, size_t bytes) {
    const struct sim_device *d = &cuda.m->device[device];
    uint64_t rate = kind == SIM_COPY_H2D ? d->h2d_bps : kind == SIM_COPY_D2H ? d->d2h_bps : d->d2d_bps;
    return rate ? (uint64_t)((unsigned __int128)bytes * 1000000000u / rate) : 0;
}

struct sim_op copy_op(int device, enum sim_copy kind, size_t bytes) {
    return (struct sim_op){.kind = SIM_OP_COPY, .copy = kind, .work_ns = copy_ns(device, kind, bytes), .arg = bytes};
}

/* At the bandwidth of copies within the card: what limits both is the card's memory. */
struct sim_op fill_op(int device, size_t bytes) {
    return (struct sim_op){.kind = SIM_OP_FILL,
                           .copy = SIM_COPY_SET,
                           .work_ns = copy_ns(device, SIM_COPY_SET, bytes),
                           .arg = bytes,
                           .width_ppm = 1000000,
                           .event = 1000000};
}

enum sim_copy copy_kind(const void *to, const void *from) {
    bool to_device = is_device((uintptr_t)to), from_device = is_device((uintptr_t)from);
    return to_device ? (from_device ? SIM_COPY_D2D : SIM_COPY_H2D) : SIM_COPY_D2H;
}

CUresult copy_submit(struct CUstream_st *s, void *to, const void *from, size_t bytes, bool wait) {
    REQUIRE(bytes == 0 || (to != NULL && from != NULL), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_range_ok((uintptr_t)to, bytes) && memory_range_ok((uintptr_t)from, bytes), CUDA_ERROR_INVALID_VALUE);
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        struct graph_work work = {.kind = WORK_COPY, .to = to, .from = from, .bytes = bytes};
        return capture_add(s, &work);
    }
    enum sim_copy kind = copy_kind(to, from);
    copy_bytes(to, from, bytes);
    uint64_t target;
    CUresult rc = submit(s, copy_op(s->ctx->device, kind, bytes), &target, false);
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

/* --- memsets ---------------------------------------------------------------------------------------------------- */

bool set_range_ok(const CUDA_MEMSET_NODE_PARAMS *p) {
    size_t row, bytes;
    return !__builtin_mul_overflow(p->width, p->elementSize, &row) &&
           !__builtin_mul_overflow(p->pitch, p->height > 1 ? p->height - 1 : 0, &bytes) &&
           !__builtin_add_overflow(bytes, row, &bytes) &&
           (bytes == 0 || (is_device((uintptr_t)p->dst) && memory_range_ok((uintptr_t)p->dst, bytes)));
}

static CUresult set_submit(CUstream handle, CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t columns,
                           size_t rows, bool wait) {
    struct CUstream_st *s;
    CUresult rc = stream_resolve(handle, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    const CUDA_MEMSET_NODE_PARAMS set = {
        .dst = to, .pitch = pitch, .value = value, .elementSize = (unsigned)width, .width = columns, .height = rows};
    REQUIRE(set_range_ok(&set) && to % width == 0, CUDA_ERROR_INVALID_VALUE);
    if (capture_active(s)) {
        REQUIRE(!wait, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        struct graph_work work = {.kind = WORK_SET, .set = set};
        return capture_add(s, &work);
    }
    for (size_t r = 0; r < rows; r++)
        fill_bytes((char *)AT(to) + r * pitch, &value, width, columns);
    (void)wait; /* a memset of device memory does not wait for its end */
    return submit(s, fill_op(s->ctx->device, columns * width * rows), NULL, false);
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
    return memory_range_ok((uintptr_t)at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemPrefetchAsync_v2(CUdeviceptr at, size_t bytes, CUmemLocation location, unsigned int flags,
                                       CUstream stream) {
    ENTER(cuMemPrefetchAsync_v2);
    (void)location;
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(stream, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return memory_range_ok((uintptr_t)at, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
