/* Process state, initialisation, forks, devices. */
#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct cuda_state cuda = {.lock = PTHREAD_MUTEX_INITIALIZER};
__thread struct thread_state thread_state;

static pthread_once_t mapped_once = PTHREAD_ONCE_INIT;
static pthread_key_t leave_key;

static void leave_at_exit(void *unused) {
    (void)unused;
    if (cuda.m != NULL)
        machine_leave(cuda.m);
}

static void in_child(void) {
    pthread_mutex_init(&cuda.lock, NULL);
    machine_forget_thread();
    thread_state.joined = false;
    if (cuda.initialised) {
        cuda.child_of_user = true;
        cuda.initialised = false;
    }
}

static void before_fork(void) {
    pthread_mutex_lock(&cuda.lock);
}
static void in_parent(void) {
    pthread_mutex_unlock(&cuda.lock);
}

static void map_machine(void) {
    pthread_key_create(&leave_key, leave_at_exit);
    pthread_atfork(before_fork, in_parent, in_child);
    const char *path = getenv(SIM_ENV);
    if (path == NULL || path[0] == 0) {
        fprintf(stderr, "poolmeter simulator: libcuda finds no machine: the variable " SIM_ENV " is not set\n");
        return;
    }
    char error[512];
    cuda.m = machine_map(path, false, error, sizeof error);
    if (cuda.m == NULL)
        fprintf(stderr, "poolmeter simulator: %s\n", error);
}

static struct sim_machine *the_machine(void) {
    if (__builtin_expect(cuda.m == NULL, 0))
        pthread_once(&mapped_once, map_machine);
    return cuda.m;
}

static int enter(uint32_t call, bool needs_init, int device) {
    struct sim_machine *m = the_machine();
    if (m != NULL) {
        int code = machine_call(m, call, device);
        if (code != 0)
            return code;
    }
    if (!needs_init)
        return 0;
    if (__builtin_expect(!cuda.initialised, 0))
        return CUDA_ERROR_NOT_INITIALIZED;
    __atomic_store_n(&m->process[cuda.process].seen_ns, machine_now(m), __ATOMIC_RELAXED);
    if (__builtin_expect(m->clock == SIM_CLOCK_VIRTUAL && !thread_state.joined, 0)) {
        thread_state.joined = true;
        pthread_setspecific(leave_key, (void *)1);
        machine_join(m, cuda.process);
    }
    if (device >= 0 && __builtin_expect(m->device[device].lost, 0))
        return CUDA_ERROR_UNKNOWN;
    return 0;
}

int sim_enter(uint32_t call, bool needs_init) {
    if (thread_state.per_thread_default > 0)
        return 0; /* counted by the per-thread variant that runs this */
    const struct CUctx_st *ctx = current_context();
    return enter(call, needs_init, ctx != NULL ? ctx->device : -1);
}

int sim_enter_device(uint32_t call, CUdevice dev) {
    int device = dev >= 0 && dev < cuda.visible_count ? cuda.visible[dev] : -1;
    return enter(call, true, device);
}

