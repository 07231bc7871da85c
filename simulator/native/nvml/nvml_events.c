/* Xid events, and GPM: metrics over the span between two samples. */
#include "nvml_state.h"

#include <stdlib.h>
#include <string.h>

/* --- events ----------------------------------------------------------------------------------------------------- */

#define EVENT_XID 8ull
#define EVENTS_SUPPORTED (EVENT_XID | 0x1ull | 0x2ull | 0x10ull)

struct event_set {
    uint32_t magic;
    unsigned long long types[SIM_MAX_DEVICES];
    uint64_t seen[SIM_MAX_DEVICES]; /* Xids before registration are not told */
};
#define EVENT_SET_MAGIC 0x45565331u

struct event_data {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

static bool set_valid(const struct event_set *set) {
    return set != NULL && set->magic == EVENT_SET_MAGIC;
}

NVML_EXPORT nvmlReturn_t nvmlEventSetCreate(struct event_set **out);
nvmlReturn_t nvmlEventSetCreate(struct event_set **out) {
    ENTER(nvmlEventSetCreate);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = calloc(1, sizeof **out);
    REQUIRE(*out != NULL, NVML_ERROR_MEMORY);
    (*out)->magic = EVENT_SET_MAGIC;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlEventSetFree(struct event_set *set);
nvmlReturn_t nvmlEventSetFree(struct event_set *set) {
    ENTER(nvmlEventSetFree);
    REQUIRE(set_valid(set), NVML_ERROR_INVALID_ARGUMENT);
    set->magic = 0;
    free(set);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types);
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER_DEVICE(nvmlDeviceGetSupportedEventTypes, device);
    REQUIRE(types != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *types = EVENTS_SUPPORTED;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, struct event_set *set);
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, struct event_set *set) {
    ENTER_DEVICE(nvmlDeviceRegisterEvents, device);
    REQUIRE(set_valid(set), NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE((types & ~EVENTS_SUPPORTED) == 0, NVML_ERROR_NOT_SUPPORTED);
    if (set->types[device->index] == 0)
        set->seen[device->index] = __atomic_load_n(&d->xids_head, __ATOMIC_ACQUIRE);
    set->types[device->index] |= types;
    return NVML_SUCCESS;
}

static bool next_event(struct event_set *set, struct event_data *out) {
    struct sim_machine *m = nvml_machine;
    for (uint32_t i = 0; i < m->devices; i++) {
        struct sim_device *d = &m->device[i];
        if (!(set->types[i] & EVENT_XID) || set->seen[i] >= __atomic_load_n(&d->xids_head, __ATOMIC_ACQUIRE))
            continue;
        if (d->xids_head - set->seen[i] > SIM_MAX_XIDS)
            set->seen[i] = d->xids_head - SIM_MAX_XIDS;
        const struct sim_xid *x = &d->xids[set->seen[i]++ % SIM_MAX_XIDS];
        *out = (struct event_data){&nvml_devices[i], EVENT_XID, x->xid, UINT32_MAX, UINT32_MAX};
        return true;
    }
    return false;
}

NVML_EXPORT nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned timeout_ms);
nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned timeout_ms) {
    ENTER(nvmlEventSetWait_v2);
    REQUIRE(set_valid(set) && out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    /* The time-out is the caller's own time: a reader of a machine that stands still must come back too. */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t end = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000 + timeout_ms;
    for (;;) {
        if (next_event(set, out))
            return NVML_SUCCESS;
        clock_gettime(CLOCK_MONOTONIC, &t);
        uint64_t now = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
        if (now >= end)
            return NVML_ERROR_TIMEOUT;
        uint64_t left = end - now < 20 ? end - now : 20;
        machine_wait(nvml_machine, machine_now(nvml_machine) + left * 1000000);
    }
}

/* --- GPM -------------------------------------------------------------------------------------------------------- */

struct gpm_sample {
    uint32_t magic;
    uint32_t device;
    uint64_t instance; /* slot of a MIG device, plus one; 0: the card */
    uint64_t time_ns, busy_ns, sm_ns, warp_ns;
    uint64_t copy_bytes[SIM_COPY_KINDS];
};
#define GPM_MAGIC 0x47504d31u

struct gpm_support {
    unsigned version;
    unsigned supported;
};

struct gpm_metric {
    unsigned id;
    int code;
    double value;
    const char *short_name, *long_name, *unit;
};

struct gpm_metrics {
    unsigned version;
    unsigned count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

NVML_EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, struct gpm_support *out);
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, struct gpm_support *out) {
    ENTER_DEVICE(nvmlGpmQueryDeviceSupport, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(out->version == 1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    out->supported = d->gpm;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleAlloc(struct gpm_sample **out);
nvmlReturn_t nvmlGpmSampleAlloc(struct gpm_sample **out) {
    ENTER(nvmlGpmSampleAlloc);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *out = calloc(1, sizeof **out);
    REQUIRE(*out != NULL, NVML_ERROR_MEMORY);
    (*out)->magic = GPM_MAGIC;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleFree(struct gpm_sample *sample);
nvmlReturn_t nvmlGpmSampleFree(struct gpm_sample *sample) {
    ENTER(nvmlGpmSampleFree);
    REQUIRE(sample != NULL && sample->magic == GPM_MAGIC, NVML_ERROR_INVALID_ARGUMENT);
    sample->magic = 0;
    free(sample);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, struct gpm_sample *sample);
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, struct gpm_sample *sample) {
    ENTER_DEVICE(nvmlGpmSampleGet, device);
    REQUIRE(sample != NULL && sample->magic == GPM_MAGIC, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->gpm && !d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    card_lock(device->index);
    sample->instance = 0;
    sample->device = device->index;
    sample->time_ns = m->advanced_ns;
    sample->busy_ns = d->busy_ns;
    sample->sm_ns = d->sm_ns;
    sample->warp_ns = d->warp_ns;
    memcpy(sample->copy_bytes, d->copy_bytes, sizeof sample->copy_bytes);
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned instance, struct gpm_sample *sample);
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned instance, struct gpm_sample *sample) {
    ENTER_DEVICE(nvmlGpmMigSampleGet, device);
    REQUIRE(sample != NULL && sample->magic == GPM_MAGIC, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->gpm && d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    for (uint32_t i = 0; i < SIM_MAX_INSTANCES; i++) {
        const struct sim_instance *mig = &d->instance[i];
        if (!mig->used || mig->gpu_instance != instance)
            continue;
        card_lock(device->index);
        sample->instance = i + 1;
        sample->device = device->index;
        sample->time_ns = m->advanced_ns;
        sample->busy_ns = instance_busy_ns(m, device->index, mig);
        card_unlock();
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

static void read_metric(struct gpm_metric *g, const struct gpm_sample *a, const struct gpm_sample *b) {
    double span = (double)(b->time_ns - a->time_ns);
    const struct sim_device *d = &nvml_machine->device[b->device];
    g->code = NVML_SUCCESS;
    if (b->instance != 0 && g->id != 1 && g->id != 2 && g->id != 5) {
        g->code = NVML_ERROR_NOT_SUPPORTED; /* of an instance only the time it worked is known */
        return;
    }
    switch (b->instance != 0 && g->id == 2 ? 1 : g->id) {
    case 1:
        *g = (struct gpm_metric){
            g->id, 0, 100.0 * (double)(b->busy_ns - a->busy_ns) / span, "graphics_util", "Graphics Utilization", "%"};
        break;
    case 2:
        *g = (struct gpm_metric){g->id, 0, 100.0 * (double)(b->sm_ns - a->sm_ns) / span, "sm_util", "SM Utilization",
                                 "%"};
        break;
    case 3:
        *g = (struct gpm_metric){g->id,          0,  100.0 * (double)(b->warp_ns - a->warp_ns) / span, "sm_occupancy",
                                 "SM Occupancy", "%"};
        break;
    case 5: /* no simulated kernel uses a tensor core */
        *g = (struct gpm_metric){g->id, 0, 0.0, "any_tensor_util", "Any Tensor Utilization", "%"};
        break;
    case 10: {
        double bytes = (double)(b->copy_bytes[SIM_COPY_D2D] - a->copy_bytes[SIM_COPY_D2D]);
        *g = (struct gpm_metric){
            g->id, 0, 100.0 * bytes / (span / 1e9) / (double)d->d2d_bps, "dram_bw_util", "DRAM Bandwidth Utilization",
            "%"};
        break;
    }
    case 20:
        *g = (struct gpm_metric){g->id,
                                 0,
                                 (double)(b->copy_bytes[SIM_COPY_D2H] - a->copy_bytes[SIM_COPY_D2H]) / 1048576.0 /
                                     (span / 1e9),
                                 "pcie_tx_per_sec",
                                 "PCIe TX Throughput",
                                 "MiB/s"};
        break;
    case 21:
        *g = (struct gpm_metric){g->id,
                                 0,
                                 (double)(b->copy_bytes[SIM_COPY_H2D] - a->copy_bytes[SIM_COPY_H2D]) / 1048576.0 /
                                     (span / 1e9),
                                 "pcie_rx_per_sec",
                                 "PCIe RX Throughput",
                                 "MiB/s"};
        break;
    default:
        g->code = NVML_ERROR_NOT_SUPPORTED; /* what a kernel's instructions are, the simulator does not know */
        break;
    }
}

NVML_EXPORT nvmlReturn_t nvmlGpmMetricsGet(struct gpm_metrics *request);
nvmlReturn_t nvmlGpmMetricsGet(struct gpm_metrics *request) {
    ENTER(nvmlGpmMetricsGet);
    REQUIRE(request != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(request->version == 1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    const struct gpm_sample *a = request->first, *b = request->second;
    REQUIRE(a != NULL && b != NULL && a->magic == GPM_MAGIC && b->magic == GPM_MAGIC, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(a->device == b->device && a->instance == b->instance && b->time_ns > a->time_ns,
            NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned i = 0; i < request->count; i++)
        read_metric(&request->metrics[i], a, b);
    return NVML_SUCCESS;
}
