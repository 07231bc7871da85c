/* Mapping, locking, recovery, processes and scripted calls of the simulated machine. */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BARRIER() __atomic_signal_fence(__ATOMIC_SEQ_CST)

static uint64_t monotonic_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void machine_note_(struct sim_machine *m, const void *word) {
    uintptr_t at = ((uintptr_t)word & ~(uintptr_t)7) - (uintptr_t)m;
    if (m->undo_count == SIM_UNDO) {
        /* A transition too long for the log is committed half-way rather than refused; the counter shows it. */
        m->undo_overflows++;
        m->undo_count = 0;
    }
    struct sim_undo *u = &m->undo[m->undo_count];
    u->offset = (uint32_t)(at / 8);
    memcpy(&u->old, (const char *)m + at, 8);
    /* A killed thread stops between two instructions, so compiler order is all that matters here. */
    BARRIER();
    m->undo_count++;
    BARRIER();
}

void machine_commit(struct sim_machine *m) {
    BARRIER();
    m->undo_count = 0;
    BARRIER();
}

static void roll_back(struct sim_machine *m) {
    while (m->undo_count > 0) {
        const struct sim_undo *u = &m->undo[m->undo_count - 1];
        memcpy((char *)m + (size_t)u->offset * 8, &u->old, 8);
        BARRIER();
        m->undo_count--;
    }
}

void machine_lock(struct sim_machine *m) {
    int rc = pthread_mutex_lock(&m->mutex);
    if (rc == EOWNERDEAD) {
        roll_back(m);
        m->recoveries++;
        pthread_mutex_consistent(&m->mutex);
    } else if (rc != 0) {
        fprintf(stderr, "poolmeter simulator: the machine's mutex cannot be taken: %s\n", strerror(rc));
        abort();
    }
}

void machine_unlock(struct sim_machine *m) {
    machine_commit(m);
    pthread_mutex_unlock(&m->mutex);
}

void machine_enter(struct sim_machine *m) {
    machine_lock(m);
    uint64_t now = machine_now(m);
    if (now - m->liveness_ns > 2000000)
        process_reap(m, false);
    engine_advance(m, now);
}

static void robust_mutex(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attr);
    pthread_mutexattr_destroy(&attr);
}

struct sim_machine *machine_map(const char *path, bool create, char *error, size_t error_size) {
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0666);
    if (fd < 0) {
        snprintf(error, error_size, "the machine file %s cannot be opened: %s", path, strerror(errno));
        return NULL;
    }
    struct stat st;
    if (create && ftruncate(fd, (off_t)sizeof(struct sim_machine)) != 0) {
        snprintf(error, error_size, "the machine file %s cannot be given %zu bytes: %s", path,
                 sizeof(struct sim_machine), strerror(errno));
        close(fd);
        return NULL;
    }
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size != sizeof(struct sim_machine)) {
        snprintf(error, error_size, "the machine file %s has %lld bytes, a machine of this version has %zu", path,
                 (long long)st.st_size, sizeof(struct sim_machine));
        close(fd);
        return NULL;
    }
    void *at = mmap(NULL, sizeof(struct sim_machine), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) {
        snprintf(error, error_size, "the machine file %s cannot be mapped: %s", path, strerror(errno));
        return NULL;
    }
    struct sim_machine *m = at;
    if (create) {
        m->layout = SIM_LAYOUT;
        m->size = sizeof(*m);
        robust_mutex(&m->mutex);
        struct timespec wall;
        clock_gettime(CLOCK_REALTIME, &wall);
        m->base_ns = monotonic_ns();
        m->epoch_us = (uint64_t)wall.tv_sec * 1000000ull + (uint64_t)wall.tv_nsec / 1000;
        m->cuda_version = 13000;
        m->magic = SIM_MAGIC;
    } else if (m->magic != SIM_MAGIC || m->layout != SIM_LAYOUT || !m->ready) {
        snprintf(error, error_size, "%s is no simulated machine of layout %u (magic %016llx, layout %u, ready %u)",
                 path, SIM_LAYOUT, (unsigned long long)m->magic, m->layout, m->ready);
        munmap(at, sizeof(*m));
        return NULL;
    }
    return m;
}

