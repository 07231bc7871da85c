/*
 * The compute limit: a bucket of device time per allocation and device, in shared memory, filled at the limit's rate. A
 * launch takes its estimate out; settling corrects that to what was charged. So what limits is what meters and bills.
 */
#ifndef PM_BUCKET_H
#define PM_BUCKET_H

#include "process.h"

/* Whether this limit limits anything. */
static inline bool pm_bucket_limits(uint64_t limit_ppm) {
    return limit_ppm < 1000000;
}

/* Returns when a launch may be handed over; waits in slices, so that a new limit bites at once. `poll`: events may be
 * asked about. */
void pm_bucket_enter(struct pm_process *self, struct pm_context *context, bool poll);

#endif
