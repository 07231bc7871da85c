/* Waiting: on the real clock, or in turns on the virtual one. */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static __thread uint32_t my_waiter = SIM_NONE;
static __thread bool slack_set;

static int futex_wait(uint32_t *word, uint32_t seen, const struct timespec *absolute) {
    return (int)syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, absolute, NULL, FUTEX_BITSET_MATCH_ANY);
}

static struct timespec absolute_in(uint64_t ns) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t at = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec + ns;
    t.tv_sec = (time_t)(at / 1000000000ull);
    t.tv_nsec = (long)(at % 1000000000ull);
    return t;
}

void machine_wake(struct sim_machine *m) {
    __atomic_fetch_add(&m->wake_seq, 1, __ATOMIC_RELEASE);
    if (__atomic_load_n(&m->sleepers, __ATOMIC_ACQUIRE) > 0)
        syscall(SYS_futex, &m->wake_seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Locked. Hands the turn to the thread with the earliest wake-up, when nobody runs. */
void machine_grant(struct sim_machine *m) {
    if (m->clock != SIM_CLOCK_VIRTUAL || m->participants_seen < m->participants_wanted || m->host_ops > 0)
        return;
    uint32_t best = SIM_NONE;
    for (uint32_t i = 0; i < m->waiter_high; i++) {
        const struct sim_waiter *w = &m->waiter[i];
        if (w->state == SIM_WAITER_RUNNING)
            return;
        if (w->state == SIM_WAITER_WAITING &&
            (best == SIM_NONE || w->wake_ns < m->waiter[best].wake_ns ||
             (w->wake_ns == m->waiter[best].wake_ns && w->order < m->waiter[best].order)))
            best = i;
    }
    if (best == SIM_NONE)
        return;
    struct sim_waiter *w = &m->waiter[best];
    if (w->wake_ns > m->virtual_ns) {
        machine_note_(m, &m->virtual_ns);
        __atomic_store_n(&m->virtual_ns, w->wake_ns, __ATOMIC_RELEASE);
    }
    PUT(m, w->state, SIM_WAITER_RUNNING);
    PUT(m, w->granted, 1);
    machine_commit(m);
    machine_wake(m);
}

/*
 * Locked. A thread that has the turn and sleeps elsewhere (on a lock, in a pause of its own) would stop the clock for
 * good: found so three times running, it is taken for absent until it calls again.
 */
static void pass_over_sleepers(struct sim_machine *m) {
    for (uint32_t i = 0; i < m->waiter_high; i++) {
        struct sim_waiter *w = &m->waiter[i];
        if (w->state != SIM_WAITER_RUNNING)
            continue;
        char path[64], text[512];
        snprintf(path, sizeof path, "/proc/%u/task/%u/stat", w->pid, w->tid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
        if (fd >= 0)
            close(fd);
        text[n > 0 ? n : 0] = 0;
        const char *after = strrchr(text, ')');
        bool asleep = after != NULL && after[1] == ' ' && after[2] == 'S';
        PUT(m, w->asleep, asleep ? w->asleep + 1 : 0);
        if (w->asleep >= 3)
            PUT(m, w->state, SIM_WAITER_ABSENT);
    }
}

static void wait_for_turn(struct sim_machine *m, struct sim_waiter *w, uint64_t until) {
    machine_lock(m);
    PUT(m, w->granted, 0);
    PUT(m, w->asleep, 0);
    PUT(m, w->wake_ns, until > m->virtual_ns ? until : m->virtual_ns);
    PUT(m, w->state, SIM_WAITER_WAITING);
    machine_grant(m);
    machine_unlock(m);
    while (!__atomic_load_n(&w->granted, __ATOMIC_ACQUIRE)) {
        uint32_t seen = __atomic_load_n(&m->wake_seq, __ATOMIC_ACQUIRE);
        __atomic_fetch_add(&m->sleepers, 1, __ATOMIC_ACQ_REL);
        struct timespec t = absolute_in(50000000);
        int rc = 0;
        if (!__atomic_load_n(&w->granted, __ATOMIC_ACQUIRE))
            rc = futex_wait(&m->wake_seq, seen, &t);
        bool timed_out = rc != 0 && errno == ETIMEDOUT;
        __atomic_fetch_sub(&m->sleepers, 1, __ATOMIC_ACQ_REL);
        if (timed_out) { /* whoever holds the turn may have died with it */
            machine_lock(m);
            process_reap(m, false);
            pass_over_sleepers(m);
            machine_grant(m);
            machine_unlock(m);
        }
    }
}

void machine_wait(struct sim_machine *m, uint64_t until) {
    if (m->clock == SIM_CLOCK_VIRTUAL && my_waiter != SIM_NONE) {
        uint64_t limit = m->virtual_ns + 1000000; /* nothing known to wait for: look again in a millisecond */
        wait_for_turn(m, &m->waiter[my_waiter], until == SIM_NEVER ? limit : until);
        return;
    }
    uint32_t seen = __atomic_load_n(&m->wake_seq, __ATOMIC_ACQUIRE);
    uint64_t now = machine_now(m);
    if (until <= now)
        return;
    uint64_t span = until - now;
    if (m->clock != SIM_CLOCK_REAL)
        span = 50000000; /* moved by others, who wake us */
    else if (span > 20000000)
        span = 20000000; /* a change without a wake (a death) is seen within this */
    if (!slack_set) {
        prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0); /* the default 50 us would show in every synchronisation */
        slack_set = true;
    }
    struct timespec t = absolute_in(span);
    __atomic_fetch_add(&m->sleepers, 1, __ATOMIC_ACQ_REL);
    futex_wait(&m->wake_seq, seen, &t);
    __atomic_fetch_sub(&m->sleepers, 1, __ATOMIC_ACQ_REL);
}

void machine_set_virtual(struct sim_machine *m, uint64_t ns) {
    if (ns > m->virtual_ns)
        __atomic_store_n(&m->virtual_ns, ns, __ATOMIC_RELEASE);
    machine_wake(m);
}

void machine_join(struct sim_machine *m, uint32_t process) {
    if (m->clock != SIM_CLOCK_VIRTUAL || my_waiter != SIM_NONE)
        return;
    machine_lock(m);
    for (uint32_t i = 0; i < SIM_MAX_WAITERS; i++) {
        struct sim_waiter *w = &m->waiter[i];
        if (w->state != SIM_WAITER_FREE)
            continue;
        if (i >= m->waiter_high)
            PUT(m, m->waiter_high, i + 1);
        PUT(m, w->process, process);
        PUT(m, w->pid, m->process[process].pid);
        PUT(m, w->tid, (uint32_t)syscall(SYS_gettid));
        PUT(m, w->asleep, 0);
        PUT(m, w->order, ((uint64_t)m->process[process].pid << 16) + i);
        PUT(m, w->state, SIM_WAITER_RUNNING);
        ADD(m, m->participants_seen, 1);
        my_waiter = i;
        break;
    }
    machine_unlock(m);
    if (my_waiter != SIM_NONE)
        wait_for_turn(m, &m->waiter[my_waiter], m->virtual_ns);
}

void machine_leave(struct sim_machine *m) {
    if (my_waiter == SIM_NONE)
        return;
    machine_lock(m);
    PUT(m, m->waiter[my_waiter].state, SIM_WAITER_FREE);
    my_waiter = SIM_NONE;
    machine_grant(m);
    machine_unlock(m);
}

void machine_return(struct sim_machine *m) {
    if (my_waiter != SIM_NONE && __atomic_load_n(&m->waiter[my_waiter].state, __ATOMIC_ACQUIRE) == SIM_WAITER_ABSENT)
        wait_for_turn(m, &m->waiter[my_waiter], m->virtual_ns);
}

void machine_forget_thread(void) {
    my_waiter = SIM_NONE;
}
