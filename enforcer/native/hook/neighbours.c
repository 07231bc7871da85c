#include "neighbours.h"

#include "board.h"
#include "clock.h"

#define WATCH_NS 2000000u
/* Until they are learned; seen on an H200 (driver 580), where kernels of 5 and 20 ms are interrupted as well. */
#define SLICE_NS 2065000.0 /* a turn of the device while several have work */
#define TURN_NS 2415000.0  /* from the end of an own turn to the next one with one neighbour, switching included */
#define FADE_NS 50000000u
#define FADING 0.8           /* of what was seen, after so long */
#define ENOUGH_NS 10000000.0 /* of their time seen, to say how much of the device they had in it */
#define CLEARLY_LESS 0.8
#define CYCLES 10               /* of turns, to say what part of them is one's own */
#define LEAST_LOOK_NS 10000000u /* what neighbours did in less time says little */

void pm_neighbours_init(struct pm_tracker *tracker) {
    tracker->slice_ns = SLICE_NS;
    tracker->turn_ns = TURN_NS;
}

/* The part of a long stretch that so many take, when they have work all the time. */
static double saturating(const struct pm_tracker *tracker, double present) {
    return tracker->turn_ns * present / (tracker->slice_ns + tracker->turn_ns * present);
}

/* The newest look at the board that lies so long back, or the oldest one kept; NULL: there is none. */
static const struct pm_seen *look_back(const struct pm_tracker *tracker, uint64_t at_ns) {
    const struct pm_seen *found = NULL;
    for (uint64_t n = tracker->seen_count; n > 0 && n + PM_SEEN > tracker->seen_count; n--) {
        found = &tracker->seen[(n - 1) % PM_SEEN];
        if (found->at_ns <= at_ns)
            break;
    }
    return found;
}

static bool grew(const struct pm_others *from, const struct pm_others *to) {
    return to->active_ns >= from->active_ns && to->told_ns >= from->told_ns && to->taken_ns >= from->taken_ns;
}

void pm_neighbours_watch(struct pm_tracker *tracker) {
    uint64_t now = pm_now_ns();
    if (!tracker->board || (tracker->seen_count && now - look_back(tracker, now)->at_ns < WATCH_NS))
        return;
    struct pm_seen *seen = &tracker->seen[tracker->seen_count % PM_SEEN];
    seen->at_ns = now;
    pm_board_others(tracker->board, tracker->seat, now, &seen->others);
    if (tracker->seen_count && !grew(&look_back(tracker, now)->others, &seen->others)) {
        tracker->seen[0] = *seen; /* a seat has changed hands */
        tracker->seen_count = 0;
    }
    tracker->seen_count++;
    const struct pm_seen *before = look_back(tracker, now - FADE_NS);
    if (tracker->seen_count == 1) {
        tracker->told = tracker->taken = 0;
        tracker->faded_at_ns = now;
    } else if (now - tracker->faded_at_ns >= FADE_NS) {
        tracker->told = tracker->told * FADING + (double)(seen->others.told_ns - before->others.told_ns);
        tracker->taken = tracker->taken * FADING + (double)(seen->others.taken_ns - before->others.taken_ns);
        tracker->faded_at_ns = now;
    }
    uint64_t slice = pm_peek(&tracker->board->slice_ns), turn = pm_peek(&tracker->board->turn_ns);
    if (!tracker->turn_learned && slice >= 100000 && slice < 100000000 && turn >= slice / 2 && turn < 4 * slice) {
        tracker->slice_ns = (double)slice; /* somebody with short kernels could measure it */
        tracker->turn_ns = (double)turn;
        tracker->turn_known = true;
    }
}

/* Of so many seen busy, how many had work on average in the last `span_ns`. */
static double present_of(const struct pm_tracker *tracker, uint32_t busy, uint64_t span_ns) {
    uint64_t now = pm_now_ns(), back = span_ns > LEAST_LOOK_NS ? span_ns : LEAST_LOOK_NS;
    const struct pm_seen *from = look_back(tracker, now > back ? now - back : 0);
    struct pm_others others;
    if (!from || now - from->at_ns < LEAST_LOOK_NS / 2)
        return busy;
    pm_board_others(tracker->board, tracker->seat, now, &others);
    if (!grew(&from->others, &others))
        return busy;
    double present = (double)(others.active_ns - from->others.active_ns) / (double)(now - from->at_ns);
    return present < busy ? present : busy;
}

