#include "estimates.h"

#include <stddef.h>
#include <sys/mman.h>

#define ENTRIES (1u << 15)
#define PROBES 32u

struct pm_estimates {
    struct pm_estimate entries[ENTRIES];
};

struct pm_estimates *pm_estimates_create(void) {
    void *at = mmap(NULL, sizeof(struct pm_estimates), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

PM_HOT struct pm_estimate *pm_estimate_find(struct pm_estimates *table, uint64_t key) {
    if (!table)
        return NULL;
    for (uint32_t i = 0; i < PROBES; i++) {
        struct pm_estimate *entry = &table->entries[(key + i) % ENTRIES];
        uint64_t found = __atomic_load_n(&entry->key, __ATOMIC_RELAXED);
        if (found == key)
            return entry;
        if (found == 0) {
            uint64_t none = 0;
            if (__atomic_compare_exchange_n(&entry->key, &none, key, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
                none == key)
                return entry;
        }
    }
    return NULL;
}

void pm_estimate_reset(struct pm_estimate *entry) {
    __atomic_store_n(&entry->samples, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->begun, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->lone, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->unknown_launches, 0, __ATOMIC_RELAXED);
    entry->strikes = 0;
    entry->met = 0;
    entry->guessed = 0;
    entry->shared = 0;
    entry->shared_ns = 0;
    entry->shared_most_ns = 0;
}
