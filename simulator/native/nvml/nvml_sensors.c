/* What a card measures of itself: memory, utilisation, power, temperature, clocks, PCIe. */
#include "nvml_state.h"

/* --- memory ------------------------------------------------------------------------------------------------------- */

struct memory_info {
    unsigned long long total, free, used;
};

struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_info *out);
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_info *out) {
    ENTER_ANY(nvmlDeviceGetMemoryInfo, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    process_reap(m, false);
    if (mig != NULL) {
        uint64_t used = instance_memory_used(m, device->index, mig);
        *out = (struct memory_info){mig->memory, mig->memory > used ? mig->memory - used : 0, used};
        card_unlock();
        return NVML_SUCCESS;
    }
    out->total = d->memory;
    out->free = memory_free(m, device->index);
    out->used = d->memory - out->free; /* the first version counts the driver's own part as used */
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_info_v2 *out);
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_info_v2 *out) {
    ENTER_ANY(nvmlDeviceGetMemoryInfo_v2, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(out->version == (sizeof *out | (2u << 24)), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    card_lock(device->index);
    process_reap(m, false);
    if (mig != NULL) {
        uint64_t used = instance_memory_used(m, device->index, mig);
        out->total = mig->memory;
        out->reserved = 0;
        out->free = mig->memory > used ? mig->memory - used : 0;
        out->used = used;
        card_unlock();
        return NVML_SUCCESS;
    }
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

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, struct bar1_info *out);
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, struct bar1_info *out) {
    ENTER_DEVICE(nvmlDeviceGetBAR1MemoryInfo, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = (struct bar1_info){d->memory, d->memory - (1u << 20), 1u << 20};
    return NVML_SUCCESS;
}

/* --- utilisation -------------------------------------------------------------------------------------------------- */

uint32_t card_busy_percent(const struct sim_device *d) {
    uint64_t n = d->samples_head < 5 ? d->samples_head : 5, sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += d->samples[(d->samples_head - 1 - i) % SIM_DEVICE_SAMPLES].busy_ppm;
    return n > 0 ? (uint32_t)(sum / n / 10000) : 0;
}

struct utilization {
    unsigned gpu, memory;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *out);
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *out) {
    ENTER_DEVICE(nvmlDeviceGetUtilizationRates, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(!d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    card_lock(device->index);
    const struct sim_device_sample *s = &d->samples[(d->samples_head - 1) % SIM_DEVICE_SAMPLES];
    *out = d->samples_head > 0 ? (struct utilization){s->sm_percent, s->memory_percent} : (struct utilization){0, 0};
    card_unlock();
    return NVML_SUCCESS;
}

/* The engines are there and nothing here uses them. */
#define CARD_VIDEO_UTILIZATION(name)                                                                                   \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *percent, unsigned *period_us);                        \
    nvmlReturn_t name(nvmlDevice_t device, unsigned *percent, unsigned *period_us) {                                   \
        ENTER_DEVICE(name, device);                                                                                    \
        REQUIRE(percent != NULL && period_us != NULL, NVML_ERROR_INVALID_ARGUMENT);                                    \
        *percent = 0;                                                                                                  \
        *period_us = (unsigned)(d->sample_ns / 1000);                                                                  \
        return NVML_SUCCESS;                                                                                           \
    }
CARD_VIDEO_UTILIZATION(nvmlDeviceGetEncoderUtilization)
CARD_VIDEO_UTILIZATION(nvmlDeviceGetDecoderUtilization)

/* --- power and temperature ---------------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *mw);
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *mw) {
    ENTER_DEVICE(nvmlDeviceGetPowerUsage, device);
    REQUIRE(mw != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    *mw = (unsigned)device_power_mw(m, device->index);
    card_unlock();
    return NVML_SUCCESS;
}

CARD_VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned, d->limit_mw)
CARD_VALUE(nvmlDeviceGetPowerManagementLimit, unsigned, d->limit_mw)
CARD_VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, d->limit_mw)

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

unsigned card_temperature(const struct sim_device *d) {
    uint64_t percent = card_busy_percent(d);
    if (percent > 100)
        percent = 100;
    return (unsigned)(d->temperature_idle_c + (d->temperature_active_c - d->temperature_idle_c) * percent / 100);
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

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent);
nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent) {
    ENTER_DEVICE(nvmlDeviceGetFanSpeed, device);
    (void)percent;
    return NVML_ERROR_NOT_SUPPORTED; /* a passively cooled card */
}

/* --- clocks ------------------------------------------------------------------------------------------------------- */

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

#define CARD_CLOCK(name, most)                                                                                         \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, int domain, unsigned *mhz);                                     \
    nvmlReturn_t name(nvmlDevice_t device, int domain, unsigned *mhz) {                                                \
        ENTER_DEVICE(name, device);                                                                                    \
        return clock_of(d, domain, most, mhz);                                                                         \
    }
CARD_CLOCK(nvmlDeviceGetClockInfo, false)
CARD_CLOCK(nvmlDeviceGetMaxClockInfo, true)
CARD_CLOCK(nvmlDeviceGetApplicationsClock, true)

/* P0 with a context on it, else P8. */
CARD_VALUE(nvmlDeviceGetPerformanceState, int, d->contexts != SIM_NONE ? 0 : 8)
CARD_VALUE(nvmlDeviceGetPowerState, int, d->contexts != SIM_NONE ? 0 : 8)

/* What is set for the card, else idle (bit 0) when nothing runs. */
static unsigned long long event_reasons(const struct sim_device *d) {
    return d->clocks_event_reasons != 0 ? d->clocks_event_reasons : d->contexts == SIM_NONE ? 1 : 0;
}

CARD_VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, event_reasons(d))
CARD_VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, event_reasons(d))
CARD_VALUE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0x1ff)
CARD_VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 0x1ff)

/* --- PCIe --------------------------------------------------------------------------------------------------------- */

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

static unsigned pcie_generation(const struct sim_device *d) {
    return d->cc_major >= 9 ? 5 : d->cc_major >= 8 ? 4 : 3;
}

CARD_VALUE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, pcie_generation(d))
CARD_VALUE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, pcie_generation(d))
CARD_VALUE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
CARD_VALUE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
CARD_VALUE(nvmlDeviceGetPcieReplayCounter, unsigned, 0)
