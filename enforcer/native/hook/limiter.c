#include "limiter.h"

#include "board.h"
#include "clock.h"
#include "process.h"

#define SLICE_NS                                                                                                       \
    20000000u /* longest sleep at a time: the caller may hold a lock of the program's, and the limit may change */
#define LEAST_NS 50000u       /* shortest sleep */
#define LOOK_NS 200000u       /* between two looks at launches that are expected to end soon */
#define UNKNOWN_IN_FLIGHT 2   /* launches of a kind that nothing is known about, ahead of the first one's measurement */
#define UNKNOWN_NS 100000000u /* so long a launch waits for that: a kernel may wait for one that comes after it */
#define UNKNOWN_WAITS 3
#define SURVEY_NS 10000000u    /* between two looks at the other allocations */
#define SOFT_SURVEY_NS 50000u  /* the same for whoever has to make way */
#define SOFT_DEPTH_NS 500000u  /* under way at most while somebody may come back any time */
#define SOFT_ALONE_NS 2000000u /* the same while nobody was there for a second */
#define SOFT_CLAIM_NS 4000000  /* saved up before a soft one takes its own limit beside a busy owner */
#define SOFT_LEAST_PPM 10000u  /* of a soft one that has no limit of its own, beside a busy owner */
#define STARVED_AFTER_NS 250000000u
#define STARVED_FOR_NS 3000000000u
#define REFILL_NS 5000000u

void pm_limiter_present(const struct pm_limiter *limiter, uint32_t seat) {
    pm_board_present(limiter->board, seat, pm_peek(&limiter->limit_ppm), pm_peek(&limiter->soft),
                     pm_peek(&limiter->weight));
}

void pm_limiter_set(struct pm_limiter *limiter, uint64_t generation, uint64_t limit_ppm, bool soft, uint64_t weight,
                    bool suspended) {
    pm_bucket_adopt(limiter->bucket, generation, limit_ppm, pm_now_ns());
    pm_poke(&limiter->limit_ppm, limit_ppm);
    pm_poke(&limiter->soft, soft);
    pm_poke(&limiter->weight, weight);
    pm_poke(&limiter->suspended, suspended);
    pm_poke(&limiter->surveyed_ns, 0);
    pm_poke(&limiter->active, suspended || soft || pm_bucket_limits(limit_ppm));
    pm_limiter_present(limiter, limiter->seat);
}

/*
 * How fast the bucket fills. Hard limits that together promise more than the card gives to several tenants (switching
 * between them costs some of its time) shrink alike while somebody gets less than its own; a soft one shares with other
 * soft ones what owners leave.
 */
static void survey(struct pm_limiter *limiter, uint64_t now, uint64_t period) {
    if (now - pm_peek(&limiter->surveyed_ns) < period)
        return;
    struct pm_neighbours found;
    pm_board_survey(limiter->board, limiter->seat, now, &found);
    uint64_t limit = pm_peek(&limiter->limit_ppm), most = pm_peek(&limiter->soft) ? SOFT_LEAST_PPM : PM_WHOLE_PPM;
    uint64_t rate = limit < PM_WHOLE_PPM ? limit : most;
    if (pm_peek(&limiter->soft) && !found.owner_busy) {
        uint64_t weight = pm_peek(&limiter->weight), part = PM_WHOLE_PPM;
        if (found.soft_weights)
            part = weight * PM_WHOLE_PPM / (weight + found.soft_weights);
        rate = part > rate ? part : rate;
    } else if (!pm_peek(&limiter->soft) && found.starved) {
        uint64_t given = pm_board_given_ppm(limiter->board), promised = found.limits_ppm + rate;
        rate = promised > given ? (uint64_t)((unsigned __int128)rate * given / promised) : rate;
    }
    pm_poke(&limiter->rate_ppm, rate);
    pm_poke(&limiter->owner_busy, found.owner_busy);
    pm_poke(&limiter->others_active, found.active);
    pm_poke(&limiter->soft_others, found.soft_weights > 0);
    pm_poke(&limiter->surveyed_ns, now);
}

static void look(struct pm_limiter *limiter, uint64_t now_ns) {
    if (now_ns - pm_peek(&limiter->looked_ns) < REFILL_NS || pm_peek(&limiter->soft))
        return;
    pm_poke(&limiter->looked_ns, now_ns);
    survey(limiter, now_ns, SURVEY_NS);
    bool full = pm_bucket_refill(limiter->bucket, pm_peek(&limiter->rate_ppm), now_ns, PM_BURST_NS) >= PM_BURST_NS;
    if (full && now_ns - pm_peek(&limiter->idle_ns) > STARVED_AFTER_NS)
        pm_poke(&limiter->starved_until_ns, now_ns + STARVED_FOR_NS);
}

void pm_limiter_true_up(struct pm_limiter *limiter, uint32_t seat, int64_t ns, uint64_t pending_ns, uint64_t now_ns) {
    if (!limiter || !pm_peek(&limiter->active))
        return;
    if (ns)
        pm_bucket_take(limiter->bucket, ns);
    if (pending_ns == 0)
        pm_poke(&limiter->idle_ns, now_ns);
    look(limiter, now_ns);
    if (pm_peek(&limiter->starved_until_ns) > now_ns)
        pm_board_starved(limiter->board, seat, pm_peek(&limiter->starved_until_ns));
}

