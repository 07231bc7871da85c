#include "lanes.h"

#include "board.h"
#include "charges.h"
#include "clock.h"
#include "marks.h"
#include "settler.h"

#define IDLE_LANE_NS 20000000u /* no thread is still on its way into a lane that was last looked up so long ago */

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

static bool idle(const struct pm_tracker *tracker, const struct pm_lane *lane, uint64_t now) {
    if (pm_work_launches(pm_peek(&lane->open_work)) ||
        (lane->open != PM_NO_MARK && now < pm_peek(&lane->begun_ns) + IDLE_LANE_NS))
        return false;
    for (uint32_t i = 0; i < tracker->segment_count; i++)
        if (tracker->segments[i].lane == lane - tracker->lanes)
            return false;
    return true;
}

struct pm_lane *pm_lane_make(struct pm_tracker *tracker, uint64_t key) {
    uint64_t now = 0;
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
    for (uint32_t i = 0; i < PM_LANES; i++) { /* all are taken: one whose stream is gone or has nothing to do */
        struct pm_lane *lane = &tracker->lanes[(key + i) % PM_LANES];
        now = now ? now : pm_now_ns();
        if (!idle(tracker, lane, now))
            continue;
        pm_mark_drop(tracker, lane->open);
        pm_poke(&lane->open, PM_NO_MARK);
        pm_poke(&lane->last, NULL);
        pm_store(&lane->key, key);
        return lane;
    }
    return NULL;
}

struct pm_lane *pm_lane_any(struct pm_tracker *tracker, uint64_t from) {
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[(from + i) % PM_LANES];
        if (pm_load(&lane->key) && pm_peek(&lane->open) != PM_NO_MARK)
            return lane;
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
    pm_poke(&lane->mixed, 0);
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
    pm_limiter_ended(tracker->limiter, pm_work_ns(work));
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
        .alike = !pm_peek(&lane->mixed) || pm_work_ns(work) == launches * PM_UNKNOWN_NS ? last : NULL,
    };
    if (tracker->settler && pm_peek(tracker->settler))
        pm_settler_wake(tracker->settler);
    tracker->marks[mark].uses++; /* once for this segment, once as the next one's start */
    open_segment(tracker, lane, mark, before, now);
}

void pm_lane_abandon(struct pm_tracker *tracker, struct pm_lane *lane) {
    uint64_t estimate = pm_work_ns(__atomic_exchange_n(&lane->open_work, 0, __ATOMIC_RELAXED));
    pm_limiter_ended(tracker->limiter, estimate);
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

/* A stream without a lane: its launch is a segment of its own, between two marks of its own. */
bool pm_lane_none_begin(struct pm_tracker *tracker, struct pm_launch *launch) {
    if (tracker->segment_count >= PM_LAUNCH_SEGMENTS)
        return false;
    launch->marking_ns = pm_now_ns();
    launch->mark = pm_mark_record(tracker, launch->stream);
    launch->begun_ns = pm_now_ns();
    return launch->mark != PM_NO_MARK;
}

bool pm_lane_none_end(struct pm_tracker *tracker, struct pm_launch *launch) {
    uint64_t launched = pm_now_ns();
    if (tracker->segment_count >= PM_LAUNCH_SEGMENTS)
        return false;
    uint16_t mark = pm_mark_record(tracker, launch->stream);
    if (mark == PM_NO_MARK)
        return false;
    tracker->segments[tracker->segment_count++] = (struct pm_segment){
        .start = launch->mark,
        .end = mark,
        .lane = PM_LANES,
        .full = pm_mark_passed(tracker, launch->mark) == 0,
        .fresh = launch->fresh,
        .launches = 1,
        .neighbours = pm_board_neighbours(tracker->board, tracker->seat, launch->begun_ns),
        .estimate_ns = launch->estimate_ns,
        .host_gap_ns = launched - launch->begun_ns,
        .host_blur_ns = launched - launch->marking_ns,
        .host_ns = pm_now_ns() - launch->begun_ns,
        .begun_ns = launch->begun_ns,
        .entry = launch->entry,
    };
    launch->mark = PM_NO_MARK;
    if (tracker->settler && pm_peek(tracker->settler))
        pm_settler_wake(tracker->settler);
    return true;
}
