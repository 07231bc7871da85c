#include "samples.h"

#include "board.h"
#include "clock.h"

#define PRESENCE_NS 50000000u
#define ROUND_NS 5000000u /* between two rounds of timing everything anew, at first and at most */
#define ROUND_MOST_NS 300000000u
#define STEADY_SAMPLES 6
#define STRIKES 12u /* launches in a row that met a neighbour, after which it is the launch that has become longer */

/* Something took longer than was known. How often that is followed up depends on whether it led to anything. */
void pm_samples_time_anew(struct pm_tracker *tracker) {
    uint64_t now = pm_now_ns();
    if (now - tracker->round_at_ns < tracker->round_every_ns)
        return;
    tracker->round_at_ns = now;
    tracker->round_every_ns = tracker->round_every_ns ? tracker->round_every_ns * 2 : ROUND_NS;
    if (tracker->round_every_ns > ROUND_MOST_NS)
        tracker->round_every_ns = ROUND_MOST_NS;
    pm_poke(&tracker->round, tracker->round + 1);
}

static void set_estimate(struct pm_estimate *entry, double ns) {
    pm_poke(&entry->ns, ns < 500 ? 500 : (uint64_t)ns);
}

/* How many neighbours had work of late: one that is busy half of the time takes half of its turns. */
void pm_samples_watch(struct pm_tracker *tracker) {
    uint64_t now = pm_now_ns();
    if (!tracker->board || now - tracker->presence_at_ns < PRESENCE_NS)
        return;
    uint64_t sum = pm_board_others_active(tracker->board, tracker->seat);
    if (tracker->presence_at_ns && sum >= tracker->presence_sum) {
        double seen = (double)(sum - tracker->presence_sum) / (double)(now - tracker->presence_at_ns);
        seen = seen > 8 ? 8 : seen; /* a long segment is published at its end, for all of its time */
        tracker->presence = tracker->presence < 0 ? seen : (tracker->presence + seen) / 2;
    } else {
        tracker->presence = -1; /* not known yet */
    }
    tracker->presence_at_ns = now;
    tracker->presence_sum = sum;
    uint64_t slice = pm_peek(&tracker->board->slice_ns), turn = pm_peek(&tracker->board->turn_ns);
    if (!tracker->turn_learned && slice >= 100000 && slice < 100000000 && turn >= slice / 2 && turn < 4 * slice) {
        tracker->slice_ns = (double)slice; /* somebody with short kernels could measure it */
        tracker->turn_ns = (double)turn;
    }
}

double pm_samples_presence(const struct pm_tracker *tracker, uint32_t neighbours) {
    return tracker->presence < 0 || tracker->presence > neighbours ? neighbours : tracker->presence;
}

/* A launch with a known length whose span holds `turns` turns of one neighbour tells how long such a turn is. */
static void learn_turn(struct pm_tracker *tracker, double beyond, double turns) {
    double turn = beyond / turns;
    if (turn < 100000 || turn > 100000000 ||
        (tracker->turn_learned && (turn < tracker->turn_ns / 2 || turn > tracker->turn_ns * 2)))
        return;
    tracker->turn_ns = tracker->turn_learned ? tracker->turn_ns + (turn - tracker->turn_ns) / 16 : turn;
    tracker->turn_learned = true;
    if (tracker->board) {
        pm_poke(&tracker->board->slice_ns, (uint64_t)tracker->slice_ns);
        pm_poke(&tracker->board->turn_ns, (uint64_t)tracker->turn_ns);
    }
}

/* A full queue of known length, of which this part of the span was its own, tells how long its own turns are. */
void pm_samples_slice(struct pm_tracker *tracker, double part) {
    if (!tracker->turn_learned || part < 0.1 || part > 0.9)
        return;
    double slice = tracker->turn_ns * part / (1 - part);
    tracker->slice_ns += (slice - tracker->slice_ns) / 16;
    if (tracker->board)
        pm_poke(&tracker->board->slice_ns, (uint64_t)tracker->slice_ns);
}

