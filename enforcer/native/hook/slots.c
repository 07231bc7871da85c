/*
 * The protocol, so that a kill at any instruction neither loses nor doubles a count:
 *
 *   owner     byte lock of the slot, then FREE -> CLAIMED -> LIVE
 *   folder    fold lock; state DEAD; memory given back; its owner noted in `left`; the idle copy of `retired` := the
 * counting copy + the slot; one store to `fold` makes that copy count and names the slot; the slot is cleared; `fold`
 * names nobody; FREE
 *
 * Whoever takes the fold lock next first finishes what `fold` names. Readers skip the slot that `fold` names.
 */
#define _GNU_SOURCE
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

#define FOLD_COPY(fold) ((uint32_t)((fold) & 1))
#define FOLD_SLOT(fold) ((uint32_t)((fold) >> 1 & 0xffff)) /* slot + 1 */
#define FOLD_NEXT(fold, copy, slot_plus_one) ((((fold) >> 17) + 1) << 17 | (uint64_t)(slot_plus_one) << 1 | (copy))

static bool try_lock(int fd, uint64_t offset) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)offset, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

static void unlock(int fd, uint64_t offset) {
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = (off_t)offset, .l_len = 1};
    fcntl(fd, F_OFD_SETLK, &lock);
}

/* The holder needs microseconds; one that is stopped must not stop us. */
static bool take_fold_lock(int fd, int patience_ms) {
    for (int waited = 0;; waited++) {
        if (try_lock(fd, PM_LOCK_FOLD))
            return true;
        if (waited >= patience_ms)
            return false;
        struct timespec pause = {.tv_nsec = 1000000};
        nanosleep(&pause, NULL);
    }
}

/* Start time in clock ticks and state of a process; false when it cannot be read (gone, or hidden). */
static bool stat_of(const char *path, uint64_t *start, char *state, char comm[16]) {
    char text[1024];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    char *open_paren = strchr(text, '('), *close_paren = strrchr(text, ')'); /* a name may hold both */
    if (!open_paren || !close_paren || close_paren < open_paren)
        return false;
    if (comm) {
        size_t length = (size_t)(close_paren - open_paren - 1);
        length = length > 15 ? 15 : length;
        memset(comm, 0, 16);
        memcpy(comm, open_paren + 1, length);
    }
    char *field = close_paren + 2;
    *state = *field;
    for (int i = 3; i < 22 && field; i++)
        field = strchr(field, ' ') ? strchr(field, ' ') + 1 : NULL;
    if (!field)
        return false;
    *start = strtoull(field, NULL, 10);
    return true;
}

void pm_identity_read(struct pm_identity *identity) {
    memset(identity, 0, sizeof *identity);
    identity->pid = (uint32_t)getpid();
    identity->uid = (uint32_t)getuid();
    struct stat st;
    if (stat("/proc/self/ns/pid", &st) == 0)
        identity->pid_namespace = st.st_ino;
    char state;
    stat_of("/proc/self/stat", &identity->start_time_ticks, &state, identity->comm);
}

static bool is_locked(int fd, uint64_t offset) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)offset, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

/* Needs the lock *and* pid with start time: a child that inherited the descriptor keeps a dead owner's lock alive. */
static bool is_dead(const struct pm_view *view, int fd, uint32_t index, const struct pm_identity *self) {
    struct pm_slot *slot = pm_view_slot(view, index);
    if (!is_locked(fd, PM_LOCK_SLOTS + index))
        return true;
    if (pm_load(&slot->state) != PM_SLOT_LIVE || !self->pid_namespace || slot->pid_namespace != self->pid_namespace)
        return false; /* in another namespace its pid means nothing here */
    uint32_t pid = pm_peek(&slot->pid);
    if (kill((pid_t)pid, 0) != 0 && errno == ESRCH)
        return true;
    char path[32], state;
    uint64_t start;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    return stat_of(path, &start, &state, NULL) && start != pm_peek(&slot->start_time_ticks);
}

static void clear_slot(const struct pm_view *view, uint32_t index) {
    struct pm_slot *slot = pm_view_slot(view, index);
    for (uint32_t d = 0; d < view->device_capacity; d++) {
        uint64_t *words = (uint64_t *)pm_view_counters(view, index, d);
        for (size_t i = 0; i < sizeof(struct pm_counters) / 8; i++)
            pm_poke(&words[i], 0);
    }
    memset(slot->on_behalf_allocation, 0, sizeof slot->on_behalf_allocation);
    memset(slot->on_behalf_node, 0, sizeof slot->on_behalf_node);
    slot->on_behalf_bytes_in = slot->on_behalf_bytes_out = 0;
}

static void set_free(const struct pm_view *view, uint32_t index) {
    struct pm_slot *slot = pm_view_slot(view, index);
    pm_store(&slot->generation, slot->generation + 1);
    pm_store(&slot->state, PM_SLOT_FREE);
}

static void finish_fold(const struct pm_view *view) {
    uint64_t fold = pm_load(&view->header->fold);
    uint32_t named = FOLD_SLOT(fold);
    if (named == 0)
        return;
    if (named <= view->slot_count)
        clear_slot(view, named - 1);
    pm_store(&view->header->fold, FOLD_NEXT(fold, FOLD_COPY(fold), 0));
    if (named <= view->slot_count)
        set_free(view, named - 1);
}

static void add_counters(struct pm_counters *sum, const struct pm_counters *gone) {
    uint64_t *to = (uint64_t *)sum;
    const uint64_t *from = (const uint64_t *)gone;
    uint64_t peak = sum->memory_peak, last = sum->last_activity_ns;
    for (size_t i = 0; i < sizeof *sum / 8; i++)
        to[i] += pm_peek(&from[i]);
    sum->busy_ns += sum->pending_ns; /* work whose events nobody can ask any more is billed as estimated */
    sum->pending_ns = 0;
    sum->memory_peak = peak > gone->memory_peak ? peak : gone->memory_peak;
    sum->last_activity_ns = last > gone->last_activity_ns ? last : gone->last_activity_ns;
    memset(sum->memory, 0, sizeof sum->memory);
}