CUresult sim_unimplemented(uint32_t call, const char *name) {
    struct sim_machine *m = the_machine();
    if (m != NULL) {
        __atomic_fetch_add(&m->calls[call], 1, __ATOMIC_RELAXED);
        m->unimplemented[call] = 1;
    }
    fprintf(
        stderr,
        "poolmeter simulator: %s is not implemented by the simulated libcuda; it returns CUDA_ERROR_NOT_SUPPORTED\n",
        name);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* --- visible devices -------------------------------------------------------------------------------------------- */

/* CUDA_VISIBLE_DEVICES: ordinals or UUID prefixes; the list ends at the first entry that names no card, or one twice.
 */
static void read_visible(void) {
    const struct sim_machine *m = cuda.m;
    cuda.visible_count = 0;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (list == NULL) {
        for (uint32_t d = 0; d < m->devices; d++)
            cuda.visible[cuda.visible_count++] = (int)d;
        return;
    }
    char copy[4096];
    snprintf(copy, sizeof copy, "%s", list);
    char *save = NULL;
    for (char *item = strtok_r(copy, ",", &save); item != NULL; item = strtok_r(NULL, ",", &save)) {
        while (*item == ' ')
            item++;
        int found = -1;
        if (strncmp(item, "GPU-", 4) == 0) {
            size_t length = strcspn(item, " ");
            int matches = 0;
            for (uint32_t d = 0; d < m->devices; d++)
                if (strncasecmp(m->device[d].uuid, item, length) == 0) {
                    found = (int)d;
                    matches++;
                }
            if (matches != 1)
                found = -1;
        } else {
            char *end = NULL;
            long index = strtol(item, &end, 10);
            if (end != item && index >= 0 && index < (long)m->devices)
                found = (int)index;
        }
        bool twice = false;
        for (int i = 0; i < cuda.visible_count; i++)
            twice |= cuda.visible[i] == found;
        if (found < 0 || cuda.visible_count == SIM_MAX_DEVICES)
            return;
        if (twice) {
            cuda.visible_count = 0;
            return;
        }
        cuda.visible[cuda.visible_count++] = found;
    }
}

bool device_of(CUdevice ordinal, int *device) {
    if (ordinal < 0 || ordinal >= cuda.visible_count)
        return false;
    *device = cuda.visible[ordinal];
    return true;
}

int ordinal_of(int device) {
    for (int i = 0; i < cuda.visible_count; i++)
        if (cuda.visible[i] == device)
            return i;
    return -1;
}

/* --- initialisation --------------------------------------------------------------------------------------------- */

static void at_exit(void) {
    if (!cuda.initialised || cuda.child_of_user || cuda.pid != getpid())
        return;
    /* No lock of ours is taken: another thread may hold it for good at this point. */
    struct sim_machine *m = cuda.m;
    machine_leave(m);
    machine_enter(m);
    process_detach(m, cuda.process, false);
    machine_unlock(m);
    cuda.initialised = false;
}

__attribute__((destructor)) static void unload(void) {
    at_exit();
}

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (cuda.child_of_user)
        return CUDA_ERROR_NOT_INITIALIZED;
    ENTER_EARLY(cuInit);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(the_machine() != NULL, CUDA_ERROR_NO_DEVICE);
    cuda_lock();
    if (cuda.initialised) {
        cuda_unlock();
        return CUDA_SUCCESS;
    }
    read_visible();
    if (cuda.visible_count == 0) {
        cuda_unlock();
        return CUDA_ERROR_NO_DEVICE;
    }
    machine_enter(cuda.m);
    cuda.process = process_attach(cuda.m, (uint32_t)getpid());
    machine_unlock(cuda.m);
    if (cuda.process == SIM_NONE) {
        cuda_unlock();
        fprintf(stderr, "poolmeter simulator: the machine holds %d processes and has no room for another\n",
                SIM_MAX_PROCESSES);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    cuda.pid = getpid();
    cuda.initialised = true;
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    ENTER_EARLY(cuDriverGetVersion);
    REQUIRE(version != NULL, CUDA_ERROR_INVALID_VALUE);
    *version = cuda.m != NULL ? (int)cuda.m->cuda_version : 13000;
    return CUDA_SUCCESS;
}

/* --- clock for programs that live on simulated time -------------------------------------------------------------- */

__attribute__((visibility("default"))) uint64_t poolmeter_sim_now_ns(void);
__attribute__((visibility("default"))) void poolmeter_sim_sleep_until_ns(uint64_t ns);
__attribute__((visibility("default"))) void poolmeter_sim_leave(void);

/* CLOCK_MONOTONIC on the real clock, so that its readings compare with anybody's; else the same origin plus virtual
 * time. */
uint64_t poolmeter_sim_now_ns(void) {
    const struct sim_machine *m = the_machine();
    if (m == NULL) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    }
    return m->base_ns + machine_now(m);
}

void poolmeter_sim_sleep_until_ns(uint64_t ns) {
    struct sim_machine *m = the_machine();
    if (m == NULL || ns <= m->base_ns)
        return;
    while (machine_now(m) < ns - m->base_ns)
        machine_wait(m, ns - m->base_ns);
}

/* The calling thread no longer holds up the virtual clock, until its next call into this library. */
void poolmeter_sim_leave(void) {
    if (the_machine() != NULL)
        machine_leave(cuda.m);
    thread_state.joined = false;
}

