/*
 * Device time of one context, from marks (timing events) in its streams.
 *
 * A segment is what a stream did between two marks. A timed launch is a segment of one launch; otherwise a segment ends
 * after 256 launches or 10 ms of estimates. Launches are pending at their estimate until the segment's end mark has
 * passed; then the segment is charged: one launch by its span, many by the sum of estimates, kept within what the span
 * allows.
 */
#ifndef PM_TRACKER_H
#define PM_TRACKER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "board.h"
#include "estimates.h"
#include "limiter.h"
#include "pages.h"

/* The driver's event calls. All return 0 or an error; query returns 0 (passed), PM_NOT_READY or an error. */
struct pm_driver {
    int (*event_create)(void **event);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *ms, void *start, void *end);
    int (*context_enter)(void *context); /* for a thread of our own; NULL: needs none */
    void (*context_leave)(void);
    const uint32_t *captures; /* stream captures under way in this process */
};
#define PM_NOT_READY 600
#define PM_NO_CONTEXT 201 /* the thread has none, and the launch that it tries will be refused */

#define PM_LANES 64
#define PM_MARKS 512
#define PM_SEGMENTS 384
#define PM_LAUNCH_SEGMENTS (PM_SEGMENTS - PM_LANES) /* the rest is for ending what is open in each stream */
#define PM_BINS 2048
#define PM_BIN_SIZES 4
#define PM_SEEN 128
#define PM_NO_MARK 0xffffu

struct pm_mark {
    void *event;
    uint32_t uses;
    bool passed;
};

struct pm_segment {
    uint16_t start, end;
    uint16_t lane; /* PM_LANES: of a stream that has none */
    bool full;     /* the start mark had not passed when the end mark was recorded: no idle gap inside */
    bool fresh;    /* the program had waited for its work before: it began with a turn of its own */
    bool unsteady; /* launches of its last kind differ in length */
    int passed;    /* as pm_mark_passed says of its end */
    bool tainted;  /* holds other work than launches, or may have waited for other streams */
    uint32_t launches;
    uint32_t neighbours;
    uint64_t estimate_ns;
    uint64_t host_gap_ns;  /* between recording the start mark and handing over the launch */
    uint64_t host_blur_ns; /* how far off that can be, if the thread was interrupted */
    uint64_t host_ns;      /* between recording the two marks */
    uint64_t begun_ns;
    uint64_t running_ns;             /* when its start mark was first seen passed */
    uint64_t progress_ns;            /* charged while it was still running */
    struct pm_estimate *entry;       /* of the only launch */
    const struct pm_estimate *alike; /* of the launches, where they are of one kind or nothing was known of any */
};

struct pm_lane {        /* what every launch touches first, in one cache line */
    uint64_t key;       /* 0: free */
    uint64_t open_work; /* launches since the mark, and their estimates (pm_work_…) */
    uint64_t begun_ns;
    struct pm_estimate *last; /* of the newest launch */
    void *stream;
    uint16_t open;
    uint16_t tainted;
    uint32_t neighbours;
    uint32_t seen_launches; /* by the last look-in */
    uint32_t full_marks;
    uint32_t mixed;      /* launches of several kinds since the mark */
    uint64_t marking_ns; /* before and after the start mark was recorded */
    uint64_t marked_ns;
    uint64_t launched_ns;
    struct pm_estimate *only;
    uint32_t fresh;
    uint32_t waited_launches; /* of the open segment, those that the program has waited for */
    uint64_t waited_estimate_ns;
} __attribute__((aligned(64)));

/* One word for both, so that a launch adds once: launches above bit 44, nanoseconds (up to four hours) below. */
#define PM_WORK_LAUNCH (1ull << 44)
static inline uint32_t pm_work_launches(uint64_t work) {
    return (uint32_t)(work >> 44);
}
static inline uint64_t pm_work_ns(uint64_t work) {
    return work & (PM_WORK_LAUNCH - 1);
}

/* What the board said at a time. */
struct pm_seen {
    uint64_t at_ns;
    struct pm_others others;
};

/* Device time already charged in a stretch of time (union.c). */
struct pm_bin {
    int64_t number;
    uint32_t charged_ns;
};

