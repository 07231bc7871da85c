/* Streams and events of the machine: what is queued, what the head of a queue may do, what waits for what. */
#include "engine.h"

#include <string.h>

/* --- the head of a queue ------------------------------------------------------------------------------------------ */

/* Does the context have the card at this moment? */
static bool on_card(const struct sim_machine *m, uint32_t ci) {
    const struct sim_device *dev = &m->device[m->context[ci].device];
    return dev->active == ci && dev->engine != SIM_ENGINE_SWITCH;
}

/* If the head is a copy under way: it is off its copy engine. */
static void copy_leaves(struct sim_machine *m, uint32_t s) {
    const struct sim_stream *st = &m->stream[s];
    const struct sim_context *c = &m->context[st->context];
    if (!st->started || stream_empty(st) || head_op(m, s)->kind != SIM_OP_COPY)
        return;
    SUB(m, m->device[c->device].copies, 1);
    SUB(m, m->process[c->process].account[c->device].copies, 1);
}

void stream_pop(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    const struct sim_op *op = head_op(m, s);
    struct sim_context *c = &m->context[st->context];
    struct sim_device *dev = &m->device[c->device];
    struct sim_account *a = &m->process[c->process].account[c->device];
    if (op->kind == SIM_OP_KERNEL) {
        ADD(m, a->kernels, op->kernels);
        ADD(m, dev->kernels, op->kernels);
    } else if (op->kind == SIM_OP_COPY || op->kind == SIM_OP_FILL) {
        ADD(m, a->copy_bytes[op->copy], op->arg);
        ADD(m, dev->copy_bytes[op->copy], op->arg);
    }
    copy_leaves(m, s);
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
            engine_note_reached(c->process);
            stream_pop(m, s);
            break;
        }
        case SIM_OP_WAIT:
            if (m->event[op->event].reached < op->arg) {
                c->waiting++;
                return progress;
            }
            stream_pop(m, s);
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
                ADD(m, m->process[c->process].account[c->device].copies, 1);
                return progress;
            }
            stream_pop(m, s);
            break;
        default:
            if (op->work_ns > 0 && !st->started) {
                PUT(m, st->started, 1);
                PUT(m, st->remaining_ns, op->work_ns);
            }
            if (st->started) {
                c->runnable++;
                if (op->kind == SIM_OP_KERNEL)
                    c->kernels++;
                else
                    c->fills++;
                c->width_ppm += op->width_ppm;
                c->occupancy_ppm += op->event;
                return progress;
            }
            stream_pop(m, s);
            break;
        }
        progress = true;
    }
    return progress;
}

void context_settle(struct sim_machine *m, uint32_t ci, uint64_t t) {
    struct sim_context *c = &m->context[ci];
    bool progress;
    machine_note_(m, &c->runnable); /* one word with `waiting` */
    machine_note_(m, &c->width_ppm);
    machine_note_(m, &c->kernels);
    machine_note_(m, &c->fills);
    machine_note_(m, &c->occupancy_ppm);
    do {
        progress = false;
        c->runnable = 0;
        c->waiting = 0;
        c->kernels = 0;
        c->fills = 0;
        c->width_ppm = 0;
        c->occupancy_ppm = 0;
        for (uint32_t s = c->streams; s != SIM_NONE; s = m->stream[s].next)
            progress |= settle_stream(m, s, t);
    } while (progress);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

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

static void unlink_stream(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    struct sim_context *c = &m->context[st->context];
    copy_leaves(m, s);
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
    engine_integrate(m, m->context[c].device, m->advanced_ns);
    unlink_stream(m, s);
    engine_note_reached(m->context[c].process);
    engine_changed(m, c, m->advanced_ns);
    machine_commit(m);
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
        engine_changed(m, st->context, m->advanced_ns);
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
    if (st->started && on_compute(head)) {
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

void host_op_done(struct sim_machine *m, uint32_t s) {
    struct sim_stream *st = &m->stream[s];
    if (stream_empty(st) || !st->started || head_op(m, s)->kind != SIM_OP_HOST)
        return;
    engine_touch(m, m->context[st->context].device);
    SUB(m, m->host_ops, 1);
    stream_pop(m, s);
    engine_changed(m, st->context, m->advanced_ns);
    /* What those who wait had reckoned with has changed: they look again, at this same time. */
    for (uint32_t w = 0; w < m->waiter_high; w++)
        if (m->waiter[w].state == SIM_WAITER_WAITING && m->waiter[w].process == m->context[st->context].process)
            PUT(m, m->waiter[w].wake_ns, m->virtual_ns);
    machine_commit(m);
    machine_grant(m);
    machine_wake(m);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

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
