/* A card's sample buffers and its field values. */
#include "nvml_state.h"

union value {
    double real;
    unsigned number;
    unsigned long long wide;
    long long signed_wide;
};

/* --- samples ------------------------------------------------------------------------------------------------------ */

struct sample {
    unsigned long long time_us;
    union value value;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, int type, unsigned long long last_us,
                                              int *value_type, unsigned *count, struct sample *out);
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, int type, unsigned long long last_us, int *value_type,
                                  unsigned *count, struct sample *out) {
    ENTER_DEVICE(nvmlDeviceGetSamples, device);
    REQUIRE(value_type != NULL && count != NULL && type >= 0 && type < 10, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(type != 7, NVML_ERROR_INVALID_ARGUMENT);       /* the power of a module these cards are not on */
    REQUIRE(type != 5 && type != 6, NVML_ERROR_NOT_FOUND); /* clocks are not sampled by these drivers */
    REQUIRE(!d->mig_mode || type == 0, NVML_ERROR_NOT_SUPPORTED);
    *value_type = 1; /* unsigned int */
    if (out == NULL) {
        *count = SIM_DEVICE_SAMPLES;
        return NVML_SUCCESS;
    }
    card_lock(device->index);
    unsigned n = 0;
    uint64_t first = d->samples_head > SIM_DEVICE_SAMPLES ? d->samples_head - SIM_DEVICE_SAMPLES : 0;
    for (uint64_t i = first; i < d->samples_head && n < *count; i++) {
        const struct sim_device_sample *s = &d->samples[i % SIM_DEVICE_SAMPLES];
        if (s->end_us <= last_us)
            continue;
        unsigned value = type == 0   ? s->power_mw
                         : type == 1 ? s->sm_percent
                         : type == 2 ? s->memory_percent
                                     : 0; /* video engines, which nothing here uses */
        out[n++] = (struct sample){s->end_us, {.wide = value}};
    }
    card_unlock();
    *count = n;
    return n > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* --- field values ------------------------------------------------------------------------------------------------- */

struct field_value {
    unsigned field, scope;
    long long time_us, latency_us;
    int type;
    int code;
    union value value;
};

enum { TYPE_UNSIGNED = 1, TYPE_WIDE = 3 };

static void put(struct field_value *f, int type, unsigned long long value) {
    f->type = type;
    f->code = NVML_SUCCESS;
    if (type == TYPE_UNSIGNED)
        f->value.number = (unsigned)value;
    else
        f->value.wide = value;
}

static void read_field(const struct sim_machine *m, const struct sim_device *d, uint32_t index, struct field_value *f) {
    f->code = NVML_ERROR_NOT_SUPPORTED;
    f->value.wide = 0;
    switch (f->field) {
    case 74: /* time held down by power, thermal, sync boost, board limit, low utilisation, reliability policies */
        put(f, TYPE_WIDE, d->held_power_ns);
        break;
    case 75:
    case 76:
    case 77:
    case 78:
    case 79:
    case 80:
    case 81:
        put(f, TYPE_WIDE, 0);
        break;
    case 82:
        put(f, TYPE_UNSIGNED, card_temperature(d) + 4);
        break;
    case 83:
    case 191: /* the newer field has 32 bits and wraps */
        if (d->energy_counter)
            put(f, f->field == 83 ? TYPE_WIDE : TYPE_UNSIGNED, d->energy_mj);
        break;
    case 94:
        put(f, TYPE_UNSIGNED, 0);
        break;
    case 142:
    case 143:
    case 144:
    case 145:
        if (d->cc_major >= 8)
            put(f, TYPE_WIDE,
                f->field == 142   ? d->remapped_correctable
                : f->field == 143 ? d->remapped_uncorrectable
                                  : 0);
        break;
    case 185:
        put(f, TYPE_UNSIGNED, device_power_mw(m, index));
        break;
    case 186:
        put(f, TYPE_UNSIGNED, device_running(m, index) ? d->active_mw : d->idle_mw);
        break;
    case 187:
        put(f, TYPE_UNSIGNED, d->limit_mw / 3);
        break;
    case 188:
    case 189:
    case 190:
    case 192:
        put(f, TYPE_UNSIGNED, d->limit_mw);
        break;
    case 197:
        put(f, TYPE_UNSIGNED, d->copy_bytes[SIM_COPY_D2H]); /* wraps */
        break;
    case 198:
        put(f, TYPE_UNSIGNED, d->copy_bytes[SIM_COPY_H2D]);
        break;
    case 230: /* recovery action: none */
        put(f, TYPE_UNSIGNED, 0);
        break;
    case 138:
    case 139: /* KiB over one link, or over all of them */
        if (d->nvlinks > 0)
            put(f, TYPE_WIDE,
                (f->field == 138 ? d->nvlink_tx_kib : d->nvlink_rx_kib) / (f->scope == UINT32_MAX ? 1 : d->nvlinks));
        break;
    case 269:
        put(f, TYPE_WIDE, d->held_sw_thermal_ns);
        break;
    case 270:
        put(f, TYPE_WIDE, d->held_hw_thermal_ns);
        break;
    case 271:
        put(f, TYPE_WIDE, d->held_brake_ns);
        break;
    default:
        break;
    }
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field_value *values);
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field_value *values) {
    ENTER_DEVICE(nvmlDeviceGetFieldValues, device);
    REQUIRE(values != NULL && count > 0, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    for (int i = 0; i < count; i++) {
        values[i].time_us = (long long)machine_now_us(m, m->advanced_ns);
        values[i].latency_us = 0;
        read_field(m, d, device->index, &values[i]);
    }
    card_unlock();
    return NVML_SUCCESS;
}
