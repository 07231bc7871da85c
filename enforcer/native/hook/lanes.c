#include "lanes.h"

#include "board.h"
#include "charges.h"
#include "clock.h"
#include "marks.h"
#include "settler.h"

PM_HOT struct pm_lane *pm_lane_find(struct pm_tracker *tracker, uint64_t key) {
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[(key + i) % PM_LANES];
        uint64_t found = pm_load(&lane->key);
        if (found == key)
            return lane;
        if (found == 0)
            return NULL;
    }
    return NULL;
}

struct pm_lane *pm_lane_make(struct pm_tracker *tracker, uint64_t key) {
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[(key + i) % PM_LANES];
        if (lane->key == key)
            return lane;
        if (lane->key == 0) {
            pm_poke(&lane->open, PM_NO_MARK);
            tracker->lane_count++;
            pm_store(&lane->key, key);
            return lane;
        }
    }
    return NULL;
}

static void open_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, uint64_t before,
                         uint64_t now) {
    pm_poke(&lane->open, mark); /* other threads read these without the lock */
    pm_poke(&lane->begun_ns, now);
    lane->marking_ns = before;
    lane->marked_ns = now;
    pm_poke(&lane->tainted, 0);
    lane->only = NULL;
    lane->fresh = 0;
    lane->launched_ns = now;
    lane->waited_launches = 0;
    lane->waited_estimate_ns = 0;
    lane->neighbours = pm_board_neighbours(tracker->board, tracker->seat, now);
}

/* Ends the open segment with `mark`, which begins the next one. */
static void end_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, bool full, uint64_t before,
                        uint64_t now) {
    uint64_t work = __atomic_exchange_n(&lane->open_work, 0, __ATOMIC_RELAXED);
    uint32_t launches = pm_work_launches(work);
    const struct pm_estimate *last = pm_peek(&lane->last);
    struct pm_segment *segment = &tracker->segments[tracker->segment_count++];
    *segment = (struct pm_segment){
        .start = lane->open,
        .end = mark,
        .lane = (uint16_t)(lane - tracker->lanes),
        .full = full,
        .tainted = pm_peek(&lane->tainted),
        .fresh = lane->fresh,
        .unsteady = last && pm_peek(&last->unsteady) > PM_UNSTEADY,
        .launches = launches,
        .neighbours = lane->neighbours,
        .estimate_ns = pm_work_ns(work),
        .host_gap_ns = lane->launched_ns - lane->marked_ns,
        .host_blur_ns = lane->launched_ns - lane->marking_ns,
        .host_ns = now - lane->marked_ns,
        .begun_ns = lane->begun_ns,
        .entry = launches == 1 ? lane->only : NULL,
    };
    if (tracker->settler && pm_peek(tracker->settler))
        pm_settler_wake(tracker->settler);
    tracker->marks[mark].uses++; /* once for this segment, once as the next one's start */
    open_segment(tracker, lane, mark, before, now);
}

void pm_lane_abandon(struct pm_tracker *tracker, struct pm_lane *lane) {
    uint64_t estimate = pm_work_ns(__atomic_exchange_n(&lane->open_work, 0, __ATOMIC_RELAXED));
    pm_charge_settled(tracker, estimate);
    pm_charge(tracker, estimate);
    pm_mark_drop(tracker, lane->open);
    pm_poke(&lane->open, PM_NO_MARK);
    pm_charge_true_up(tracker);
}

void pm_lanes_charge_estimates(struct pm_tracker *tracker) {
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        pm_charge_settled(tracker, tracker->segments[i].estimate_ns);
        pm_charge_rest(tracker, &tracker->segments[i], tracker->segments[i].estimate_ns);
    }
    tracker->segment_count = 0;
    for (uint32_t i = 0; i < PM_LANES; i++)
        if (tracker->lanes[i].key && tracker->lanes[i].open != PM_NO_MARK)
            pm_lane_abandon(tracker, &tracker->lanes[i]);
    pm_charge_true_up(tracker);
}

bool pm_lane_mark(struct pm_tracker *tracker, struct pm_lane *lane, void *stream) {
    if (tracker->segment_count == PM_SEGMENTS)
        return false;
    uint64_t before = pm_now_ns();
    uint16_t mark = pm_mark_record(tracker, stream);
    if (mark == PM_NO_MARK)
        return false;
    uint64_t now = pm_now_ns();
    /* Asked only now: were the thread interrupted between asking and recording, the queue could run dry unseen. */
    bool full = lane->open != PM_NO_MARK && pm_work_launches(pm_peek(&lane->open_work)) &&
                pm_mark_passed(tracker, lane->open) == 0;
    if (lane->open == PM_NO_MARK) {
        open_segment(tracker, lane, mark, before, now);
    } else if (pm_work_launches(pm_peek(&lane->open_work)) == 0) {
        pm_mark_drop(tracker, lane->open);
        open_segment(tracker, lane, mark, before, now);
    } else {
        end_segment(tracker, lane, mark, full, before, now);
    }
    return true;
}

bool pm_lane_measure_mark(struct pm_tracker *tracker, struct pm_lane *lane, void *stream) {
    uint64_t before = pm_now_ns();
    uint16_t mark = pm_mark_record(tracker, stream);
    if (mark == PM_NO_MARK)
        return false;
    end_segment(tracker, lane, mark, pm_mark_passed(tracker, lane->open) == 0, before, pm_now_ns());
    return true;
}
