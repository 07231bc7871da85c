/*
 * The discrete-event engine of the cards.
 *
 * A card runs the kernels of one context at a time. Within the context every stream's head kernel runs at once; each
 * fills a part of the card (its width), and when the parts sum to more than the card all slow down alike, so that two
 * kernels that fill the card take as long together as one after the other. A context keeps the card while it is alone;
 * when another has work, it keeps it for the rest of its slice (or until it has no work) and the switch takes switch_ns
 * in which nothing runs. Copies run on copy engines, whatever the context, at their own bandwidth; memsets too.
 *
 * Time moves from event to event; a card is integrated only when something on it changes or somebody reads it.
 */
#include "machine.h"

#include <string.h>

static struct sim_op *head_op(struct sim_machine *m, uint32_t s) {
    return &m->queue[s][m->stream[s].head % SIM_QUEUE_DEPTH];
}

static bool stream_empty(const struct sim_stream *s) {
    return s->head == s->tail;
}

/* --- samples ---------------------------------------------------------------------------------------------------- */

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
static void roll_idle(struct sim_machine *m, uint32_t d, uint64_t to) {
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

/* --- integration ------------------------------------------------------------------------------------------------ */

static void add_energy(struct sim_machine *m, struct sim_device *dev, uint64_t dt, uint64_t mw) {
    unsigned __int128 pj = (unsigned __int128)dt * mw + dev->energy_pj;
    ADD(m, dev->energy_mj, (uint64_t)(pj / 1000000000u));
    PUT(m, dev->energy_pj, (uint64_t)(pj % 1000000000u));
}

/* Brings a card up to `t`, at or before which nothing changes on it. */
static void integrate(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    if (t <= dev->time_ns)
        return;
    uint64_t dt = t - dev->time_ns;
    bool running = dev->engine == SIM_ENGINE_RUN && dev->active != SIM_NONE && m->context[dev->active].kernels > 0;
    PUT(m, dev->time_ns, t);
    if (running) {
        struct sim_context *c = &m->context[dev->active];
        struct sim_account *a = &m->process[c->process].account[d];
        ADD(m, dev->busy_ns, dt);
        ADD(m, dev->sm_ns, c->width_ppm >= 1000000 ? dt : dt * c->width_ppm / 1000000u);
        ADD(m, dev->period_busy_ns, dt);
        ADD(m, a->busy_ns, dt);
        ADD(m, a->period_ns, dt);
        ADD(m, dev->warp_ns, c->occupancy_ppm >= 1000000 ? dt : dt * c->occupancy_ppm / 1000000u);
        uint64_t progress = dt;
        if (c->width_ppm > 1000000)
            progress = (uint64_t)((unsigned __int128)dt * 1000000u / c->width_ppm);
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next) {
            struct sim_stream *st = &m->stream[s];
            if (st->started && !stream_empty(st) && head_op(m, s)->kind == SIM_OP_KERNEL)
                PUT(m, st->remaining_ns, st->remaining_ns > progress ? st->remaining_ns - progress : 0);
        }
    } else if (dev->engine == SIM_ENGINE_SWITCH) {
        ADD(m, dev->switched_ns, dt);
        ADD(m, dev->period_busy_ns, dt);
    }
    if (dev->copies > 0)
        ADD(m, dev->period_copy_ns, dt);
    add_energy(m, dev, dt, running ? dev->active_mw : dev->idle_mw);
}

/* --- streams ---------------------------------------------------------------------------------------------------- */

/* Processes whose records were reached while settling: what waits for them may go on. Transient, under the mutex. */
static bool reached_[SIM_MAX_PROCESSES];
static uint32_t reached_count_;

static void note_reached(uint32_t process) {
    if (!reached_[process]) {
        reached_[process] = true;
        reached_count_++;
    }
}

/* Does the context have the card at this moment? */
static bool on_card(const struct sim_machine *m, uint32_t ci) {
    const struct sim_device *dev = &m->device[m->context[ci].device];
    return dev->active == ci && dev->engine != SIM_ENGINE_SWITCH;
}