/* Before the fold itself: a folder that is killed in between leaves a name twice, which says nothing more. */
static void note_left(const struct pm_view *view, uint32_t index) {
    const struct pm_slot *slot = pm_view_slot(view, index);
    uint64_t at = pm_load(&view->header->left_count);
    struct pm_left *left = &view->header->left[at % PM_LEFT];
    left->pid_namespace = slot->pid_namespace;
    left->start_time_ticks = slot->start_time_ticks;
    left->pid = pm_peek(&slot->pid);
    pm_store(&view->header->left_count, at + 1);
}

static void fold_slot(const struct pm_view *view, uint32_t index) {
    pm_store(&pm_view_slot(view, index)->state, PM_SLOT_DEAD);
    pm_memory_give_back_all(view, index);
    note_left(view, index);
    uint64_t fold = pm_load(&view->header->fold);
    uint32_t now = FOLD_COPY(fold), next = !now;
    for (uint32_t d = 0; d < view->device_count; d++) {
        struct pm_meter_device *device = pm_view_device(view, d);
        struct pm_counters sum = device->retired[now];
        add_counters(&sum, pm_view_counters(view, index, d));
        const uint64_t *from = (const uint64_t *)&sum;
        uint64_t *to = (uint64_t *)&device->retired[next];
        for (size_t i = 0; i < sizeof sum / 8; i++)
            pm_poke(&to[i], from[i]);
    }
    pm_store(&view->header->fold, FOLD_NEXT(fold, next, index + 1));
    finish_fold(view);
}

static int reclaim_locked(const struct pm_view *view, int fd, uint32_t own, const struct pm_identity *identity) {
    int folded = 0;
    finish_fold(view);
    uint32_t used = pm_load(&view->header->slots_used);
    for (uint32_t i = 0; i < view->slot_count && i < used; i++) {
        if (i == own || pm_load(&pm_view_slot(view, i)->state) == PM_SLOT_FREE)
            continue;
        bool locked = try_lock(fd, PM_LOCK_SLOTS + i); /* keeps claimers off, and proves that the owner is gone */
        if (locked || is_dead(view, fd, i, identity)) {
            fold_slot(view, i);
            folded++;
        }
        if (locked)
            unlock(fd, PM_LOCK_SLOTS + i);
    }
    return folded;
}

int pm_slots_reclaim(const struct pm_view *view, int fd, uint32_t own, const struct pm_identity *identity,
                     int patience_ms) {
    if (!take_fold_lock(fd, patience_ms))
        return -EBUSY;
    int folded = reclaim_locked(view, fd, own, identity);
    unlock(fd, PM_LOCK_FOLD);
    return folded;
}

static uint32_t claim_once(const struct pm_view *view, int fd, const struct pm_identity *identity) {
    for (uint32_t i = 0; i < view->slot_count; i++) {
        struct pm_slot *slot = pm_view_slot(view, i);
        if (pm_load(&slot->state) != PM_SLOT_FREE || !try_lock(fd, PM_LOCK_SLOTS + i))
            continue;
        if (pm_load(&slot->state) != PM_SLOT_FREE) {
            unlock(fd, PM_LOCK_SLOTS + i);
            continue;
        }
        uint32_t used = pm_load(&view->header->slots_used);
        while (used < i + 1 && !__atomic_compare_exchange_n(&view->header->slots_used, &used, i + 1, false,
                                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            ;
        pm_store(&slot->state, PM_SLOT_CLAIMED);
        slot->pid = identity->pid;
        slot->uid = identity->uid;
        slot->pid_namespace = identity->pid_namespace;
        slot->start_time_ticks = identity->start_time_ticks;
        memcpy(slot->comm, identity->comm, sizeof slot->comm);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        slot->attached_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        pm_store(&slot->generation, slot->generation + 1);
        pm_store(&slot->state, PM_SLOT_LIVE);
        return i;
    }
    return PM_NO_SLOT;
}

uint32_t pm_slot_claim(const struct pm_view *view, int fd, const struct pm_identity *identity) {
    pm_slots_reclaim(view, fd, PM_NO_SLOT, identity, 0); /* a newcomer tidies up when that costs no waiting */
    uint32_t slot = claim_once(view, fd, identity);
    for (int attempt = 0; slot == PM_NO_SLOT && attempt < 3; attempt++) {
        pm_slots_reclaim(view, fd, PM_NO_SLOT, identity, 1000);
        slot = claim_once(view, fd, identity);
    }
    return slot;
}

bool pm_slot_relock(const struct pm_view *view, int fd, uint32_t slot, uint64_t generation) {
    if (!try_lock(fd, PM_LOCK_SLOTS + slot))
        return false;
    const struct pm_slot *own = pm_view_slot(view, slot);
    if (pm_load(&own->state) == PM_SLOT_LIVE && pm_load(&own->generation) == generation)
        return true;
    unlock(fd, PM_LOCK_SLOTS + slot);
    return false;
}

void pm_slot_release(const struct pm_view *view, int fd, uint32_t slot) {
    if (take_fold_lock(fd, 20)) {
        finish_fold(view);
        fold_slot(view, slot);
        unlock(fd, PM_LOCK_FOLD);
    } else {
        pm_store(&pm_view_slot(view, slot)->state, PM_SLOT_DEAD);
    }
    unlock(fd, PM_LOCK_SLOTS + slot);
}
