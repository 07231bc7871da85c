/* MIG: a card's instances, each one compute instance on a GPU instance of its own, as the machine file or a test lays
 * them out. */
#include "nvml_state.h"

#include <string.h>

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending);
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(nvmlDeviceGetMigMode, device);
    REQUIRE(current != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->mig_capable, NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = d->mig_mode;
    return NVML_SUCCESS;
}

CARD_VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned, d->mig_capable ? 7 : 0)

NVML_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is);
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) {
    ENTER_ANY(nvmlDeviceIsMigDeviceHandle, device);
    REQUIRE(is != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *is = mig != NULL;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out) {
    ENTER_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->mig_capable, NVML_ERROR_NOT_SUPPORTED);
    REQUIRE(d->mig_mode && index < SIM_MAX_INSTANCES && d->instance[index].used, NVML_ERROR_NOT_FOUND);
    *out = &nvml_migs[device->index][index];
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id);
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_ANY(nvmlDeviceGetGpuInstanceId, device);
    REQUIRE(id != NULL && mig != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *id = mig->gpu_instance;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id);
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_ANY(nvmlDeviceGetComputeInstanceId, device);
    REQUIRE(id != NULL && mig != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *id = mig->compute_instance;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out) {
    ENTER_ANY(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, device);
    REQUIRE(out != NULL && mig != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = &nvml_devices[device->index];
    return NVML_SUCCESS;
}

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mb;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, struct attributes *out);
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, struct attributes *out) {
    ENTER_ANY(nvmlDeviceGetAttributes_v2, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(mig != NULL, NVML_ERROR_NOT_SUPPORTED); /* for MIG handles only */
    *out = (struct attributes){.multiprocessors = mig->sms,
                               .copy_engines = mig->slices,
                               .gpu_slices = mig->slices,
                               .compute_slices = mig->slices,
                               .memory_mb = mig->memory >> 20};
    return NVML_SUCCESS;
}

struct placement {
    unsigned start, size;
};

struct gpu_instance_info {
    nvmlDevice_t device;
    unsigned id, profile_id;
    struct placement placement;
};

/* A GPU instance's handle is that of the MIG device on it. */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlDevice_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuInstanceById, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    for (uint32_t i = 0; i < SIM_MAX_INSTANCES; i++)
        if (d->instance[i].used && d->instance[i].gpu_instance == id) {
            *out = &nvml_migs[device->index][i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlDevice_t device, struct gpu_instance_info *out);
nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlDevice_t device, struct gpu_instance_info *out) {
    ENTER_ANY(nvmlGpuInstanceGetInfo, device);
    REQUIRE(out != NULL && mig != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = (struct gpu_instance_info){
        &nvml_devices[device->index], mig->gpu_instance, mig->profile_id, {mig->start, mig->size}};
    return NVML_SUCCESS;
}

uint64_t instance_memory_used(const struct sim_machine *m, uint32_t device, const struct sim_instance *mig) {
    uint64_t used = 0;
    for (uint32_t i = 0; i < m->process_high; i++)
        if (process_on(&m->process[i], device, mig))
            used += m->process[i].account[device].memory + m->process[i].account[device].overhead;
    return used;
}

uint64_t instance_busy_ns(const struct sim_machine *m, uint32_t device, const struct sim_instance *mig) {
    uint64_t busy = mig->ended_busy_ns;
    for (uint32_t i = 0; i < m->process_high; i++)
        if (process_on(&m->process[i], device, mig))
            busy += m->process[i].account[device].busy_ns;
    return busy;
}
