/* What the driver says of its cards. */
#include "state.h"

#include <stdio.h>
#include <string.h>

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
