#include "tracker.h"

#include <string.h>

#include "board.h"
#include "charges.h"
#include "clock.h"
#include "lanes.h"
#include "marks.h"
#include "neighbours.h"
#include "samples.h"

#define SEGMENT_LAUNCHES 1024u
#define SEGMENT_NS 10000000u
#define SEGMENT_WALL_NS 5000000u
#define CLOCK_EVERY 8u /* launches to one look at the clock; a few at great intervals are ended by who looks in */
#define UNKNOWN_BUSY_NS 200000000u
#define LATE_NS 20000000u    /* no waiter is woken so late for want of a processor, as a rule */
#define LONG_WAIT_NS 100000u /* a mark of its own is a small part of what comes after */
#define TAIL_LAUNCHES 8u
#define CROWDED_LAUNCHES 8u
#define TAIL_NS 200000u
#define CAPTURED_NS 100000000u /* so much is charged as estimated when no event may be touched */

void pm_tracker_init(struct pm_tracker *tracker, const struct pm_driver *driver, struct pm_counters *counters) {
    memset(tracker, 0, sizeof *tracker);
    pthread_mutex_init(&tracker->lock, NULL);
    tracker->driver = driver;
    tracker->counters = counters;
    tracker->seat = PM_NO_SEAT;
    tracker->reference = PM_NO_MARK;
    tracker->quiet = 1;
    pm_neighbours_init(tracker);
}

/* Events can be used now. Asked again under the lock: whoever begins a capture counts it first, then waits for each
 * lock once. */
static bool usable(const struct pm_tracker *tracker) {
    return !tracker->broken && pm_load(tracker->driver->captures) == 0;
}

static void settle(struct pm_tracker *tracker, struct pm_segment *segment) {
    if (segment->passed > 0) {
        tracker->marks[segment->start].passed = true;
        pm_charge_segment(tracker, segment);
    } else {
        pm_marks_fault(tracker);
        pm_charge_settled(tracker, segment->estimate_ns);
        pm_charge_rest(tracker, segment, segment->estimate_ns);
    }
    pm_mark_drop(tracker, segment->start);
    pm_mark_drop(tracker, segment->end);
}

static void poll_locked(struct pm_tracker *tracker) {
    pm_neighbours_watch(tracker);
    uint64_t waiting = 0; /* lanes whose oldest segment has not passed: the later ones have not either */
    bool any = false;
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        struct pm_segment *segment = &tracker->segments[i];
        uint64_t bit = segment->lane < PM_LANES ? 1ull << segment->lane : 0;
        segment->passed = waiting & bit ? 0 : pm_mark_passed(tracker, segment->end);
        if (segment->passed == 0 && !(waiting & bit))
            pm_charge_progress(tracker, segment);
        waiting |= segment->passed == 0 ? bit : 0;
        any |= segment->passed != 0;
    }
    /* What was measured by itself goes first: it may explain the launches before it. */
    for (uint32_t i = 0; any && i < tracker->segment_count; i++)
        if (tracker->segments[i].passed && tracker->segments[i].entry)
            settle(tracker, &tracker->segments[i]);
    uint32_t kept = 0;
    for (uint32_t i = 0; any && i < tracker->segment_count; i++) {
        struct pm_segment *segment = &tracker->segments[i];
        if (segment->passed && !segment->entry)
            settle(tracker, segment);
        else if (!segment->passed)
            tracker->segments[kept++] = *segment;
    }
    tracker->segment_count = any ? kept : tracker->segment_count;
    if (pm_peek(&tracker->counters->pending_ns) == 0 && pm_peek(&tracker->quiet)) {
        pm_board_busy(tracker->board, tracker->seat, pm_now_ns());
        if (pm_peek(&tracker->active))
            pm_neighbours_tell_active(tracker, 0, false);
    }
    pm_charge_true_up(tracker);
}

void pm_tracker_poll(struct pm_tracker *tracker) {
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker))
        poll_locked(tracker);
    pthread_mutex_unlock(&tracker->lock);
}

