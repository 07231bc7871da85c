#include "tracker.h"

#include <string.h>

#include "board.h"
#include "clock.h"

#define SEGMENT_LAUNCHES 256u
#define SEGMENT_NS 10000000u
#define SLICE_NS 1500000u      /* a span shorter than a turn of the device seldom holds another's turn */
#define MANY_SLICES_NS 4000000u
#define GAP_NS 2000u           /* between two launches of a full queue, at most */
#define TAIL_LAUNCHES 8u
#define TAIL_NS 200000u
#define REFERENCE_NS 1000000000
#define FAULT_LIMIT 16u

void pm_tracker_init(struct pm_tracker *tracker, const struct pm_driver *driver, struct pm_counters *counters) {
    memset(tracker, 0, sizeof *tracker);
    pthread_mutex_init(&tracker->lock, NULL);
    tracker->driver = driver;
    tracker->counters = counters;
    tracker->seat = PM_NO_SEAT;
    tracker->reference = PM_NO_MARK;
    tracker->random = (uint64_t)(uintptr_t)tracker ^ pm_now_ns();
    for (int k = 1; k < 4; k++)
        tracker->shared_part[k] = 1.0 / (1 + k);
}

/* Events can be used now. Asked again under the lock: whoever begins a capture counts it first, then waits for each lock once. */
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
}

