/*
 * Memory between processes. The card's memory stays with the process that made it; who imports it sees the same bytes
 * and takes nothing of the card. An exported allocation moves into an anonymous file on export, its bytes with it, and
 * importers open that through the exporter's descriptor.
 *
 * Physical memory (cuMemCreate) travels as a descriptor that says what it is; its bytes belong to each mapping, as
 * everywhere in this driver. Importing needs the exporter alive, which the real driver does not ask.
 */
#define _GNU_SOURCE
#include "share.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define TICKET_MARK 0x504d53484152450aull

struct ticket { /* no longer than an IPC handle or a pool's export data */
    uint64_t mark;
    int32_t pid, fd;
    uint64_t size;
    int32_t device;
    uint32_t kind;
    uint64_t file; /* which file the descriptor is of: its number is given again once the memory is freed */
};

_Static_assert(sizeof(struct ticket) <= CU_IPC_HANDLE_SIZE, "an IPC handle holds a ticket");
_Static_assert(sizeof(CUmemPoolPtrExportData) == CU_IPC_HANDLE_SIZE, "and so do export data");

static size_t whole_pages(size_t bytes) {
    return (bytes + 4095) & ~(size_t)4095;
}

/* Exported once, an allocation keeps its descriptor until it is freed. */
static struct exported {
    uint64_t id, file;
    int fd;
    struct exported *next;
} *exports; /* under our lock */

void export_drop(uint64_t id) {
    for (struct exported **link = &exports; *link != NULL; link = &(*link)->next) {
        struct exported *e = *link;
        if (e->id != id)
            continue;
        *link = e->next;
        close(e->fd);
        free(e);
        return;
    }
}

