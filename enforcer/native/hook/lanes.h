/* Lanes: the streams of a context, each with the segment that is open in it. Under the tracker's lock, but for finding.
 */
#ifndef PM_LANES_H
#define PM_LANES_H

#include "tracker.h"

/* The stream's lane; NULL: it has none yet. */
struct pm_lane *pm_lane_find(struct pm_tracker *tracker, uint64_t key);
/* The same, made when absent; NULL: no room. */
struct pm_lane *pm_lane_make(struct pm_tracker *tracker, uint64_t key);
/* A mark now, in a stream that is alive; ends what is open. False: no mark could be made. */
bool pm_lane_mark(struct pm_tracker *tracker, struct pm_lane *lane, void *stream);
/* Two marks in a full queue with nothing between them: what they cost is in every sample. */
bool pm_lane_measure_mark(struct pm_tracker *tracker, struct pm_lane *lane, void *stream);
/* Charges what the lane has open at its estimates, without a mark. */
void pm_lane_abandon(struct pm_tracker *tracker, struct pm_lane *lane);
/* Charges all that is pending at its estimates. */
void pm_lanes_charge_estimates(struct pm_tracker *tracker);

/* One that has a segment open, or NULL. */
struct pm_lane *pm_lane_any(struct pm_tracker *tracker, uint64_t from);
/* For a stream that got no lane: marks before and after the launch. False: not measured, its mark is the caller's. */
bool pm_lane_none_begin(struct pm_tracker *tracker, struct pm_launch *launch);
bool pm_lane_none_end(struct pm_tracker *tracker, struct pm_launch *launch);

#endif
