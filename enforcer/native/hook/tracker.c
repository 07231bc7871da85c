#include "tracker.h"

#include <string.h>

#include "board.h"
#include "clock.h"
#include "samples.h"
#include "settler.h"

#define SEGMENT_LAUNCHES 256u
#define SEGMENT_NS 10000000u
#define SEGMENT_WALL_NS 5000000u
#define SLICE_NS 2000000.0 /* a turn of the device, until it is learned */
#define TURN_NS 2270000.0  /* the same with the switching to and from it, until it is learned */
#define BIN_NS 20000
#define GAP_NS 2000u /* between two launches of a full queue, at most */
#define TAIL_LAUNCHES 8u
#define CROWDED_LAUNCHES 8u
/*
 * What a card does besides the kernel itself, in units of the time between two adjacent marks in a full queue. Seen on
 * an H200 (driver 580), where that unit is 1.28 us, for kernels of 5 to 200 us: one launch between two marks reads the
 * kernel's own span + 3.80 us, a launch of a full queue comes 1.75 us after the one before it has ended. In an idle
 * queue the gap that the host leaves between mark and launch comes on top; the launch call returns about 1.7 us after
 * the launch has reached the card, by which the gap is shorter there than the host sees it.
 */
#define SAMPLE_MARKS 3.0
#define IDLE_MARKS 1.7
#define LAUNCH_MARKS 1.4
#define TAIL_NS 200000u
#define REFERENCE_NS 1000000000
#define FAULT_LIMIT 16u
#define WAIT_NS 100000u        /* a wait from here on says how long the work was */
#define CAPTURED_NS 100000000u /* so much is charged as estimated when no event may be touched */
#define OVERDUE_NS 100000000u  /* beyond its estimate a running launch is charged as it goes */

void pm_tracker_init(struct pm_tracker *tracker, const struct pm_driver *driver, struct pm_counters *counters) {
    memset(tracker, 0, sizeof *tracker);
    pthread_mutex_init(&tracker->lock, NULL);
    tracker->driver = driver;
    tracker->counters = counters;
    tracker->seat = PM_NO_SEAT;
    tracker->reference = PM_NO_MARK;
    tracker->slice_ns = SLICE_NS;
    tracker->turn_ns = TURN_NS;
}

/* Events can be used now. Asked again under the lock: whoever begins a capture counts it first, then waits for each
 * lock once. */
static bool usable(const struct pm_tracker *tracker) {
    return !tracker->broken && pm_load(tracker->driver->captures) == 0;
}

static void fault(struct pm_tracker *tracker) {
    pm_add(&tracker->counters->internal_faults, 1);
    if (++tracker->faults >= FAULT_LIMIT)
        tracker->broken = true;
}

/* ---- charges ----------------------------------------------------------------------------------------------------- */

static void charge(struct pm_tracker *tracker, uint64_t ns) {
    uint64_t kept = ns < tracker->credit_ns ? ns : tracker->credit_ns;
    tracker->credit_ns -= kept;
    if (ns > kept)
        pm_add(&tracker->counters->busy_ns, ns - kept);
    tracker->owed_ns += (int64_t)(ns - kept);
}

static void settle_pending(struct pm_tracker *tracker, uint64_t estimate_ns) {
    __atomic_fetch_sub(&tracker->counters->pending_ns, estimate_ns, __ATOMIC_RELAXED);
    tracker->owed_ns -= (int64_t)estimate_ns;
}

