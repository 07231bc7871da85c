/* Who uses a card: process lists and utilisation by process. */
#include "nvml_state.h"

/* --- lists -------------------------------------------------------------------------------------------------------- */

struct process_info { /* second and third version alike */
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

bool process_on(const struct sim_process *p, uint32_t device, const struct sim_instance *mig) {
    const struct sim_account *a = &p->account[device];
    if (p->state != SIM_PROCESS_LIVE)
        return false;
    return mig == NULL || (a->instance > 0 && &nvml_machine->device[device].instance[a->instance - 1] == mig);
}

static struct process_info entry(const struct sim_device *d, const struct sim_process *p, const struct sim_account *a) {
    const struct sim_instance *mig = a->instance > 0 && d->mig_mode ? &d->instance[a->instance - 1] : NULL;
    return (struct process_info){p->pid, a->memory + a->overhead, mig != NULL ? mig->gpu_instance : UINT32_MAX,
                                 mig != NULL ? mig->compute_instance : UINT32_MAX};
}

enum list { LIST_COMPUTE, LIST_GRAPHICS, LIST_MPS };

/*
 * Nothing draws on these cards. Where an MPS server runs, it is among the compute processes, and all others are its
 * clients: they stand in both lists, as on a card.
 */
static nvmlReturn_t list(struct sim_machine *m, uint32_t index, const struct sim_instance *mig, enum list kind,
                         unsigned *count, struct process_info *out) {
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    const struct sim_device *d = &m->device[index];
    if (kind == LIST_GRAPHICS || (kind == LIST_MPS && d->mps_server == 0)) {
        *count = 0;
        return NVML_SUCCESS;
    }
    REQUIRE(out != NULL || *count == 0, NVML_ERROR_INVALID_ARGUMENT);
    card_lock(index);
    process_reap(m, true); /* a list shows no dead process */
    unsigned n = 0;
    if (kind == LIST_COMPUTE && d->mps_server != 0 && mig == NULL) {
        if (n < *count)
            out[n] = (struct process_info){(unsigned)d->mps_server, 30u << 20, UINT32_MAX, UINT32_MAX};
        n++;
    }
    for (uint32_t i = 0; i < m->process_high; i++) {
        const struct sim_process *p = &m->process[i];
        const struct sim_account *a = &p->account[index];
        if (!process_on(p, index, mig) || a->contexts == 0)
            continue;
        if (n < *count)
            out[n] = entry(d, p, a);
        n++;
    }
    card_unlock();
    bool fits = n <= *count;
    *count = n;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

#define CARD_LIST(name, kind)                                                                                          \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, struct process_info *out);                     \
    nvmlReturn_t name(nvmlDevice_t device, unsigned *count, struct process_info *out) {                                \
        ENTER_ANY(name, device);                                                                                       \
        return list(m, device->index, mig, kind, count, out);                                                          \
    }
CARD_LIST(nvmlDeviceGetComputeRunningProcesses_v2, LIST_COMPUTE)
CARD_LIST(nvmlDeviceGetComputeRunningProcesses_v3, LIST_COMPUTE)
CARD_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, LIST_GRAPHICS)
CARD_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, LIST_GRAPHICS)
CARD_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, LIST_MPS)
CARD_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, LIST_MPS)

/* --- utilisation -------------------------------------------------------------------------------------------------- */

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

/* Under MPS only the server is told of, with the sum of its clients. */
static unsigned to_server(const struct sim_device *d, struct usage *found, unsigned n) {
    if (d->mps_server == 0 || n == 0)
        return n;
    struct usage all = found[0];
    all.pid = (uint32_t)d->mps_server;
    all.percent_sum = 0;
    for (unsigned i = 0; i < n; i++) {
        all.percent_sum += found[i].percent_sum * all.samples / found[i].samples;
        if (found[i].newest_us > all.newest_us)
            all.newest_us = found[i].newest_us;
    }
    found[0] = all;
    return 1;
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
    unsigned n = to_server(d, found, gather(d, last_us, found, SIM_MAX_PROCESSES));
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
    unsigned n = to_server(d, found, gather(d, info->last_us, found, SIM_MAX_PROCESSES));
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