/*
 * An idle queue runs the start mark at once and the launch when it comes, so the time between handing over the two is
 * taken off. That fails when the thread was interrupted there, or when the launch had ended before the end mark came.
 */
bool pm_samples_blurred(const struct pm_segment *segment, uint64_t span, uint64_t took) {
    if (segment->full)
        return false;
    uint64_t allowed = took / 50 > 10000 ? took / 50 : 10000;
    return segment->host_blur_ns > allowed || segment->host_ns > span - span / 5;
}

/*
 * Charge of such a launch: no more than its span and, alone, no less than what the host cannot have slept through. The
 * next sample sets it right.
 */
uint64_t pm_samples_take_blurred(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t took) {
    struct pm_estimate *entry = segment->entry;
    uint64_t known = entry->ns ? entry->ns : PM_UNKNOWN_NS, cost = known < took ? known : took;
    uint64_t asleep = segment->host_ns + segment->host_blur_ns - segment->host_gap_ns;
    uint64_t least = segment->neighbours == 0 && took > asleep ? took - asleep : 0;
    if (least > took - took / 20)
        return pm_samples_take_lone(tracker, entry, least);
    if (cost < least)
        cost = least;
    pm_add(&tracker->counters->dropped_samples, 1);
    entry->samples++;
    if (entry->ns > took)
        set_estimate(entry, (double)took);
    if (entry->lone == 0) {
        if (entry->ns == 0 &&
            (entry->samples > 8 || took < PM_UNKNOWN_NS)) /* launches this short are never measured better */
            set_estimate(entry, (double)took);
        entry->shared++;
        entry->shared_ns += cost;
        entry->shared_most_ns += took;
    }
    return cost;
}

/* Charge of a launch measured while it had the device to itself. */
uint64_t pm_samples_take_lone(struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t took) {
    pm_add(&tracker->counters->timed_samples, 1);
    entry->samples++;
    if (entry->lone == 0) {
        set_estimate(entry, (double)took);
        if (entry->shared) { /* what shared spans made us charge can now be set right */
            uint64_t right =
                entry->shared * took < entry->shared_most_ns ? entry->shared * took : entry->shared_most_ns;
            if (right < entry->shared_ns)
                tracker->credit_ns += entry->shared_ns - right;
            else
                took += right - entry->shared_ns;
            entry->shared = 0;
            entry->shared_ns = 0;
            entry->shared_most_ns = 0;
        }
    } else {
        bool agrees = took > entry->ns - entry->ns / 4 && took < entry->ns + entry->ns / 4 + 2000;
        entry->unsteady = agrees                 ? (entry->unsteady ? entry->unsteady - 1 : 0)
                          : entry->unsteady < 18 ? entry->unsteady + 2
                                                 : 20;
        double weight = entry->lone < 16 ? entry->lone + 1 : 16;
        uint32_t suspects = __atomic_exchange_n(&entry->suspects, 0, __ATOMIC_RELAXED);
        uint64_t more = took > 2 * entry->ns ? suspects * (took - entry->ns) : 0;
        if (agrees || entry->unsteady > 10) { /* lengths that vary all the time have a mean */
            set_estimate(entry, (double)entry->ns + ((double)took - (double)entry->ns) / weight);
        } else { /* a new length; timed until two agree */
            set_estimate(entry, (double)took);
            pm_poke(&entry->begun, PM_FIRST_SAMPLES - 2);
            tracker->round_every_ns = ROUND_NS;
        }
        took += more;
    }
    entry->lone++;
    return took;
}

/*
 * Charge of a launch measured while neighbours were busy: its span holds a whole number of their turns. With turns of
 * one length on both sides a span of s holds the nearest whole number to s / (own turn + their turns) of them, whatever
 * the launch's length.
 */
