/* What a card's driver keeps of the past: utilisation periods, power drawn, XIDs. */
#include "engine.h"

static void roll_period(struct sim_machine *m, uint32_t d) {
    struct sim_device *dev = &m->device[d];
    struct sim_device_sample *sample = &dev->samples[dev->samples_head % SIM_DEVICE_SAMPLES];
    uint64_t busy = dev->period_busy_ns;
    sample->end_us = machine_now_us(m, dev->period_end_ns);
    sample->sm_percent = (uint32_t)((busy * 100 + dev->sample_ns / 2) / dev->sample_ns);
    if (sample->sm_percent > 100)
        sample->sm_percent = 100;
    sample->busy_ppm = (uint32_t)(busy * 1000000 / dev->sample_ns);
    sample->memory_percent = (uint32_t)(dev->period_copy_ns * 100 / dev->sample_ns);
    if (sample->memory_percent > 100)
        sample->memory_percent = 100;
    sample->power_mw = (uint32_t)(dev->idle_mw + (dev->active_mw - dev->idle_mw) *
                                                     (busy > dev->sample_ns ? dev->sample_ns : busy) / dev->sample_ns);
    ADD(m, dev->samples_head, 1);
    PUT(m, dev->period_busy_ns, 0);
    PUT(m, dev->period_copy_ns, 0);
    for (uint32_t i = 0; i < m->process_high; i++) {
        struct sim_process *p = &m->process[i];
        struct sim_account *a = &p->account[d];
        if (p->state != SIM_PROCESS_LIVE || a->contexts == 0)
            continue;
        /* Whoever has a context gets a sample, be it 0: seen on a 580 driver. Whole per cents, rounded down. */
        uint64_t percent = a->period_ns * 100 / dev->sample_ns;
        ADD(m, a->util_samples, 1);
        ADD(m, a->util_sum, a->period_ns * 10000 / dev->sample_ns);
        ADD(m, a->fb_sum, (a->memory + a->overhead) / 4096 * 10000 / (dev->memory / 4096));
        struct sim_process_sample *ps = &dev->process_samples[dev->process_samples_head % SIM_PROCESS_SAMPLES];
        ps->end_us = machine_now_us(m, dev->period_end_ns);
        ps->pid = p->pid;
        ps->sm_percent = (uint32_t)(percent > 100 ? 100 : percent);
        ps->memory_percent = 0;
        ADD(m, dev->process_samples_head, 1);
        PUT(m, a->period_ns, 0);
    }
    ADD(m, dev->period_end_ns, dev->sample_ns);
}

/* Sample periods of an idle card, all alike: only those that still fit the ring are written. */
void samples_roll(struct sim_machine *m, uint32_t d, uint64_t to) {
    struct sim_device *dev = &m->device[d];
    if (dev->period_end_ns > to)
        return;
    uint64_t periods = (to - dev->period_end_ns) / dev->sample_ns + 1;
    if (periods > SIM_DEVICE_SAMPLES + 1) {
        uint64_t skipped = periods - SIM_DEVICE_SAMPLES - 1;
        for (uint32_t i = 0; i < m->process_high; i++) {
            struct sim_account *a = &m->process[i].account[d];
            if (m->process[i].state == SIM_PROCESS_LIVE && a->contexts > 0) {
                ADD(m, a->util_samples, skipped);
                ADD(m, a->fb_sum, (a->memory + a->overhead) / 4096 * 10000 / (dev->memory / 4096) * skipped);
            }
        }
        roll_period(m, d); /* the one that may hold some work */
        ADD(m, dev->period_end_ns, skipped * dev->sample_ns);
    }
    while (dev->period_end_ns <= to)
        roll_period(m, d);
}

uint64_t device_power_mw(const struct sim_machine *m, uint32_t d) {
    const struct sim_device *dev = &m->device[d];
    uint64_t second = 1000000000ull / dev->sample_ns + (dev->sample_ns > 1000000000ull);
    uint64_t n = dev->samples_head < second ? dev->samples_head : second;
    if (n > SIM_DEVICE_SAMPLES)
        n = SIM_DEVICE_SAMPLES;
    if (n == 0)
        return dev->idle_mw;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += dev->samples[(dev->samples_head - 1 - i) % SIM_DEVICE_SAMPLES].power_mw;
    return sum / n;
}

void device_xid(struct sim_machine *m, uint32_t d, uint64_t xid) {
    struct sim_device *dev = &m->device[d];
    struct sim_xid *x = &dev->xids[dev->xids_head % SIM_MAX_XIDS];
    x->sequence = dev->xids_head + 1;
    x->xid = xid;
    x->time_ns = m->advanced_ns;
    ADD(m, dev->xids_head, 1);
    machine_commit(m);
    machine_wake(m);
}
