#include "clock.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

static uint64_t (*simulated_now)(void);
static void (*simulated_sleep)(uint64_t);

static uint64_t read_clock(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void pm_clock_use(uint64_t (*now)(void), void (*sleep_until)(uint64_t)) {
    simulated_sleep = sleep_until;
    simulated_now = now;
}

#if defined(__x86_64__)
static inline uint64_t ticks(void) {
    return __builtin_ia32_rdtsc();
}
#elif defined(__aarch64__)
static inline uint64_t ticks(void) {
    uint64_t count;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(count));
    return count;
}
#else
static inline uint64_t ticks(void) {
    return 0;
}
#endif

#define LEAST_STRETCH_NS 200000u /* between two readings of both clocks, to say how fast the counter runs */
#define MOST_STRETCH_NS 1000000000u

/*
 * Where even the coarse clock is a system call, as on some virtual machines, it costs more than all else that the hook
 * does for a launch. Each thread takes the counter's rate from its own precise readings, of which the last one is never
 * far off, so that a counter that stops, jumps or differs between processors does no lasting harm.
 */
struct pace {
    uint64_t ticks, ns;
    double ns_per_tick; /* 0: not known yet */
};
static __thread struct pace pace __attribute__((tls_model("initial-exec")));

uint64_t pm_now_ns(void) {
    if (simulated_now)
        return simulated_now();
    uint64_t ns = read_clock(CLOCK_MONOTONIC), count = ticks();
    uint64_t passed = ns - pace.ns;
    if (passed >= LEAST_STRETCH_NS || pace.ns == 0) {
        bool sound = pace.ns && passed < MOST_STRETCH_NS && count > pace.ticks;
        pace.ns_per_tick = sound ? (double)passed / (double)(count - pace.ticks) : 0;
        pace.ns = ns;
        pace.ticks = count;
    }
    return ns;
}

uint64_t pm_now_coarse_ns(void) {
    if (simulated_now)
        return simulated_now();
    uint64_t count = ticks();
    double ahead = (double)(int64_t)(count - pace.ticks) * pace.ns_per_tick;
    if (ahead > 0 && ahead < MOST_STRETCH_NS)
        return pace.ns + (uint64_t)ahead;
    return pm_now_ns();
}

uint64_t pm_realtime_coarse_ns(void) {
    return read_clock(CLOCK_REALTIME_COARSE);
}

void pm_sleep_until_ns(uint64_t deadline_ns) {
    if (simulated_sleep) {
        simulated_sleep(deadline_ns);
        return;
    }
    struct timespec t = {.tv_sec = (time_t)(deadline_ns / 1000000000u), .tv_nsec = (long)(deadline_ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}