static void settle_pending(struct pm_tracker *tracker, uint64_t estimate_ns) {
    __atomic_fetch_sub(&tracker->counters->pending_ns, estimate_ns, __ATOMIC_RELAXED);
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

/* ---- learning ---------------------------------------------------------------------------------------------------- */

static void next_sample(struct pm_tracker *tracker, struct pm_estimate *entry) {
    uint64_t ns = entry->ns ? entry->ns : PM_UNKNOWN_NS;
    uint64_t every = PM_SAMPLE_BUDGET_NS / ns;
    every = every < 1 ? 1 : every > 1000 ? 1000 : every;
    tracker->random = tracker->random * 6364136223846793005u + 1442695040888963407u;
    /* uneven, so that a program's own rhythm does not pick always the same of its launches */
    pm_poke(&entry->countdown, (int32_t)(every / 2 + (tracker->random >> 33) % (every + 1) + 1));
}

static void set_estimate(struct pm_estimate *entry, double ns) {
    pm_poke(&entry->ns, ns < 500 ? 500 : (uint64_t)ns);
}

/* The own part of a span while `neighbours` others were busy. */
static double shared_part(const struct pm_tracker *tracker, uint32_t neighbours) {
    return neighbours == 0 ? 1.0 : neighbours < 4 ? tracker->shared_part[neighbours] : 1.0 / (1 + neighbours);
}

static void learn_part(struct pm_tracker *tracker, uint32_t neighbours, double part) {
    if (neighbours == 0 || neighbours > 3 || part < 0.4 / (1 + neighbours) || part > 1)
        return;
    tracker->shared_part[neighbours] += (part - tracker->shared_part[neighbours]) / 16;
}

/* Charge of a launch measured while it had the device to itself. */
static uint64_t lone_sample(struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t took, const struct pm_segment *segment) {
    bool blurred = !segment->full && segment->host_gap_ns > 100000 && took < 20 * segment->host_gap_ns;
    pm_add(&tracker->counters->timed_samples, 1);
    entry->samples++;
    if (blurred) /* a first launch that loaded its code: good enough to charge, not to learn from */
        return took;
    if (entry->lone == 0) {
        set_estimate(entry, (double)took);
        if (entry->shared) { /* what shared spans made us charge can now be set right */
            uint64_t right = entry->shared * took;
            if (right < entry->shared_ns)
                tracker->credit_ns += entry->shared_ns - right;
            else
                took += right - entry->shared_ns;
            entry->shared = 0;
            entry->shared_ns = 0;
        }
    } else {
        double weight = entry->lone < 16 ? entry->lone + 1 : 16;
        set_estimate(entry, (double)entry->ns + ((double)took - (double)entry->ns) / weight);
    }
    entry->lone++;
    entry->strikes = 0;
    return took;
}

/* Charge of a launch measured while neighbours were busy: its span may hold their turns. */
static uint64_t shared_sample(struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t took, const struct pm_segment *segment) {
    uint32_t neighbours = segment->neighbours;
    double part = shared_part(tracker, neighbours), mine = (double)took * part;
    entry->samples++;
    if (entry->lone) {
        if (took <= entry->ns + entry->ns / 4) {
            entry->strikes = 0;
            pm_add(&tracker->counters->timed_samples, 1);
            set_estimate(entry, (double)entry->ns + ((double)took - (double)entry->ns) / 16);
            return took;
        }
        pm_add(&tracker->counters->dropped_samples, 1);
        bool longer = mine > 2.0 * (double)entry->ns && took > entry->ns + (neighbours + 1) * 5000000u;
        entry->strikes = longer ? entry->strikes + 1 : 0;
        if (entry->strikes >= 3) { /* no single turn of a neighbour explains this: the launch itself has become longer */
            entry->lone = 0;
            entry->strikes = 0;
            set_estimate(entry, mine);
            return (uint64_t)mine;
        }
        if (segment->full && entry->ns >= MANY_SLICES_NS)
            learn_part(tracker, neighbours, (double)entry->ns / (double)took);
        return entry->ns;
    }
    pm_add(&tracker->counters->timed_samples, 1);
    double known = (double)entry->ns, cost;
    if (took < SLICE_NS)
        cost = (double)took;
    else
        cost = mine > SLICE_NS ? mine : SLICE_NS;
    if (known == 0)
        known = cost;
    else if (took >= MANY_SLICES_NS && known > 0.6 * cost)
        known += (cost - known) / 8;
    else if (cost > 0.8 * known && cost < 1.25 * known)
        known += (cost - known) / 16;
    else if (cost < known)
        known = cost; /* the shortest spans are those without a neighbour's turn */
    set_estimate(entry, known);
    if (took < MANY_SLICES_NS)
        cost = known;
    entry->shared++;
    entry->shared_ns += (uint64_t)cost;
    return (uint64_t)cost;
}

/* ---- settling ---------------------------------------------------------------------------------------------------- */

/* Several streams at once: no stretch of device time is charged twice. */
static uint64_t within_union(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost) {
    int64_t start, end;
    if (tracker->lane_count < 2 || !position(tracker, segment->start, &start) || !position(tracker, segment->end, &end))
        return cost;
    double room = (double)(end - start);
    double span = room;
    for (uint32_t i = 0; i < PM_SPANS; i++) {
        const struct pm_span *other = &tracker->spans[i];
        int64_t from = other->start > start ? other->start : start, to = other->end < end ? other->end : end;
        if (other->lane != segment->lane && to > from)
            room -= (double)(to - from) * other->density;
    }
    if (room < 0)
        room = 0;
    if ((double)cost > room)
        cost = (uint64_t)room;
    if (span > 0) {
        tracker->spans[tracker->span_next] = (struct pm_span){start, end, (double)cost / span, segment->lane};
        tracker->span_next = (tracker->span_next + 1) % PM_SPANS;
    }
    return cost;
}

static void settle(struct pm_tracker *tracker, struct pm_segment *segment) {
    uint64_t cost = segment->estimate_ns;
    int64_t span;
    settle_pending(tracker, segment->estimate_ns);
    if (segment->launches == 0)
        return;
    if (!elapsed(tracker, segment->start, segment->end, &span) || span < 0) {
        fault(tracker);
        charge(tracker, cost);
        return;
    }
    uint32_t now_busy = pm_board_neighbours(tracker->board, tracker->seat, segment->begun_ns);
    if (now_busy > segment->neighbours)
        segment->neighbours = now_busy;
    if (segment->launches == 1 && segment->entry && !segment->tainted) {
        int64_t took = span - (segment->full ? (int64_t)tracker->mark_cost_ns : (int64_t)segment->host_gap_ns);
        took = took < 500 ? 500 : took;
        cost = segment->neighbours ? shared_sample(tracker, segment->entry, (uint64_t)took, segment)
                                   : lone_sample(tracker, segment->entry, (uint64_t)took, segment);
        next_sample(tracker, segment->entry);
    } else {
        uint64_t upper = (uint64_t)span, gaps = (uint64_t)segment->launches * GAP_NS;
        if (cost > upper)
            cost = upper;
        if (segment->full && !segment->tainted && segment->neighbours == 0) {
            uint64_t lower = upper > gaps ? upper - gaps : 0;
            if (cost < lower)
                cost = lower;
            pm_add(&tracker->counters->burst_samples, 1);
        } else if (segment->full && !segment->tainted && upper > 2 * MANY_SLICES_NS) {
            learn_part(tracker, segment->neighbours, (double)segment->estimate_ns / (double)upper);
        }
    }
    charge(tracker, within_union(tracker, segment, cost));
}

static void poll_locked(struct pm_tracker *tracker) {
    uint64_t waiting = 0; /* lanes whose oldest segment has not passed: the later ones have not either */
    uint32_t kept = 0;
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        struct pm_segment *segment = &tracker->segments[i];
        uint64_t bit = 1ull << segment->lane;
        int passed = waiting & bit ? 0 : mark_passed(tracker, segment->end);
        if (passed == 0) {
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
            charge(tracker, segment->estimate_ns);
        }
        drop_mark(tracker, segment->start);
        drop_mark(tracker, segment->end);
    }
    tracker->segment_count = kept;
    tracker->polled_ns = pm_now_ns();
}

