/*
 * Device time that an allocation may still use on a device: one line in shared memory, changed by single atomic
 * operations.
 *
 * At any rest balance_ns == refilled_ns - charged_ns: nothing is lost or made but what a full bucket turns away.
 */
#ifndef PM_BUCKET_H
#define PM_BUCKET_H

#include <stdbool.h>

#include "pages.h"

#define PM_BURST_NS 20000000 /* what an idle allocation saves up at most */
#define PM_QUANTUM_NS                                                                                                  \
    2000000 /* what a waiter waits for: going on at the first nanosecond makes short launches drift                    \
             */
#define PM_WHOLE_PPM 1000000u

/* Whether this limit limits anything. */
static inline bool pm_bucket_limits(uint64_t limit_ppm) {
    return limit_ppm < PM_WHOLE_PPM;
}

static inline int64_t pm_bucket_balance(const struct pm_bucket *bucket) {
    return pm_peek(&bucket->balance_ns);
}

static inline void pm_bucket_take(struct pm_bucket *bucket, int64_t ns) {
    pm_add(&bucket->charged_ns, (uint64_t)ns);
    __atomic_fetch_sub(&bucket->balance_ns, ns, __ATOMIC_RELAXED);
}

/* Adds what has come in since the last refill at `rate_ppm`, up to a balance of `most_ns`; returns the balance. Any
 * number may call. */
int64_t pm_bucket_refill(struct pm_bucket *bucket, uint64_t rate_ppm, uint64_t now_ns, int64_t most_ns);
/* Debt made of time that nobody else wanted. */
void pm_bucket_forgive(struct pm_bucket *bucket);
/* Takes the limit of a newer grant. A limit where there was none begins with an even account; else debt is carried. */
void pm_bucket_adopt(struct pm_bucket *bucket, uint64_t generation, uint64_t limit_ppm, uint64_t now_ns);
/* Time until the balance will be `enough_ns` at this rate; UINT64_MAX: never. */
uint64_t pm_bucket_wait(int64_t balance_ns, int64_t enough_ns, uint64_t rate_ppm);

#endif