/* The work under way may take so long: what was estimated when it was launched may be known better now. */
static uint64_t under_way_ns(const struct pm_tracker *tracker) {
    uint64_t sum = pm_peek(&tracker->counters->pending_ns);
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        const struct pm_segment *segment = &tracker->segments[i];
        uint64_t known = segment->entry ? pm_peek(&segment->entry->ns) : segment->estimate_ns;
        if (known == 0)
            return UNKNOWN_BUSY_NS;
        sum += known > segment->estimate_ns ? known - segment->estimate_ns : 0;
    }
    return 2 * sum; /* neighbours have their turns meanwhile */
}

static void publish(struct pm_tracker *tracker) {
    if (!tracker->board)
        return;
    uint64_t now = pm_now_ns(), least_ns = tracker->segment_count ? 20000000 : 2000000; /* estimates may be far off */
    uint64_t pending = under_way_ns(tracker);
    pending = pending > 1000000000u ? 1000000000u : pending;
    pm_board_busy(tracker->board, tracker->seat, now + (pending > least_ns ? pending : least_ns));
    if (!pm_peek(&tracker->active))
        pm_neighbours_tell_active(tracker, 0, true);
}

struct pm_wait pm_tracker_waits(struct pm_tracker *tracker) {
    uint64_t now = pm_now_ns();
    pm_board_busy(tracker->board, tracker->seat, now + 1000000000u);
    pm_add(&tracker->waiters, 1);
    return (struct pm_wait){now, pm_peek(&tracker->counters->busy_ns)};
}

void pm_tracker_waited(struct pm_tracker *tracker, const struct pm_wait *wait, uint64_t lane_key) {
    uint64_t now = pm_now_ns(), waited = now - wait->since_ns;
    uint64_t pending = pm_peek(&tracker->counters->pending_ns); /* the program need not have waited for all there is */
    pm_board_busy(tracker->board, tracker->seat, now + (pending < 20000000u ? pending : 20000000u));
    pm_poke(&tracker->quiet, 1);
    pthread_mutex_lock(&tracker->lock);
    if (pm_peek(&tracker->waiters))
        __atomic_fetch_sub(&tracker->waiters, 1, __ATOMIC_RELAXED);
    if (usable(tracker)) /* what was launched before the last explains its part of the wait, however long it took */
        poll_locked(tracker);
    uint64_t charged = pm_peek(&tracker->counters->busy_ns) - wait->busy_ns;
    pending = pm_peek(&tracker->counters->pending_ns);
    for (uint32_t i = 0; i < PM_LANES && (lane_key || tracker->lane_count == 1); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (!lane->key || (lane_key && lane->key != lane_key) || lane->open == PM_NO_MARK)
            continue;
        uint64_t work = pm_peek(&lane->open_work), estimate = pm_work_ns(work);
        uint32_t launches = pm_work_launches(work);
        struct pm_estimate *entry = pm_peek(&lane->last);
        uint64_t last = estimate - lane->waited_estimate_ns, expected = charged + (last > pending ? last : pending);
        if (launches > lane->waited_launches && waited > 2 * expected + PM_WAIT_NS) {
            /* They took longer than thought, or the waiter was woken late: the next sample tells, and sets the charge
             * right. */
            if (entry)
                pm_add(&entry->suspects, launches - lane->waited_launches);
            pm_samples_time_anew(tracker);
            uint64_t beyond = waited - expected;
            if (beyond > LATE_NS && pm_board_neighbours(tracker->board, tracker->seat, wait->since_ns) == 0) {
                tracker->suspect = entry;
                tracker->suspect_ns += beyond;
            }
        }
        lane->waited_launches = launches;
        lane->waited_estimate_ns = estimate;
        if (launches == 0 &&
            waited > LONG_WAIT_NS) { /* its mark lies before the wait, which is no time of the host's */
            pm_mark_drop(tracker, lane->open);
            pm_poke(&lane->open, PM_NO_MARK);
        }
    }
    pthread_mutex_unlock(&tracker->lock);
}