static void pop(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    const struct sim_op *op = head_op(m, s);
    struct sim_context *c = &m->context[st->context];
    struct sim_device *dev = &m->device[c->device];
    struct sim_account *a = &m->process[c->process].account[c->device];
    if (op->kind == SIM_OP_KERNEL) {
        ADD(m, a->kernels, op->kernels);
        ADD(m, dev->kernels, op->kernels);
    } else if (op->kind == SIM_OP_COPY) {
        ADD(m, a->copy_bytes[op->copy], op->arg);
        ADD(m, dev->copy_bytes[op->copy], op->arg);
    }
    if (op->flags & SIM_OP_GRAPH_END)
        ADD(m, a->graph_launches, 1);
    PUT(m, st->done, op->position);
    PUT(m, st->started, 0);
    PUT(m, st->head, st->head + 1);
}

/* May the head start, by the legacy default stream's ordering? */
static bool in_order(struct sim_machine *m, uint32_t s) {
    const struct sim_stream *st = &m->stream[s];
    const struct sim_context *c = &m->context[st->context];
    if (c->legacy == SIM_NONE || (!st->blocking && !st->legacy))
        return true;
    uint64_t order = head_op(m, s)->order;
    if (!st->legacy) {
        const struct sim_stream *legacy = &m->stream[c->legacy];
        return stream_empty(legacy) || head_op(m, c->legacy)->order > order;
    }
    for (uint32_t o = c->streams; o != SIM_NONE; o = m->stream[o].next) {
        const struct sim_stream *other = &m->stream[o];
        if (o != s && other->blocking && !stream_empty(other) && head_op(m, o)->order < order)
            return false;
    }
    return true;
}

/* Does what the head of a stream can do at once; true when it did something that may let others go on. */
static bool settle_stream(struct sim_machine *m, uint32_t s, uint64_t t) {
    struct sim_stream *st = &m->stream[s];
    struct sim_context *c = &m->context[st->context];
    bool progress = false;
    while (!stream_empty(st)) {
        struct sim_op *op = head_op(m, s);
        if (!st->started && !in_order(m, s)) {
            c->waiting++;
            return progress;
        }
        switch (op->kind) {
        case SIM_OP_RECORD: {
            if (!on_card(m, st->context)) { /* the channel's methods run only while its context is on the card */
                c->runnable++;
                return progress;
            }
            struct sim_event *e = &m->event[op->event];
            if (op->arg > e->reached) {
                PUT(m, e->reached, op->arg);
                PUT(m, e->time_ns, t);
            }
            if (e->used == 2 && e->reached >= e->submitted) /* destroyed while pending */
                PUT(m, e->used, 0);
            note_reached(c->process);
            pop(m, s);
            break;
        }
        case SIM_OP_WAIT:
            if (m->event[op->event].reached < op->arg) {
                c->waiting++;
                return progress;
            }
            pop(m, s);
            break;
        case SIM_OP_HOST:
            if (!st->started) {
                PUT(m, st->started, 1);
                ADD(m, m->host_ops, 1);
                machine_wake(m);
            }
            c->waiting++;
            return progress;
        case SIM_OP_COPY:
            if (st->started)
                return progress;
            if (op->work_ns > 0) {
                PUT(m, st->started, 1);
                PUT(m, st->copy_end_ns, t + op->work_ns);
                ADD(m, m->device[c->device].copies, 1);
                return progress;
            }
            pop(m, s);
            break;
        default:
            if (op->work_ns > 0 && !st->started) {
                PUT(m, st->started, 1);
                PUT(m, st->remaining_ns, op->work_ns);
            }
            if (st->started) {
                c->runnable++;
                c->kernels++;
                c->width_ppm += op->width_ppm;
                c->occupancy_ppm += op->event;
                return progress;
            }
            pop(m, s);
            break;
        }
        progress = true;
    }
    return progress;
}