/* The same charge limits: the account has had the estimates, and is set right by what they turned out to be. */
static void true_up(struct pm_tracker *tracker) {
    pm_limiter_true_up(tracker->limiter, tracker->owed_ns, pm_peek(&tracker->counters->pending_ns), pm_now_ns());
    tracker->owed_ns = 0;
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

static uint16_t record_mark(struct pm_tracker *tracker, void *stream) {
    for (uint32_t i = 0; i < PM_MARKS; i++) {
        uint16_t index = (uint16_t)((tracker->mark_hint + i) % PM_MARKS);
        struct pm_mark *mark = &tracker->marks[index];
        if (mark->uses)
            continue;
        tracker->mark_hint = (uint16_t)((index + 1) % PM_MARKS);
        if (!mark->event && tracker->driver->event_create(&mark->event) != 0) {
            mark->event = NULL;
            fault(tracker);
            return PM_NO_MARK;
        }
        if (tracker->driver->event_record(mark->event, stream) != 0) {
            fault(tracker);
            return PM_NO_MARK;
        }
        mark->uses = 1;
        mark->passed = false;
        return index;
    }
    return PM_NO_MARK;
}

static void drop_mark(struct pm_tracker *tracker, uint16_t index) {
    if (index != PM_NO_MARK && tracker->marks[index].uses)
        tracker->marks[index].uses--;
}

/* 1: passed, 0: not yet, -1: cannot be asked */
static int mark_passed(struct pm_tracker *tracker, uint16_t index) {
    struct pm_mark *mark = &tracker->marks[index];
    if (mark->passed)
        return 1;
    int answer = tracker->driver->event_query(mark->event);
    if (answer == PM_NOT_READY)
        return 0;
    mark->passed = answer == 0;
    return answer == 0 ? 1 : -1;
}

static bool elapsed(struct pm_tracker *tracker, uint16_t from, uint16_t to, int64_t *ns) {
    float ms = 0;
    if (tracker->driver->event_elapsed(&ms, tracker->marks[from].event, tracker->marks[to].event) != 0)
        return false;
    *ns = (int64_t)((double)ms * 1e6);
    return true;
}

/* Device time of a passed mark. Float milliseconds lose microseconds after seconds, so the reference moves along. */
static bool position(struct pm_tracker *tracker, uint16_t mark, int64_t *ns) {
    if (tracker->reference == PM_NO_MARK) {
        tracker->reference = mark;
        tracker->marks[mark].uses++;
        tracker->reference_ns = 0;
        *ns = 0;
        return true;
    }
    int64_t from_reference;
    if (!elapsed(tracker, tracker->reference, mark, &from_reference))
        return false;
    *ns = tracker->reference_ns + from_reference;
    if (from_reference > REFERENCE_NS) {
        drop_mark(tracker, tracker->reference);
        tracker->reference = mark;
        tracker->marks[mark].uses++;
        tracker->reference_ns = *ns;
    }
    return true;
}

/* ---- settling ---------------------------------------------------------------------------------------------------- */

/* Several streams at once: no stretch of device time is charged twice. */
static uint64_t within_union(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost) {
    int64_t start, end;
    if (tracker->lane_count < 2 || !position(tracker, segment->start, &start) ||
        !position(tracker, segment->end, &end) || end <= start)
        return cost;
    start += INT64_MAX / 4; /* marks may lie before the reference */
    end += INT64_MAX / 4;
    int64_t first = start / BIN_NS, last = (end - 1) / BIN_NS;
    double room = 0;
    if (last - first >= PM_BINS) {
        room = (double)(last - PM_BINS + 1 - first) * BIN_NS;
        first = last - PM_BINS + 1;
    }
    for (int pass = 0; pass < 2; pass++) { /* first how much is left, then taking it evenly */
        double part = pass == 0 ? 0 : room > 0 && (double)cost < room ? (double)cost / room : 1;
        for (int64_t n = first; n <= last; n++) {
            struct pm_bin *bin = &tracker->bins[n % PM_BINS];
            if (bin->number > n) /* so old that the bin serves another time */
                continue;
            if (bin->number < n)
                *bin = (struct pm_bin){n, 0};
            int64_t from = n * BIN_NS > start ? n * BIN_NS : start,
                    to = (n + 1) * BIN_NS < end ? (n + 1) * BIN_NS : end;
            int64_t left = BIN_NS - bin->charged_ns, here = to - from < left ? to - from : left;
            if (here <= 0)
                continue;
            if (pass == 0)
                room += (double)here;
            else
                bin->charged_ns += (uint32_t)((double)here * part);
        }
    }
    return (double)cost < room ? cost : (uint64_t)room;
}

/* The seat had work for so long; several streams at once count once. */
static void publish_active(struct pm_tracker *tracker, uint64_t span) {
    uint64_t now = pm_now_ns(), since = now - tracker->active_at_ns;
    if (!tracker->board)
        return;
    if (tracker->lane_count > 1 && span > since)
        span = since;
    tracker->active_at_ns = now;
    pm_board_active(tracker->board, tracker->seat, span);
}

/* Charges what was not charged while it ran. */
static void charge_rest(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost) {
    if (cost >= segment->progress_ns)
        charge(tracker, cost - segment->progress_ns);
    else
        tracker->credit_ns += segment->progress_ns - cost;
}

/* A launch that does not end is charged the time it has had so far, so that it is metered at all. */
static void charge_progress(struct pm_tracker *tracker, struct pm_segment *segment) {
    uint64_t now = pm_now_ns();
    if (segment->running_ns == 0) {
        if (mark_passed(tracker, segment->start) == 1)
            segment->running_ns = now;
        return;
    }
    uint64_t running = now - segment->running_ns;
    if (running < 2 * segment->estimate_ns + OVERDUE_NS)
        return;
    uint32_t neighbours = pm_board_neighbours(tracker->board, tracker->seat, segment->running_ns);
    double others = neighbours ? tracker->turn_ns * pm_samples_presence(tracker, neighbours) : 0;
    uint64_t mine = (uint64_t)((double)running * tracker->slice_ns / (tracker->slice_ns + others));
    if (mine > segment->progress_ns) {
        charge(tracker, mine - segment->progress_ns);
        segment->progress_ns = mine;
    }
}

/*
 * Charge of a segment of several launches, or of one that was not timed. The device can have been idle inside only
 * while the host was still handing work over.
 */
static uint64_t many_launches(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t span) {
    uint64_t cost = segment->estimate_ns, gaps = (uint64_t)segment->launches * GAP_NS;
    uint64_t idle = gaps + (segment->full ? 0 : segment->host_ns), lower = span > idle ? span - idle : 0;
    if (segment->tainted)
        lower = 0;
    if (segment->neighbours) {
        double cycle = tracker->slice_ns + tracker->turn_ns * segment->neighbours;
        double part = tracker->slice_ns /
                      (tracker->slice_ns + tracker->turn_ns * pm_samples_presence(tracker, segment->neighbours));
        if (segment->full && !segment->tainted && segment->neighbours == 1 && pm_samples_presence(tracker, 1) > 0.9 &&
            (double)span > 2 * cycle && (double)cost > 0.7 * part * (double)span)
            pm_samples_slice(tracker, (double)cost / (double)span);
        /* the part is known within the turns at both ends */
        lower = (double)lower > 4 * cycle ? (uint64_t)((double)lower * part * 0.85) : 0;
    } else if (segment->full && !segment->tainted) {
        pm_add(&tracker->counters->burst_samples, 1);
    }
    uint64_t upper = span;
    if (segment->full && segment->neighbours == 0) {
        uint64_t between = (uint64_t)(LAUNCH_MARKS * tracker->mark_cost_ns * segment->launches);
        upper = span > between ? span - between : 0;
        upper = upper > lower ? upper : lower;
    }
    if (cost > upper)
        cost = upper;
    if (cost + cost / 4 + gaps < lower || (!segment->full && span > 2 * cost + WAIT_NS))
        pm_samples_time_anew(tracker);
    return cost < lower ? lower : cost;
}

static void settle(struct pm_tracker *tracker, struct pm_segment *segment) {
    uint64_t cost = segment->estimate_ns;
    int64_t span;
    settle_pending(tracker, segment->estimate_ns);
    if (segment->launches == 0) {
        if (segment->full && !segment->tainted && elapsed(tracker, segment->start, segment->end, &span) && span >= 0 &&
            span < 10000) {
            /* more than the gap between two launches is not the mark's doing */
            double seen = span < GAP_NS ? (double)span : GAP_NS;
            tracker->mark_costs++;
            tracker->mark_cost_ns +=
                (seen - tracker->mark_cost_ns) / (tracker->mark_costs < 8 ? tracker->mark_costs : 8);
        }
        return;
    }
    if (!elapsed(tracker, segment->start, segment->end, &span) || span < 0) {
        fault(tracker);
        charge_rest(tracker, segment, cost);
        return;
    }
    publish_active(tracker, (uint64_t)span);
    uint32_t now_busy = pm_board_neighbours(tracker->board, tracker->seat, segment->begun_ns);
    if (now_busy > segment->neighbours)
        segment->neighbours = now_busy;
    if (segment->launches == 1 && segment->entry && !segment->tainted) {
        int64_t beside = (int64_t)((segment->full ? SAMPLE_MARKS : IDLE_MARKS) * tracker->mark_cost_ns);
        int64_t took = span - beside - (segment->full ? 0 : (int64_t)segment->host_gap_ns);
        span = span - beside < 500 ? 500 : span - beside;
        took = took < 500 ? 500 : took;
        if (pm_samples_blurred(segment, (uint64_t)span, (uint64_t)took))
            cost = pm_samples_take_blurred(tracker, segment, (uint64_t)span);
        else if (segment->neighbours)
            cost = pm_samples_take_shared(tracker, segment->entry, (uint64_t)took, segment);
        else
            cost = pm_samples_take_lone(tracker, segment->entry, (uint64_t)took);
    } else {
        cost = many_launches(tracker, segment, (uint64_t)span);
    }
    charge_rest(tracker, segment, within_union(tracker, segment, cost));
}

static void poll_locked(struct pm_tracker *tracker) {
    pm_samples_watch(tracker);
    uint64_t waiting = 0; /* lanes whose oldest segment has not passed: the later ones have not either */
    uint32_t kept = 0;
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        struct pm_segment *segment = &tracker->segments[i];
        uint64_t bit = 1ull << segment->lane;
        int passed = waiting & bit ? 0 : mark_passed(tracker, segment->end);
        if (passed == 0) {
            if (!(waiting & bit))
                charge_progress(tracker, segment);
            waiting |= bit;
            if (kept != i)
                tracker->segments[kept] = *segment;
            kept++;
            continue;
        }
        if (passed > 0) {
            tracker->marks[segment->start].passed = true;
            settle(tracker, segment);
        } else {
            fault(tracker);
            settle_pending(tracker, segment->estimate_ns);
            charge_rest(tracker, segment, segment->estimate_ns);
        }
        drop_mark(tracker, segment->start);
        drop_mark(tracker, segment->end);
    }
    tracker->segment_count = kept;
    if (pm_peek(&tracker->counters->pending_ns) == 0 && pm_peek(&tracker->quiet))
        pm_board_busy(tracker->board, tracker->seat, pm_now_ns());
    true_up(tracker);
}

