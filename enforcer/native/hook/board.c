#define _GNU_SOURCE
#include "board.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"

#define STALE_NS 60000000000u

static struct pm_board *map(const char *path) {
    int fd = pm_open_page(path, O_RDWR);
    if (fd < 0)
        return NULL;
    struct pm_board head;
    struct stat st;
    void *at = MAP_FAILED;
    if (fstat(fd, &st) == 0 && (uint64_t)st.st_size == sizeof head &&
        pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head && head.magic == PM_BOARD_MAGIC &&
        head.abi_major == PM_ABI_MAJOR && head.total_size == sizeof head)
        at = mmap(NULL, sizeof head, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

struct pm_board *pm_board_map(const char *path, const char *uuid) {
    struct pm_board *board = map(path);
    if (board || access(path, F_OK) == 0)
        return board;
    char temporary[512];
    if (snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid()) >= (int)sizeof temporary)
        return NULL;
    int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return NULL;
    struct pm_board *image = calloc(1, sizeof *image);
    if (image) {
        image->magic = PM_BOARD_MAGIC;
        image->abi_major = PM_ABI_MAJOR;
        image->abi_minor = PM_ABI_MINOR;
        image->total_size = sizeof *image;
        image->seat_count = PM_BOARD_SEATS;
        snprintf(image->uuid, sizeof image->uuid, "%s", uuid);
        bool whole = write(fd, image, sizeof *image) == (ssize_t)sizeof *image && fchmod(fd, 0666) == 0;
        if (whole && link(temporary, path) != 0)
            whole = false; /* somebody else was first: theirs is used */
        free(image);
    }
    close(fd);
    unlink(temporary);
    return map(path);
}

uint32_t pm_board_sit(struct pm_board *board, uint64_t owner) {
    uint64_t now = pm_now_ns();
    for (uint32_t i = 0; board && i < PM_BOARD_SEATS; i++) {
        struct pm_board_seat *seat = &board->seats[i];
        uint64_t found = pm_load(&seat->owner), until = pm_load(&seat->busy_until_ns);
        /* a time far ahead is left from before a restart of the machine */
        bool stale = until + STALE_NS < now || until > now + STALE_NS;
        if (found != 0 && !stale)
            continue;
        if (__atomic_compare_exchange_n(&seat->owner, &found, owner, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            pm_store(&seat->busy_until_ns, now);
            return i;
        }
    }
    return PM_NO_SEAT;
}

void pm_board_leave(struct pm_board *board, uint32_t seat) {
    if (board && seat < PM_BOARD_SEATS) {
        pm_store(&board->seats[seat].busy_until_ns, pm_now_ns());
        pm_store(&board->seats[seat].owner, 0);
    }
}

void pm_board_change(struct pm_board *board) {
    if (board)
        pm_add(&board->changes, 1);
}

bool pm_board_alone(const struct pm_board *board, uint64_t owner) {
    bool there = false;
    for (uint32_t i = 0; board && i < PM_BOARD_SEATS; i++) {
        uint64_t found = pm_load(&board->seats[i].owner);
        if (found && found != owner)
            return false;
        there |= found == owner;
    }
    return there;
}

void pm_board_busy(struct pm_board *board, uint32_t seat, uint64_t until_ns) {
    if (board && seat < PM_BOARD_SEATS)
        pm_store(&board->seats[seat].busy_until_ns, until_ns);
}

void pm_board_active(struct pm_board *board, uint32_t seat, uint64_t ns, uint64_t since_ns) {
    if (board && seat < PM_BOARD_SEATS) {
        pm_add(&board->seats[seat].active_ns, ns);
        pm_poke(&board->seats[seat].active_since_ns, since_ns);
    }
}

void pm_board_taken(struct pm_board *board, uint32_t seat, uint64_t ns) {
    if (board && seat < PM_BOARD_SEATS)
        pm_add(&board->seats[seat].taken_ns, ns);
}

/* A soft one makes way for those that are not, so it is no neighbour of theirs. */
static bool counts(const struct pm_board *board, uint32_t seat, uint32_t other) {
    return other != seat &&
           (seat >= PM_BOARD_SEATS || pm_peek(&board->seats[seat].soft) || !pm_peek(&board->seats[other].soft));
}

void pm_board_others(const struct pm_board *board, uint32_t seat, uint64_t now_ns, struct pm_others *others) {
    uint32_t empty = 0;
    *others = (struct pm_others){0};
    for (uint32_t i = 0; board && i < PM_BOARD_SEATS && empty < 32; i++) {
        const struct pm_board_seat *other = &board->seats[i];
        uint64_t until = pm_peek(&other->busy_until_ns), since = pm_peek(&other->active_since_ns);
        empty = until ? 0 : empty + 1;
        if (!counts(board, seat, i))
            continue;
        others->taken_ns += pm_peek(&other->taken_ns);
        others->told_ns += pm_peek(&other->active_ns);
        until = until < now_ns ? until : now_ns; /* whoever was killed in the middle has no work for ever */
        if (since && since < until && since + STALE_NS > now_ns)
            others->active_ns += until - since;
    }
    others->active_ns += others->told_ns;
}

uint32_t pm_board_neighbours(const struct pm_board *board, uint32_t seat, uint64_t since_ns) {
    uint32_t count = 0, empty = 0;
    for (uint32_t i = 0; board && i < PM_BOARD_SEATS && empty < 32; i++) { /* seats are taken from the front */
        uint64_t until = pm_peek(&board->seats[i].busy_until_ns);
        empty = until ? 0 : empty + 1;
        count += counts(board, seat, i) && until > since_ns && until < since_ns + STALE_NS;
    }
    return count;
}

void pm_board_present(struct pm_board *board, uint32_t seat, uint64_t limit_ppm, bool soft, uint64_t weight) {
    if (board && seat < PM_BOARD_SEATS) {
        pm_poke(&board->seats[seat].limit_ppm, limit_ppm < 1000000 ? limit_ppm : 0);
        pm_poke(&board->seats[seat].soft, soft);
        pm_poke(&board->seats[seat].weight, weight > UINT32_MAX ? UINT32_MAX : (uint32_t)weight);
    }
}

void pm_board_starved(struct pm_board *board, uint32_t seat, uint64_t until_ns) {
    if (board && seat < PM_BOARD_SEATS)
        pm_poke(&board->seats[seat].starved_until_ns, until_ns);
}

#define LATELY_NS 100000000u
/*
 * Seats are anybody's to write, so no more is believed of one than an enforcer can have granted it; together they may
 * have been granted many times the card.
 */
#define MOST_PPM 1000000u
#define MOST_WEIGHT 10000u

static uint64_t at_most(uint64_t value, uint64_t most) {
    return value < most ? value : most;
}

#define ALLOCATIONS 64u

void pm_board_survey(const struct pm_board *board, uint32_t seat, uint64_t now_ns, struct pm_neighbours *found) {
    *found = (struct pm_neighbours){0};
    if (!board || seat >= PM_BOARD_SEATS)
        return;
    uint32_t seen[ALLOCATIONS], count = 1, empty = 0;
    seen[0] = (uint32_t)pm_peek(
        &board->seats[seat].owner); /* its low half is the allocation, which may have many processes */
    for (uint32_t i = 0; i < PM_BOARD_SEATS && empty < 32; i++) {
        const struct pm_board_seat *other = &board->seats[i];
        uint64_t until = pm_peek(&other->busy_until_ns), owner = pm_peek(&other->owner);
        empty = until ? 0 : empty + 1;
        if (owner == 0 || until > now_ns + STALE_NS || until + 1000000000u < now_ns)
            continue;
        found->starved |=
            pm_peek(&other->starved_until_ns) > now_ns && pm_peek(&other->starved_until_ns) < now_ns + STALE_NS;
        if ((uint32_t)owner == seen[0])
            continue;
        bool soft = pm_peek(&other->soft) != 0;
        found->active = true;
        found->owner_busy |= !soft && until > now_ns;
        if (until + LATELY_NS < now_ns)
            continue;
        uint32_t known = 1;
        while (known < count && seen[known] != (uint32_t)owner)
            known++;
        if (known < count || count == ALLOCATIONS)
            continue;
        seen[count++] = (uint32_t)owner;
        found->limits_ppm += at_most(pm_peek(&other->limit_ppm), MOST_PPM);
        found->soft_weights += soft ? at_most(pm_peek(&other->weight), MOST_WEIGHT) : 0;
    }
}

uint64_t pm_board_given_ppm(const struct pm_board *board) {
    uint64_t slice = board ? pm_peek(&board->slice_ns) : 0, turn = board ? pm_peek(&board->turn_ns) : 0;
    if (slice < 100000 || slice > 100000000 || turn < slice || turn > 2 * slice)
        return 890000; /* nobody has learned it */
    /* A turn and the way to the next one; a little less: short launches leave gaps, and what is promised has to be
     * there. */
    uint64_t given = slice * 965000 / (slice + (turn - slice) / 2);
    return given < 870000 ? 870000 : given; /* cards differ less than what is learned of them */
}