static void settle_context(struct sim_machine *m, uint32_t ci, uint64_t t) {
    struct sim_context *c = &m->context[ci];
    bool progress;
    machine_note_(m, &c->runnable); /* one word with `waiting` */
    machine_note_(m, &c->width_ppm);
    machine_note_(m, &c->kernels);
    machine_note_(m, &c->occupancy_ppm);
    do {
        progress = false;
        c->runnable = 0;
        c->waiting = 0;
        c->kernels = 0;
        c->width_ppm = 0;
        c->occupancy_ppm = 0;
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next)
            progress |= settle_stream(m, s, t);
    } while (progress);
}

/* --- the card's scheduler --------------------------------------------------------------------------------------- */

static uint32_t next_runnable(const struct sim_machine *m, const struct sim_device *dev, uint32_t after) {
    uint32_t first = after != SIM_NONE ? m->context[after].next : dev->contexts;
    uint32_t c = first != SIM_NONE ? first : dev->contexts;
    for (uint32_t start = c; c != SIM_NONE;) {
        if (c != after && m->context[c].runnable > 0)
            return c;
        c = m->context[c].next != SIM_NONE ? m->context[c].next : dev->contexts;
        if (c == start)
            break;
    }
    return SIM_NONE;
}

static void begin_switch(struct sim_machine *m, struct sim_device *dev, uint32_t to, uint64_t t) {
    PUT(m, dev->target, to);
    PUT(m, dev->engine, SIM_ENGINE_SWITCH);
    PUT(m, dev->switch_end_ns, t + dev->switch_ns);
    ADD(m, dev->switches, 1);
}

/* One decision about who has the card; true when a context has just got it, which lets its records be reached. */
static bool decide(struct sim_machine *m, struct sim_device *dev, uint64_t t) {
    if (dev->engine == SIM_ENGINE_SWITCH) {
        if (dev->target != SIM_NONE && dev->switch_end_ns > t)
            return false;
        bool arrived = dev->target != SIM_NONE; /* else the context went away meanwhile */
        if (arrived) {
            PUT(m, dev->active, dev->target);
            PUT(m, dev->target, SIM_NONE);
            PUT(m, dev->slice_start_ns, t);
        }
        PUT(m, dev->engine, arrived ? SIM_ENGINE_RUN : SIM_ENGINE_IDLE);
        return true;
    }
    bool has_work = dev->active != SIM_NONE && m->context[dev->active].runnable > 0;
    uint32_t other = next_runnable(m, dev, dev->active);
    if (has_work) {
        if (dev->engine == SIM_ENGINE_IDLE) {
            PUT(m, dev->engine, SIM_ENGINE_RUN);
            PUT(m, dev->slice_start_ns, t);
        }
        if (other != SIM_NONE) {
            uint64_t end = dev->slice_start_ns + dev->slice_ns;
            if (t > end) /* ended while alone: renewed */
                PUT(m, dev->slice_start_ns,
                    dev->slice_start_ns + (t - dev->slice_start_ns) / dev->slice_ns * dev->slice_ns);
            else if (t == end)
                begin_switch(m, dev, other, t);
        }
        return false;
    }
    if (other == SIM_NONE) {
        PUT(m, dev->engine, SIM_ENGINE_IDLE);
        return false;
    }
    if (dev->active != SIM_NONE) {
        begin_switch(m, dev, other, t);
        return dev->switch_end_ns <= t;
    }
    PUT(m, dev->active, other);
    PUT(m, dev->engine, SIM_ENGINE_RUN);
    PUT(m, dev->slice_start_ns, t);
    return true;
}

