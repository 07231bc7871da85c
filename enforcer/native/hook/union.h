/* Several streams at once: no stretch of device time is charged twice. */
#ifndef PM_UNION_H
#define PM_UNION_H

#include "tracker.h"

/* So much of `cost` as nobody was charged for within the segment's span; it is taken. */
uint64_t pm_union_take(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost);

#endif
