/* Device memory of an allocation: one word per device over all processes, exact through a kill at any instruction. */
#ifndef PM_MEMORY_H
#define PM_MEMORY_H

#include "pages.h"

#define PM_UNITS(bytes) ((uint64_t)(bytes) / PM_MEMORY_UNIT + ((uint64_t)(bytes) % PM_MEMORY_UNIT != 0))

/* Takes `bytes` for the slot unless the device's total would pass `limit` (bytes, PM_UNLIMITED: none). One caller at a
 * time per slot. */
bool pm_memory_take(const struct pm_view *view, uint32_t slot, uint32_t device, uint32_t kind, uint64_t bytes,
                    uint64_t limit);
/* Gives them back. One caller at a time per slot. */
void pm_memory_give_back(const struct pm_view *view, uint32_t slot, uint32_t device, uint32_t kind, uint64_t bytes);
/* For a folder: everything that a dead slot holds, after settling the change it died in. */
void pm_memory_give_back_all(const struct pm_view *view, uint32_t slot);
/* Bytes that all processes hold on the device. */
uint64_t pm_memory_used(const struct pm_view *view, uint32_t device);

#endif
