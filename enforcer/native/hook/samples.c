#include "samples.h"

#include "charges.h"
#include "clock.h"

#define ROUND_NS 5000000u /* between two rounds of timing everything anew, at first and at most */
#define ROUND_MOST_NS 300000000u
#define STEADY_SAMPLES 6
#define STEADY 0.05
#define LONG_TURNS 3 /* a span of so many turns of everybody is divided by their parts */
#define STRIKES 12u  /* launches in a row that met a neighbour, after which it is the launch that has become longer */

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
uint64_t pm_samples_take_blurred(struct pm_tracker *tracker, const struct pm_segment *segment,
                                 const struct pm_beside *beside, uint64_t took) {
    struct pm_estimate *entry = segment->entry;
    uint64_t known = entry->ns ? entry->ns : PM_UNKNOWN_NS, cost = known < took ? known : took;
    uint64_t asleep = segment->host_ns + segment->host_blur_ns - segment->host_gap_ns;
    uint64_t least = segment->neighbours == 0 && took > asleep ? took - asleep : 0;
    if (entry->ns == 0 && segment->neighbours && took > asleep + PM_LONG_NS) /* nothing better is known */
        least = (uint64_t)((double)(took - asleep) * beside->own_part);
    if (least > took - took / 20)
        return pm_samples_take_lone(tracker, entry, least);
    if (cost < least)
        cost = least;
    pm_add(&tracker->counters->dropped_samples, 1);
    pm_poke(&entry->samples, entry->samples + 1);
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
    pm_poke(&entry->samples, entry->samples + 1);
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
        if (entry == tracker->suspect)
            tracker->suspect_ns = 0;
        uint64_t more = took > 2 * entry->ns ? suspects * (took - entry->ns) : 0;
        if (agrees || entry->unsteady > PM_UNSTEADY) { /* lengths that vary all the time have a mean */
            set_estimate(entry, (double)entry->ns + ((double)took - (double)entry->ns) / weight);
        } else { /* a new length; timed until two agree */
            set_estimate(entry, (double)took);
            pm_poke(&entry->begun, PM_FIRST_SAMPLES - 2);
            tracker->round_every_ns = ROUND_NS;
        }
        took += more;
    }
    entry->lone++;
    entry->guessed = 0;
    return took;
}

/*
 * Launches longer than a turn beside one neighbour that has work all the time: their spans hold one number of its turns
 * or the next, so that they differ by a turn or not at all, and their mean tells how long they are. So little is known
 * after one or two measurements alone that this decides: the neighbour may have been setting itself up meanwhile, of
 * which nobody tells. Returns what the launches were charged too much.
 */
static double met_turns(struct pm_tracker *tracker, const struct pm_segment *segment, const struct pm_beside *beside,
                        uint64_t took) {
    struct pm_estimate *entry = segment->entry;
    double known = (double)entry->ns, mean, step;
    if (!segment->full || segment->neighbours != 1 || !beside->in_full || took < 2 * (uint64_t)tracker->slice_ns) {
        entry->met = 0;
        return 0;
    }
    entry->met_ns[entry->met++ % PM_MET] = (float)took;
    if (entry->met < PM_MET)
        return 0;
    float least = entry->met_ns[0], most = entry->met_ns[0], sum = 0;
    for (uint32_t i = 0; i < PM_MET; i++) {
        least = entry->met_ns[i] < least ? entry->met_ns[i] : least;
        most = entry->met_ns[i] > most ? entry->met_ns[i] : most;
        sum += entry->met_ns[i];
    }
    mean = sum / PM_MET;
    step = most - least;
    uint32_t shorter = 0, longer = 0;
    for (uint32_t i = 0; i < PM_MET; i++) {
        shorter += entry->met_ns[i] <= least + STEADY * tracker->turn_ns;
        longer += entry->met_ns[i] >= most - STEADY * tracker->turn_ns;
    }
    bool alike = shorter == PM_MET, two = shorter + longer == PM_MET && shorter > 1 && longer > 1;
    if (!alike && !two) /* lengths differ, or turns do */
        return 0;
    if (step > 1.25 * tracker->turn_ns)
        return 0;
    if (two && step > 0.8 * tracker->turn_ns)
        pm_neighbours_learn_turn(tracker, step, 1);
    if (entry->lone == 0 || known < tracker->slice_ns)
        return 0;
    double likely = mean * pm_neighbours_beside(tracker, 1, (uint64_t)sum).own_part, off = known / likely - 1;
    double doubtful = entry->lone < PM_SURE_SAMPLES ? 0.07 : 0.1;
    if (off < doubtful && off > -doubtful)
        return 0;
    set_estimate(entry, likely);
    entry->lone = 0;
    entry->met = 0;
    uint32_t guessed = entry->guessed;
    entry->guessed = 0;
    return guessed * (known - likely);
}