void pm_tracker_poll(struct pm_tracker *tracker) {
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker))
        poll_locked(tracker);
    pthread_mutex_unlock(&tracker->lock);
}

static void publish(struct pm_tracker *tracker) {
    if (!tracker->board)
        return;
    uint64_t now = pm_now_ns(), least_ns = tracker->segment_count ? 20000000 : 2000000; /* estimates may be far off */
    uint64_t pending = pm_peek(&tracker->counters->pending_ns);
    pending = pending > 1000000000u ? 1000000000u : pending;
    pm_board_busy(tracker->board, tracker->seat, now + (pending > least_ns ? pending : least_ns));
}

uint64_t pm_tracker_waits(struct pm_tracker *tracker) {
    uint64_t now = pm_now_ns();
    pm_board_busy(tracker->board, tracker->seat, now + 1000000000u);
    return now;
}

void pm_tracker_waited(struct pm_tracker *tracker, uint64_t since_ns, uint64_t lane_key) {
    uint64_t now = pm_now_ns(), waited = now - since_ns;
    uint64_t pending = pm_peek(&tracker->counters->pending_ns); /* the program need not have waited for all there is */
    pm_board_busy(tracker->board, tracker->seat, now + (pending < 20000000u ? pending : 20000000u));
    pm_poke(&tracker->quiet, 1);
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES && (lane_key || tracker->lane_count == 1); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (!lane->key || (lane_key && lane->key != lane_key) || lane->open == PM_NO_MARK)
            continue;
        uint32_t launches = pm_peek(&lane->launches);
        uint64_t estimate = pm_peek(&lane->estimate_ns);
        struct pm_estimate *entry = pm_peek(&lane->last);
        if (launches > lane->waited_launches && waited > 2 * (estimate - lane->waited_estimate_ns) + WAIT_NS) {
            /* They took longer than thought, or the waiter was woken late: the next sample tells, and sets the charge
             * right. */
            if (entry)
                pm_add(&entry->suspects, launches - lane->waited_launches);
            pm_samples_time_anew(tracker);
        }
        lane->waited_launches = launches;
        lane->waited_estimate_ns = estimate;
    }
    if (usable(tracker))
        poll_locked(tracker);
    pthread_mutex_unlock(&tracker->lock);
}

