#include "clock.h"

#include <errno.h>
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

uint64_t pm_now_ns(void) {
    return simulated_now ? simulated_now() : read_clock(CLOCK_MONOTONIC);
}

uint64_t pm_now_coarse_ns(void) {
    return simulated_now ? simulated_now() : read_clock(CLOCK_MONOTONIC_COARSE);
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
