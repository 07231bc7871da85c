#include "marks.h"

#define REFERENCE_NS 1000000000
#define FAULT_LIMIT 16u

void pm_marks_fault(struct pm_tracker *tracker) {
    pm_add(&tracker->counters->internal_faults, 1);
    if (++tracker->faults >= FAULT_LIMIT)
        tracker->broken = true;
}

uint16_t pm_mark_record(struct pm_tracker *tracker, void *stream) {
    for (uint32_t i = 0; i < PM_MARKS; i++) {
        uint16_t index = (uint16_t)((tracker->mark_hint + i) % PM_MARKS);
        struct pm_mark *mark = &tracker->marks[index];
        if (mark->uses)
            continue;
        tracker->mark_hint = (uint16_t)((index + 1) % PM_MARKS);
        if (!mark->event && tracker->driver->event_create(&mark->event) != 0) {
            mark->event = NULL;
            tracker->unmarked = true;
            return PM_NO_MARK;
        }
        if (tracker->driver->event_record(mark->event, stream) != 0) {
            tracker->unmarked = true;
            return PM_NO_MARK;
        }
        mark->uses = 1;
        mark->passed = false;
        return index;
    }
    return PM_NO_MARK;
}

void pm_mark_drop(struct pm_tracker *tracker, uint16_t index) {
    if (index == PM_NO_MARK || tracker->marks[index].uses == 0)
        return;
    if (--tracker->marks[index].uses == 0 && index < tracker->mark_hint)
        tracker->mark_hint = index; /* few events serve a program that never has many under way */
}

int pm_mark_passed(struct pm_tracker *tracker, uint16_t index) {
    struct pm_mark *mark = &tracker->marks[index];
    if (mark->passed)
        return 1;
    int answer = tracker->driver->event_query(mark->event);
    if (answer == PM_NOT_READY || answer == PM_NO_CONTEXT)
        return 0;
    mark->passed = answer == 0;
    return answer == 0 ? 1 : -1;
}

bool pm_marks_apart(struct pm_tracker *tracker, uint16_t from, uint16_t to, int64_t *ns) {
    float ms = 0;
    if (tracker->driver->event_elapsed(&ms, tracker->marks[from].event, tracker->marks[to].event) != 0)
        return false;
    *ns = (int64_t)((double)ms * 1e6);
    return true;
}

/* Float milliseconds lose microseconds after seconds, so the reference moves along. */
bool pm_mark_position(struct pm_tracker *tracker, uint16_t mark, int64_t *ns) {
    if (tracker->reference == PM_NO_MARK) {
        tracker->reference = mark;
        tracker->marks[mark].uses++;
        tracker->reference_ns = 0;
        *ns = 0;
        return true;
    }
    int64_t from_reference;
    if (!pm_marks_apart(tracker, tracker->reference, mark, &from_reference))
        return false;
    *ns = tracker->reference_ns + from_reference;
    if (from_reference > REFERENCE_NS) {
        pm_mark_drop(tracker, tracker->reference);
        tracker->reference = mark;
        tracker->marks[mark].uses++;
        tracker->reference_ns = *ns;
    }
    return true;
}