void pm_tracker_poll(struct pm_tracker *tracker) {
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker))
        poll_locked(tracker);
    pthread_mutex_unlock(&tracker->lock);
}

static void publish(struct pm_tracker *tracker, uint64_t now, uint64_t least_ns) {
    if (!tracker->board)
        return;
    uint64_t pending = pm_peek(&tracker->counters->pending_ns);
    pending = pending > 1000000000u ? 1000000000u : pending;
    pm_board_busy(tracker->board, tracker->seat, now + (pending > least_ns ? pending : least_ns));
}

void pm_tracker_waiting(struct pm_tracker *tracker, bool waiting) {
    if (tracker->board)
        pm_board_busy(tracker->board, tracker->seat, pm_now_ns() + (waiting ? 1000000000u : 0));
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

static void open_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, uint64_t now) {
    lane->open = mark;
    lane->begun_ns = now;
    lane->marked_ns = now;
    lane->tainted = 0;
    lane->only = NULL;
    lane->host_gap_ns = 0;
    lane->neighbours = pm_board_neighbours(tracker->board, tracker->seat, now);
}

/* Ends the open segment with `mark`, which begins the next one. */
static void end_segment(struct pm_tracker *tracker, struct pm_lane *lane, uint16_t mark, bool full, uint64_t now) {
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
        .host_gap_ns = lane->host_gap_ns,
        .begun_ns = lane->begun_ns,
        .entry = launches == 1 ? lane->only : NULL,
    };
    tracker->marks[mark].uses++; /* once for this segment, once as the next one's start */
    open_segment(tracker, lane, mark, now);
}

/* Charges what the lane has open at its estimates, without a mark. */
static void abandon_segment(struct pm_tracker *tracker, struct pm_lane *lane) {
    uint64_t estimate = __atomic_exchange_n(&lane->estimate_ns, 0, __ATOMIC_RELAXED);
    pm_poke(&lane->launches, 0);
    settle_pending(tracker, estimate);
    charge(tracker, estimate);
    drop_mark(tracker, lane->open);
    lane->open = PM_NO_MARK;
}

/* Charges all that is pending at its estimates. */
static void charge_estimates(struct pm_tracker *tracker) {
    for (uint32_t i = 0; i < tracker->segment_count; i++) {
        settle_pending(tracker, tracker->segments[i].estimate_ns);
        charge(tracker, tracker->segments[i].estimate_ns);
    }
    tracker->segment_count = 0;
    for (uint32_t i = 0; i < PM_LANES; i++)
        if (tracker->lanes[i].key && tracker->lanes[i].open != PM_NO_MARK)
            abandon_segment(tracker, &tracker->lanes[i]);
}

