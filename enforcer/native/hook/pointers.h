/* What the program holds: address or handle -> bytes, device, kind. */
#ifndef PM_POINTERS_H
#define PM_POINTERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pm_holding {
    uint64_t key;
    uint64_t bytes;
    uint64_t other; /* of a mapping: the handle; of a global: the module; of others: the context it goes away with */
    uint32_t device;
    uint32_t kind : 6;
    uint32_t uses : 26; /* one allocation may be mapped in very many places */
    uint64_t note; /* of a context's limit: what it was at first; of a module: bytes of its globals that are known */
};

/* Up to PM_HOLD_MEMORY a holding is memory that is taken from the limit. */
enum pm_holding_class {
    PM_HOLD_ADDRESS,
    PM_HOLD_HANDLE,
    PM_HOLD_ARRAY,  /* arrays and mipmapped arrays */
    PM_HOLD_MODULE, /* modules and libraries */
    PM_HOLD_LIMIT,  /* what a limit of a context takes */
    PM_HOLD_MEMORY,
    PM_HOLD_MAPPING = PM_HOLD_MEMORY,
    PM_HOLD_TILE, /* a part of an array on physical memory, whose handle is in `bytes`; `other` is the array */
    PM_HOLD_POOL,
    PM_HOLD_GLOBAL,
    PM_HOLD_EXEC,  /* executable graphs that allocate: `bytes` is the least that a launch needs */
    PM_HOLD_GREEN, /* contexts on a part of the processors: `other` is the primary context, `device` its ordinal */
    PM_HOLD_CLASSES
};

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
/* Takes out any holding with this `other`, going on from `*at`, which begins at 0; false when none is left. */
bool pm_pointers_take_any(struct pm_pointers *table, enum pm_holding_class of, uint64_t other, size_t *at,
                          struct pm_holding *holding);

/* The next holding from `*at` on, which begins at 0; false when there is none left. Others may come and go meanwhile.
 */
bool pm_pointers_next(struct pm_pointers *table, enum pm_holding_class of, size_t *at, struct pm_holding *holding);

#endif