/* Of the span of a launch that nothing is known about, what was its own. */
static double own_of(const struct pm_tracker *tracker, const struct pm_segment *segment, const struct pm_beside *beside,
                     double span) {
    double slice = tracker->slice_ns, part = beside->own_part;
    double turn = slice * (1 - part) / part; /* of all of them, between two of its own */
    if (segment->fresh) {                    /* the wait for its turn is time in which others had theirs as well */
        double whole = (double)(pm_now_ns() - segment->begun_ns);
        whole = whole < span ? span : whole > span + slice + turn ? span + turn / 2 : whole;
        return whole * part < span ? whole * part : span;
    }
    if (span > LONG_TURNS * (slice + turn) || !beside->in_full)
        return span * part;
    double turns = (double)(uint64_t)(span / (slice + turn) + 0.5), mine = span - turns * turn;
    return mine < span * slice / (slice + 2 * turn) ? span * part : mine;
}

/*
 * Charge of a launch measured while neighbours were busy. What is known of its kind tells how many of their turns its
 * span holds; a first one is charged its part.
 */
uint64_t pm_samples_take_shared(struct pm_tracker *tracker, const struct pm_segment *segment,
                                const struct pm_beside *beside, uint64_t took) {
    struct pm_estimate *entry = segment->entry;
    double span = (double)took, known = (double)entry->ns;
    double turn = tracker->turn_ns * segment->neighbours, mine;
    double turns = (double)(uint64_t)(span / (tracker->slice_ns + turn) + 0.5);
    /* Not short against a turn, so that many meet one, nor so long that all do. */
    bool comparable =
        entry->lone && entry->unsteady <= PM_UNSTEADY && known > tracker->slice_ns / 4 && known < tracker->slice_ns;
    bool short_and_known = comparable && entry->lone >= STEADY_SAMPLES;
    if (comparable && !short_and_known && span < 0.8 * tracker->turn_ns + known) { /* the shortest met nobody */
        pm_poke(&entry->samples, entry->samples + 1);
        entry->lone++;
        pm_add(&tracker->counters->timed_samples, 1);
        if (span < known)
            set_estimate(entry, span);
        return entry->ns;
    }
    if (span < 0.8 * tracker->turn_ns + (short_and_known ? known : 0)) {
        /* No room for a whole turn of anybody's, so as good as alone; but a neighbour with little to do ends its turn
         * early. */
        double likely = short_and_known ? 1.08 * known + 2000 : (entry->unsteady > PM_UNSTEADY ? 3 : 1.3) * known;
        pm_poke(&entry->suspects, 0); /* the neighbours' turns explain long waits */
        if (entry->lone && span >= likely && ++entry->strikes > (short_and_known ? STRIKES : 3))
            entry->lone = 0; /* that often, it is the launch itself that has become longer */
        if (!entry->lone || span < likely) {
            entry->strikes = 0;
            return pm_samples_take_lone(tracker, entry, took);
        }
        pm_poke(&entry->samples, entry->samples + 1);
        if (!short_and_known)
            entry->unsteady = entry->unsteady < 18 ? entry->unsteady + 2 : 20;
        pm_add(&tracker->counters->dropped_samples, 1);
        return entry->ns;
    }
    if (entry->lone)
        entry->guessed++;
    double amends = met_turns(tracker, segment, beside, took);
    known = (double)entry->ns;
    if (amends > 0)
        tracker->credit_ns += (uint64_t)amends;
    else
        pm_charge(tracker, (uint64_t)-amends);
    pm_poke(&entry->samples, entry->samples + 1);
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
        bool all = beside->present > 0.9 * segment->neighbours;
        if (turns > 0 && all && entry->lone > 4 && entry->unsteady <= PM_UNSTEADY && known < 2 * tracker->slice_ns &&
            span > known)
            pm_neighbours_learn_turn(tracker, span - known, turns);
        if (entry->lone) {
            bool likely = mine > known / 3 && mine < 3 * known, close = mine > 0.8 * known && mine < 1.25 * known;
            if (short_and_known && turns > 0 && (close || ++entry->strikes < STRIKES))
                return entry->ns; /* turns of any length explain it */
            if (turns > 0 && (!likely || (comparable && !close)))
                return entry->ns; /* met turns that ended early, or of another length than thought: says nothing */
            /* launches of one kind can differ in length; leaving out those that met a neighbour would leave out the
             * long ones */
            if (likely && (turns == 0 || tracker->turn_known))
                set_estimate(entry, known + (mine - known) / 16);
            if (likely && entry->unsteady > PM_UNSTEADY && tracker->turn_known)
                return (uint64_t)mine;
            if (close)
                return turns == 0 ? took : (uint64_t)known;
        }
    } else {
        mine = own_of(tracker, segment, beside, span);
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
