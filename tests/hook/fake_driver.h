/* A device for the accounting library alone: one queue, work of a stated length, timing events. For any thread. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <stdlib.h>

#include "clock.h"
#include "process.h"

struct fake_event {
    uint64_t at_ns;
};

static uint64_t fake_free_ns; /* when the device has done all that was handed over */
static uint32_t fake_captures;

static uint64_t fake_work(uint64_t ns) {
    uint64_t old = pm_load(&fake_free_ns), now = pm_now_ns(), next;
    do
        next = (old > now ? old : now) + ns;
    while (!__atomic_compare_exchange_n(&fake_free_ns, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return next;
}

static int fake_create(void **event) {
    *event = calloc(1, sizeof(struct fake_event));
    return *event ? 0 : 2;
}

static int fake_destroy(void *event) {
    free(event);
    return 0;
}

static int fake_record(void *event, void *stream) {
    (void)stream;
    pm_store(&((struct fake_event *)event)->at_ns, fake_work(0));
    return 0;
}

static int fake_query(void *event) {
    return pm_load(&((struct fake_event *)event)->at_ns) <= pm_now_ns() ? 0 : PM_NOT_READY;
}

static int fake_elapsed(float *ms, void *start, void *end) {
    int64_t ns = (int64_t)(pm_load(&((struct fake_event *)end)->at_ns) - pm_load(&((struct fake_event *)start)->at_ns));
    *ms = (float)((double)ns / 1e6);
    return 0;
}

static const struct pm_driver fake_driver = {fake_create,  fake_destroy, fake_record, fake_query,
                                             fake_elapsed, NULL,         NULL,        &fake_captures};

/* What the shim of a launch does. */
static void fake_launch(struct pm_process *self, struct pm_context *context, uint64_t kind, void *stream, uint64_t ns) {
    struct pm_launch launch;
    struct pm_estimate *entry = pm_estimate_find(self->estimates, kind);
    uint64_t lane_key = pm_mix(17, (uint64_t)(uintptr_t)stream) | 1;
    pm_limiter_wait(self, context, entry, 2, lane_key);
    pm_launch_begin(&launch, &context->tracker, entry, stream, lane_key);
    fake_work(ns);
    pm_add(&context->tracker.counters->launches, 1);
    pm_launch_end(&launch, true);
}

#endif