PM_SELDOM static void slow_begin(struct pm_launch *launch, uint64_t lane_key) {
    struct pm_tracker *tracker = launch->tracker;
    pthread_mutex_lock(&tracker->lock);
    tracker->unmarked = false;
    if (!launch->lane || pm_peek(&launch->lane->key) != lane_key)
        launch->lane = pm_lane_make(tracker, lane_key);
    if (!launch->lane && usable(tracker)) {
        poll_locked(tracker);
        launch->lane = pm_lane_make(tracker, lane_key);
    }
    struct pm_lane *lane = launch->lane;
    if (lane)
        lane->stream = launch->stream;
    if (lane && usable(tracker))
        poll_locked(tracker);
    bool crowded = lane && tracker->segment_count > PM_SEGMENTS / 2 && lane->open != PM_NO_MARK &&
                   pm_work_launches(pm_peek(&lane->open_work)) < CROWDED_LAUNCHES;
    if (crowded) {
        launch->timed = false; /* so far ahead of the device, several launches to a mark will do */
    } else if (lane && usable(tracker)) {
        bool ready = lane->open != PM_NO_MARK && pm_work_launches(pm_peek(&lane->open_work)) == 0 &&
                     !pm_peek(&lane->tainted) && pm_mark_passed(tracker, lane->open) == 0;
        if (ready)
            lane->marking_ns = lane->marked_ns = pm_now_ns();
        else
            ready = pm_lane_mark(tracker, lane, launch->stream);
        if (ready && launch->timed && tracker->mark_costs < 64 && tracker->segment_count < PM_SEGMENTS / 2 &&
            lane->full_marks++ % 4 == 0 && pm_mark_passed(tracker, lane->open) == 0)
            ready = pm_lane_measure_mark(tracker, lane, launch->stream);
        launch->timed = launch->timed && ready;
    } else {
        launch->timed = !lane && usable(tracker) && pm_lane_none_begin(tracker, launch);
        if (tracker->broken)
            pm_lanes_charge_estimates(tracker);
    }
    launch->unmarked = tracker->unmarked;
    pthread_mutex_unlock(&tracker->lock);
}

PM_HOT void pm_launch_begin(struct pm_launch *launch, struct pm_tracker *tracker, struct pm_estimate *entry,
                            void *stream, uint64_t lane_key) {
    bool quiet = pm_peek(&tracker->quiet) != 0;
    launch->fresh = quiet && pm_peek(&tracker->counters->pending_ns) == 0;
    if (quiet) { /* others who wait for a quiet device are to know before it is not */
        pm_poke(&tracker->quiet, 0);
        pm_board_busy(tracker->board, tracker->seat, pm_now_ns() + 2000000);
    }
    launch->tracker = tracker;
    launch->entry = entry;
    launch->stream = stream;
    launch->mark = PM_NO_MARK;
    launch->unmarked = false;
    launch->estimate_ns = entry && pm_peek(&entry->ns) ? pm_peek(&entry->ns) : PM_UNKNOWN_NS;
    launch->lane = pm_lane_find(tracker, lane_key);
    launch->timed = entry && pm_estimate_due(entry, pm_peek(&tracker->round));
    if ((launch->timed || !launch->lane || pm_peek(&launch->lane->open) == PM_NO_MARK) && usable(tracker))
        slow_begin(launch, lane_key);
}

PM_SELDOM static void slow_end(struct pm_launch *launch) {
    struct pm_tracker *tracker = launch->tracker;
    struct pm_lane *lane = launch->lane;
    uint64_t now = launch->timed ? pm_now_ns() : 0; /* as soon as the driver has it */
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker) && lane->open != PM_NO_MARK && tracker->segment_count < PM_LAUNCH_SEGMENTS) {
        if (launch->timed) {
            lane->only = launch->entry;
            lane->fresh = launch->fresh;
            lane->launched_ns = now;
        }
        tracker->unmarked = false;
        bool marked = pm_lane_mark(tracker, lane, launch->stream);
        if (tracker->unmarked)
            pm_marks_fault(tracker);
        /* Behind a launch the queue is full, also of a program that waits for each. */
        if (marked && launch->timed && tracker->mark_costs < 64 && tracker->segment_count < PM_SEGMENTS / 2 &&
            (tracker->mark_costs == 0 || lane->full_marks++ % 4 == 0) && pm_mark_passed(tracker, lane->open) == 0)
            pm_lane_measure_mark(tracker, lane, launch->stream);
        poll_locked(tracker);
        publish(tracker);
    } else if (tracker->broken) {
        pm_lanes_charge_estimates(tracker);
    } else if (usable(tracker)) {
        poll_locked(tracker);
        publish(tracker);
    }
    pthread_mutex_unlock(&tracker->lock);
}