static const struct exported *export_of(const struct allocation *a) { /* under our lock; NULL when it cannot be */
    for (struct exported *e = exports; e != NULL; e = e->next)
        if (e->id == a->id)
            return e;
    size_t size = whole_pages(a->size), kept = size < BACKING_BYTES ? size : BACKING_BYTES;
    int fd = memfd_create("poolmeter-sim", MFD_CLOEXEC);
    struct exported *e = calloc(1, sizeof *e);
    struct stat about;
    bool ok = fd >= 0 && e != NULL && ftruncate(fd, (off_t)size) == 0 && fstat(fd, &about) == 0;
    for (size_t done = 0; ok && done < kept;) {
        ssize_t n = pwrite(fd, (const char *)a->base + done, kept - done, (off_t)done);
        ok = n > 0;
        done += ok ? (size_t)n : 0;
    }
    if (!ok || mmap((void *)a->base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        if (fd >= 0)
            close(fd);
        free(e);
        return NULL;
    }
    *e = (struct exported){a->id, about.st_ino, fd, exports};
    exports = e;
    return e;
}

static CUresult give_ticket(void *out, CUdeviceptr at, bool pooled) {
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    struct ticket ticket;
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool ok = a != NULL && (pooled ? a->kind == ALLOCATION_POOL : a->kind == ALLOCATION_DEVICE);
    const struct exported *e = ok ? export_of(a) : NULL;
    if (e != NULL)
        ticket = (struct ticket){TICKET_MARK, (int32_t)getpid(), e->fd, a->size, a->device, pooled, e->file};
    cuda_unlock();
    REQUIRE(ok, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(e != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    memset(out, 0, CU_IPC_HANDLE_SIZE);
    memcpy(out, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

static CUresult open_ticket(const struct ticket *ticket, struct CUmemPoolHandle_st *pool, unsigned flags,
                            CUdeviceptr *out) {
    REQUIRE(ticket->mark == TICKET_MARK, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(ticket->pid != getpid(), CUDA_ERROR_INVALID_CONTEXT); /* not by the process that exported it */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket->pid, ticket->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0, CUDA_ERROR_INVALID_VALUE);
    struct stat about;
    bool same = fstat(fd, &about) == 0 && about.st_ino == ticket->file;
    size_t size = whole_pages(ticket->size);
    void *at = same ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    REQUIRE(same, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(at != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
    cuda_lock();
    struct allocation *a = allocation_add((struct allocation){.base = (uintptr_t)at,
                                                              .size = ticket->size,
                                                              .kind = ALLOCATION_IMPORTED,
                                                              .device = ticket->device,
                                                              .ctx = current_context(),
                                                              .pool = pool,
                                                              .flags = flags});
    cuda_unlock();
    if (a == NULL) {
        munmap(at, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUdeviceptr)(uintptr_t)at;
    return CUDA_SUCCESS;
}

/* --- IPC -------------------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr at) {
    ENTER(cuIpcGetMemHandle);
    return give_ticket(out, at, false);
}

static CUresult open_handle(CUdeviceptr *out, const CUipcMemHandle *handle, unsigned flags) {
    struct ticket ticket;
    REQUIRE(out != NULL && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    memcpy(&ticket, handle, sizeof ticket);
    return open_ticket(&ticket, NULL, 1, out);
}

CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    ENTER(cuIpcOpenMemHandle_v2);
    return open_handle(out, &handle, flags);
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    ENTER(cuIpcOpenMemHandle);
    return open_handle(out, &handle, flags);
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr at) {
    ENTER(cuIpcCloseMemHandle);
    cuda_lock();
    const struct allocation *a = allocation_find((uintptr_t)at);
    bool ours = a != NULL && a->base == (uintptr_t)at && a->kind == ALLOCATION_IMPORTED && a->flags == 1;
    cuda_unlock();
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    return memory_release(at);
}

/* --- descriptors of physical memory and of pools ------------------------------------------------------------------ */

static CUresult say(void *os_handle, CUmemAllocationHandleType type, struct ticket ticket) {
    REQUIRE(os_handle != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    int fd = memfd_create("poolmeter-sim", MFD_CLOEXEC);
    if (fd < 0 || pwrite(fd, &ticket, sizeof ticket, 0) != (ssize_t)sizeof ticket) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *(int *)os_handle = fd;
    return CUDA_SUCCESS;
}

/* A descriptor is handed in as a pointer's value. */
static CUresult hear(void *os_handle, CUmemAllocationHandleType type, uint32_t kind, struct ticket *ticket) {
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(pread((int)(intptr_t)os_handle, ticket, sizeof *ticket, 0) == (ssize_t)sizeof *ticket,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(ticket->mark == TICKET_MARK && ticket->kind == kind, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

enum { KIND_PHYSICAL = 2, KIND_POOL = 3 };

CUresult CUDAAPI cuMemExportToShareableHandle(void *os_handle, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(cuMemExportToShareableHandle);
    int device;
    size_t bytes;
    REQUIRE(flags == 0 && physical_about(handle, &device, &bytes), CUDA_ERROR_INVALID_VALUE);
    return say(os_handle, type, (struct ticket){TICKET_MARK, (int32_t)getpid(), -1, bytes, device, KIND_PHYSICAL, 0});
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle,
                                                CUmemAllocationHandleType type) {
    ENTER(cuMemImportFromShareableHandle);
    struct ticket ticket;
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = hear(os_handle, type, KIND_PHYSICAL, &ticket);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return physical_import(out, ticket.device, ticket.size);
}

CUresult CUDAAPI cuMemPoolExportToShareableHandle(void *os_handle, CUmemoryPool pool, CUmemAllocationHandleType type,
                                                  unsigned long long flags) {
    ENTER(cuMemPoolExportToShareableHandle);
    REQUIRE(flags == 0 && pool != NULL && pool->magic == MAGIC_POOL && !pool->is_default, CUDA_ERROR_INVALID_VALUE);
    return say(os_handle, type, (struct ticket){TICKET_MARK, (int32_t)getpid(), -1, 0, pool->device, KIND_POOL, 0});
}

CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *os_handle, CUmemAllocationHandleType type,
                                                    unsigned long long flags) {
    ENTER(cuMemPoolImportFromShareableHandle);
    struct ticket ticket;
    REQUIRE(out != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    CUresult rc = hear(os_handle, type, KIND_POOL, &ticket);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    return pool_import(out, ticket.device);
}

CUresult CUDAAPI cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr at) {
    ENTER(cuMemPoolExportPointer);
    return give_ticket(out, at, true);
}

CUresult CUDAAPI cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
    ENTER(cuMemPoolImportPointer);
    struct ticket ticket;
    REQUIRE(out != NULL && data != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(pool != NULL && pool->magic == MAGIC_POOL && pool->imported, CUDA_ERROR_INVALID_VALUE);
    memcpy(&ticket, data, sizeof ticket);
    return open_ticket(&ticket, pool, 0, out);
}

/* --- memory of other libraries, by the descriptors above ---------------------------------------------------------- */

struct CUextMemory_st {
    uint32_t magic;
    int device;
    size_t bytes;
};

CUresult CUDAAPI cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *of) {
    ENTER(cuImportExternalMemory);
    struct ticket ticket;
    REQUIRE(out != NULL && of != NULL && of->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    CUresult rc =
        hear((void *)(intptr_t)of->handle.fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, KIND_PHYSICAL, &ticket);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(of->size == ticket.size, CUDA_ERROR_INVALID_VALUE);
    struct CUextMemory_st *memory = calloc(1, sizeof *memory);
    REQUIRE(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *memory = (struct CUextMemory_st){MAGIC_EXTERNAL, ticket.device, ticket.size};
    close(of->handle.fd); /* the driver owns it from here on */
    *out = memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                                 const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *of) {
    ENTER(cuExternalMemoryGetMappedBuffer);
    REQUIRE(memory != NULL && memory->magic == MAGIC_EXTERNAL, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out != NULL && of != NULL && of->offset <= memory->bytes && of->size <= memory->bytes - of->offset,
            CUDA_ERROR_INVALID_VALUE);
    return memory_allocate(out, of->size, memory->device, current_context(), ALLOCATION_IMPORTED, 0);
}

CUresult CUDAAPI cuDestroyExternalMemory(CUexternalMemory memory) {
    ENTER(cuDestroyExternalMemory);
    REQUIRE(memory != NULL && memory->magic == MAGIC_EXTERNAL, CUDA_ERROR_INVALID_HANDLE);
    memory->magic = 0; /* stays allocated: a stale handle is refused, not followed */
    return CUDA_SUCCESS;
}
