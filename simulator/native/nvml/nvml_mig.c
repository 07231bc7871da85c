/* MIG: capable cards have it off, so no handle of an instance exists. */
#include "nvml_state.h"

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending);
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(nvmlDeviceGetMigMode, device);
    REQUIRE(current != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->mig_capable, NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = d->mig_mode;
    return NVML_SUCCESS;
}

CARD_VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned, d->mig_capable ? 7 : 0)
CARD_VALUE(nvmlDeviceIsMigDeviceHandle, unsigned, 0)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out) {
    ENTER_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, device);
    (void)index;
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return d->mig_capable ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id);
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_DEVICE(nvmlDeviceGetGpuInstanceId, device);
    REQUIRE(id != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return NVML_ERROR_INVALID_ARGUMENT; /* no MIG handle exists */
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id);
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_DEVICE(nvmlDeviceGetComputeInstanceId, device);
    REQUIRE(id != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return NVML_ERROR_INVALID_ARGUMENT; /* no MIG handle exists */
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out) {
    ENTER_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return NVML_ERROR_INVALID_ARGUMENT; /* no MIG handle exists */
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, void *attributes);
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, void *attributes) {
    ENTER_DEVICE(nvmlDeviceGetAttributes_v2, device);
    REQUIRE(attributes != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return NVML_ERROR_NOT_SUPPORTED; /* for MIG handles only */
}