/* Decides who has the card, and when something happens next. The card is integrated up to `t`. */
static void schedule(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    while (decide(m, dev, t))
        if (dev->engine == SIM_ENGINE_RUN)
            settle_context(m, dev->active, t);
    bool competitor = next_runnable(m, dev, dev->active) != SIM_NONE;
    uint64_t next = SIM_NEVER;
    if (dev->engine == SIM_ENGINE_SWITCH) {
        next = dev->switch_end_ns;
    } else if (dev->engine == SIM_ENGINE_RUN) {
        const struct sim_context *c = &m->context[dev->active];
        uint64_t least = SIM_NEVER;
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next) {
            const struct sim_stream *st = &m->stream[s];
            if (st->started && head_op(m, s)->kind == SIM_OP_KERNEL && st->remaining_ns < least)
                least = st->remaining_ns;
        }
        if (least != SIM_NEVER) {
            if (c->width_ppm > 1000000)
                least = (uint64_t)(((unsigned __int128)least * c->width_ppm + 999999u) / 1000000u);
            next = t + least;
        }
        if (competitor && dev->slice_start_ns + dev->slice_ns < next)
            next = dev->slice_start_ns + dev->slice_ns;
    }
    if (dev->copies > 0)
        for (uint32_t c = dev->contexts; c != SIM_NONE; c = m->context[c].next)
            for (uint32_t s = m->context[c].streams; s != SIM_NONE; s = m->stream[s].next) {
                const struct sim_stream *st = &m->stream[s];
                if (st->started && head_op(m, s)->kind == SIM_OP_COPY && st->copy_end_ns < next)
                    next = st->copy_end_ns;
            }
    if (next != SIM_NEVER && dev->period_end_ns < next)
        next = dev->period_end_ns;
    PUT(m, dev->next_ns, next);
}

/* After records were reached: contexts of those processes, on any card, may go on. */
static void settle_reached(struct sim_machine *m, uint64_t t) {
    while (reached_count_ > 0) {
        uint32_t process = 0;
        while (!reached_[process])
            process++;
        reached_[process] = false;
        reached_count_--;
        for (uint32_t c = 0; c < m->context_high; c++) {
            struct sim_context *ctx = &m->context[c];
            if (!ctx->used || ctx->process != process || ctx->waiting == 0)
                continue;
            integrate(m, ctx->device, t);
            settle_context(m, c, t);
            schedule(m, ctx->device, t);
        }
    }
}

/* Something changed in a context: everything that follows from it at time `t`. */
static void changed(struct sim_machine *m, uint32_t ci, uint64_t t) {
    settle_context(m, ci, t);
    schedule(m, m->context[ci].device, t);
    settle_reached(m, t);
}

static void step(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    integrate(m, d, t);
    if (dev->period_end_ns <= t)
        roll_idle(m, d, t);
    if (dev->engine == SIM_ENGINE_RUN && dev->active != SIM_NONE) {
        uint32_t ci = dev->active;
        bool any = false;
        for (uint32_t s = m->context[ci].streams; s != SIM_NONE; s = m->stream[s].next) {
            struct sim_stream *st = &m->stream[s];
            if (st->started && st->remaining_ns == 0 && head_op(m, s)->kind == SIM_OP_KERNEL) {
                pop(m, s);
                any = true;
            }
        }
        if (any)
            changed(m, ci, t);
    }
    if (dev->copies > 0) {
        for (uint32_t c = dev->contexts; c != SIM_NONE; c = m->context[c].next) {
            bool any = false;
            for (uint32_t s = m->context[c].streams; s != SIM_NONE; s = m->stream[s].next) {
                struct sim_stream *st = &m->stream[s];
                if (st->started && head_op(m, s)->kind == SIM_OP_COPY && st->copy_end_ns <= t) {
                    pop(m, s);
                    SUB(m, dev->copies, 1);
                    any = true;
                }
            }
            if (any)
                changed(m, c, t);
        }
    }
    schedule(m, d, t);
    settle_reached(m, t);
    ADD(m, m->transitions, 1);
}

void engine_advance(struct sim_machine *m, uint64_t now) {
    if (now < m->advanced_ns)
        now = m->advanced_ns;
    for (;;) {
        uint32_t best = SIM_NONE;
        uint64_t when = now;
        for (uint32_t d = 0; d < m->devices; d++)
            if (m->device[d].next_ns <= when && (best == SIM_NONE || m->device[d].next_ns < when)) {
                best = d;
                when = m->device[d].next_ns;
            }
        if (best == SIM_NONE)
            break;
        if (when < m->advanced_ns)
            when = m->advanced_ns;
        PUT(m, m->advanced_ns, when);
        step(m, best, when);
        machine_commit(m);
    }
    PUT(m, m->advanced_ns, now);
    machine_commit(m);
}

