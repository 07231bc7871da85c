/* How long a launch of a kind takes: a lock-free table keyed by (function, shape) or by executable graph. */
#ifndef PM_ESTIMATES_H
#define PM_ESTIMATES_H

#include <stdbool.h>
#include <stdint.h>

/* On the way of every launch: kept together, so that it stays in the caches beside the driver's own code. */
#define PM_HOT __attribute__((hot))
#define PM_SELDOM __attribute__((noinline, cold))

#define PM_UNKNOWN_NS 50000u /* a launch nothing is known about */
#define PM_LONG_NS 500000u   /* from here on every launch is timed */
#define PM_FIRST_SAMPLES 3u  /* so many launches of a kind are timed at once */
#define PM_SURE_SAMPLES 4u   /* measured alone so often, the length of a kind is known */
#define PM_SAMPLE_BUDGET_NS                                                                                            \
    1500000u /* device time between two samples of a kind: an event pair costs below 0.3 % of it */

#define PM_MET 8u
#define PM_UNSTEADY 10u /* from here on lengths vary, and their mean is all there is to know */

#define PM_KIND_NAMED 1u      /* its name has been looked at */
#define PM_KIND_COLLECTIVE 2u /* waits for its peers on other devices */

struct pm_estimate { /* what every launch touches in one cache line */
    uint64_t key;
    uint64_t ns;       /* 0: unknown */
    int32_t countdown; /* launches until the next sample */
    uint32_t begun;    /* of the first samples, those begun */
    uint32_t round;    /* of re-timing, as last seen */
    uint32_t flags;    /* PM_KIND_… */
    uint32_t random;
    uint32_t samples;  /* measured, trusted or not */
    uint32_t lone;     /* of these, with the device to itself */
    uint32_t unsteady; /* how often samples differ of late, 0 to 20: one length, or one after the other, or many */
    uint32_t unknown_launches; /* under a compute limit, before anything was known */
    uint32_t suspects;         /* untimed launches that the program waited for longer than the estimate explains */
    uint64_t shared_ns;        /* charged on the strength of shared spans alone */
    uint64_t shared_most_ns;   /* their spans: no launch was longer than its own */
    uint32_t shared;           /* launches charged so */
    uint32_t strikes;          /* samples in a row far above the estimate while neighbours were busy */
    uint32_t guessed;          /* launches beside neighbours since the last one alone */
    uint32_t met;              /* spans beside one neighbour that had work all the time, the last of which: */
    float met_ns[PM_MET];
} __attribute__((aligned(64)));

struct pm_estimates;

struct pm_estimates *pm_estimates_create(void);
/* The entry of a key (never 0), made when absent; NULL when the table or its neighbourhood is full. */
struct pm_estimate *pm_estimate_find(struct pm_estimates *table, uint64_t key);
/* Forgets what is known: the same key now does something else. */
void pm_estimate_reset(struct pm_estimate *entry);

static inline uint64_t pm_mix(uint64_t hash, uint64_t value) {
    hash ^= value;
    hash *= 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Launches from one sample to the next, on average. */
static inline uint32_t pm_estimate_every(const struct pm_estimate *entry) {
    uint64_t ns = __atomic_load_n(&entry->ns, __ATOMIC_RELAXED);
    uint64_t every = PM_SAMPLE_BUDGET_NS / (ns ? ns : PM_UNKNOWN_NS);
    return every < 1 ? 1 : every > 1000 ? 1000 : (uint32_t)every;
}

/* Whether this launch is to be timed; counts it. The result is not known before long, so the next one is set at once.
   `round` changes when something took longer than all that was known of it: then every kind is timed anew. */
static inline bool pm_estimate_due(struct pm_estimate *entry, uint32_t round) {
    if (__atomic_load_n(&entry->round, __ATOMIC_RELAXED) != round) {
        __atomic_store_n(&entry->round, round, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->begun, PM_FIRST_SAMPLES - 2, __ATOMIC_RELAXED);
    }
    uint64_t ns = __atomic_load_n(&entry->ns, __ATOMIC_RELAXED);
    if (ns == 0 || ns >= PM_LONG_NS) /* of an unknown kind too: it may turn out to be long */
        return true;
    if (__atomic_load_n(&entry->begun, __ATOMIC_RELAXED) < PM_FIRST_SAMPLES) {
        __atomic_fetch_add(&entry->begun, 1, __ATOMIC_RELAXED);
        return true;
    }
    int32_t left = __atomic_load_n(&entry->countdown, __ATOMIC_RELAXED) - 1;
    if (left <= 0) {
        /* uneven, so that a program's own rhythm does not pick always the same of its launches */
        uint32_t every = pm_estimate_every(entry);
        uint32_t random = __atomic_load_n(&entry->random, __ATOMIC_RELAXED) * 1664525u + 1013904223u;
        __atomic_store_n(&entry->random, random, __ATOMIC_RELAXED);
        left = (int32_t)(every / 2 + (uint32_t)((uint64_t)random * (every + 1) >> 32) + 1);
        __atomic_store_n(&entry->countdown, left, __ATOMIC_RELAXED);
        return true;
    }
    __atomic_store_n(&entry->countdown, left, __ATOMIC_RELAXED);
    return false;
}

#endif
