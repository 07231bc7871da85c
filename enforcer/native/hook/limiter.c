#include "limiter.h"

#include "clock.h"
#include "process.h"

#define SLICE_NS 20000000u  /* longest sleep at a time: the caller may hold a lock of the program's, and the limit may change */
#define LEAST_NS 50000u     /* shortest sleep */
#define LOOK_NS 200000u     /* between two looks at launches that are expected to end soon */
#define UNKNOWN_IN_FLIGHT 2 /* launches of a kind that nothing is known about, ahead of the first one's measurement */
#define UNKNOWN_NS 100000000u /* so long a launch waits for that: a kernel may wait for one that comes after it */
#define UNKNOWN_WAITS 3

void pm_limiter_set(struct pm_limiter *limiter, uint64_t generation, uint64_t limit_ppm, bool soft, uint64_t weight, bool suspended) {
    pm_bucket_adopt(limiter->bucket, generation, limit_ppm, pm_now_ns());
    pm_poke(&limiter->limit_ppm, limit_ppm);
    pm_poke(&limiter->soft, soft);
    pm_poke(&limiter->weight, weight);
    pm_poke(&limiter->suspended, suspended);
    pm_poke(&limiter->active, suspended || pm_bucket_limits(limit_ppm));
}

/* Launches of a kind that wait for the first one's measurement. */
static bool unmeasured(const struct pm_tracker *tracker, struct pm_estimate *entry) {
    if (!entry || pm_peek(&entry->ns) || tracker->broken || pm_peek(tracker->driver->captures))
        return false;
    uint32_t went = pm_peek(&entry->unknown_launches), samples = pm_peek(&entry->samples);
    return went >= samples + UNKNOWN_IN_FLIGHT && went < samples + UNKNOWN_IN_FLIGHT + UNKNOWN_WAITS;
}

/* How long the launch has to wait from now; 0: it may go. */
static uint64_t pause_of(struct pm_limiter *limiter, const struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t began, uint64_t now) {
    if (pm_peek(&limiter->suspended))
        return UINT64_MAX;
    uint64_t rate = pm_peek(&limiter->limit_ppm);
    if (!pm_bucket_limits(rate))
        return 0;
    if (unmeasured(tracker, entry) && (began == 0 || now - began < UNKNOWN_NS))
        return LOOK_NS;
    int64_t balance = pm_bucket_refill(limiter->bucket, rate, now, PM_BURST_NS);
    if (balance > 0 && began == 0)
        return 0;
    uint64_t wait = pm_bucket_wait(balance, PM_QUANTUM_NS, rate);
    /* What is under way may turn out shorter than estimated, and is worth looking at as soon as it is expected to have ended. */
    uint64_t pending = pm_peek(&tracker->counters->pending_ns);
    if (pending && wait > pending)
        wait = pending < LOOK_NS ? LOOK_NS : pending;
    return wait;
}

void pm_limiter_wait(struct pm_process *self, struct pm_context *context, struct pm_estimate *entry, void *stream, uint64_t lane_key) {
    struct pm_limiter *limiter = &self->limiters[context->device];
    struct pm_tracker *tracker = &context->tracker;
    uint64_t began = 0, slept = 0;
    for (;;) {
        pm_process_limits(self, context->device); /* as the grant says now */
        uint64_t now = pm_now_ns(), wait = pause_of(limiter, tracker, entry, began, now);
        if (wait == 0)
            break;
        if (began == 0) {
            began = now;
            pm_add(&tracker->counters->throttle_waits, 1);
            pm_add(&limiter->bucket->waiters, 1);
            pm_limiter_flush(limiter);
            pm_tracker_mark(tracker, stream, lane_key); /* so that what has gone is measured meanwhile */
        }
        pm_sleep_until_ns(now + (wait > SLICE_NS ? SLICE_NS : wait < LEAST_NS ? LEAST_NS : wait));
        pm_tracker_poll(tracker);
        slept = pm_now_ns();
        pm_add(&tracker->counters->throttled_ns, slept - now);
    }
    if (began) {
        __atomic_fetch_sub(&limiter->bucket->waiters, 1, __ATOMIC_RELAXED);
        pm_tracker_rested(tracker, lane_key);
    }
    if (entry && pm_peek(&limiter->active) && pm_peek(&entry->ns) == 0)
        pm_add(&entry->unknown_launches, 1);
}
