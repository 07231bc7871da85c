/* The clock of all charges: the machine's, or that of a simulated machine. */
#ifndef PM_CLOCK_H
#define PM_CLOCK_H

#include <stdint.h>

/* Nanoseconds that only grow. */
uint64_t pm_now_ns(void);
/* Nanoseconds that only grow, cheap and a few milliseconds coarse. */
uint64_t pm_now_coarse_ns(void);
/* CLOCK_REALTIME in nanoseconds, cheap and a few milliseconds coarse. */
uint64_t pm_realtime_coarse_ns(void);
/* Returns at `deadline_ns` of pm_now_ns, or later. */
void pm_sleep_until_ns(uint64_t deadline_ns);
/* From now on asks these instead; NULL: the machine's clock. */
void pm_clock_use(uint64_t (*now)(void), void (*sleep_until)(uint64_t));

#endif