void engine_touch(struct sim_machine *m, uint32_t d) {
    struct sim_device *dev = &m->device[d];
    integrate(m, d, m->advanced_ns);
    if (dev->next_ns == SIM_NEVER) /* idle: whatever the open period holds was done before it began to idle */
        roll_idle(m, d, m->advanced_ns);
    machine_commit(m);
}

/* --- contexts, streams, events ---------------------------------------------------------------------------------- */

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

static void unlink_stream(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    struct sim_context *c = &m->context[st->context];
    if (st->started && !stream_empty(st) && head_op(m, s)->kind == SIM_OP_COPY)
        SUB(m, m->device[c->device].copies, 1);
    if (st->started && !stream_empty(st) && head_op(m, s)->kind == SIM_OP_HOST)
        SUB(m, m->host_ops, 1);
    if (c->streams == s) {
        PUT(m, c->streams, st->next);
    } else {
        uint32_t before = c->streams;
        while (before != SIM_NONE && m->stream[before].next != s)
            before = m->stream[before].next;
        if (before != SIM_NONE)
            PUT(m, m->stream[before].next, st->next);
    }
    if (c->legacy == s)
        PUT(m, c->legacy, SIM_NONE);
    /* Records still queued will never be reached: what waits for them goes on, as after a driver's clean-up. */
    for (uint64_t i = st->head; i != st->tail; i++) {
        const struct sim_op *op = &m->queue[s][i % SIM_QUEUE_DEPTH];
        if (op->kind == SIM_OP_RECORD && m->event[op->event].reached < op->arg) {
            PUT(m, m->event[op->event].reached, op->arg);
            PUT(m, m->event[op->event].time_ns, m->advanced_ns);
            if (m->event[op->event].used == 2)
                PUT(m, m->event[op->event].used, 0);
        }
    }
    PUT(m, st->used, 0);
}

void stream_destroy(struct sim_machine *m, uint32_t s) {
    uint32_t c = m->stream[s].context;
    integrate(m, m->context[c].device, m->advanced_ns);
    unlink_stream(m, s);
    note_reached(m->context[c].process);
    changed(m, c, m->advanced_ns);
    machine_commit(m);
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
    schedule(m, c->device, m->advanced_ns);
    settle_reached(m, m->advanced_ns);
    machine_commit(m);
}

uint32_t stream_create(struct sim_machine *m, uint32_t ci, bool blocking, bool legacy, int priority) {
    struct sim_context *c = &m->context[ci];
    for (uint32_t i = 0; i < SIM_MAX_STREAMS; i++) {
        struct sim_stream *st = &m->stream[i];
        if (st->used)
            continue;
        uint32_t generation = st->generation + 1;
        memset(st, 0, sizeof *st);
        st->generation = generation;
        st->context = ci;
        st->blocking = blocking;
        st->legacy = legacy;
        st->priority = priority;
        st->next = c->streams;
        PUT(m, st->used, 1);
        if (i >= m->stream_high)
            PUT(m, m->stream_high, i + 1);
        PUT(m, c->streams, i);
        if (legacy)
            PUT(m, c->legacy, i);
        machine_commit(m);
        return i;
    }
    return SIM_NONE;
}

bool stream_full(const struct sim_machine *m, uint32_t s, uint64_t entries) {
    const struct sim_stream *st = &m->stream[s];
    return st->tail - st->head + entries > SIM_QUEUE_DEPTH;
}

