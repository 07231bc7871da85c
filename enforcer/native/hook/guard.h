/* Pages that somebody truncates under our feet: the program goes on, on private memory in their place. */
#ifndef PM_GUARD_H
#define PM_GUARD_H

#include <stddef.h>
#include <stdint.h>

#define PM_TORN_GRANT 1u
#define PM_TORN_METER 2u
#define PM_TORN_BOARD 4u

/* Forgets all ranges; before those of this process are added. */
void pm_guard_reset(void);
/* Guards a mapped page; a fault in it sets `kind` in pm_guard_torn. */
void pm_guard_add(const void *at, size_t size, uint32_t kind);
/* Takes SIGBUS over where the program has left it at its default. */
void pm_guard_install(void);
/* Which kinds of pages were torn away. */
uint32_t pm_guard_torn(void);

#endif