void machine_unmap(struct sim_machine *m) {
    munmap(m, sizeof(*m));
}

uint64_t machine_now(const struct sim_machine *m) {
    if (m->clock == SIM_CLOCK_REAL)
        return monotonic_ns() - m->base_ns;
    return __atomic_load_n(&m->virtual_ns, __ATOMIC_ACQUIRE);
}

uint64_t machine_now_us(const struct sim_machine *m, uint64_t ns) {
    return m->epoch_us + ns / 1000;
}

/* --- processes -------------------------------------------------------------------------------------------------- */

uint64_t process_start_time(uint32_t pid, char *state) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    const char *after = strrchr(text, ')'); /* the name may hold spaces and brackets */
    if (after == NULL)
        return 0;
    unsigned long long start = 0;
    char letter = '?';
    /* field 3 is the state, field 22 the start time */
    if (sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &letter,
               &start) != 2)
        return 0;
    if (state != NULL)
        *state = letter;
    return start;
}

static bool process_alive(const struct sim_process *p) {
    char state = '?';
    uint64_t start = process_start_time(p->pid, &state);
    return start == p->start_time && state != 'Z' && state != 'X';
}

static void read_name(uint32_t pid, char *name, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    name[0] = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t n = read(fd, name, size - 1);
    close(fd);
    if (n <= 0)
        return;
    name[n] = 0;
    name[strcspn(name, "\n")] = 0;
}

uint32_t process_attach(struct sim_machine *m, uint32_t pid) {
    uint64_t start = process_start_time(pid, NULL);
    process_reap(m, true);
    engine_advance(m, machine_now(m));
    for (uint32_t i = 0; i < SIM_MAX_PROCESSES; i++) {
        struct sim_process *p = &m->process[i];
        if (p->state != SIM_PROCESS_FREE)
            continue;
        memset(p, 0, sizeof *p);
        p->pid = pid;
        p->start_time = start;
        p->attached_ns = m->advanced_ns;
        p->seen_ns = m->advanced_ns;
        p->wall_start_us = machine_now_us(m, m->advanced_ns);
        read_name(pid, p->name, sizeof p->name);
        robust_mutex(&p->life);
        pthread_mutex_trylock(&p->life); /* nobody else can have it: it is new */
        if (i >= m->process_high)
            PUT(m, m->process_high, i + 1);
        PUT(m, p->state, SIM_PROCESS_LIVE);
        machine_commit(m);
        return i;
    }
    return SIM_NONE;
}

static void retire(struct sim_machine *m, struct sim_process *p, bool killed) {
    struct sim_retired *r = &m->retired[m->retired_head % SIM_MAX_RETIRED];
    bool used_device = false;
    for (uint32_t d = 0; d < m->devices; d++)
        used_device |= p->account[d].first_context_ns != 0 || p->account[d].launches != 0 ||
                       p->account[d].memory_peak != 0 || p->account[d].refused != 0;
    if (!used_device)
        return;
    memset(r, 0, sizeof *r); /* beyond the head: invisible until it moves */
    r->pid = p->pid;
    r->start_time = p->start_time;
    r->attached_ns = p->attached_ns;
    r->ended_ns = m->advanced_ns;
    r->killed = killed;
    memcpy(r->name, p->name, sizeof r->name);
    memcpy(r->account, p->account, sizeof r->account);
    for (uint32_t d = 0; d < m->devices; d++) {
        r->account[d].memory = 0;
        r->account[d].overhead = 0;
        r->account[d].contexts = 0;
    }
    r->used = 1;
    PUT(m, m->retired_head, m->retired_head + 1);
}

