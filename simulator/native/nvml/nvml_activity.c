/* Who uses a card, and how much: process lists, utilisation samples, accounting, field values. */
#include "nvml_state.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- process lists ---------------------------------------------------------------------------------------------- */

struct process_info { /* second and third version alike */
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

static nvmlReturn_t list_compute(struct sim_machine *m, uint32_t index, unsigned *count, struct process_info *out) {
    REQUIRE(count != NULL && (out != NULL || *count == 0), NVML_ERROR_INVALID_ARGUMENT);
    card_lock(index);
    process_reap(m, true); /* a list shows no dead process */
    unsigned n = 0;
    for (uint32_t i = 0; i < m->process_high; i++) {
        const struct sim_process *p = &m->process[i];
        const struct sim_account *a = &p->account[index];
        if (p->state != SIM_PROCESS_LIVE || a->contexts == 0)
            continue;
        if (n < *count)
            out[n] = (struct process_info){p->pid, a->memory + a->overhead, UINT32_MAX, UINT32_MAX};
        n++;
    }
    card_unlock();
    bool fits = n <= *count;
    *count = n;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

#define COMPUTE_LIST(name)                                                                                             \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, struct process_info *out);
COMPUTE_LIST(nvmlDeviceGetComputeRunningProcesses_v2)
COMPUTE_LIST(nvmlDeviceGetComputeRunningProcesses_v3)
COMPUTE_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2)
COMPUTE_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3)
COMPUTE_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2)
COMPUTE_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3)

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetComputeRunningProcesses_v2, device);
    return list_compute(m, device->index, count, out);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetComputeRunningProcesses_v3, device);
    return list_compute(m, device->index, count, out);
}

/* Nothing draws on these cards, and no MPS server runs. */
static nvmlReturn_t list_nobody(unsigned *count) {
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned *count, struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v2, device);
    (void)out;
    return list_nobody(count);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v3, device);
    (void)out;
    return list_nobody(count);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                        struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetMPSComputeRunningProcesses_v2, device);
    (void)out;
    return list_nobody(count);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                        struct process_info *out) {
    ENTER_DEVICE(nvmlDeviceGetMPSComputeRunningProcesses_v3, device);
    (void)out;
    return list_nobody(count);
}

/* --- utilisation of processes ----------------------------------------------------------------------------------- */

struct usage {
    uint32_t pid;
    uint64_t newest_us;
    uint64_t percent_sum;
    uint64_t samples;
};

/*
 * One entry per process with samples newer than `last_us`: their mean, and the time of the newest. A process that has a
 * context and does nothing has samples of 0 and so an entry; one that has ended keeps its entry while the ring holds
 * it.
 */
static unsigned gather(const struct sim_device *d, uint64_t last_us, struct usage *out, unsigned most) {
    unsigned n = 0;
    uint64_t kept = d->samples_head > SIM_DEVICE_SAMPLES ? d->samples_head - SIM_DEVICE_SAMPLES : 0;
    uint64_t oldest_us = d->samples_head > 0 ? d->samples[kept % SIM_DEVICE_SAMPLES].end_us : 0;
    uint64_t first = d->process_samples_head > SIM_PROCESS_SAMPLES ? d->process_samples_head - SIM_PROCESS_SAMPLES : 0;
    for (uint64_t i = first; i < d->process_samples_head; i++) {
        const struct sim_process_sample *s = &d->process_samples[i % SIM_PROCESS_SAMPLES];
        if (s->end_us <= last_us || s->end_us < oldest_us)
            continue;
        unsigned at = 0;
        while (at < n && out[at].pid != s->pid)
            at++;
        if (at == n) {
            if (n == most)
                continue;
            out[n++] = (struct usage){.pid = s->pid};
        }
        out[at].newest_us = s->end_us;
        out[at].percent_sum += s->sm_percent;
        out[at].samples++;
    }
    return n;
}

static unsigned mean_percent(const struct usage *u) {
    return (unsigned)(u->percent_sum / u->samples);
}

/* A call without room is told the size of the driver's buffer, whether or not that holds anything new. */
static unsigned room_for(unsigned n) {
    return n > SIM_DEVICE_SAMPLES ? n : SIM_DEVICE_SAMPLES;
}

