/* The rate at which a limiter fills its bucket, for ctypes. */
#include "limiter.h"

#include "board.h"
#include "clock.h"

static uint64_t time_ns;

static uint64_t now(void) {
    return time_ns;
}

static void sleep_until(uint64_t until) {
    time_ns = until;
}

/* Parts per million of the card, for a hard limit whose process sits there, at that time. */
__attribute__((visibility("default"))) uint64_t rate(struct pm_board *board, uint32_t seat, uint64_t limit_ppm,
                                                     uint64_t now_ns) {
    struct pm_bucket bucket = {0};
    struct pm_limiter limiter = {.bucket = &bucket, .board = board, .seat = seat};
    time_ns = now_ns;
    pm_clock_use(now, sleep_until);
    pm_limiter_set(&limiter, 1, limit_ppm, false, 100, false);
    pm_limiter_true_up(&limiter, seat, 0, 1, now_ns);
    return limiter.rate_ppm;
}