/* A mark now, in a stream that is alive; ends what is open. */
static bool mark_now(struct pm_tracker *tracker, struct pm_lane *lane, void *stream) {
    if (tracker->segment_count == PM_SEGMENTS)
        return false;
    bool full = lane->open != PM_NO_MARK && mark_passed(tracker, lane->open) == 0;
    uint16_t mark = record_mark(tracker, stream);
    if (mark == PM_NO_MARK)
        return false;
    uint64_t now = pm_now_ns();
    if (lane->open == PM_NO_MARK) {
        open_segment(tracker, lane, mark, now);
    } else if (pm_peek(&lane->launches) == 0) {
        drop_mark(tracker, lane->open);
        open_segment(tracker, lane, mark, now);
    } else {
        end_segment(tracker, lane, mark, full, now);
    }
    return true;
}

static void slow_begin(struct pm_launch *launch, uint64_t lane_key) {
    struct pm_tracker *tracker = launch->tracker;
    pthread_mutex_lock(&tracker->lock);
    if (!launch->lane)
        launch->lane = make_lane(tracker, lane_key);
    struct pm_lane *lane = launch->lane;
    if (lane && usable(tracker)) {
        poll_locked(tracker);
        bool ready = lane->open != PM_NO_MARK && pm_peek(&lane->launches) == 0 && !lane->tainted &&
                     mark_passed(tracker, lane->open) == 0;
        if (ready)
            lane->marked_ns = pm_now_ns();
        else
            ready = mark_now(tracker, lane, launch->stream);
        launch->timed = launch->timed && ready;
        launch->begun_ns = lane->marked_ns;
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
    launch->timed = entry && pm_estimate_due(entry);
    if ((launch->timed || !launch->lane || pm_peek(&launch->lane->open) == PM_NO_MARK) && usable(tracker))
        slow_begin(launch, lane_key);
}

static void slow_end(struct pm_launch *launch) {
    struct pm_tracker *tracker = launch->tracker;
    struct pm_lane *lane = launch->lane;
    uint64_t now = launch->timed ? pm_now_ns() : 0;
    pthread_mutex_lock(&tracker->lock);
    if (usable(tracker) && lane->open != PM_NO_MARK) {
        if (launch->timed) {
            lane->only = launch->entry;
            lane->host_gap_ns = now - launch->begun_ns;
        }
        mark_now(tracker, lane, launch->stream);
        publish(tracker, pm_now_ns(), 2000000);
        poll_locked(tracker);
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
    if (!lane || pm_peek(&lane->open) == PM_NO_MARK) { /* nothing will ever settle it */
        pm_add(&tracker->counters->busy_ns, launch->estimate_ns);
        return;
    }
    pm_add(&tracker->counters->pending_ns, launch->estimate_ns);
    uint64_t estimate = pm_add(&lane->estimate_ns, launch->estimate_ns) + launch->estimate_ns;
    uint32_t launches = pm_add(&lane->launches, 1) + 1;
    if ((launch->timed || launches >= SEGMENT_LAUNCHES || estimate >= SEGMENT_NS) && pm_peek(tracker->driver->captures) == 0)
        slow_end(launch);
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

void pm_tracker_drop_lane(struct pm_tracker *tracker, uint64_t lane_key) {
    pthread_mutex_lock(&tracker->lock);
    struct pm_lane *lane = find_lane(tracker, lane_key);
    if (lane && lane->open != PM_NO_MARK)
        abandon_segment(tracker, lane);
    pthread_mutex_unlock(&tracker->lock);
}

void pm_tracker_finish(struct pm_tracker *tracker, bool poll, bool destroy) {
    pthread_mutex_lock(&tracker->lock);
    if (poll && usable(tracker))
        poll_locked(tracker);
    charge_estimates(tracker);
    for (uint32_t i = 0; i < PM_MARKS; i++) {
        if (destroy && tracker->marks[i].event)
            tracker->driver->event_destroy(tracker->marks[i].event);
        tracker->marks[i] = (struct pm_mark){0};
    }
    tracker->reference = PM_NO_MARK;
    memset(tracker->spans, 0, sizeof tracker->spans);
    pthread_mutex_unlock(&tracker->lock);
}