/* ---- lanes ------------------------------------------------------------------------------------------------------- */

static struct pm_lane *find_lane(struct pm_tracker *tracker, uint64_t key) {
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

static struct pm_lane *make_lane(struct pm_tracker *tracker, uint64_t key) {
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[(key + i) % PM_LANES];
        if (lane->key == key)
            return lane;
        if (lane->key == 0) {
            lane->open = PM_NO_MARK;
            tracker->lane_count++;
            pm_store(&lane->key, key);
            return lane;
        }
    }
    return NULL;
}

static void open_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, uint64_t before,
                         uint64_t now) {
    lane->open = mark;
    lane->begun_ns = now;
    lane->marking_ns = before;
    lane->marked_ns = now;
    lane->tainted = 0;
    lane->only = NULL;
    lane->launched_ns = now;
    lane->waited_launches = 0;
    lane->waited_estimate_ns = 0;
    lane->neighbours = pm_board_neighbours(tracker->board, tracker->seat, now);
}

/* Ends the open segment with `mark`, which begins the next one. */
static void end_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, bool full, uint64_t before,
                        uint64_t now) {
    uint32_t launches = __atomic_exchange_n(&lane->launches, 0, __ATOMIC_RELAXED);
    uint64_t estimate = __atomic_exchange_n(&lane->estimate_ns, 0, __ATOMIC_RELAXED);
    struct pm_segment *segment = &tracker->segments[tracker->segment_count++];
    *segment = (struct pm_segment){
        .start = lane->open,
        .end = mark,
        .lane = (uint16_t)(lane - tracker->lanes),
        .full = full,
        .tainted = lane->tainted,
        .launches = launches,
        .neighbours = lane->neighbours,
        .estimate_ns = estimate,
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

/* Charges what the lane has open at its estimates, without a mark. */
static void abandon_segment(struct pm_tracker *tracker, struct pm_lane *lane) {
    uint64_t estimate = __atomic_exchange_n(&lane->estimate_ns, 0, __ATOMIC_RELAXED);
    pm_poke(&lane->launches, 0);
    settle_pending(tracker, estimate);
    charge(tracker, estimate);
    drop_mark(tracker, lane->open);
    lane->open = PM_NO_MARK;
    true_up(tracker);
}

/* Charges all that is pending at its estimates. */
static void charge_estimates(struct pm_tracker *tracker) {
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        settle_pending(tracker, tracker->segments[i].estimate_ns);
        charge_rest(tracker, &tracker->segments[i], tracker->segments[i].estimate_ns);
    }
    tracker->segment_count = 0;
    for (uint32_t i = 0; i < PM_LANES; i++)
        if (tracker->lanes[i].key && tracker->lanes[i].open != PM_NO_MARK)
            abandon_segment(tracker, &tracker->lanes[i]);
    true_up(tracker);
}

/* A mark now, in a stream that is alive; ends what is open. */
static bool mark_now(struct pm_tracker *tracker, struct pm_lane *lane, void *stream) {
    if (tracker->segment_count == PM_SEGMENTS)
        return false;
    uint64_t before = pm_now_ns();
    uint16_t mark = record_mark(tracker, stream);
    if (mark == PM_NO_MARK)
        return false;
    uint64_t now = pm_now_ns();
    /* Asked only now: were the thread interrupted between asking and recording, the queue could run dry unseen. */
    bool full = lane->open != PM_NO_MARK && pm_peek(&lane->launches) && mark_passed(tracker, lane->open) == 0;
    if (lane->open == PM_NO_MARK) {
        open_segment(tracker, lane, mark, before, now);
    } else if (pm_peek(&lane->launches) == 0) {
        drop_mark(tracker, lane->open);
        open_segment(tracker, lane, mark, before, now);
    } else {
        end_segment(tracker, lane, mark, full, before, now);
    }
    return true;
}

/* Two marks in a full queue with nothing between them: what they cost is in every sample. */
static bool measure_mark(struct pm_tracker *tracker, struct pm_lane *lane, void *stream) {
    uint64_t before = pm_now_ns();
    uint16_t mark = record_mark(tracker, stream);
    if (mark == PM_NO_MARK)
        return false;
    end_segment(tracker, lane, mark, mark_passed(tracker, lane->open) == 0, before, pm_now_ns());
    return true;
}

static void slow_begin(struct pm_launch *launch, uint64_t lane_key) {
    struct pm_tracker *tracker = launch->tracker;
    pthread_mutex_lock(&tracker->lock);
    if (!launch->lane)
        launch->lane = make_lane(tracker, lane_key);
    struct pm_lane *lane = launch->lane;
    if (lane)
        lane->stream = launch->stream;
    if (lane && usable(tracker))
        poll_locked(tracker);
    bool crowded = lane && tracker->segment_count > PM_SEGMENTS / 2 && lane->open != PM_NO_MARK &&
                   pm_peek(&lane->launches) < CROWDED_LAUNCHES;
    if (crowded) {
        launch->timed = false; /* so far ahead of the device, several launches to a mark will do */
    } else if (lane && usable(tracker)) {
        bool ready = lane->open != PM_NO_MARK && pm_peek(&lane->launches) == 0 && !lane->tainted &&
                     mark_passed(tracker, lane->open) == 0;
        if (ready)
            lane->marking_ns = lane->marked_ns = pm_now_ns();
        else
            ready = mark_now(tracker, lane, launch->stream);
        if (ready && launch->timed && tracker->mark_costs < 64 && tracker->segment_count < PM_SEGMENTS / 2 &&
            lane->full_marks++ % 4 == 0 && mark_passed(tracker, lane->open) == 0)
            ready = measure_mark(tracker, lane, launch->stream);
        launch->timed = launch->timed && ready;
    } else {
        launch->timed = false;
        if (tracker->broken)
            charge_estimates(tracker);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_launch_begin(struct pm_launch *launch, struct pm_tracker *tracker, struct pm_estimate *entry, void *stream,
                     uint64_t lane_key) {
    launch->tracker = tracker;
    launch->entry = entry;
    launch->stream = stream;
    launch->estimate_ns = entry && pm_peek(&entry->ns) ? pm_peek(&entry->ns) : PM_UNKNOWN_NS;
    launch->lane = find_lane(tracker, lane_key);
    launch->timed = entry && pm_estimate_due(entry, pm_peek(&tracker->round));
    if ((launch->timed || !launch->lane || pm_peek(&launch->lane->open) == PM_NO_MARK) && usable(tracker))
        slow_begin(launch, lane_key);
}

static void slow_end(struct pm_launch *launch) {
    struct pm_tracker *tracker = launch->tracker;
    struct pm_lane *lane = launch->lane;
    uint64_t now = launch->timed ? pm_now_ns() : 0; /* as soon as the driver has it */
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker) && lane->open != PM_NO_MARK) {
        if (launch->timed) {
            lane->only = launch->entry;
            lane->launched_ns = now;
        }
        bool marked = mark_now(tracker, lane, launch->stream);
        /* Behind a launch the queue is full, also of a program that waits for each. */
        if (marked && launch->timed && tracker->mark_costs < 64 && tracker->segment_count < PM_SEGMENTS / 2 &&
            (tracker->mark_costs == 0 || lane->full_marks++ % 4 == 0) && mark_passed(tracker, lane->open) == 0)
            measure_mark(tracker, lane, launch->stream);
        poll_locked(tracker);
        publish(tracker);
    } else if (tracker->broken) {
        charge_estimates(tracker);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_launch_end(struct pm_launch *launch, bool launched) {
    if (!launched)
        return;
    struct pm_tracker *tracker = launch->tracker;
    struct pm_lane *lane = launch->lane;
    pm_poke(&tracker->counters->last_activity_ns, pm_realtime_coarse_ns());
    pm_limiter_launched(tracker->limiter, launch->estimate_ns);
    if (pm_peek(&tracker->quiet)) { /* others who wait for a quiet device are to know at once */
        pm_poke(&tracker->quiet, 0);
        pm_board_busy(tracker->board, tracker->seat, pm_now_ns() + 2000000);
    }
    if (!lane || pm_peek(&lane->open) == PM_NO_MARK) { /* nothing will ever settle it */
        pm_add(&tracker->counters->busy_ns, launch->estimate_ns);
        return;
    }
    pm_add(&tracker->counters->pending_ns, launch->estimate_ns);
    pm_poke(&lane->last, launch->entry);
    uint64_t estimate = pm_add(&lane->estimate_ns, launch->estimate_ns) + launch->estimate_ns;
    uint32_t launches = pm_add(&lane->launches, 1) + 1;
    bool due = launch->timed || launches >= SEGMENT_LAUNCHES || estimate >= SEGMENT_NS ||
               estimate >= pm_limiter_stretch(tracker->limiter) ||
               pm_now_coarse_ns() > pm_peek(&lane->begun_ns) + SEGMENT_WALL_NS;
    if (due && pm_peek(tracker->driver->captures) == 0) {
        slow_end(launch);
    } else if (estimate >= CAPTURED_NS) { /* a capture that goes on and on, or was left behind */
        pthread_mutex_lock(&tracker->lock);
        if (lane->open != PM_NO_MARK)
            abandon_segment(tracker, lane);
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
        uint32_t launches = lane->key && lane->open != PM_NO_MARK ? pm_peek(&lane->launches) : 0;
        if (launches &&
            launches ==
                lane->seen_launches) { /* nobody came to end the segment, and no stream may be touched from here */
            abandon_segment(tracker, lane);
            launches = 0;
        }
        lane->seen_launches = launches;
        pending |= launches > 0;
    }
    pthread_mutex_unlock(&tracker->lock);
    return pending;
}

void pm_tracker_taint(struct pm_tracker *tracker, uint64_t lane_key) {
    struct pm_lane *lane = find_lane(tracker, lane_key);
    if (lane)
        pm_poke(&lane->tainted, 1);
}

void pm_tracker_close(struct pm_tracker *tracker, void *stream, uint64_t lane_key) {
    struct pm_lane *lane = find_lane(tracker, lane_key);
    if (!lane || (pm_peek(&lane->launches) < TAIL_LAUNCHES && pm_peek(&lane->estimate_ns) < TAIL_NS))
        return;
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker) && lane->open != PM_NO_MARK && pm_peek(&lane->launches))
        mark_now(tracker, lane, stream);
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_close_all(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES && usable(tracker); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (lane->key && lane->open != PM_NO_MARK &&
            (pm_peek(&lane->launches) >= TAIL_LAUNCHES || pm_peek(&lane->estimate_ns) >= TAIL_NS) &&
            (lane->key == lane_key || (uint64_t)(uintptr_t)lane->stream != other_threads))
            mark_now(tracker, lane, lane->stream);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_held(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES && usable(tracker); i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        /* Under the lock the stream of a lane exists: who destroys it drops the lane first. */
        if (lane->key && lane->open != PM_NO_MARK && pm_peek(&lane->launches) &&
            (lane->key == lane_key || (uint64_t)(uintptr_t)lane->stream != other_threads))
            mark_now(tracker, lane, lane->stream);
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_rested(struct pm_tracker *tracker) {
    pthread_mutex_lock(&tracker->lock);
    for (uint32_t i = 0; i < PM_LANES; i++) {
        struct pm_lane *lane = &tracker->lanes[i];
        if (lane->key && lane->open != PM_NO_MARK && pm_peek(&lane->launches) == 0) {
            drop_mark(tracker, lane->open);
            lane->open = PM_NO_MARK;
        }
    }
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_drop_lane(struct pm_tracker *tracker, uint64_t lane_key) {
    pthread_mutex_lock(&tracker->lock);
    struct pm_lane *lane = find_lane(tracker, lane_key);
    if (lane && lane->open != PM_NO_MARK)
        abandon_segment(tracker, lane);
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_finish(struct pm_tracker *tracker, bool poll, bool destroy) {
    pthread_mutex_lock(&tracker->lock);
    tracker->closed = true;
    if (poll && usable(tracker))
        poll_locked(tracker);
    charge_estimates(tracker);
    for (uint32_t i = 0; i < PM_MARKS; i++) {
        if (destroy && tracker->marks[i].event)
            tracker->driver->event_destroy(tracker->marks[i].event);
        tracker->marks[i] = (struct pm_mark){0};
    }
    tracker->reference = PM_NO_MARK;
    memset(tracker->bins, 0, sizeof tracker->bins);
    pthread_mutex_unlock(&tracker->lock);
}
