/*
 * What was charged lies in bins of several sizes, each size for its own stretch of the past: 41 ms in bins of 20 us,
 * up to minutes in bins of 82 ms. A program that fills many streams has spans of seconds, all of them over the same
 * time, and they are charged in the order in which they are looked at. So a span is held against the finest bins that
 * still remember its beginning, and taken from all sizes.
 */
#include "union.h"

#include "marks.h"
#include "neighbours.h"

#define FINEST_NS 20000
#define COARSER 16

static int64_t size_ns(int size) {
    int64_t ns = FINEST_NS;
    while (size--)
        ns *= COARSER;
    return ns;
}

/* The time from `start` to `end` within bin `n` that is free. */
static int64_t free_ns(const struct pm_bin *bin, int64_t n, int64_t bin_ns, int64_t start, int64_t end) {
    if (bin->number > n) /* so old that the bin serves another time */
        return 0;
    int64_t from = n * bin_ns > start ? n * bin_ns : start, to = (n + 1) * bin_ns < end ? (n + 1) * bin_ns : end;
    int64_t left = bin_ns - (bin->number == n ? (int64_t)bin->charged_ns : 0);
    return to - from < left ? to - from : left;
}

static double room_of(const struct pm_tracker *tracker, int size, int64_t first, int64_t last, int64_t start,
                      int64_t end) {
    double room = 0;
    for (int64_t n = first; n <= last; n++) {
        int64_t here = free_ns(&tracker->bins[size][n % PM_BINS], n, size_ns(size), start, end);
        room += here > 0 ? (double)here : 0;
    }
    return room;
}

static void take(struct pm_tracker *tracker, int size, int64_t start, int64_t end, double cost) {
    int64_t bin_ns = size_ns(size), first = start / bin_ns, last = (end - 1) / bin_ns;
    if (last > tracker->newest_bin[size])
        tracker->newest_bin[size] = last;
    double within = 1;
    if (first <= tracker->newest_bin[size] - PM_BINS) { /* only its end is remembered, and that part of the cost */
        first = tracker->newest_bin[size] - PM_BINS + 1;
        within = (double)(end - first * bin_ns) / (double)(end - start);
    }
    double room = first <= last ? room_of(tracker, size, first, last, start, end) : 0;
    double part = room > 0 && cost * within < room ? cost * within / room : 1;
    for (int64_t n = first; n <= last; n++) {
        struct pm_bin *bin = &tracker->bins[size][n % PM_BINS];
        int64_t here = free_ns(bin, n, bin_ns, start, end);
        if (here <= 0)
            continue;
        if (bin->number < n)
            *bin = (struct pm_bin){n, 0};
        bin->charged_ns += (uint32_t)((double)here * part);
    }
}

uint64_t pm_union_take(struct pm_tracker *tracker, const struct pm_segment *segment, uint64_t cost) {
    int64_t start, end;
    if (tracker->lane_count < 2 || !pm_mark_position(tracker, segment->start, &start) ||
        !pm_mark_position(tracker, segment->end, &end) || end <= start)
        return cost;
    start += INT64_MAX / 4; /* marks may lie before the reference */
    end += INT64_MAX / 4;
    double room = 0;
    int size = 0;
    for (;; size++) {
        int64_t bin_ns = size_ns(size), first = start / bin_ns, last = (end - 1) / bin_ns;
        int64_t newest = last > tracker->newest_bin[size] ? last : tracker->newest_bin[size];
        bool remembered = first > newest - PM_BINS;
        if (!remembered && size < PM_BIN_SIZES - 1)
            continue;
        if (!remembered) { /* longer ago than anything is kept: that part is free */
            int64_t oldest = newest - PM_BINS + 1;
            room = (double)((oldest < last ? oldest : last) - first) * (double)bin_ns;
            first = oldest;
        }
        room += room_of(tracker, size, first, last, start, end);
        break;
    }
    /* Neighbours had their turns in the same time, so that a cost takes up more of it than it is long. */
    double part = pm_neighbours_beside(tracker, segment->neighbours, (uint64_t)(end - start)).own_part;
    double wall = (double)cost / part;
    for (size = 0; size < PM_BIN_SIZES; size++)
        take(tracker, size, start, end, wall < room ? wall : room);
    return wall < room ? cost : (uint64_t)(room * part);
}
