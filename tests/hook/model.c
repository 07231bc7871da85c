/*
 * The tracker over a model of a time-sliced device with events: no driver, no threads, a clock of its own.
 *
 *   model SLICE_US SWITCH_US SECONDS BOARD TENANT...     TENANT: PATTERN:US[:US2[:BEGIN_MS]]
 *
 * BOARD 0: none; 1: one; 2: one, and each event takes the device 1.1 us, each launch 0.6 us before it begins.
 *
 * PATTERN: queue, sync, gaps (host pause of twice the length), mixed (one kind, lengths 1x to 8x), change (US, then US2
 * from half time on, one kind), two (kinds of US and US2 in turn), copies (a copy as long as the kernel after each),
 * streams (two streams that overlap fully), untimed (events fail), pause (waits for each, then pauses for US2), late
 * (queue, after 60 ms of other work). Prints a JSON line per tenant: truth and charge.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "clock.h"
#include "tracker.h"

#define QUEUE 4096u
#define STREAMS 2
#define TENANTS 4
#define SETUP_NS 60000000u

enum op_kind { KERNEL, COPY, EVENT };

struct event {
    uint64_t time;
    bool recorded, reached;
};

struct op {
    enum op_kind kind;
    uint64_t ns;
    struct event *event;
};

struct stream {
    struct op ops[QUEUE];
    uint64_t head, tail;
    uint64_t left;
    bool begun;
};

struct tenant {
    const char *pattern;
    double us, us2;
    uint64_t begin;
    uint64_t host; /* its own host time */
    struct stream streams[STREAMS];
    uint64_t busy, issued, paused;
    struct pm_tracker tracker;
    struct pm_counters counters;
    struct pm_estimates *estimates;
    uint32_t dice;
};

static struct tenant tenants[TENANTS];
static int tenant_count, current = -1, on_device = -1;
static uint64_t event_ns, gap_ns, resume_ns, idle_ns;
static uint64_t slice_ns, switch_ns, device_time, slice_end;

static uint64_t now(void) {
    return current >= 0 ? tenants[current].host : device_time;
}

static void sleep_until(uint64_t until) {
    if (tenants[current].host < until)
        tenants[current].host = until;
}

static bool pass_events(struct tenant *t) {
    bool any = false;
    for (int s = 0; s < STREAMS; s++) {
        struct stream *q = &t->streams[s];
        while (q->head < q->tail && q->ops[q->head % QUEUE].kind == EVENT) {
            struct event *e = q->ops[q->head++ % QUEUE].event;
            e->time = device_time;
            e->reached = true;
            any = true;
        }
        any |= q->head < q->tail;
    }
    return any;
}

static bool has_work(struct tenant *t) {
    for (int s = 0; s < STREAMS; s++)
        if (t->streams[s].head < t->streams[s].tail)
            return true;
    return false;
}

/* Runs the device up to `until`. */
static void advance(uint64_t until) {
    while (device_time < until) {
        if (on_device >= 0)
            pass_events(&tenants[on_device]);
        if (on_device < 0 || !has_work(&tenants[on_device]) || device_time >= slice_end) {
            int next = -1;
            for (int i = 1; i <= tenant_count && next < 0; i++)
                if (has_work(&tenants[(on_device + i + tenant_count) % tenant_count]))
                    next = (on_device + i + tenant_count) % tenant_count;
            if (next < 0) {
                device_time = until;
                return;
            }
            if (next != on_device && on_device >= 0)
                device_time += switch_ns;
            on_device = next;
            slice_end = device_time + slice_ns;
            pass_events(
                &tenants[next]); /* an event is reached in a turn of its own tenant, as all of a stream's work */
            if (!has_work(&tenants[next]) || device_time >= until)
                continue;
        }
        struct tenant *t = &tenants[on_device];
        uint64_t step = slice_end > device_time ? slice_end - device_time : 1;
        bool kernel = false;
        for (int s = 0; s < STREAMS; s++) { /* streams run side by side at full speed */
            struct stream *q = &t->streams[s];
            if (q->head == q->tail)
                continue;
            struct op *op = &q->ops[q->head % QUEUE];
            if (!q->begun) {
                q->begun = true;
                q->left = op->ns;
            }
            kernel |= op->kind == KERNEL;
            step = q->left < step ? q->left : step;
        }
        if (step > until - device_time)
            step = until - device_time;
        device_time += step;
        if (kernel)
            t->busy += step;
        for (int s = 0; s < STREAMS; s++) {
            struct stream *q = &t->streams[s];
            if (q->head == q->tail || !q->begun)
                continue;
            q->left -= step;
            if (q->left == 0) {
                q->begun = false;
                q->head++;
            }
        }
        pass_events(t);
    }
}

