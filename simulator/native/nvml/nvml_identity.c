/* Which card it is: handles, names, and what it says of its make and modes. */
#include "nvml_state.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* --- handles ------------------------------------------------------------------------------------------------------ */

/* A lost card gives no handle. */
static nvmlReturn_t give_handle(uint32_t index, nvmlDevice_t *out) {
    REQUIRE(!nvml_machine->device[index].lost, NVML_ERROR_GPU_IS_LOST);
    *out = &nvml_devices[index];
    return NVML_SUCCESS;
}

/* The index names a card, so what is scripted for that card applies. */
static nvmlReturn_t by_index(uint32_t call, unsigned index, nvmlDevice_t *out) {
    int code = nvml_enter_device(call, index < SIM_MAX_DEVICES ? &nvml_devices[index] : NULL);
    REQUIRE(code == 0, (nvmlReturn_t)code);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return give_handle(index, out);
}

CARD_MACHINE_VALUE(nvmlDeviceGetCount, unsigned, nvml_machine->devices)
CARD_MACHINE_VALUE(nvmlDeviceGetCount_v2, unsigned, nvml_machine->devices)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out) {
    return by_index(CALL_nvmlDeviceGetHandleByIndex, index, out);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
    return by_index(CALL_nvmlDeviceGetHandleByIndex_v2, index, out);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    ENTER(nvmlDeviceGetHandleByUUID);
    REQUIRE(uuid != NULL && out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < nvml_machine->devices; i++)
        if (strcasecmp(nvml_machine->device[i].uuid, uuid) == 0)
            return give_handle(i, out);
    return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out) {
    ENTER(nvmlDeviceGetHandleBySerial);
    REQUIRE(serial != NULL && out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < nvml_machine->devices; i++)
        if (strcmp(nvml_machine->device[i].serial, serial) == 0)
            return give_handle(i, out);
    return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out);
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out) {
    ENTER(nvmlDeviceGetHandleByPciBusId_v2);
    REQUIRE(bus_id != NULL && out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    unsigned asked[3] = {0, 0, 0};
    REQUIRE(sscanf(bus_id, "%x:%x:%x", &asked[0], &asked[1], &asked[2]) == 3, NVML_ERROR_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < nvml_machine->devices; i++) {
        unsigned own[3] = {0, 0, 0};
        if (sscanf(nvml_machine->device[i].bus_id, "%x:%x:%x", &own[0], &own[1], &own[2]) == 3 &&
            memcmp(asked, own, sizeof own) == 0)
            return give_handle(i, out);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* --- names -------------------------------------------------------------------------------------------------------- */

#define CARD_TEXT(name, expression)                                                                                    \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, char *text, unsigned length);                                   \
    nvmlReturn_t name(nvmlDevice_t device, char *text, unsigned length) {                                              \
        ENTER_DEVICE(name, device);                                                                                    \
        return give_text(text, length, expression);                                                                    \
    }

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_ANY(nvmlDeviceGetUUID, device);
    return give_text(text, length, mig != NULL ? mig->uuid : d->uuid);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_ANY(nvmlDeviceGetName, device);
    if (mig == NULL)
        return give_text(text, length, d->name);
    char name[SIM_NAME + 48];
    snprintf(name, sizeof name, "%s MIG %s", d->name, mig->profile);
    return give_text(text, length, name);
}

CARD_TEXT(nvmlDeviceGetSerial, d->serial)

CARD_VALUE(nvmlDeviceGetIndex, unsigned, device->index)
CARD_VALUE(nvmlDeviceGetMinorNumber, unsigned, d->minor)

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *out);
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *out) {
    ENTER_DEVICE(nvmlDeviceGetPciInfo_v3, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    memset(out, 0, sizeof *out);
    sscanf(d->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0x1f);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0x1f);
    out->device_id = d->pci_device_id;
    out->subsystem_id = d->pci_subsystem_id;
    return NVML_SUCCESS;
}

/* --- make --------------------------------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor);
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ENTER_DEVICE(nvmlDeviceGetCudaComputeCapability, device);
    REQUIRE(major != NULL && minor != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *major = (int)d->cc_major;
    *minor = (int)d->cc_minor;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture);
nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture) {
    ENTER_DEVICE(nvmlDeviceGetArchitecture, device);
    REQUIRE(architecture != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *architecture = d->cc_major >= 10  ? 10
                    : d->cc_major == 9 ? 9
                    : d->cc_major == 8 ? (d->cc_minor == 9 ? 8 : 7)
                    : d->cc_minor == 5 ? 6
                                       : 5;
    return NVML_SUCCESS;
}

CARD_VALUE(nvmlDeviceGetBrand, int, 14)
CARD_VALUE(nvmlDeviceGetNumGpuCores, unsigned, d->sms * 128)
CARD_VALUE(nvmlDeviceGetMemoryBusWidth, unsigned, d->bus_width)
CARD_VALUE(nvmlDeviceGetMultiGpuBoard, unsigned, 0)

/* --- modes -------------------------------------------------------------------------------------------------------- */

CARD_VALUE(nvmlDeviceGetPersistenceMode, int, d->persistence)
CARD_VALUE(nvmlDeviceGetComputeMode, int, d->compute_mode)
CARD_VALUE(nvmlDeviceGetVirtualizationMode, int, d->virtualization)
CARD_VALUE(nvmlDeviceGetDisplayMode, int, 0)
CARD_VALUE(nvmlDeviceGetDisplayActive, int, 0)
