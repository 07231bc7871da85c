/* What segments cost: their charge to the counters and to the limiter's account. Under the tracker's lock. */
#ifndef PM_CHARGES_H
#define PM_CHARGES_H

#include "tracker.h"

#define PM_WAIT_NS 100000u /* a wait from here on says how long the work was */

void pm_charge(struct pm_tracker *tracker, uint64_t ns);
/* Launches with this sum of estimates are pending no more. */
void pm_charge_settled(struct pm_tracker *tracker, uint64_t estimate_ns);
/* The same charge limits: the account has had the estimates, and is set right by what they turned out to be. */
void pm_charge_true_up(struct pm_tracker *tracker);
/* Charges what was not charged while it ran. */
void pm_charge_rest(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost);
/* A launch that does not end is charged the time it has had so far, so that it is metered at all. */
void pm_charge_progress(struct pm_tracker *tracker, struct pm_segment *segment);
/* Charges a segment whose marks have passed. */
void pm_charge_segment(struct pm_tracker *tracker, struct pm_segment *segment);

#endif
