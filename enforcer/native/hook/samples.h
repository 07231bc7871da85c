/* What samples teach: how long launches of a kind take, and how neighbours' turns lengthen their spans. Under the
 * tracker's lock. */
#ifndef PM_SAMPLES_H
#define PM_SAMPLES_H

#include "neighbours.h"
#include "tracker.h"

/* Something took longer than was known: has every kind timed anew, unless that was done just now. */
void pm_samples_time_anew(struct pm_tracker *tracker);
/* Whether the host was too slow around the launch for its span to tell its length. */
bool pm_samples_blurred(const struct pm_segment *segment, uint64_t span, uint64_t took);
/* Charge of such a launch. */
uint64_t pm_samples_take_blurred(struct pm_tracker *tracker, const struct pm_segment *segment,
                                 const struct pm_beside *beside, uint64_t took);
/* Charge of a launch measured while it had the device to itself. */
uint64_t pm_samples_take_lone(struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t took);
/* Charge of a launch measured while neighbours were busy. */
uint64_t pm_samples_take_shared(struct pm_tracker *tracker, const struct pm_segment *segment,
                                const struct pm_beside *beside, uint64_t took);

#endif