uint64_t pm_samples_take_shared(struct pm_tracker *tracker, struct pm_estimate *entry, uint64_t took,
                                const struct pm_segment *segment) {
    double span = (double)took, known = (double)entry->ns, near = pm_samples_presence(tracker, segment->neighbours);
    double turn = tracker->turn_ns * segment->neighbours, mine;
    double turns = (double)(uint64_t)(span / (tracker->slice_ns + turn) + 0.5);
    /* Not short against a turn, so that many meet one, nor so long that all do. */
    bool comparable =
        entry->lone && entry->unsteady <= 10 && known > tracker->slice_ns / 4 && known < tracker->slice_ns;
    bool short_and_known = comparable && entry->lone >= STEADY_SAMPLES;
    if (comparable && !short_and_known && span < 0.8 * tracker->turn_ns + known) { /* the shortest met nobody */
        entry->samples++;
        entry->lone++;
        pm_add(&tracker->counters->timed_samples, 1);
        if (span < known)
            set_estimate(entry, span);
        return entry->ns;
    }
    if (span < 0.8 * tracker->turn_ns + (short_and_known ? known : 0)) {
        /* No room for a whole turn of anybody's, so as good as alone; but a neighbour with little to do ends its turn
         * early. */
        double likely = short_and_known ? 1.08 * known + 2000 : (entry->unsteady > 10 ? 3 : 1.3) * known;
        pm_poke(&entry->suspects, 0); /* the neighbours' turns explain long waits */
        if (entry->lone && span >= likely && ++entry->strikes > (short_and_known ? STRIKES : 3))
            entry->lone = 0; /* that often, it is the launch itself that has become longer */
        if (!entry->lone || span < likely) {
            entry->strikes = 0;
            return pm_samples_take_lone(tracker, entry, took);
        }
        entry->samples++;
        if (!short_and_known)
            entry->unsteady = entry->unsteady < 18 ? entry->unsteady + 2 : 20;
        pm_add(&tracker->counters->dropped_samples, 1);
        return entry->ns;
    }
    entry->samples++;
    pm_add(turns > 0 ? &tracker->counters->dropped_samples : &tracker->counters->timed_samples, 1);
    if (entry->lone || (known > 0 && known < tracker->slice_ns)) {
        /* The number of single turns that leaves what is closest to the known length: not every neighbour takes all of
         * its turns. */
        double most = (turns + 1) * segment->neighbours, best = span;
        turns = 0;
        for (double n = 1; n <= most; n++) {
            double rest = span - n * tracker->turn_ns;
            if ((rest > known ? rest - known : known - rest) < (best > known ? best - known : known - best)) {
                best = rest;
                turns = n;
            }
        }
        mine = best;
        bool all = near > 0.9 * segment->neighbours;
        if (turns > 0 && all && entry->lone > 4 && known < 2 * tracker->slice_ns && span > known)
            learn_turn(tracker, span - known, turns);
        if (entry->lone) {
            bool likely = mine > known / 3 && mine < 3 * known, close = mine > 0.8 * known && mine < 1.25 * known;
            if (short_and_known && turns > 0 && (close || ++entry->strikes < STRIKES))
                return entry->ns; /* turns of any length explain it */
            if (!likely && turns > 0)
                return entry->ns; /* met turns that ended early: says nothing */
            /* launches of one kind can differ in length; leaving out those that met a neighbour would leave out the
             * long ones */
            if (likely && (turns == 0 || tracker->turn_learned))
                set_estimate(entry, known + (mine - known) / 16);
            if (close)
                return turns == 0 ? took : (uint64_t)known;
        }
    } else {
        turn = tracker->turn_ns * near;
        turns = (double)(uint64_t)(span / (tracker->slice_ns + turn) + 0.5);
        mine = span - turns * turn;
        if (mine < span * tracker->slice_ns / (tracker->slice_ns + 2 * turn))
            mine = span * tracker->slice_ns / (tracker->slice_ns + turn);
    }
    double weight = entry->samples < 16 ? entry->samples : 16;
    set_estimate(entry, known == 0 ? mine : known + (mine - known) / weight);
    if (!entry->lone) {
        entry->shared++;
        entry->shared_ns += (uint64_t)mine;
        entry->shared_most_ns += took;
    }
    return (uint64_t)mine;
}