/* At least every few milliseconds of launching, which is as often as anybody asks. */
static void active_now(struct pm_tracker *tracker) {
    pm_poke(&tracker->counters->last_activity_ns, pm_realtime_coarse_ns());
}

/* True: it is measured between marks of its own. */
PM_SELDOM static bool ends_without_lane(struct pm_launch *launch, bool launched) {
    struct pm_tracker *tracker = launch->tracker;
    pthread_mutex_lock(&tracker->lock);
    tracker->unmarked = false;
    bool measured = launched && usable(tracker) && pm_lane_none_end(tracker, launch);
    launch->unmarked = tracker->unmarked;
    if (measured) {
        pm_add(&tracker->counters->pending_ns, launch->estimate_ns);
        pm_limiter_launched(tracker->limiter, 0, launch->estimate_ns);
        pm_limiter_ended(tracker->limiter, launch->estimate_ns);
        poll_locked(tracker);
        publish(tracker);
    } else {
        pm_mark_drop(tracker, launch->mark);
    }
    pthread_mutex_unlock(&tracker->lock);
    return measured;
}

PM_HOT void pm_launch_end(struct pm_launch *launch, bool launched) {
    struct pm_tracker *tracker = launch->tracker;
    struct pm_lane *lane = launch->lane;
    if (launch->mark != PM_NO_MARK && ends_without_lane(launch, launched)) {
        active_now(tracker);
        return;
    }
    if (!launched)
        return;
    if (__builtin_expect(launch->unmarked, 0)) {
        pthread_mutex_lock(&tracker->lock);
        pm_marks_fault(tracker);
        pthread_mutex_unlock(&tracker->lock);
    }
    bool lent = !lane && (lane = pm_lane_any(tracker, (uint64_t)(uintptr_t)launch->stream >> 4));
    if (!lane || pm_peek(&lane->open) == PM_NO_MARK) { /* nothing will ever settle it */
        active_now(tracker);
        pm_limiter_launched(tracker->limiter, 0, launch->estimate_ns);
        pm_limiter_ended(tracker->limiter, launch->estimate_ns);
        pm_add(&tracker->counters->busy_ns, launch->estimate_ns);
        return;
    }
    pm_add(&tracker->counters->pending_ns, launch->estimate_ns);
    if (pm_peek(&lane->last) != launch->entry) {
        pm_poke(&lane->mixed, pm_peek(&lane->open_work) != 0);
        pm_poke(&lane->last, launch->entry);
    }
    uint64_t more = PM_WORK_LAUNCH + launch->estimate_ns, work = pm_add(&lane->open_work, more) + more;
    uint64_t estimate = pm_work_ns(work);
    uint32_t launches = pm_work_launches(work);
    pm_limiter_launched(tracker->limiter, estimate - launch->estimate_ns, estimate);
    bool due = launch->timed || launches >= SEGMENT_LAUNCHES || estimate >= SEGMENT_NS ||
               estimate >= pm_limiter_stretch(tracker->limiter) ||
               (launches % CLOCK_EVERY == 0 && pm_now_coarse_ns() > pm_peek(&lane->begun_ns) + SEGMENT_WALL_NS);
    if (due)
        active_now(tracker);
    if (due && !lent && pm_peek(tracker->driver->captures) == 0) {
        slow_end(launch);
    } else if (estimate >= CAPTURED_NS) { /* a capture that goes on and on, or was left behind */
        pthread_mutex_lock(&tracker->lock);
        if (lane->open != PM_NO_MARK)
            pm_lane_abandon(tracker, lane);
        pthread_mutex_unlock(&tracker->lock);
    }
}

