/* A thread per process that looks in on what is pending: launches that do not end, and work after which the program
 * does nothing. */
#ifndef PM_SETTLER_H
#define PM_SETTLER_H

#include <stdint.h>

struct pm_process;

/* Starts the thread; it ends by itself on a clock that does not run on its own. */
void pm_settler_start(struct pm_process *self);
/* Something is pending. */
void pm_settler_wake(uint32_t *word);

#endif
