#include "charges.h"

#include "board.h"
#include "clock.h"
#include "marks.h"
#include "neighbours.h"
#include "samples.h"
#include "union.h"

#define GAP_NS 2000u /* between two launches of a full queue, at most */
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
#define OVERDUE_NS 100000000u /* beyond its estimate a running launch is charged as it goes */

void pm_charge(struct pm_tracker *tracker, uint64_t ns) {
    uint64_t kept = ns < tracker->credit_ns ? ns : tracker->credit_ns;
    tracker->credit_ns -= kept;
    if (ns > kept)
        pm_add(&tracker->counters->busy_ns, ns - kept);
    tracker->owed_ns += (int64_t)(ns - kept);
}

void pm_charge_settled(struct pm_tracker *tracker, uint64_t estimate_ns) {
    __atomic_fetch_sub(&tracker->counters->pending_ns, estimate_ns, __ATOMIC_RELAXED);
    tracker->owed_ns -= (int64_t)estimate_ns;
}

void pm_charge_true_up(struct pm_tracker *tracker) {
    pm_limiter_true_up(tracker->limiter, tracker->seat, tracker->owed_ns, pm_peek(&tracker->counters->pending_ns),
                       pm_now_ns());
    tracker->owed_ns = 0;
}

void pm_charge_rest(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost) {
    if (cost >= segment->progress_ns)
        pm_charge(tracker, cost - segment->progress_ns);
    else
        tracker->credit_ns += segment->progress_ns - cost;
}

void pm_charge_progress(struct pm_tracker *tracker, struct pm_segment *segment) {
    uint64_t now = pm_now_ns();
    if (segment->running_ns == 0) {
        if (pm_mark_passed(tracker, segment->start) == 1)
            segment->running_ns = now;
        return;
    }
    uint64_t running = now - segment->running_ns;
    if (running < 2 * segment->estimate_ns + OVERDUE_NS)
        return;
    uint32_t neighbours = pm_board_neighbours(tracker->board, tracker->seat, segment->running_ns);
    uint64_t mine = (uint64_t)((double)running * pm_neighbours_beside(tracker, neighbours, running).own_part);
    if (mine > segment->progress_ns) {
        pm_charge(tracker, mine - segment->progress_ns);
        segment->progress_ns = mine;
    }
}

/*
 * What is left of the span without the neighbours' turns that leave what is closest to the estimate. The lengths of
 * these launches vary, so that the sum of their estimates is only good for that; where turns end early, not even so.
 */
static uint64_t without_turns(const struct pm_tracker *tracker, const struct pm_segment *segment,
                              const struct pm_beside *beside, uint64_t span) {
    double rest = (double)span, estimate = (double)segment->estimate_ns, turn = tracker->turn_ns;
    if (rest < 0.8 * turn)
        return span;
    if (!tracker->turn_known || !beside->in_full)
        return segment->estimate_ns < span ? segment->estimate_ns : span;
    while (rest - turn / 2 > estimate)
        rest -= turn;
    return rest > 0 ? (uint64_t)rest : 0;
}

/*
 * Charge of a segment of several launches, or of one that was not timed. The device can have been idle inside only
 * while the host was still handing work over.
 */