struct pm_tracker {               /* what every launch touches first, in one cache line */
    struct pm_counters *counters; /* of the own slot and this device */
    struct pm_limiter *limiter;   /* NULL: no account is kept */
    const struct pm_driver *driver;
    struct pm_board *board;
    uint32_t seat;
    uint32_t quiet; /* the program has waited for its work, and nothing was launched since */
    uint32_t round; /* of timing everything anew */
    uint32_t lane_count;
    struct pm_lane lanes[PM_LANES];
    int64_t owed_ns;   /* to the limiter's account: charged beyond the estimates that were settled */
    bool broken;       /* events do not work here: estimates only */
    bool unmarked;     /* the driver refused a mark; a fault of ours only where it takes the launch */
    bool closed;       /* the context is about to go, or has gone */
    uint32_t *settler; /* futex word: 1 while the settling thread sleeps because nothing is pending */
    uint32_t faults;
    uint64_t credit_ns;          /* charged too much earlier; taken from the next charges */
    struct pm_estimate *suspect; /* what the program last waited for much longer than was charged, and that time */
    uint64_t suspect_ns;
    uint32_t waiters;              /* threads of the program that wait now */
    uint64_t round_at_ns;          /* when it began */
    uint64_t round_every_ns;       /* not before so long */
    double mark_cost_ns;           /* between two marks with nothing between them, in a full queue */
    uint32_t mark_costs;           /* how often that was measured */
    double slice_ns;               /* own turn while neighbours are busy, as learned */
    double turn_ns;                /* what one neighbour's turn adds to a span, switching included */
    bool turn_learned, turn_known; /* from own launches; from anybody's */
    struct pm_seen seen[PM_SEEN];  /* what the other seats said, and when; the newest at seen_count - 1 */
    uint64_t seen_count;
    double own_ns, whole_ns; /* of spans of late beside one neighbour, what they cost, and all of them */
    double told, taken;      /* time of late for which they had work, and what they took of it, switching included */
    uint64_t faded_at_ns;
    struct pm_mark marks[PM_MARKS];
    uint16_t mark_hint;
    uint16_t reference;
    int64_t reference_ns;
    struct pm_segment segments[PM_SEGMENTS];
    uint32_t segment_count;
    uint64_t active_at_ns;
    uint32_t active; /* the board knows of work under way */
    struct pm_bin bins[PM_BIN_SIZES][PM_BINS];
    int64_t newest_bin[PM_BIN_SIZES];
    pthread_mutex_t lock; /* last, so that all before it can be set anew under it */
};

/* When the program began to wait, and what was charged until then. */
struct pm_wait {
    uint64_t since_ns, busy_ns;
};

/* A launch on its way. */
struct pm_launch {
    struct pm_tracker *tracker;
    struct pm_lane *lane;
    struct pm_estimate *entry;
    uint64_t estimate_ns;
    uint64_t marking_ns, begun_ns; /* before and after `mark` was recorded */
    void *stream;
    uint16_t mark; /* of a launch into a stream that has no lane */
    bool timed;
    bool unmarked; /* the driver refused its mark */
    bool fresh;    /* the first one after the program waited */
};

void pm_tracker_init(struct pm_tracker *tracker, const struct pm_driver *driver, struct pm_counters *counters);
/* Before the driver's launch call. `lane_key`: of the stream, never 0. */
void pm_launch_begin(struct pm_launch *launch, struct pm_tracker *tracker, struct pm_estimate *entry, void *stream,
                     uint64_t lane_key);
/* After it; `launched`: the driver took it. */
void pm_launch_end(struct pm_launch *launch, bool launched);
/* Other work than launches went into the stream. */
void pm_tracker_taint(struct pm_tracker *tracker, uint64_t lane_key);
/* Before the program waits for the stream; ends an open segment worth measuring. */
void pm_tracker_close(struct pm_tracker *tracker, void *stream, uint64_t lane_key);
/* The same before it waits for all there is. `other_threads`: as below. */
void pm_tracker_close_all(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads);
/*
 * The program is held from launching: ends what is open in all streams, however short, so that it is measured
 * meanwhile. A stream handle that means another stream in each thread is `other_threads`; of these only the one with
 * this key is the caller's.
 */
void pm_tracker_held(struct pm_tracker *tracker, uint64_t lane_key, uint64_t other_threads);
/* It goes on: what comes next begins with a mark of its own. */
void pm_tracker_rested(struct pm_tracker *tracker);
/* Charges what has passed. */
void pm_tracker_poll(struct pm_tracker *tracker);
/*
 * For a thread that looks in now and then: charges what has passed, what is still running by its progress, and what was
 * left open for long at its estimates. False: nothing is pending.
 */
bool pm_tracker_look_in(struct pm_tracker *tracker, void *context);
/* The program waits (until further notice at most a second); the result is for `waited`. */
struct pm_wait pm_tracker_waits(struct pm_tracker *tracker);
/* It has waited, for the stream or (0) for all; charges what has passed. */
void pm_tracker_waited(struct pm_tracker *tracker, const struct pm_wait *wait, uint64_t lane_key);
/* Forgets the stream: it is about to be destroyed. */
void pm_tracker_drop_lane(struct pm_tracker *tracker, uint64_t lane_key);
/* Charges what has passed, the rest as estimated, and forgets all events; they are destroyed when `destroy`. */
void pm_tracker_finish(struct pm_tracker *tracker, bool poll, bool destroy);

#endif
