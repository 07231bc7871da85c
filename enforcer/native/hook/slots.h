/* A slot per process: taking one, telling the dead from the living, folding what the dead counted. */
#ifndef PM_SLOTS_H
#define PM_SLOTS_H

#include "pages.h"

#define PM_NO_SLOT UINT32_MAX

struct pm_identity {
    uint32_t pid;
    uint32_t uid;
    uint64_t pid_namespace;
    uint64_t start_time_ticks;
    char comm[16];
};

void pm_identity_read(struct pm_identity *identity);
/* Takes a free slot, with its lock held through `fd`; folds dead ones first when none is free. PM_NO_SLOT: all are
 * taken. */
uint32_t pm_slot_claim(const struct pm_view *view, int fd, const struct pm_identity *identity);
/* Takes the slot's lock again through another descriptor; false: somebody else has it, or it is no longer ours. */
bool pm_slot_relock(const struct pm_view *view, int fd, uint32_t slot, uint64_t generation);
/* Gives the slot up and folds it; when the fold lock stays taken, the next process folds it. */
void pm_slot_release(const struct pm_view *view, int fd, uint32_t slot);
/* Folds every dead slot but `own` (PM_NO_SLOT: the caller has none); the number folded, or -errno when the fold lock
 * stays taken. */
int pm_slots_reclaim(const struct pm_view *view, int fd, uint32_t own, const struct pm_identity *identity,
                     int patience_ms);

#endif
