/*
 * A mapped page whose file is truncated raises SIGBUS in whoever touches it, and every tenant of a device can truncate
 * its board. The handler puts zeros of our own where the page was and lets the access happen again. Only where the
 * disposition is the default one: a program that has its own handler keeps it.
 */
#define _GNU_SOURCE
#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "pages.h"

#define RANGES (PM_MAX_DEVICES + 2)

struct range {
    uintptr_t at;
    size_t size;
    uint32_t kind;
    uint32_t taken; /* 1: somebody replaces it, or has */
};

static struct range ranges[RANGES];
static uint32_t range_count, torn;

static bool replace(uintptr_t address) {
    for (uint32_t i = 0; i < pm_load(&range_count); i++) {
        struct range *range = &ranges[i];
        if (address < range->at || address - range->at >= range->size)
            continue;
        uint32_t nobody = 0;
        if (!__atomic_compare_exchange_n(&range->taken, &nobody, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true; /* another thread is at it; the access faults again until it is done */
        if (mmap((void *)range->at, range->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                 0) == MAP_FAILED)
            return false;
        __atomic_fetch_or(&torn, range->kind, __ATOMIC_SEQ_CST);
        return true;
    }
    return false;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    int before = errno;
    bool ours = info->si_code == BUS_ADRERR && replace((uintptr_t)info->si_addr);
    errno = before;
    if (ours)
        return;
    /* As if we were not there: the access faults again, or the signal that was sent comes again. */
    struct sigaction by_default = {.sa_handler = SIG_DFL};
    sigaction(number, &by_default, NULL);
    if (info->si_code <= 0)
        raise(number);
}

void pm_guard_reset(void) {
    pm_store(&range_count, 0);
    pm_store(&torn, 0);
}

void pm_guard_add(const void *at, size_t size, uint32_t kind) {
    uint32_t count = pm_load(&range_count);
    if (!at || count == RANGES)
        return;
    ranges[count] = (struct range){(uintptr_t)at, (size + 4095) & ~(size_t)4095, kind, 0};
    pm_store(&range_count, count + 1);
}

void pm_guard_install(void) {
    struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (sigaction(SIGBUS, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
        sigaction(SIGBUS, &ours, NULL);
}

uint32_t pm_guard_torn(void) {
    return pm_load(&torn);
}