/* Launches of a kind that wait for the first one's measurement. */
static bool unmeasured(const struct pm_tracker *tracker, struct pm_estimate *entry) {
    if (!entry || pm_peek(&entry->ns) || tracker->broken || pm_peek(tracker->driver->captures))
        return false;
    uint32_t went = pm_peek(&entry->unknown_launches), samples = pm_peek(&entry->samples);
    return went >= samples + UNKNOWN_IN_FLIGHT && went < samples + UNKNOWN_IN_FLIGHT + UNKNOWN_WAITS;
}

/* Why a launch waits, and for how long from now; for_ns 0: it may go. */
struct pause {
    uint64_t for_ns;
    bool throttled; /* because of the limit; else because enough is under way */
};

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* A soft one goes while no owner is busy, or with what it has saved up of its own limit; never far ahead of the device.
 */
static struct pause soft_pause(struct pm_limiter *limiter, uint64_t pending, uint64_t now) {
    survey(limiter, now, SOFT_SURVEY_NS);
    uint64_t rate = pm_peek(&limiter->rate_ppm);
    bool beside_owner = pm_peek(&limiter->owner_busy);
    int64_t balance = pm_bucket_refill(limiter->bucket, rate, now, beside_owner ? PM_BURST_NS : PM_QUANTUM_NS);
    if (balance <= 0 && !beside_owner && !pm_peek(&limiter->soft_others)) {
        pm_bucket_forgive(limiter->bucket);
        balance = 1;
    }
    int64_t enough = beside_owner && !pm_peek(&limiter->claiming) ? SOFT_CLAIM_NS : 1;
    if (balance < enough) {
        pm_poke(&limiter->claiming, 0);
        return (struct pause){least(pm_bucket_wait(balance, enough, rate), LOOK_NS), true};
    }
    pm_poke(&limiter->claiming, beside_owner);
    return (struct pause){pending > (pm_peek(&limiter->others_active) ? SOFT_DEPTH_NS : SOFT_ALONE_NS) ? LEAST_NS : 0,
                          false};
}

static struct pause pause_of(struct pm_limiter *limiter, const struct pm_tracker *tracker, struct pm_estimate *entry,
                             uint64_t began, uint64_t now) {
    if (pm_peek(&limiter->suspended))
        return (struct pause){UINT64_MAX, true};
    if (!pm_peek(&limiter->active))
        return (struct pause){0, false};
    if (unmeasured(tracker, entry) && (began == 0 || now - began < UNKNOWN_NS))
        return (struct pause){LOOK_NS, true};
    uint64_t pending = pm_peek(&tracker->counters->pending_ns);
    if (pm_peek(&limiter->soft))
        return soft_pause(limiter, pending, now);
    survey(limiter, now, SURVEY_NS);
    uint64_t rate = pm_peek(&limiter->rate_ppm);
    int64_t balance = pm_bucket_refill(limiter->bucket, rate, now, PM_BURST_NS);
    if (balance > 0 && began == 0)
        return (struct pause){0, false};
    uint64_t wait = pm_bucket_wait(balance, PM_QUANTUM_NS, rate);
    /* What is under way may turn out shorter than estimated, and is worth looking at as soon as it is expected to have
     * ended. */
    return (struct pause){pending && wait ? least(wait, pending < LOOK_NS ? LOOK_NS : pending) : wait, true};
}

void pm_limiter_wait(struct pm_process *self, struct pm_context *context, struct pm_estimate *entry,
                     uint64_t per_thread, uint64_t lane_key) {
    struct pm_limiter *limiter = &self->limiters[context->device];
    struct pm_tracker *tracker = &context->tracker;
    uint64_t began = 0;
    bool throttled = false;
    for (;;) {
        pm_process_limits(self, context->device); /* as the grant says now */
        uint64_t now = pm_now_ns();
        struct pause pause = pause_of(limiter, tracker, entry, began, now);
        if (pause.for_ns == 0)
            break;
        if (pause.throttled && !throttled) {
            throttled = true;
            pm_add(&tracker->counters->throttle_waits, 1);
            pm_add(&limiter->bucket->waiters, 1);
        }
        if (began == 0) {
            began = now;
            pm_tracker_held(tracker, lane_key, per_thread);
        }
        pm_sleep_until_ns(now + (pause.for_ns > SLICE_NS   ? SLICE_NS
                                 : pause.for_ns < LEAST_NS ? LEAST_NS
                                                           : pause.for_ns));
        pm_tracker_poll(tracker);
        if (pause.throttled)
            pm_add(&tracker->counters->throttled_ns, pm_now_ns() - now);
    }
    if (throttled)
        __atomic_fetch_sub(&limiter->bucket->waiters, 1, __ATOMIC_RELAXED);
    if (began)
        pm_tracker_rested(tracker);
    if (entry && pm_peek(&limiter->active) && pm_peek(&entry->ns) == 0)
        pm_add(&entry->unknown_launches, 1);
}