static uint64_t many_launches(struct pm_tracker *tracker, const struct pm_segment *segment,
                              const struct pm_beside *beside, uint64_t span) {
    uint64_t cost = segment->estimate_ns, gaps = (uint64_t)segment->launches * GAP_NS;
    if (segment->alike && pm_peek(&segment->alike->ns)) /* measured since they were launched */
        cost = segment->launches * pm_peek(&segment->alike->ns);
    uint64_t idle = gaps + (segment->full ? 0 : segment->host_ns), lower = span > idle ? span - idle : 0;
    if (segment->tainted)
        lower = 0;
    if (segment->neighbours) {
        double cycle = tracker->slice_ns + tracker->turn_ns * segment->neighbours;
        /* the part is known within the turns at both ends */
        lower = (double)lower > 4 * cycle ? (uint64_t)((double)lower * beside->own_part * 0.85) : 0;
    } else if (segment->full && !segment->tainted) {
        pm_add(&tracker->counters->burst_samples, 1);
    }
    uint64_t upper = span;
    if (segment->full && segment->neighbours == 0) {
        uint64_t between = (uint64_t)(LAUNCH_MARKS * tracker->mark_cost_ns * segment->launches);
        upper = span > between ? span - between : 0;
        upper = upper > lower ? upper : lower;
    } else if (segment->full && !segment->tainted && segment->unsteady) {
        lower = upper = without_turns(tracker, segment, beside, span);
    }
    if (cost > upper)
        cost = upper;
    if (cost + cost / 4 + gaps < lower ||
        (!segment->full && span > 2 * cost + PM_WAIT_NS && span > segment->host_ns + PM_WAIT_NS))
        pm_samples_time_anew(tracker);
    return cost < lower ? lower : cost;
}

/* How often the device was switched to these launches, at least: a queue that runs dry gives its turn up. */
static double turns_of(const struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t span) {
    if (segment->full || segment->neighbours == 0)
        return 0;
    double most = (double)span / tracker->slice_ns + 1;
    return segment->launches < most ? segment->launches : most;
}

void pm_charge_segment(struct pm_tracker *tracker, struct pm_segment *segment) {
    uint64_t cost = segment->estimate_ns;
    int64_t span;
    pm_charge_settled(tracker, segment->estimate_ns);
    if (segment->launches == 0) {
        if (segment->full && !segment->tainted && pm_marks_apart(tracker, segment->start, segment->end, &span) &&
            span >= 0 && span < 10000) {
            /* more than the gap between two launches is not the mark's doing */
            double seen = span < GAP_NS ? (double)span : GAP_NS;
            tracker->mark_costs++;
            tracker->mark_cost_ns +=
                (seen - tracker->mark_cost_ns) / (tracker->mark_costs < 8 ? tracker->mark_costs : 8);
        }
        return;
    }
    if (!pm_marks_apart(tracker, segment->start, segment->end, &span) || span < 0) {
        pm_marks_fault(tracker);
        pm_charge_rest(tracker, segment, cost);
        return;
    }
    pm_neighbours_tell_active(tracker, (uint64_t)span, pm_peek(&tracker->counters->pending_ns) > 0);
    uint32_t now_busy = pm_board_neighbours(tracker->board, tracker->seat, segment->begun_ns);
    if (now_busy > segment->neighbours)
        segment->neighbours = now_busy;
    struct pm_beside beside = pm_neighbours_beside(tracker, segment->neighbours, (uint64_t)span);
    if (segment->launches == 1 && segment->entry && !segment->tainted) {
        int64_t marks = (int64_t)((segment->full ? SAMPLE_MARKS : IDLE_MARKS) * tracker->mark_cost_ns);
        int64_t took = span - marks - (segment->full ? 0 : (int64_t)segment->host_gap_ns);
        span = span - marks < 500 ? 500 : span - marks;
        took = took < 500 ? 500 : took;
        if (pm_samples_blurred(segment, (uint64_t)span, (uint64_t)took))
            cost = pm_samples_take_blurred(tracker, segment, &beside, (uint64_t)span);
        else if (segment->neighbours)
            cost = pm_samples_take_shared(tracker, segment, &beside, (uint64_t)took);
        else
            cost = pm_samples_take_lone(tracker, segment->entry, (uint64_t)took);
    } else {
        cost = many_launches(tracker, segment, &beside, (uint64_t)span);
    }
    cost = pm_union_take(tracker, segment, cost);
    if (segment->full && !segment->tainted && !segment->unsteady && segment->neighbours == 1 &&
        (!segment->entry || segment->entry->lone >= PM_SURE_SAMPLES))
        pm_neighbours_learn_slice(tracker, &beside, cost, (uint64_t)span);
    pm_neighbours_tell_taken(tracker, cost, turns_of(tracker, segment, (uint64_t)span));
    pm_charge_rest(tracker, segment, cost);
}
