/* Marks: timing events in a tracker's streams, used again once nobody needs them. Under the tracker's lock. */
#ifndef PM_MARKS_H
#define PM_MARKS_H

#include "tracker.h"

/* An event call failed; after many, events are not used any more. */
void pm_marks_fault(struct pm_tracker *tracker);
/* A mark in the stream now, used once; PM_NO_MARK: none is free, or the driver refused. */
uint16_t pm_mark_record(struct pm_tracker *tracker, void *stream);
/* One use less. */
void pm_mark_drop(struct pm_tracker *tracker, uint16_t index);
/* 1: passed, 0: not yet, -1: cannot be asked */
int pm_mark_passed(struct pm_tracker *tracker, uint16_t index);
/* Device time between two passed marks; false: cannot be asked. */
bool pm_marks_apart(struct pm_tracker *tracker, uint16_t from, uint16_t to, int64_t *ns);
/* Device time of a passed mark, from the first one ever asked about. */
bool pm_mark_position(struct pm_tracker *tracker, uint16_t mark, int64_t *ns);

#endif
