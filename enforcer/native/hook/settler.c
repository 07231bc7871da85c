#define _GNU_SOURCE
#include "settler.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "process.h"

#define PERIOD_NS 100000000

static void rest(long ns) {
    struct timespec t = {.tv_nsec = ns};
    nanosleep(&t, NULL);
}

void pm_settler_wake(uint32_t *word) {
    if (__atomic_exchange_n(word, 0, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* A simulated clock only moves with the program's own calls, which ours must not be among. */
static bool clock_runs(void) {
    int close = 0;
    for (int i = 0; i < 3; i++, rest(2000000)) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        int64_t apart = (int64_t)(pm_now_ns() - ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec));
        close += apart > -300000 && apart < 300000;
    }
    return close >= 2;
}

static void *settle_for_ever(void *argument) {
    struct pm_process *self = argument;
    if (!clock_runs())
        return NULL;
    while (pm_load(&self->state) == PM_ATTACHED) {
        bool pending = false;
        pm_process_keep_slot(self);
        for (uint32_t i = 0; i < pm_load(&self->context_count); i++) {
            void *handle = pm_load(&self->contexts[i]->handle);
            if (handle)
                pending |= pm_tracker_look_in(&self->contexts[i]->tracker, handle);
        }
        if (!pending) {
            __atomic_store_n(&self->settler, 1, __ATOMIC_SEQ_CST);
            struct timespec most = {.tv_sec = 1}; /* a wake-up may be missed, and then costs a second */
            syscall(SYS_futex, &self->settler, FUTEX_WAIT_PRIVATE, 1, &most, NULL, 0);
            __atomic_store_n(&self->settler, 0, __ATOMIC_SEQ_CST);
        }
        rest(PERIOD_NS);
    }
    return NULL;
}

void pm_settler_start(struct pm_process *self) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, old;
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);        /* the program's signals are for the program's threads */
    sigdelset(&all, SIGBUS); /* but a fault of its own, blocked, ends the process */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (pthread_create(&thread, &attributes, settle_for_ever, self) == 0)
        pthread_setname_np(thread, "poolmeter");
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
}