bool pm_tracker_look_in(struct pm_tracker *tracker, void *context) {
    bool pending = false;
    pthread_mutex_lock(&tracker->lock);
    if (tracker->closed) {
        pthread_mutex_unlock(&tracker->lock);
        return false;
    }
    if (tracker->segment_count && usable(tracker) &&
        (!tracker->driver->context_enter || tracker->driver->context_enter(context) == 0)) {
        poll_locked(tracker);
        if (tracker->driver->context_leave)
            tracker->driver->context_leave();
    }
    pending = tracker->segment_count > 0;
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        uint32_t launches = lane->key && lane->open != PM_NO_MARK ? pm_work_launches(pm_peek(&lane->open_work)) : 0;
        /* Nobody came to end the segment, and no stream may be touched from here; whoever waits will see to it. */
        if (launches && launches == lane->seen_launches && pm_peek(&tracker->waiters) == 0) {
            pm_lane_abandon(tracker, lane);
            launches = 0;
        }
        lane->seen_launches = launches;
        pending |= launches > 0;
    }
    pthread_mutex_unlock(&tracker->lock);
    return pending;
}

void pm_tracker_taint(struct pm_tracker *tracker, uint64_t lane_key) {
    struct pm_lane *lane = pm_lane_find(tracker, lane_key);
    if (lane)
        pm_poke(&lane->tainted, 1);
}

static bool worth_ending(const struct pm_tracker *tracker, const struct pm_lane *lane) {
    uint64_t work = pm_peek(&lane->open_work), launches = pm_work_launches(work);
    const struct pm_estimate *last = pm_peek(&lane->last);
    uint64_t known = last ? pm_peek(&last->ns) : 0; /* better by now than when they were launched */
    if (launches == 0)
        return false;
    return launches >= TAIL_LAUNCHES || pm_work_ns(work) >= TAIL_NS ||
           (last && (known == 0 || launches * known >= TAIL_NS)) ||
           tracker->segment_count > 1; /* behind a queue, of which the wait may be the first to tell how long it is */
}

void pm_tracker_close(struct pm_tracker *tracker, void *stream, uint64_t lane_key) {
    struct pm_lane *lane = pm_lane_find(tracker, lane_key);
    if (!lane || pm_work_launches(pm_peek(&lane->open_work)) == 0)
        return;
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker) && lane->open != PM_NO_MARK && worth_ending(tracker, lane))
        pm_lane_mark(tracker, lane, stream);
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_close_all(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES && usable(tracker); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (lane->key && lane->open != PM_NO_MARK && worth_ending(tracker, lane) &&
            (lane->key == lane_key || (uint64_t)(uintptr_t)lane->stream != other_threads))
            pm_lane_mark(tracker, lane, lane->stream);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_held(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES && usable(tracker); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        /* Under the lock the stream of a lane exists: who destroys it drops the lane first. */
        if (lane->key && lane->open != PM_NO_MARK && pm_work_launches(pm_peek(&lane->open_work)) &&
            (lane->key == lane_key || (uint64_t)(uintptr_t)lane->stream != other_threads))
            pm_lane_mark(tracker, lane, lane->stream);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_rested(struct pm_tracker *tracker) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (lane->key && lane->open != PM_NO_MARK && pm_work_launches(pm_peek(&lane->open_work)) == 0) {
            pm_mark_drop(tracker, lane->open);
            pm_poke(&lane->open, PM_NO_MARK);
        }
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_drop_lane(struct pm_tracker *tracker, uint64_t lane_key) {
    pthread_mutex_lock(&tracker->lock);
    struct pm_lane *lane = pm_lane_find(tracker, lane_key);
    if (lane && lane->open != PM_NO_MARK)
        pm_lane_abandon(tracker, lane);
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_finish(struct pm_tracker *tracker, bool poll, bool destroy) {
    pthread_mutex_lock(&tracker->lock);
    tracker->closed = true;
    if (poll && usable(tracker))
        poll_locked(tracker);
    if (tracker->suspect && pm_peek(&tracker->suspect->suspects)) /* no sample will tell any more: the wait has to do */
        pm_charge(tracker, tracker->suspect_ns);
    tracker->suspect = NULL;
    tracker->suspect_ns = 0;
    pm_lanes_charge_estimates(tracker);
    for (uint32_t i = 0; i < PM_MARKS; i++) {
        if (destroy && tracker->marks[i].event)
            tracker->driver->event_destroy(tracker->marks[i].event);
        tracker->marks[i] = (struct pm_mark){0};
    }
    tracker->reference = PM_NO_MARK;
    memset(tracker->bins, 0, sizeof tracker->bins);
    memset(tracker->newest_bin, 0, sizeof tracker->newest_bin);
    pthread_mutex_unlock(&tracker->lock);
}
