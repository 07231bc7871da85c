/* Contexts of the machine, and the card memory that they and their processes take. */
#include "engine.h"

#include <string.h>

/* --- memory ------------------------------------------------------------------------------------------------------- */

static void account_peak(struct sim_machine *m, struct sim_account *a) {
    if (a->memory > a->memory_peak)
        PUT(m, a->memory_peak, a->memory);
    if (a->memory + a->overhead > a->memory_all_peak)
        PUT(m, a->memory_all_peak, a->memory + a->overhead);
}

uint64_t memory_free(const struct sim_machine *m, uint32_t d) {
    const struct sim_device *dev = &m->device[d];
    uint64_t used = dev->reserved + dev->memory_used;
    return used < dev->memory ? dev->memory - used : 0;
}

bool memory_take(struct sim_machine *m, uint32_t process, uint32_t d, uint64_t bytes) {
    struct sim_account *a = &m->process[process].account[d];
    if (m->process[process].state != SIM_PROCESS_LIVE) /* a thread that outlives its process's farewell */
        return false;
    if (bytes > memory_free(m, d)) {
        process_reap(m, true); /* the dead may hold it */
        if (bytes > memory_free(m, d)) {
            ADD(m, a->refused, 1);
            machine_commit(m);
            return false;
        }
    }
    ADD(m, m->device[d].memory_used, bytes);
    ADD(m, a->memory, bytes);
    account_peak(m, a);
    machine_commit(m);
    return true;
}

void memory_give(struct sim_machine *m, uint32_t process, uint32_t d, uint64_t bytes) {
    struct sim_account *a = &m->process[process].account[d];
    if (m->process[process].state != SIM_PROCESS_LIVE)
        return;
    SUB(m, m->device[d].memory_used, bytes);
    SUB(m, a->memory, bytes);
    machine_commit(m);
}

/* --- contexts ----------------------------------------------------------------------------------------------------- */

uint32_t context_create(struct sim_machine *m, uint32_t process, uint32_t d) {
    struct sim_device *dev = &m->device[d];
    if (m->process[process].state != SIM_PROCESS_LIVE)
        return SIM_NONE;
    if (dev->context_overhead > memory_free(m, d))
        process_reap(m, true);
    if (dev->context_overhead > memory_free(m, d))
        return SIM_NONE;
    engine_touch(m, d);
    for (uint32_t i = 0; i < SIM_MAX_CONTEXTS; i++) {
        struct sim_context *c = &m->context[i];
        if (c->used)
            continue;
        memset(c, 0, sizeof *c);
        c->process = process;
        c->device = d;
        c->streams = SIM_NONE;
        c->legacy = SIM_NONE;
        c->next = SIM_NONE;
        c->overhead = dev->context_overhead;
        struct sim_account *a = &m->process[process].account[d];
        PUT(m, c->used, 1);
        if (i >= m->context_high)
            PUT(m, m->context_high, i + 1);
        ADD(m, dev->memory_used, c->overhead);
        ADD(m, a->overhead, c->overhead);
        ADD(m, a->contexts, 1);
        if (a->first_context_ns == 0)
            PUT(m, a->first_context_ns, m->advanced_ns ? m->advanced_ns : 1);
        account_peak(m, a);
        /* appended: the round robin goes in order of creation */
        if (dev->contexts == SIM_NONE) {
            PUT(m, dev->contexts, i);
        } else {
            uint32_t last = dev->contexts;
            while (m->context[last].next != SIM_NONE)
                last = m->context[last].next;
            PUT(m, m->context[last].next, i);
        }
        machine_commit(m);
        return i;
    }
    return SIM_NONE;
}

void context_destroy(struct sim_machine *m, uint32_t i) {
    struct sim_context *c = &m->context[i];
    struct sim_device *dev = &m->device[c->device];
    while (c->streams != SIM_NONE)
        stream_destroy(m, c->streams);
    for (uint32_t e = 0; e < m->event_high; e++)
        if (m->event[e].used && m->event[e].context == i) {
            PUT(m, m->event[e].used, 0);
            machine_commit(m);
        }
    engine_touch(m, c->device);
    struct sim_account *a = &m->process[c->process].account[c->device];
    SUB(m, dev->memory_used, c->overhead);
    SUB(m, a->overhead, c->overhead);
    SUB(m, a->contexts, 1);
    if (dev->contexts == i) {
        PUT(m, dev->contexts, c->next);
    } else {
        uint32_t before = dev->contexts;
        while (before != SIM_NONE && m->context[before].next != i)
            before = m->context[before].next;
        if (before != SIM_NONE)
            PUT(m, m->context[before].next, c->next);
    }
    if (dev->active == i) {
        PUT(m, dev->active, SIM_NONE);
        if (dev->engine == SIM_ENGINE_RUN)
            PUT(m, dev->engine, SIM_ENGINE_IDLE);
    }
    if (dev->target == i)
        PUT(m, dev->target, SIM_NONE);
    PUT(m, c->used, 0);
    engine_schedule(m, c->device, m->advanced_ns);
    engine_settle_reached(m, m->advanced_ns);
    machine_commit(m);
}
