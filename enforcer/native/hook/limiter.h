/*
 * The compute limit of this process's launches on one device: takes estimates out of the allocation's bucket as
 * launches go, gives back what settling finds too much, and holds launches while the bucket is empty.
 */
#ifndef PM_LIMITER_H
#define PM_LIMITER_H

#include <stdbool.h>
#include <stdint.h>

#include "bucket.h"

struct pm_board;
struct pm_context;
struct pm_estimate;
struct pm_process;

#define PM_FLUSH_NS 50000u /* estimates that a stream keeps to itself before it touches the shared line */

struct pm_limiter {
    uint32_t active;    /* launches are taken from the bucket and may have to wait; 0: nothing limits */
    uint32_t soft;      /* may use what others leave */
    uint32_t suspended; /* nothing may start */
    uint32_t spare;
    uint64_t limit_ppm;
    uint64_t weight;
    struct pm_bucket *bucket;
    struct pm_board *board; /* NULL: nothing is known of others */
    uint32_t seat;
    uint32_t claiming;    /* a soft one takes its own limit while others are busy */
    uint64_t surveyed_ns; /* when the following was found out */
    uint64_t rate_ppm;    /* at which the bucket fills now */
    uint32_t owner_busy;
    uint32_t others_active;
    uint32_t soft_others; /* soft ones that are active */
    uint32_t spare2;
    uint64_t looked_ns;
    uint64_t idle_ns; /* when this process last had nothing under way */
    uint64_t starved_until_ns;
} __attribute__((aligned(64)));

/* The grant says so now. `generation`: of the grant. */
void pm_limiter_set(struct pm_limiter *limiter, uint64_t generation, uint64_t limit_ppm, bool soft, uint64_t weight,
                    bool suspended);

/* Lets other allocations know of the limit, at a seat of this process. */
void pm_limiter_present(const struct pm_limiter *limiter, uint32_t seat);

/*
 * Launches took a stream's open work from `before_ns` to `after_ns` of estimates. The shared line is touched once for
 * each PM_FLUSH_NS of them; what is left over is for pm_limiter_ended.
 */
static inline void pm_limiter_launched(struct pm_limiter *limiter, uint64_t before_ns, uint64_t after_ns) {
    if (limiter && pm_peek(&limiter->active) && before_ns / PM_FLUSH_NS != after_ns / PM_FLUSH_NS)
        pm_bucket_take(limiter->bucket, (int64_t)((after_ns / PM_FLUSH_NS - before_ns / PM_FLUSH_NS) * PM_FLUSH_NS));
}

/* Open work of so many estimates has ended. */
static inline void pm_limiter_ended(struct pm_limiter *limiter, uint64_t estimate_ns) {
    if (limiter && pm_peek(&limiter->active) && estimate_ns % PM_FLUSH_NS)
        pm_bucket_take(limiter->bucket, (int64_t)(estimate_ns % PM_FLUSH_NS));
}

/* Settling found this much more (less: negative) than was estimated; `pending_ns` is still under way. `seat`: whose
 * work it is. */
void pm_limiter_true_up(struct pm_limiter *limiter, uint32_t seat, int64_t ns, uint64_t pending_ns, uint64_t now_ns);

/* Estimates that may go into a stream before they are measured: what cannot be called back is kept short where others
 * come first. */
static inline uint64_t pm_limiter_stretch(const struct pm_limiter *limiter) {
    return limiter && pm_peek(&limiter->soft) ? 200000 : UINT64_MAX;
}

/* Waits until the launch may go. Never with a lock of ours held. `entry`: of its kind, or NULL; `per_thread`: the
 * stream handle that means another stream in each thread. */
void pm_limiter_wait(struct pm_process *self, struct pm_context *context, struct pm_estimate *entry,
                     uint64_t per_thread, uint64_t lane_key);

#endif
