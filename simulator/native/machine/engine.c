/*
 * The discrete-event engine of the cards.
 *
 * A card runs the kernels of one context at a time. Within the context every stream's head kernel runs at once; each
 * fills a part of the card (its width), and when the parts sum to more than the card all slow down alike, so that two
 * kernels that fill the card take as long together as one after the other. A context keeps the card while it is alone;
 * when another has work, it keeps it for the rest of its slice (or until it has no work) and the switch takes switch_ns
 * in which nothing runs. Memsets are kernels of the driver's own and run among the context's kernels. Copies run on
 * copy engines, whatever the context, at their own bandwidth.
 *
 * Time moves from event to event; a card is integrated only when something on it changes or somebody reads it.
 */
#include "engine.h"

/* --- integration -------------------------------------------------------------------------------------------------- */

static void add_energy(struct sim_machine *m, struct sim_device *dev, uint64_t dt, uint64_t mw) {
    unsigned __int128 pj = (unsigned __int128)dt * mw + dev->energy_pj;
    ADD(m, dev->energy_mj, (uint64_t)(pj / 1000000000u));
    PUT(m, dev->energy_pj, (uint64_t)(pj % 1000000000u));
}

static void integrate_copies(struct sim_machine *m, struct sim_device *dev, uint64_t dt) {
    ADD(m, dev->period_copy_ns, dt);
    ADD(m, dev->copy_ns, dt);
    for (uint32_t ci = dev->contexts; ci != SIM_NONE; ci = m->context[ci].next) {
        struct sim_account *a = &m->process[m->context[ci].process].account[m->context[ci].device];
        if (a->copies == 0 || a->copied_to_ns == dev->time_ns) /* none, or its other context came first */
            continue;
        ADD(m, a->copy_ns, dt);
        PUT(m, a->copied_to_ns, dev->time_ns);
    }
}

bool device_running(const struct sim_machine *m, uint32_t d) {
    const struct sim_device *dev = &m->device[d];
    return dev->engine == SIM_ENGINE_RUN && dev->active != SIM_NONE &&
           m->context[dev->active].kernels + m->context[dev->active].fills > 0;
}

/* Brings a card up to `t`, at or before which nothing changes on it. */
void engine_integrate(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    if (t <= dev->time_ns)
        return;
    uint64_t dt = t - dev->time_ns;
    bool running = device_running(m, d);
    PUT(m, dev->time_ns, t);
    if (running) {
        struct sim_context *c = &m->context[dev->active];
        struct sim_account *a = &m->process[c->process].account[d];
        if (c->kernels > 0) {
            ADD(m, dev->busy_ns, dt);
            ADD(m, a->busy_ns, dt);
        } else {
            ADD(m, dev->fill_ns, dt);
            ADD(m, a->fill_ns, dt);
        }
        ADD(m, dev->sm_ns, c->width_ppm >= 1000000 ? dt : dt * c->width_ppm / 1000000u);
        ADD(m, dev->period_busy_ns, dt);
        ADD(m, a->period_ns, dt);
        ADD(m, dev->warp_ns, c->occupancy_ppm >= 1000000 ? dt : dt * c->occupancy_ppm / 1000000u);
        uint64_t progress = dt;
        if (c->width_ppm > 1000000)
            progress = (uint64_t)((unsigned __int128)dt * 1000000u / c->width_ppm);
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next) {
            struct sim_stream *st = &m->stream[s];
            if (st->started && !stream_empty(st) && on_compute(head_op(m, s)))
                PUT(m, st->remaining_ns, st->remaining_ns > progress ? st->remaining_ns - progress : 0);
        }
    } else if (dev->engine == SIM_ENGINE_SWITCH) {
        ADD(m, dev->switched_ns, dt);
        ADD(m, dev->period_busy_ns, dt);
    }
    if (dev->copies > 0)
        integrate_copies(m, dev, dt);
    add_energy(m, dev, dt, running ? dev->active_mw : dev->idle_mw);
}

/* --- who has the card --------------------------------------------------------------------------------------------- */

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
void engine_schedule(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    while (decide(m, dev, t))
        if (dev->engine == SIM_ENGINE_RUN)
            context_settle(m, dev->active, t);
    bool competitor = next_runnable(m, dev, dev->active) != SIM_NONE;
    uint64_t next = SIM_NEVER;
    if (dev->engine == SIM_ENGINE_SWITCH) {
        next = dev->switch_end_ns;
    } else if (dev->engine == SIM_ENGINE_RUN) {
        const struct sim_context *c = &m->context[dev->active];
        uint64_t least = SIM_NEVER;
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next) {
            const struct sim_stream *st = &m->stream[s];
            if (st->started && on_compute(head_op(m, s)) && st->remaining_ns < least)
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

/* --- what follows from a change ----------------------------------------------------------------------------------- */

/* Processes whose records were reached while settling: what waits for them may go on. Transient, under the mutex. */
static bool reached_[SIM_MAX_PROCESSES];
static uint32_t reached_count_;

void engine_note_reached(uint32_t process) {
    if (!reached_[process]) {
        reached_[process] = true;
        reached_count_++;
    }
}

/* After records were reached: contexts of those processes, on any card, may go on. */
void engine_settle_reached(struct sim_machine *m, uint64_t t) {
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
            engine_integrate(m, ctx->device, t);
            context_settle(m, c, t);
            engine_schedule(m, ctx->device, t);
        }
    }
}

/* Something changed in a context: everything that follows from it at time `t`. */
void engine_changed(struct sim_machine *m, uint32_t ci, uint64_t t) {
    context_settle(m, ci, t);
    engine_schedule(m, m->context[ci].device, t);
    engine_settle_reached(m, t);
}

static void step(struct sim_machine *m, uint32_t d, uint64_t t) {
    struct sim_device *dev = &m->device[d];
    engine_integrate(m, d, t);
    if (dev->period_end_ns <= t)
        samples_roll(m, d, t);
    if (dev->engine == SIM_ENGINE_RUN && dev->active != SIM_NONE) {
        uint32_t ci = dev->active;
        bool any = false;
        for (uint32_t s = m->context[ci].streams; s != SIM_NONE; s = m->stream[s].next) {
            struct sim_stream *st = &m->stream[s];
            if (st->started && st->remaining_ns == 0 && on_compute(head_op(m, s))) {
                stream_pop(m, s);
                any = true;
            }
        }
        if (any)
            engine_changed(m, ci, t);
    }
    if (dev->copies > 0) {
        for (uint32_t c = dev->contexts; c != SIM_NONE; c = m->context[c].next) {
            bool any = false;
            for (uint32_t s = m->context[c].streams; s != SIM_NONE; s = m->stream[s].next) {
                struct sim_stream *st = &m->stream[s];
                if (st->started && head_op(m, s)->kind == SIM_OP_COPY && st->copy_end_ns <= t) {
                    stream_pop(m, s);
                    any = true;
                }
            }
            if (any)
                engine_changed(m, c, t);
        }
    }
    engine_schedule(m, d, t);
    engine_settle_reached(m, t);
    ADD(m, m->transitions, 1);
}

/* --- time --------------------------------------------------------------------------------------------------------- */

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
    engine_integrate(m, d, m->advanced_ns);
    if (dev->next_ns == SIM_NEVER) /* idle: whatever the open period holds was done before it began to idle */
        samples_roll(m, d, m->advanced_ns);
    machine_commit(m);
}
