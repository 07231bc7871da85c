/* What the program holds: address or handle -> bytes, device, kind. */
#ifndef PM_POINTERS_H
#define PM_POINTERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pm_holding {
    uint64_t key;
    uint64_t bytes;
    uint64_t other; /* of a mapping: the handle; of an address: the context it goes away with */
    uint32_t device;
    uint16_t kind;
    uint16_t uses;
};

enum pm_holding_class { PM_HOLD_ADDRESS, PM_HOLD_HANDLE, PM_HOLD_MAPPING, PM_HOLD_POOL, PM_HOLD_CLASSES };

struct pm_pointers;

struct pm_pointers *pm_pointers_create(void);
/* False when there is no memory for it. */
bool pm_pointers_put(struct pm_pointers *table, enum pm_holding_class of, const struct pm_holding *holding);
/* Takes the holding out. */
bool pm_pointers_take(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, struct pm_holding *holding);
bool pm_pointers_get(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, struct pm_holding *holding);
/* Changes `uses` by `by`; at 0 takes it out. What was found is in `holding`, with the new `uses`. */
bool pm_pointers_use(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, int by,
                     struct pm_holding *holding);
/* Takes out any holding with this `other`; false when none is left. */
bool pm_pointers_take_any(struct pm_pointers *table, enum pm_holding_class of, uint64_t other,
                          struct pm_holding *holding);

/* The next holding from `*at` on, which begins at 0; false when there is none left. Others may come and go meanwhile.
 */
bool pm_pointers_next(struct pm_pointers *table, enum pm_holding_class of, size_t *at, struct pm_holding *holding);

#endif
