/* Accounting: what the driver keeps of each process, also after its end. */
#include "nvml_state.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

CARD_VALUE(nvmlDeviceGetAccountingMode, int, d->accounting)
CARD_VALUE(nvmlDeviceGetAccountingBufferSize, unsigned, SIM_ACCOUNTED)

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