static void push(struct tenant *t, int stream, struct op op) {
    struct stream *q = &t->streams[stream];
    if (q->tail - q->head >= QUEUE)
        exit(9);
    q->ops[q->tail++ % QUEUE] = op;
}

static int event_create(void **event) {
    *event = calloc(1, sizeof(struct event));
    return 0;
}

static int event_destroy(void *event) {
    (void)event;
    return 0;
}

static int event_record(void *event, void *stream) {
    struct tenant *t = &tenants[current];
    if (strcmp(t->pattern, "untimed") == 0)
        return 999;
    t->host += 1000;
    struct event *e = event;
    e->recorded = true;
    e->reached = false;
    if (event_ns)
        push(t, (int)(uintptr_t)stream - 1, (struct op){COPY, event_ns, NULL});
    push(t, (int)(uintptr_t)stream - 1, (struct op){EVENT, 0, e});
    return 0;
}

static int event_query(void *event) {
    return ((struct event *)event)->reached ? 0 : PM_NOT_READY;
}

static int event_elapsed(float *ms, void *start, void *end) {
    const struct event *a = start, *b = end;
    if (!a->reached || !b->reached)
        return PM_NOT_READY;
    *ms = (float)(((double)b->time - (double)a->time) / 1e6);
    return 0;
}

static uint32_t captures;
static const struct pm_driver driver = {event_create,  event_destroy, event_record, event_query,
                                        event_elapsed, NULL,          NULL,         &captures};

static void launch(struct tenant *t, int stream, uint64_t kind, double us) {
    struct pm_launch launch;
    struct pm_estimate *entry = pm_estimate_find(t->estimates, pm_mix(1, kind) | 1);
    pm_launch_begin(&launch, &t->tracker, entry, (void *)(uintptr_t)(stream + 1), (uint64_t)(stream + 1));
    t->host += 3000;
    if (gap_ns) {
        const struct stream *q = &t->streams[stream];
        bool after_event = q->tail > 0 && q->ops[(q->tail - 1) % QUEUE].kind == EVENT;
        bool idle = q->head == q->tail;
        push(t, stream, (struct op){COPY, idle ? idle_ns : gap_ns + (after_event ? resume_ns : 0), NULL});
    }
    push(t, stream, (struct op){KERNEL, (uint64_t)(us * 1000), NULL});
    pm_launch_end(&launch, true);
    t->issued++;
}

static uint64_t depth(const struct tenant *t) {
    uint64_t most = 0;
    for (int s = 0; s < STREAMS; s++)
        if (t->streams[s].tail - t->streams[s].head > most)
            most = t->streams[s].tail - t->streams[s].head;
    return most;
}