/* --- devices ---------------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuDeviceGet(CUdevice *out, int ordinal) {
    ENTER(cuDeviceGet);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    int device;
    REQUIRE(device_of(ordinal, &device), CUDA_ERROR_INVALID_DEVICE);
    *out = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    REQUIRE(count != NULL, CUDA_ERROR_INVALID_VALUE);
    *count = cuda.visible_count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetName, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(name != NULL && length > 0, CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)length, "%s", cuda.m->device[device].name);
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice dev) {
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(uuid != NULL, CUDA_ERROR_INVALID_VALUE);
    const char *text = cuda.m->device[device].uuid + 4; /* after "GPU-" */
    for (int i = 0; i < 16; i++) {
        while (*text == '-')
            text++;
        unsigned byte = 0;
        if (sscanf(text, "%2x", &byte) != 1)
            return CUDA_ERROR_UNKNOWN;
        uuid->bytes[i] = (char)byte;
        text += 2;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetUuid, dev);
    return uuid_of(uuid, dev);
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetUuid_v2, dev);
    return uuid_of(uuid, dev);
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    ENTER_DEVICE(cuDeviceTotalMem_v2, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(bytes != NULL, CUDA_ERROR_INVALID_VALUE);
    *bytes = cuda.m->device[device].memory - cuda.m->device[device].reserved;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    ENTER_DEVICE(cuDeviceTotalMem, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(bytes != NULL, CUDA_ERROR_INVALID_VALUE);
    uint64_t total = cuda.m->device[device].memory - cuda.m->device[device].reserved;
    *bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned)total;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice dev) {
    ENTER_DEVICE(cuDeviceComputeCapability, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(major != NULL && minor != NULL, CUDA_ERROR_INVALID_VALUE);
    *major = (int)cuda.m->device[device].cc_major;
    *minor = (int)cuda.m->device[device].cc_minor;
    return CUDA_SUCCESS;
}

static void bus_numbers(const struct sim_device *d, unsigned *domain, unsigned *bus, unsigned *slot) {
    *domain = *bus = *slot = 0;
    sscanf(d->bus_id, "%x:%x:%x", domain, bus, slot);
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *text, int length, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetPCIBusId, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(text != NULL && length > 0, CUDA_ERROR_INVALID_VALUE);
    unsigned domain, bus, slot;
    bus_numbers(&cuda.m->device[device], &domain, &bus, &slot);
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", domain, bus, slot);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *out, const char *text) {
    ENTER(cuDeviceGetByPCIBusId);
    REQUIRE(out != NULL && text != NULL, CUDA_ERROR_INVALID_VALUE);
    unsigned wanted[3] = {0, 0, 0};
    if (sscanf(text, "%x:%x:%x", &wanted[0], &wanted[1], &wanted[2]) != 3) {
        wanted[0] = 0;
        REQUIRE(sscanf(text, "%x:%x", &wanted[1], &wanted[2]) == 2, CUDA_ERROR_INVALID_VALUE);
    }
    for (int i = 0; i < cuda.visible_count; i++) {
        unsigned domain, bus, slot;
        bus_numbers(&cuda.m->device[cuda.visible[i]], &domain, &bus, &slot);
        if (domain == wanted[0] && bus == wanted[1] && slot == wanted[2]) {
            *out = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetAttribute, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value != NULL && attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    const struct sim_device *d = &cuda.m->device[device];
    unsigned domain, bus, slot;
    bus_numbers(d, &domain, &bus, &slot);
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        *value = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        *value = 64;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        *value = 2147483647;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        *value = 65535;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        *value = 49152;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = 232448;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = 233472;
        break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        *value = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        *value = 65536;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        *value = 2147483647;
        break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        *value = (int)d->sm_clock_mhz * 1000;
        break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        *value = (int)d->memory_clock_mhz * 1000;
        break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        *value = (int)d->bus_width;
        break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
        *value = 512;
        break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = (int)d->sms;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = (int)d->threads_per_sm;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = 3;
        break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *value = 50 << 20;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = (int)d->cc_major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = (int)d->cc_minor;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = (int)bus;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        *value = (int)slot;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        *value = (int)domain;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *value = (int)d->compute_mode;
        break;
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        *value = (int)d->ecc;
        break;
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
        *value = 2;
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = 1;
        break;
    default:
        *value = 0; /* an ability this card does not have */
        break;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetProperties(CUdevprop *prop, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetProperties, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(prop != NULL, CUDA_ERROR_INVALID_VALUE);
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024,
                        .maxThreadsDim = {1024, 1024, 64},
                        .maxGridSize = {2147483647, 65535, 65535},
                        .sharedMemPerBlock = 49152,
                        .totalConstantMemory = 65536,
                        .SIMDWidth = 32,
                        .memPitch = 2147483647,
                        .regsPerBlock = 65536,
                        .clockRate = (int)cuda.m->device[device].sm_clock_mhz * 1000,
                        .textureAlign = 512};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer) {
    ENTER_DEVICE(cuDeviceCanAccessPeer, dev);
    int a, b;
    REQUIRE(device_of(dev, &a) && device_of(peer, &b), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(can != NULL, CUDA_ERROR_INVALID_VALUE);
    *can = a != b;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
    ENTER_DEVICE(cuDeviceGetP2PAttribute, from);
    int a, b;
    REQUIRE(device_of(from, &a) && device_of(to, &b), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value != NULL && a != b, CUDA_ERROR_INVALID_VALUE);
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
             attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetExecAffinitySupport(int *value, CUexecAffinityType type, CUdevice dev) {
    ENTER_DEVICE(cuDeviceGetExecAffinitySupport, dev);
    (void)type;
    REQUIRE(value != NULL, CUDA_ERROR_INVALID_VALUE);
    *value = 0;
    return CUDA_SUCCESS;
}

/* --- errors ----------------------------------------------------------------------------------------------------- */

#define ERRORS(X)                                                                                                      \
    X(CUDA_SUCCESS, "no error")                                                                                        \
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                                    \
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                                       \
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                                              \
    X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                                                \
    X(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                                                        \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable")                              \
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                                      \
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                                             \
    X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                                                      \
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                                            \
    X(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")                                                            \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device")                        \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                                             \
    X(CUDA_ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture")                                     \
    X(CUDA_ERROR_CONTEXT_ALREADY_IN_USE, "exclusive-thread device already in use by a different thread")               \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices")                    \
    X(CUDA_ERROR_INVALID_SOURCE, "device kernel image is invalid")                                                     \
    X(CUDA_ERROR_FILE_NOT_FOUND, "file not found")                                                                     \
    X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")                             \
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                                            \
    X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")                              \
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                                                  \
    X(CUDA_ERROR_NOT_READY, "device not ready")                                                                        \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                                          \
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")                                   \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")                                            \
    X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled")                                        \
    X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled")                                          \
    X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process")                          \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                                         \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")        \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")              \
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                                          \
    X(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch")                                \
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                                             \
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                                             \
    X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                                                       \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")                       \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")                \
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences")              \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began")                     \
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")                                        \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream")                  \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,                                                                              \
      "operation would make the legacy stream depend on a capturing blocking stream")                                  \
    X(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream")            \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,                                                                          \
      "attempt to terminate a thread-local capture sequence from another thread")                                      \
    X(CUDA_ERROR_TIMEOUT, "wait operation timed out")                                                                  \
    X(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,                                                                            \
      "the graph update was not performed because it included changes which violated constraints")                     \
    X(CUDA_ERROR_UNKNOWN, "unknown error")

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    ENTER_EARLY(cuGetErrorName);
    REQUIRE(text != NULL, CUDA_ERROR_INVALID_VALUE);
    switch (error) {
#define NAME_CASE(code, words)                                                                                         \
    case code:                                                                                                         \
        *text = #code;                                                                                                 \
        return CUDA_SUCCESS;
        ERRORS(NAME_CASE)
    default:
        *text = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    ENTER_EARLY(cuGetErrorString);
    REQUIRE(text != NULL, CUDA_ERROR_INVALID_VALUE);
    switch (error) {
#define TEXT_CASE(code, words)                                                                                         \
    case code:                                                                                                         \
        *text = words;                                                                                                 \
        return CUDA_SUCCESS;
        ERRORS(TEXT_CASE)
    default:
        *text = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* The undocumented tables of the runtime library: there are none here, and the caller is told so without noise. */
CUresult CUDAAPI cuGetExportTable(const void **table, const CUuuid *id) {
    ENTER_EARLY(cuGetExportTable);
    REQUIRE(table != NULL && id != NULL, CUDA_ERROR_INVALID_VALUE);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