/*
 * Whoever has work all the time takes its turns in full. One with a little work now and then waits for its turn for
 * some of the time, and takes as much of it as it says.
 */
struct pm_beside pm_neighbours_beside(const struct pm_tracker *tracker, uint32_t busy, uint64_t span_ns) {
    if (busy == 0)
        return (struct pm_beside){.own_part = 1};
    bool told = tracker->told >= ENOUGH_NS;
    double present = present_of(tracker, busy, span_ns), most = saturating(tracker, busy);
    double took = told ? present * tracker->taken / tracker->told : present * most / busy;
    bool in_full = present > 0.9 * busy && (!told || took > CLEARLY_LESS * most);
    return (struct pm_beside){present, 1 - (in_full || took > most ? most : took), in_full};
}

void pm_neighbours_learn_turn(struct pm_tracker *tracker, double beyond, double turns) {
    double turn = beyond / turns;
    if (turn < 100000 || turn > 100000000 ||
        (tracker->turn_learned && (turn < tracker->turn_ns / 2 || turn > tracker->turn_ns * 2)))
        return;
    tracker->turn_ns = tracker->turn_learned ? tracker->turn_ns + (turn - tracker->turn_ns) / 16 : turn;
    if (!tracker->turn_learned && (turn < 0.8 * TURN_NS || turn > 1.2 * TURN_NS))
        tracker->slice_ns = turn * SLICE_NS / TURN_NS; /* turns are of another length here */
    tracker->turn_learned = tracker->turn_known = true;
    if (tracker->board) {
        pm_poke(&tracker->board->slice_ns, (uint64_t)tracker->slice_ns);
        pm_poke(&tracker->board->turn_ns, (uint64_t)tracker->turn_ns);
    }
}

void pm_neighbours_learn_slice(struct pm_tracker *tracker, const struct pm_beside *beside, uint64_t cost_ns,
                               uint64_t span_ns) {
    double cycle = tracker->slice_ns + tracker->turn_ns;
    if (!tracker->turn_known || tracker->lane_count > 1 || !beside->in_full) {
        tracker->own_ns = tracker->whole_ns = 0;
        return;
    }
    tracker->own_ns += (double)cost_ns;
    tracker->whole_ns += (double)span_ns;
    if (tracker->whole_ns < CYCLES * cycle)
        return;
    double part = tracker->own_ns / tracker->whole_ns, slice = tracker->turn_ns * part / (1 - part);
    tracker->own_ns = tracker->whole_ns = 0;
    if (slice < tracker->turn_ns / 2 || slice > tracker->turn_ns * 1.1)
        return; /* one of the two did not take its turns in full */
    tracker->slice_ns += (slice - tracker->slice_ns) / 4;
    if (tracker->board)
        pm_poke(&tracker->board->slice_ns, (uint64_t)tracker->slice_ns);
}

void pm_neighbours_tell_taken(struct pm_tracker *tracker, uint64_t cost_ns, double turns) {
    double least = (double)cost_ns / tracker->slice_ns,
           switching = tracker->turn_ns > tracker->slice_ns ? tracker->turn_ns - tracker->slice_ns : 0;
    if (tracker->board)
        pm_board_taken(tracker->board, tracker->seat,
                       cost_ns + (uint64_t)((turns > least ? turns : least) * switching));
}

void pm_neighbours_tell_active(struct pm_tracker *tracker, uint64_t span_ns, bool under_way) {
    uint64_t now = pm_now_ns();
    if (!tracker->board)
        return;
    if (pm_peek(&tracker->active)) /* waiting for turns included; several streams at once count once */
        span_ns = now - tracker->active_at_ns;
    tracker->active_at_ns = now;
    pm_poke(&tracker->active, under_way);
    pm_board_active(tracker->board, tracker->seat, span_ns, under_way ? now : 0);
}
