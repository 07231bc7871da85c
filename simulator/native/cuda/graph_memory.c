/*
 * The memory that a process's graphs allocate: a pool for each device, which grows with the launches and uploads, keeps
 * what executables that are gone had, and gives it back when it is trimmed.
 */
#include "graph.h"

static struct {
    uint64_t reserved, used, reserved_high, used_high;
} pools[SIM_MAX_DEVICES]; /* under our lock */

CUresult graph_memory_take(int device, uint64_t bytes) {
    cuda_lock();
    uint64_t needed = pools[device].used + bytes;
    if (needed > pools[device].reserved) {
        machine_enter(cuda.m);
        bool ok = memory_take(cuda.m, cuda.process, (uint32_t)device, needed - pools[device].reserved);
        machine_unlock(cuda.m);
        if (!ok) {
            cuda_unlock();
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pools[device].reserved = needed;
    }
    pools[device].used = needed;
    if (needed > pools[device].used_high)
        pools[device].used_high = needed;
    if (pools[device].reserved > pools[device].reserved_high)
        pools[device].reserved_high = pools[device].reserved;
    cuda_unlock();
    return CUDA_SUCCESS;
}

static void give_back(int device, uint64_t bytes) { /* under our lock */
    pools[device].reserved -= bytes;
    machine_enter(cuda.m);
    memory_give(cuda.m, cuda.process, (uint32_t)device, bytes);
    machine_unlock(cuda.m);
}

void graph_memory_give(int device, uint64_t bytes) {
    cuda_lock();
    pools[device].used -= bytes < pools[device].used ? bytes : pools[device].used;
    cuda_unlock();
}

void graph_memory_drop(int device) { /* under our lock */
    if (pools[device].reserved)
        give_back(device, pools[device].reserved);
    pools[device].used = 0;
}

CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice dev) {
    ENTER_DEVICE(cuDeviceGraphMemTrim, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    cuda_lock();
    if (pools[device].reserved > pools[device].used)
        give_back(device, pools[device].reserved - pools[device].used);
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value) {
    ENTER_DEVICE(cuDeviceGetGraphMemAttribute, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value != NULL, CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    const uint64_t found[] = {[CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT] = pools[device].used,
                              [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH] = pools[device].used_high,
                              [CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT] = pools[device].reserved,
                              [CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = pools[device].reserved_high};
    cuda_unlock();
    REQUIRE((unsigned)attribute < sizeof found / sizeof found[0], CUDA_ERROR_INVALID_VALUE);
    *(cuuint64_t *)value = found[attribute];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value) {
    ENTER_DEVICE(cuDeviceSetGraphMemAttribute, dev);
    int device;
    REQUIRE(device_of(dev, &device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value != NULL && *(const cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH,
            CUDA_ERROR_INVALID_VALUE);
    cuda_lock();
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        pools[device].used_high = pools[device].used;
    else
        pools[device].reserved_high = pools[device].reserved;
    cuda_unlock();
    return CUDA_SUCCESS;
}
