/* What a card says of itself. */
#include "nvml_state.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static nvmlReturn_t give_text(char *to, unsigned length, const char *from) {
    REQUIRE(to != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(strlen(from) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(to, from);
    return NVML_SUCCESS;
}

uint32_t card_busy_percent(const struct sim_device *d) {
    uint64_t n = d->samples_head < 5 ? d->samples_head : 5, sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += d->samples[(d->samples_head - 1 - i) % SIM_DEVICE_SAMPLES].busy_ppm;
    return n > 0 ? (uint32_t)(sum / n / 10000) : 0;
}

unsigned card_temperature(const struct sim_device *d) {
    uint64_t percent = card_busy_percent(d);
    if (percent > 100)
        percent = 100;
    return (unsigned)(d->temperature_idle_c + (d->temperature_active_c - d->temperature_idle_c) * percent / 100);
}

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

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count);
nvmlReturn_t nvmlDeviceGetCount(unsigned *count) {
    ENTER(nvmlDeviceGetCount);
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = nvml_machine->devices;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count);
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(nvmlDeviceGetCount_v2);
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = nvml_machine->devices;
    return NVML_SUCCESS;
}

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

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_DEVICE(nvmlDeviceGetUUID, device);
    return give_text(text, length, d->uuid);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_DEVICE(nvmlDeviceGetName, device);
    return give_text(text, length, d->name);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_DEVICE(nvmlDeviceGetSerial, device);
    return give_text(text, length, d->serial);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetIndex, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = device->index;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMinorNumber, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->minor;
    return NVML_SUCCESS;
}

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

struct memory_info {
    unsigned long long total, free, used;
};

struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_info *out);
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_info *out) {
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    process_reap(m, false);
    out->total = d->memory;
    out->free = memory_free(m, device->index);
    out->used = d->memory - out->free; /* the first version counts the driver's own part as used */
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_info_v2 *out);
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_info_v2 *out) {
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo_v2, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(out->version == (sizeof *out | (2u << 24)), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    card_lock(device->index);
    process_reap(m, false);
    out->total = d->memory;
    out->reserved = d->reserved;
    out->free = memory_free(m, device->index);
    out->used = d->memory - d->reserved - out->free;
    card_unlock();
    return NVML_SUCCESS;
}

struct bar1_info {
    unsigned long long total, free, used;
};

struct utilization {
    unsigned gpu, memory;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, struct bar1_info *out);
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, struct bar1_info *out) {
    ENTER_DEVICE(nvmlDeviceGetBAR1MemoryInfo, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = (struct bar1_info){d->memory, d->memory - (1u << 20), 1u << 20};
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *out);
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *out) {
    ENTER_DEVICE(nvmlDeviceGetUtilizationRates, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    const struct sim_device_sample *s = &d->samples[(d->samples_head - 1) % SIM_DEVICE_SAMPLES];
    *out = d->samples_head > 0 ? (struct utilization){s->sm_percent, s->memory_percent} : (struct utilization){0, 0};
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us);
nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us) {
    ENTER_DEVICE(nvmlDeviceGetEncoderUtilization, device);
    REQUIRE(percent != NULL && period_us != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *percent = 0; /* the engine is there and nothing here uses it */
    *period_us = (unsigned)(d->sample_ns / 1000);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us);
nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *period_us) {
    ENTER_DEVICE(nvmlDeviceGetDecoderUtilization, device);
    REQUIRE(percent != NULL && period_us != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *percent = 0; /* the engine is there and nothing here uses it */
    *period_us = (unsigned)(d->sample_ns / 1000);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *mw);
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *mw) {
    ENTER_DEVICE(nvmlDeviceGetPowerUsage, device);
    REQUIRE(mw != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    *mw = (unsigned)device_power_mw(m, device->index);
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetEnforcedPowerLimit, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = (unsigned)d->limit_mw;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetPowerManagementLimit, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = (unsigned)d->limit_mw;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetPowerManagementDefaultLimit, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = (unsigned)d->limit_mw;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least,
                                                                      unsigned *most);
nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least, unsigned *most) {
    ENTER_DEVICE(nvmlDeviceGetPowerManagementLimitConstraints, device);
    REQUIRE(least != NULL && most != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *least = (unsigned)(d->limit_mw / 3);
    *most = (unsigned)d->limit_mw;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *mj);
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *mj) {
    ENTER_DEVICE(nvmlDeviceGetTotalEnergyConsumption, device);
    REQUIRE(mj != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->energy_counter, NVML_ERROR_NOT_SUPPORTED);
    card_lock(device->index);
    *mj = d->energy_mj;
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius);
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius) {
    ENTER_DEVICE(nvmlDeviceGetTemperature, device);
    REQUIRE(celsius != NULL && sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    *celsius = card_temperature(d);
    card_unlock();
    return NVML_SUCCESS;
}

struct temperature_v1 {
    unsigned version;
    int sensor;
    int celsius;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, struct temperature_v1 *out);
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, struct temperature_v1 *out) {
    ENTER_DEVICE(nvmlDeviceGetTemperatureV, device);
    REQUIRE(out != NULL && out->sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(out->version == (sizeof *out | (1u << 24)), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    card_lock(device->index);
    out->celsius = (int)card_temperature(d);
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int which, unsigned *celsius);
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int which, unsigned *celsius) {
    ENTER_DEVICE(nvmlDeviceGetTemperatureThreshold, device);
    REQUIRE(celsius != NULL && which >= 0, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(which < 2, NVML_ERROR_NOT_SUPPORTED);
    *celsius = which == 0 ? 92 : 87; /* shutdown, slowdown */
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(const struct sim_device *d, int domain, bool most, unsigned *mhz) {
    REQUIRE(mhz != NULL && domain >= 0, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(domain < 4, NVML_ERROR_NOT_SUPPORTED);
    if (domain == 2) {
        *mhz = (unsigned)d->memory_clock_mhz;
        return NVML_SUCCESS;
    }
    /* A card with no context rests at its idle clock. */
    bool awake = most || d->contexts != SIM_NONE;
    *mhz = awake ? (unsigned)d->sm_clock_mhz : (unsigned)(d->sm_clock_mhz < 345 ? d->sm_clock_mhz : 345);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int domain, unsigned *mhz);
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int domain, unsigned *mhz) {
    ENTER_DEVICE(nvmlDeviceGetClockInfo, device);
    return clock_of(d, domain, false, mhz);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int domain, unsigned *mhz);
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int domain, unsigned *mhz) {
    ENTER_DEVICE(nvmlDeviceGetMaxClockInfo, device);
    return clock_of(d, domain, true, mhz);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, int domain, unsigned *mhz);
nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, int domain, unsigned *mhz) {
    ENTER_DEVICE(nvmlDeviceGetApplicationsClock, device);
    return clock_of(d, domain, true, mhz);
}

/* What is set for the card, else idle (bit 0) when nothing runs. */
static unsigned long long event_reasons(const struct sim_device *d) {
    return d->clocks_event_reasons != 0 ? d->clocks_event_reasons : d->contexts == SIM_NONE ? 1 : 0;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *value);
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *value) {
    ENTER_DEVICE(nvmlDeviceGetCurrentClocksEventReasons, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = event_reasons(d);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *value);
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *value) {
    ENTER_DEVICE(nvmlDeviceGetCurrentClocksThrottleReasons, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = event_reasons(d);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *value);
nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *value) {
    ENTER_DEVICE(nvmlDeviceGetSupportedClocksEventReasons, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 0x1ff;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *value);
nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *value) {
    ENTER_DEVICE(nvmlDeviceGetSupportedClocksThrottleReasons, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 0x1ff;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned *kb_per_second);
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned *kb_per_second) {
    ENTER_DEVICE(nvmlDeviceGetPcieThroughput, device);
    REQUIRE(kb_per_second != NULL && (counter == 0 || counter == 1), NVML_ERROR_INVALID_ARGUMENT);
    /* Measured over 20 ms, in which the caller waits, as on a card: 0 is what the card sends, 1 what it receives. */
    enum sim_copy kind = counter == 0 ? SIM_COPY_D2H : SIM_COPY_H2D;
    card_lock(device->index);
    uint64_t before = d->copy_bytes[kind];
    card_unlock();
    uint64_t until = machine_now(m) + 20000000;
    while (m->clock != SIM_CLOCK_MANUAL && machine_now(m) < until)
        machine_wait(m, until);
    card_lock(device->index);
    *kb_per_second = (unsigned)((d->copy_bytes[kind] - before) * 50 / 1024);
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMaxPcieLinkGeneration, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->cc_major >= 9 ? 5 : d->cc_major >= 8 ? 4 : 3;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetCurrPcieLinkGeneration, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->cc_major >= 9 ? 5 : d->cc_major >= 8 ? 4 : 3;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMaxPcieLinkWidth, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 16;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetCurrPcieLinkWidth, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 16;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetPcieReplayCounter, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter,
                                                     unsigned long long *count);
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    ENTER_DEVICE(nvmlDeviceGetTotalEccErrors, device);
    REQUIRE(count != NULL && (type == 0 || type == 1) && (counter == 0 || counter == 1), NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->ecc, NVML_ERROR_NOT_SUPPORTED);
    *count = counter == 0 ? (type == 0 ? d->ecc_volatile_correctable : d->ecc_volatile_uncorrectable)
                          : (type == 0 ? d->ecc_aggregate_correctable : d->ecc_aggregate_uncorrectable);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, int *current, int *pending);
nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, int *current, int *pending) {
    ENTER_DEVICE(nvmlDeviceGetEccMode, device);
    REQUIRE(current != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *current = *pending = (int)d->ecc;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                                   unsigned *pending, unsigned *failed);
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                       unsigned *pending, unsigned *failed) {
    ENTER_DEVICE(nvmlDeviceGetRemappedRows, device);
    REQUIRE(correctable != NULL && uncorrectable != NULL && pending != NULL && failed != NULL,
            NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->cc_major >= 8, NVML_ERROR_NOT_SUPPORTED);
    *correctable = d->remapped_correctable;
    *uncorrectable = d->remapped_uncorrectable;
    *pending = *failed = 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *value);
nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *value) {
    ENTER_DEVICE(nvmlDeviceGetPersistenceMode, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = (int)d->persistence;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, int *value);
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, int *value) {
    ENTER_DEVICE(nvmlDeviceGetComputeMode, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = (int)d->compute_mode;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, int *mode);
nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, int *mode) {
    ENTER_DEVICE(nvmlDeviceGetVirtualizationMode, device);
    REQUIRE(mode != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *mode = (int)d->virtualization;
    return NVML_SUCCESS;
}

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

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, int *value);
nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, int *value) {
    ENTER_DEVICE(nvmlDeviceGetBrand, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 14;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, int *value);
nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, int *value) {
    ENTER_DEVICE(nvmlDeviceGetPerformanceState, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->contexts != SIM_NONE ? 0 : 8;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMemoryBusWidth, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->bus_width;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetNumGpuCores, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->sms * 128;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMultiGpuBoard, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, int *value);
nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, int *value) {
    ENTER_DEVICE(nvmlDeviceGetPowerState, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->contexts != SIM_NONE ? 0 : 8;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent);
nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent) {
    ENTER_DEVICE(nvmlDeviceGetFanSpeed, device);
    (void)percent;
    return NVML_ERROR_NOT_SUPPORTED; /* a passively cooled card */
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, int *mode);
nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, int *mode) {
    ENTER_DEVICE(nvmlDeviceGetDisplayMode, device);
    REQUIRE(mode != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *mode = 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, int *mode);
nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, int *mode) {
    ENTER_DEVICE(nvmlDeviceGetDisplayActive, device);
    REQUIRE(mode != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *mode = 0;
    return NVML_SUCCESS;
}

/* --- MIG: capable cards have it off --- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending);
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(nvmlDeviceGetMigMode, device);
    REQUIRE(current != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->mig_capable, NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = d->mig_mode;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *value);
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *value) {
    ENTER_DEVICE(nvmlDeviceGetMaxMigDeviceCount, device);
    REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *value = d->mig_capable ? 7 : 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig);
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
    ENTER_DEVICE(nvmlDeviceIsMigDeviceHandle, device);
    REQUIRE(is_mig != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *is_mig = 0;
    return NVML_SUCCESS;
}

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
