#include "bucket.h"

#include "clock.h"

#define BURST_NS 20000000 /* what an idle allocation can save up */
#define QUANTUM_NS                                                                                                     \
    2000000                /* a waiter sleeps until so much is there: waking for every launch makes short ones drift   \
                            */
#define SLICE_NS 20000000u /* longest sleep at a time: the caller may hold a lock, and the limit may change */

/* Adds what has come in since the last refill; whoever wins the exchange adds it, so nobody else has to. */
static void refill(struct pm_bucket *bucket, uint64_t limit_ppm, uint64_t now) {
    uint64_t last = pm_load(&bucket->last_refill_ns);
    if (now <= last || now - last < 10000)
        return;
    if (!__atomic_compare_exchange_n(&bucket->last_refill_ns, &last, now, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        return;
    uint64_t elapsed = now - last > 1000000000u ? 1000000000u : now - last;
    int64_t income = (int64_t)(elapsed * limit_ppm / 1000000);
    pm_add(&bucket->refilled_ns, (uint64_t)income);
    int64_t balance = pm_add(&bucket->balance_ns, income) + income;
    if (balance > BURST_NS)
        pm_add(&bucket->balance_ns, BURST_NS - balance);
}

/* A limit where there was none begins with an even account; else debt is carried, never forgiven. */
static void adopt(struct pm_bucket *bucket, uint64_t limit_ppm, uint64_t now) {
    uint64_t before = pm_load(&bucket->limit_ppm);
    if (before == limit_ppm ||
        !__atomic_compare_exchange_n(&bucket->limit_ppm, &before, limit_ppm, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        return;
    if (before == 0 || !pm_bucket_limits(before)) { /* 0: of a new page; a limit of nothing takes no income to adopt */
        pm_store(&bucket->last_refill_ns, now);
        pm_store(&bucket->balance_ns, (int64_t)QUANTUM_NS);
    }
}

void pm_bucket_enter(struct pm_process *self, struct pm_context *context, bool poll) {
    struct pm_bucket *bucket = context->tracker.bucket;
    struct pm_counters *counters = context->tracker.counters;
    uint64_t began = 0;
    int64_t enough = 1;
    for (;;) {
        uint64_t limit_ppm = pm_process_limits(self, context->device).limit_ppm;
        if (limit_ppm != pm_load(&bucket->limit_ppm))
            adopt(bucket, limit_ppm, pm_now_ns());
        if (!pm_bucket_limits(limit_ppm))
            break;
        if (pm_load(&bucket->balance_ns) >= enough && began == 0)
            break;
        uint64_t now = pm_now_ns();
        refill(bucket, limit_ppm, now);
        int64_t balance = pm_load(&bucket->balance_ns);
        if (balance >= enough)
            break;
        if (began == 0) {
            began = now;
            enough = QUANTUM_NS;
            pm_add(&counters->throttle_waits, 1);
            __atomic_fetch_add(&bucket->waiters, 1, __ATOMIC_RELAXED);
        }
        uint64_t wait = limit_ppm ? (uint64_t)(enough - balance) * 1000000 / limit_ppm : SLICE_NS;
        pm_sleep_until_ns(now + (wait > SLICE_NS ? SLICE_NS : wait < 20000 ? 20000 : wait));
        if (poll)
            pm_tracker_poll(&context->tracker);
        uint64_t after = pm_now_ns();
        pm_add(&counters->throttled_ns, after - now);
    }
    if (began)
        __atomic_fetch_sub(&bucket->waiters, 1, __ATOMIC_RELAXED);
}