void stream_push(struct sim_machine *m, uint32_t s, struct sim_op op) {
    struct sim_stream *st = &m->stream[s];
    struct sim_context *c = &m->context[st->context];
    bool was_empty = stream_empty(st);
    op.position = st->position + op.work_ns;
    op.order = c->order;
    m->queue[s][st->tail % SIM_QUEUE_DEPTH] = op;
    PUT(m, c->order, c->order + 1);
    PUT(m, st->position, op.position);
    PUT(m, st->tail, st->tail + 1);
    if (was_empty) {
        engine_touch(m, c->device);
        changed(m, st->context, m->advanced_ns);
    }
    machine_commit(m);
}

bool stream_done(const struct sim_machine *m, uint32_t s, uint64_t target) {
    return m->stream[s].head >= target;
}

uint64_t stream_bound(const struct sim_machine *m, uint32_t s, uint64_t target, uint64_t now) {
    const struct sim_stream *st = &m->stream[s];
    if (st->head >= target || target == 0)
        return now;
    const struct sim_op *last = &m->queue[s][(target - 1) % SIM_QUEUE_DEPTH];
    const struct sim_op *head = &m->queue[s][st->head % SIM_QUEUE_DEPTH];
    const struct sim_context *c = &m->context[st->context];
    const struct sim_device *dev = &m->device[c->device];
    uint64_t work = last->position - st->done;
    if (st->started && head->kind == SIM_OP_KERNEL) {
        uint64_t elapsed = dev->engine == SIM_ENGINE_RUN && dev->active == st->context ? now - dev->time_ns : 0;
        uint64_t left = st->remaining_ns > elapsed ? st->remaining_ns - elapsed : 0;
        work = work - head->work_ns + left;
    } else if (st->started && head->kind == SIM_OP_COPY) {
        work = work - head->work_ns + (st->copy_end_ns > now ? st->copy_end_ns - now : 0);
    }
    uint64_t bound = now + work;
    if (c->runnable > 0 && dev->active != st->context) { /* another context has the card */
        if (dev->engine == SIM_ENGINE_RUN && dev->next_ns != SIM_NEVER) {
            uint64_t end = dev->slice_start_ns + dev->slice_ns;
            if (dev->next_ns < end && m->context[dev->active].runnable > 0)
                end = dev->next_ns;
            bound += (end > now ? end - now : 0) + dev->switch_ns;
        } else if (dev->engine == SIM_ENGINE_SWITCH) {
            bound += dev->switch_end_ns > now ? dev->switch_end_ns - now : 0;
        }
    }
    if (work == 0 && c->waiting > 0)
        bound = now + 200000; /* a host function or another stream decides */
    return bound;
}

uint32_t event_create(struct sim_machine *m, uint32_t context) {
    static __thread uint32_t hint;
    for (uint32_t n = 0; n < SIM_MAX_EVENTS; n++) {
        uint32_t i = (hint + n) % SIM_MAX_EVENTS;
        struct sim_event *e = &m->event[i];
        if (e->used)
            continue;
        PUT(m, e->context, context);
        PUT(m, e->reached, e->submitted); /* generations go on: an old wait never matches a new owner */
        PUT(m, e->used, 1);
        if (i >= m->event_high)
            PUT(m, m->event_high, i + 1);
        hint = i + 1;
        machine_commit(m);
        return i;
    }
    return SIM_NONE;
}

void event_destroy(struct sim_machine *m, uint32_t i) {
    struct sim_event *e = &m->event[i];
    PUT(m, e->used, e->reached < e->submitted ? 2 : 0);
    machine_commit(m);
}

void host_op_done(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    if (stream_empty(st) || !st->started || head_op(m, s)->kind != SIM_OP_HOST)
        return;
    engine_touch(m, m->context[st->context].device);
    SUB(m, m->host_ops, 1);
    pop(m, s);
    changed(m, st->context, m->advanced_ns);
    /* What those who wait had reckoned with has changed: they look again, at this same time. */
    for (uint32_t w = 0; w < m->waiter_high; w++)
        if (m->waiter[w].state == SIM_WAITER_WAITING && m->waiter[w].process == m->context[st->context].process)
            PUT(m, m->waiter[w].wake_ns, m->virtual_ns);
    machine_commit(m);
    machine_grant(m);
    machine_wake(m);
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
