/* What the other tenants of the device take of it while this one has work. Under the tracker's lock. */
#ifndef PM_NEIGHBOURS_H
#define PM_NEIGHBOURS_H

#include "tracker.h"

void pm_neighbours_init(struct pm_tracker *tracker);
/* Sees what they did of late. */
void pm_neighbours_watch(struct pm_tracker *tracker);
/* How the device was divided in a stretch in which this one had work throughout. */
struct pm_beside {
    double present;  /* of the neighbours that were seen busy, how many had work on average */
    double own_part; /* of the stretch, 0 to 1 */
    bool in_full;    /* all of them had work all the time, and took their turns in full */
};
/* Of the last `span_ns`, in which so many neighbours were seen busy. */
struct pm_beside pm_neighbours_beside(const struct pm_tracker *tracker, uint32_t busy, uint64_t span_ns);
/* A launch of known length whose span is longer by `beyond`, which is `turns` turns of one neighbour. */
void pm_neighbours_learn_turn(struct pm_tracker *tracker, double beyond, double turns);
/* Launches of known length in a full queue beside one neighbour: they cost so much of their span. */
void pm_neighbours_learn_slice(struct pm_tracker *tracker, const struct pm_beside *beside, uint64_t cost_ns,
                               uint64_t span_ns);
/* This one had work since it last told that it had, or for so long; `under_way`: and has. */
void pm_neighbours_tell_active(struct pm_tracker *tracker, uint64_t span_ns, bool under_way);
/* This one's work of `cost_ns` has ended; it had the device in at least so many turns. */
void pm_neighbours_tell_taken(struct pm_tracker *tracker, uint64_t cost_ns, double turns);

#endif
