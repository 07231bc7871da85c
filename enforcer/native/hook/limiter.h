/*
 * The compute limit of this process's launches on one device: takes estimates out of the allocation's bucket as launches go, gives back
 * what settling finds too much, and holds launches while the bucket is empty.
 */
#ifndef PM_LIMITER_H
#define PM_LIMITER_H

#include <stdbool.h>
#include <stdint.h>

#include "bucket.h"

struct pm_context;
struct pm_estimate;
struct pm_process;

#define PM_FLUSH_NS 50000 /* estimates that a process keeps to itself before it touches the shared line */

struct pm_limiter {
    uint32_t active;    /* launches are taken from the bucket and may have to wait; 0: nothing limits */
    uint32_t soft;      /* may use what others leave */
    uint32_t suspended; /* nothing may start */
    uint32_t spare;
    uint64_t limit_ppm;
    uint64_t weight;
    struct pm_bucket *bucket;
    int64_t unflushed_ns __attribute__((aligned(64)));
};

/* The grant says so now. `generation`: of the grant. */
void pm_limiter_set(struct pm_limiter *limiter, uint64_t generation, uint64_t limit_ppm, bool soft, uint64_t weight, bool suspended);

static inline void pm_limiter_flush(struct pm_limiter *limiter) {
    int64_t ns = __atomic_exchange_n(&limiter->unflushed_ns, 0, __ATOMIC_RELAXED);
    if (ns)
        pm_bucket_take(limiter->bucket, ns);
}

/* A launch of this estimate has gone. */
static inline void pm_limiter_launched(struct pm_limiter *limiter, uint64_t estimate_ns) {
    if (limiter && pm_peek(&limiter->active) && pm_add(&limiter->unflushed_ns, (int64_t)estimate_ns) + (int64_t)estimate_ns >= PM_FLUSH_NS)
        pm_limiter_flush(limiter);
}

/* Settling found this much more (less: negative) than was estimated. */
static inline void pm_limiter_true_up(struct pm_limiter *limiter, int64_t ns) {
    if (limiter && ns && pm_peek(&limiter->active))
        pm_bucket_take(limiter->bucket, ns);
}

/* Waits until the launch may go. Never with a lock of ours held. `entry`: of its kind, or NULL. */
void pm_limiter_wait(struct pm_process *self, struct pm_context *context, struct pm_estimate *entry, void *stream, uint64_t lane_key);

#endif