/* One step of a tenant's program; a wait is many short steps, so that the others' hosts keep up. */
static void step(struct tenant *t, uint64_t begin, uint64_t end) {
    bool pauses = strcmp(t->pattern, "pause") == 0, is_sync = strcmp(t->pattern, "sync") == 0 || pauses;
    if (strcmp(t->pattern, "late") == 0 && t->host < t->begin + SETUP_NS) { /* work that nobody is told of */
        push(t, 0, (struct op){COPY, 20000, NULL});
        t->host += 300000;
        return;
    }
    uint64_t limit = is_sync ? 1 : (uint64_t)(50000 / t->us) < 8 ? 8 : (uint64_t)(50000 / t->us);
    if (limit > 900)
        limit = 900;
    if (depth(t) >= limit) {
        t->host += 5000;
        if (is_sync && depth(t) == 0)
            pm_tracker_poll(&t->tracker);
        return;
    }
    if (is_sync)
        pm_tracker_waited(&t->tracker, &(struct pm_wait){t->host, pm_peek(&t->tracker.counters->busy_ns)}, 1);
    if (pauses && t->paused == t->issued) {
        t->paused++;
        t->host += (uint64_t)(t->us2 * 1000);
        return;
    }
    if (strcmp(t->pattern, "mixed") == 0) {
        t->dice = t->dice * 1664525u + 1013904223u;
        launch(t, 0, 1, t->us * (1 + (t->dice >> 24) % 8));
    } else if (strcmp(t->pattern, "change") == 0) {
        launch(t, 0, 1, t->host < (begin + end) / 2 ? t->us : t->us2);
    } else if (strcmp(t->pattern, "two") == 0) {
        launch(t, 0, 1 + (t->issued & 1), t->issued & 1 ? t->us2 : t->us);
    } else if (strcmp(t->pattern, "copies") == 0) {
        launch(t, 0, 1, t->us);
        pm_tracker_taint(&t->tracker, 1);
        push(t, 0, (struct op){COPY, (uint64_t)(t->us * 1000), NULL});
    } else if (strcmp(t->pattern, "streams") == 0) {
        launch(t, 0, 1, t->us);
        launch(t, 1, 2, t->us);
    } else {
        launch(t, 0, 1, t->us);
    }
    if (strcmp(t->pattern, "gaps") == 0)
        t->host += (uint64_t)(t->us * 2000);
}

int main(int argc, char **argv) {
    if (argc < 6)
        return 2;
    slice_ns = (uint64_t)(atof(argv[1]) * 1000);
    switch_ns = (uint64_t)(atof(argv[2]) * 1000);
    uint64_t begin = 1000000000, end = begin + (uint64_t)(atof(argv[3]) * 1e9);
    struct pm_board *board = atoi(argv[4]) ? calloc(1, sizeof *board) : NULL;
    if (atoi(argv[4]) == 2) {
        event_ns = 1280; /* as seen on an H200, driver 580 */
        gap_ns = 1750;
        resume_ns = 770; /* more, after an event */
        idle_ns = 900;   /* instead, in an empty queue */
    }
    pm_clock_use(now, sleep_until);
    device_time = begin;
    for (int i = 5; i < argc && tenant_count < TENANTS; i++) {
        struct tenant *t = &tenants[tenant_count];
        t->pattern = strtok(argv[i], ":");
        t->us = atof(strtok(NULL, ":"));
        const char *second = strtok(NULL, ":"), *third = strtok(NULL, ":");
        t->us2 = second ? atof(second) : t->us;
        t->host = t->begin = begin + (third ? (uint64_t)(atof(third) * 1e6) : 0);
        t->dice = (uint32_t)i;
        t->estimates = pm_estimates_create();
        current = tenant_count++;
        pm_tracker_init(&t->tracker, &driver, &t->counters);
        t->tracker.board = board;
        t->tracker.seat = pm_board_sit(board, (uint64_t)i);
    }
    for (;;) {
        current = -1;
        for (int i = 0; i < tenant_count; i++)
            if (tenants[i].host < end && (current < 0 || tenants[i].host < tenants[current].host))
                current = i;
        if (current < 0)
            break;
        advance(tenants[current].host);
        step(&tenants[current], begin, end);
    }
    for (int i = 0; i < tenant_count; i++) { /* wait for the rest, as a program does before it ends */
        current = i;
        while (has_work(&tenants[i])) {
            tenants[i].host += 100000;
            if (tenants[i].host > device_time)
                advance(tenants[i].host);
        }
        pm_tracker_finish(&tenants[i].tracker, true, false);
        struct pm_counters *c = &tenants[i].counters;
        printf("{\"truth_ns\": %llu, \"charged_ns\": %llu, \"pending_ns\": %llu, \"launches\": %llu, \"timed\": %llu, "
               "\"bursts\": %llu, "
               "\"dropped\": %llu, \"faults\": %llu}\n",
               (unsigned long long)tenants[i].busy, (unsigned long long)c->busy_ns, (unsigned long long)c->pending_ns,
               (unsigned long long)tenants[i].issued, (unsigned long long)c->timed_samples,
               (unsigned long long)c->burst_samples, (unsigned long long)c->dropped_samples,
               (unsigned long long)c->internal_faults);
    }
    return 0;
}
