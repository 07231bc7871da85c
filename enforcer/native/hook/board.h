/* Who else keeps the device busy: a page per device that the hooks of all allocations share. Advice, never a limit. */
#ifndef PM_BOARD_H
#define PM_BOARD_H

#include "pages.h"

#define PM_NO_SEAT UINT32_MAX

/* Maps the board at `path`, making it when the folder allows; NULL: no board. */
struct pm_board *pm_board_map(const char *path, const char *uuid);
/* A seat for `owner` (never 0): a free one, or one whose owner has not been busy for a minute. */
uint32_t pm_board_sit(struct pm_board *board, uint64_t owner);
void pm_board_leave(struct pm_board *board, uint32_t seat);
/* A call that takes or gives back memory of the device begins, or ends. */
void pm_board_change(struct pm_board *board);
/* `owner` sits there, and nobody else. */
bool pm_board_alone(const struct pm_board *board, uint64_t owner);
/* The seat is busy until then. */
void pm_board_busy(struct pm_board *board, uint32_t seat, uint64_t until_ns);
/* Adds to the time for which the seat had work; `since_ns`: more is under way since then, 0: none is. */
void pm_board_active(struct pm_board *board, uint32_t seat, uint64_t ns, uint64_t since_ns);
/* Adds to the device time that the seat took. */
void pm_board_taken(struct pm_board *board, uint32_t seat, uint64_t ns);
/* What the other seats say, summed up; without those that make way. */
struct pm_others {
    uint64_t active_ns; /* for so long they had work, up to now */
    uint64_t told_ns;   /* the same without work that is still under way */
    uint64_t taken_ns;  /* the device time they took of that */
};
void pm_board_others(const struct pm_board *board, uint32_t seat, uint64_t now_ns, struct pm_others *others);
/* What a limit looks at: the other allocations. */
struct pm_neighbours {
    uint64_t limits_ppm;   /* sum of the limits of those active of late; without those that have none */
    uint64_t soft_weights; /* sum of the weights of the soft ones among them */
    bool active;           /* somebody was active within a second */
    bool owner_busy;       /* one that is not soft has work now */
    bool starved;          /* one, or the own, gets less than its limit although it has work */
};
void pm_board_survey(const struct pm_board *board, uint32_t seat, uint64_t now_ns, struct pm_neighbours *found);
/* Parts per million of the card that tenants get together when all of them keep it busy. */
uint64_t pm_board_given_ppm(const struct pm_board *board);
/* What the seat's allocation may use. */
void pm_board_present(struct pm_board *board, uint32_t seat, uint64_t limit_ppm, bool soft, uint64_t weight);
void pm_board_starved(struct pm_board *board, uint32_t seat, uint64_t until_ns);
/* Other seats that were busy at some time after `since_ns`; without those that make way. */
uint32_t pm_board_neighbours(const struct pm_board *board, uint32_t seat, uint64_t since_ns);

#endif