struct process_utilization {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, memory, encoder, decoder;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, struct process_utilization *out,
                                                         unsigned *count, unsigned long long last_us);
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, struct process_utilization *out, unsigned *count,
                                             unsigned long long last_us) {
    ENTER_DEVICE(nvmlDeviceGetProcessUtilization, device);
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(!d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    struct usage found[SIM_MAX_PROCESSES];
    card_lock(device->index);
    unsigned n = gather(d, last_us, found, SIM_MAX_PROCESSES);
    card_unlock();
    if (out == NULL || *count < n) {
        *count = room_for(n);
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    REQUIRE(n > 0, NVML_ERROR_NOT_FOUND);
    for (unsigned i = 0; i < n; i++)
        out[i] = (struct process_utilization){found[i].pid, found[i].newest_us, mean_percent(&found[i]), 0, 0, 0};
    *count = n;
    return NVML_SUCCESS;
}

struct process_utilization_v1 {
    unsigned long long time_us;
    unsigned pid, sm, memory, encoder, decoder, jpg, ofa;
};

struct processes_utilization_v1 {
    unsigned version;
    unsigned count;
    unsigned long long last_us;
    struct process_utilization_v1 *entries;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                               struct processes_utilization_v1 *info);
nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, struct processes_utilization_v1 *info) {
    ENTER_DEVICE(nvmlDeviceGetProcessesUtilizationInfo, device);
    REQUIRE(info != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(info->version == (sizeof *info | (1u << 24)), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(!d->mig_mode, NVML_ERROR_NOT_SUPPORTED);
    struct usage found[SIM_MAX_PROCESSES];
    card_lock(device->index);
    unsigned n = gather(d, info->last_us, found, SIM_MAX_PROCESSES);
    card_unlock();
    if (info->entries == NULL || info->count < n) {
        info->count = room_for(n);
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    REQUIRE(n > 0, NVML_ERROR_NOT_FOUND);
    for (unsigned i = 0; i < n; i++)
        info->entries[i] = (struct process_utilization_v1){
            .time_us = found[i].newest_us, .pid = found[i].pid, .sm = mean_percent(&found[i])};
    info->count = n;
    return NVML_SUCCESS;
}

/* --- samples of a card ------------------------------------------------------------------------------------------ */

union value {
    double real;
    unsigned number;
    unsigned long long wide;
    long long signed_wide;
};

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
    *value_type = 1;                                       /* unsigned int */
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

/* --- accounting ------------------------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, int *mode);
nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, int *mode) {
    ENTER_DEVICE(nvmlDeviceGetAccountingMode, device);
    REQUIRE(mode != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *mode = (int)d->accounting;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, int mode);
nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, int mode) {
    ENTER_DEVICE(nvmlDeviceSetAccountingMode, device);
    REQUIRE(mode == 0 || mode == 1, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(geteuid() == 0, NVML_ERROR_NO_PERMISSION);
    card_lock(device->index);
    PUT(m, d->accounting, (uint32_t)mode);
    card_unlock();
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned *size);
nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned *size) {
    ENTER_DEVICE(nvmlDeviceGetAccountingBufferSize, device);
    REQUIRE(size != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *size = SIM_ACCOUNTED;
    return NVML_SUCCESS;
}

/* With accounting off nobody is accounted, and asking is no error; seen on a 580 driver. */
static bool accounted_live(const struct sim_device *d, const struct sim_process *p, uint32_t index) {
    return d->accounting && p->state == SIM_PROCESS_LIVE && p->account[index].first_context_ns != 0;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids);
nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids) {
    ENTER_DEVICE(nvmlDeviceGetAccountingPids, device);
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(device->index);
    process_reap(m, true);
    unsigned n = 0, room = pids != NULL ? *count : 0;
    for (uint32_t i = 0; i < m->process_high; i++)
        if (accounted_live(d, &m->process[i], device->index)) {
            if (n < room)
                pids[n] = m->process[i].pid;
            n++;
        }
    uint64_t first = d->accounted_head > SIM_ACCOUNTED ? d->accounted_head - SIM_ACCOUNTED : 0;
    for (uint64_t i = d->accounted_head; i > first && n < SIM_ACCOUNTED; i--) {
        if (n < room)
            pids[n] = d->accounted[(i - 1) % SIM_ACCOUNTED].pid;
        n++;
    }
    card_unlock();
    bool fits = n <= room;
    *count = n;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t accounted(struct sim_machine *m, struct sim_device *d, uint32_t index, unsigned pid,
                              struct sim_accounted *out) {
    nvmlReturn_t rc = NVML_ERROR_NOT_FOUND;
    card_lock(index);
    for (uint32_t i = 0; i < m->process_high; i++) {
        const struct sim_process *p = &m->process[i];
        if (!accounted_live(d, p, index) || p->pid != pid)
            continue;
        const struct sim_account *a = &p->account[index];
        uint64_t span = m->advanced_ns - a->first_context_ns;
        *out = (struct sim_accounted){.pid = pid,
                                      .running = 1,
                                      .gpu_percent = span ? (uint32_t)(a->busy_ns * 100 / span) : 0,
                                      .max_memory = a->memory_all_peak,
                                      .start_us = machine_now_us(m, a->first_context_ns),
                                      .samples = a->util_samples,
                                      .util_sum = a->util_sum,
                                      .fb_sum = a->fb_sum};
        rc = NVML_SUCCESS;
        break;
    }
    uint64_t first = d->accounted_head > SIM_ACCOUNTED ? d->accounted_head - SIM_ACCOUNTED : 0;
    for (uint64_t i = d->accounted_head; rc != NVML_SUCCESS && i > first; i--)
        if (d->accounted[(i - 1) % SIM_ACCOUNTED].pid == pid) { /* the last one that ended with this pid */
            *out = d->accounted[(i - 1) % SIM_ACCOUNTED];
            rc = NVML_SUCCESS;
        }
    card_unlock();
    return rc;
}

struct accounting_stats {
    unsigned gpu, memory;
    unsigned long long max_memory, time_ms, start_us;
    unsigned running;
    unsigned reserved[5];
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, struct accounting_stats *out);
nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, struct accounting_stats *out) {
    ENTER_DEVICE(nvmlDeviceGetAccountingStats, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    struct sim_accounted a;
    nvmlReturn_t rc = accounted(m, d, device->index, pid, &a);
    REQUIRE(rc == NVML_SUCCESS, rc);
    memset(out, 0, sizeof *out);
    out->gpu = a.gpu_percent;
    out->memory = a.memory_percent;
    out->max_memory = a.max_memory;
    out->time_ms = a.time_ms; /* 0 while it runs */
    out->start_us = a.start_us;
    out->running = a.running;
    return NVML_SUCCESS;
}

struct accounting_stats_v2 {
    unsigned pid, running, gpu, memory;
    unsigned long long max_memory;
    unsigned samples;
    unsigned long long gpu_sum, memory_sum, time_ms, start_us;
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, struct accounting_stats_v2 *out);
nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, struct accounting_stats_v2 *out) {
    ENTER_DEVICE(nvmlDeviceGetAccountingStats_v2, device);
    REQUIRE(atoi(m->driver_version) >= 610, NVML_ERROR_FUNCTION_NOT_FOUND); /* older drivers do not have it */
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    struct sim_accounted a;
    unsigned pid = out->pid;
    nvmlReturn_t rc = accounted(m, d, device->index, pid, &a);
    REQUIRE(rc == NVML_SUCCESS, rc);
    *out = (struct accounting_stats_v2){.pid = pid,
                                        .running = a.running,
                                        .gpu = a.gpu_percent,
                                        .memory = a.memory_percent,
                                        .max_memory = a.max_memory,
                                        .samples = (unsigned)a.samples,
                                        .gpu_sum = a.util_sum,
                                        .memory_sum = a.fb_sum,
                                        .time_ms = a.time_ms,
                                        .start_us = a.start_us};
    return NVML_SUCCESS;
}

/* --- field values ----------------------------------------------------------------------------------------------- */

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
        put(f, TYPE_UNSIGNED,
            d->engine == SIM_ENGINE_RUN && d->active != SIM_NONE && m->context[d->active].kernels > 0 ? d->active_mw
                                                                                                      : d->idle_mw);
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
    case 269:
    case 270:
    case 271:
        put(f, TYPE_WIDE, 0);
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