void process_detach(struct sim_machine *m, uint32_t index, bool killed) {
    struct sim_process *p = &m->process[index];
    if (p->state == SIM_PROCESS_FREE)
        return;
    /* Every step below leaves a consistent machine: a helper that dies here leaves the rest to the next one. */
    for (uint32_t c = 0; c < m->context_high; c++)
        if (m->context[c].used && m->context[c].process == index)
            context_destroy(m, c);
    for (uint32_t w = 0; w < m->waiter_high; w++)
        if (m->waiter[w].state != SIM_WAITER_FREE && m->waiter[w].process == index)
            PUT(m, m->waiter[w].state, SIM_WAITER_FREE);
    for (uint32_t d = 0; d < m->devices; d++) {
        struct sim_account *a = &p->account[d];
        if (m->device[d].accounting && a->first_context_ns != 0) {
            struct sim_device *dev = &m->device[d];
            struct sim_accounted *acc = &dev->accounted[dev->accounted_head % SIM_ACCOUNTED];
            acc->pid = p->pid;
            acc->running = 0;
            acc->max_memory = a->memory_all_peak;
            acc->time_ms = (m->advanced_ns - a->first_context_ns) / 1000000;
            acc->start_us = machine_now_us(m, a->first_context_ns);
            acc->samples = a->util_samples;
            acc->util_sum = a->util_sum;
            acc->fb_sum = a->fb_sum;
            uint64_t span = m->advanced_ns - a->first_context_ns;
            acc->gpu_percent = span ? (uint32_t)(a->busy_ns * 100 / span) : 0;
            acc->memory_percent = 0;
            PUT(m, dev->accounted_head, dev->accounted_head + 1);
        }
        if (a->instance > 0 && a->instance <= SIM_MAX_INSTANCES)
            ADD(m, m->device[d].instance[a->instance - 1].ended_busy_ns, a->busy_ns);
        SUB(m, m->device[d].memory_used, a->memory);
        PUT(m, a->memory, 0);
    }
    retire(m, p, killed);
    if (killed)
        ADD(m, m->reaped, 1);
    PUT(m, p->state, SIM_PROCESS_FREE);
    machine_commit(m);
    machine_wake(m);
}

void process_reap(struct sim_machine *m, bool thorough) {
    uint64_t real = monotonic_ns();
    uint64_t now = machine_now(m);
    bool files = thorough || real - m->liveness_real_ns > 250000000ull;
    for (uint32_t i = 0; i < m->process_high; i++) {
        struct sim_process *p = &m->process[i];
        if (p->state == SIM_PROCESS_FREE)
            continue;
        bool dead = false;
        bool ask = files;
        if (!p->life_unreliable) {
            int rc = pthread_mutex_trylock(&p->life);
            if (rc == 0) { /* held by nobody: an attach that died half-way */
                pthread_mutex_unlock(&p->life);
                ask = true;
            } else if (rc == EOWNERDEAD || rc == ENOTRECOVERABLE) {
                if (rc == EOWNERDEAD)
                    pthread_mutex_unlock(&p->life);
                ask = true;
                p->life_unreliable = 1;
            }
        }
        if (ask)
            dead = !process_alive(p);
        if (!dead)
            continue;
        /* It died between its last sign of life and now; its queue ran no longer than that on a card. */
        uint64_t last = p->seen_ns > m->liveness_ns ? p->seen_ns : m->liveness_ns;
        if (last > m->advanced_ns)
            engine_advance(m, last < now ? last : now);
        process_detach(m, i, true);
    }
    if (files)
        m->liveness_real_ns = real;
    m->liveness_ns = now;
}

/* --- scripted calls --------------------------------------------------------------------------------------------- */

int machine_call(struct sim_machine *m, uint32_t call, int device) {
    __atomic_fetch_add(&m->calls[call], 1, __ATOMIC_RELAXED);
    if (__builtin_expect(!__atomic_load_n(&m->armed[call], __ATOMIC_RELAXED), 1))
        return 0;
    int code = 0;
    uint64_t delay = 0;
    machine_lock(m);
    for (uint32_t i = 0; i < SIM_MAX_RULES; i++) {
        struct sim_rule *r = &m->rule[i];
        if (!r->used || !(r->mask[call / 8] & (1u << (call % 8))))
            continue;
        if (r->device >= 0 && device >= 0 && r->device != device)
            continue;
        if (r->device >= 0 && device < 0)
            continue;
        if (r->pid != 0 && r->pid != (uint32_t)getpid())
            continue;
        r->seen++;
        if (r->seen <= r->after || r->hit >= r->times)
            continue;
        r->hit++;
        delay += r->delay_ns;
        if (code == 0)
            code = r->code;
    }
    machine_unlock(m);
    if (delay > 0) {
        uint64_t until = machine_now(m) + delay;
        while (machine_now(m) < until)
            machine_wait(m, until);
    }
    return code;
}
