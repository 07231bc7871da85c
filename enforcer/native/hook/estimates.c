#include "estimates.h"

#include <stddef.h>
#include <sys/mman.h>

#define ENTRIES (1u << 15)
#define INDEX (2 * ENTRIES)
#define FRONT 512u
#define PROBES 32u

/*
 * Between two launches a program may have driven everything of ours out of the caches, and out of the processor's page
 * translations with it. So entries lie side by side in the order in which kinds were first seen, and those met of late
 * are found through one page.
 */
struct pm_estimates {
    struct pm_estimate *front[FRONT];
    uint32_t index[INDEX]; /* number of the entry + 1; 0: none */
    uint32_t used;
    struct pm_estimate entries[ENTRIES];
};

struct pm_estimates *pm_estimates_create(void) {
    void *at = mmap(NULL, sizeof(struct pm_estimates), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* Number + 1 of a fresh entry; 0: there is none left. */
static uint32_t made_for(struct pm_estimates *table, uint64_t key) {
    if (__atomic_load_n(&table->used, __ATOMIC_RELAXED) >= ENTRIES)
        return 0;
    uint32_t number = __atomic_fetch_add(&table->used, 1, __ATOMIC_RELAXED);
    if (number >= ENTRIES)
        return 0;
    __atomic_store_n(&table->entries[number].key, key, __ATOMIC_RELAXED);
    return number + 1;
}

PM_SELDOM static struct pm_estimate *search(struct pm_estimates *table, uint64_t key) {
    uint32_t made = 0;
    for (uint32_t i = 0; i < PROBES; i++) {
        uint32_t *at = &table->index[(key + i) % INDEX], found = __atomic_load_n(at, __ATOMIC_ACQUIRE);
        if (found == 0) {
            made = made ? made : made_for(table, key);
            if (!made)
                return NULL;
            if (__atomic_compare_exchange_n(at, &found, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                return &table->entries[made - 1];
        }
        struct pm_estimate *entry = &table->entries[found - 1];
        if (__atomic_load_n(&entry->key, __ATOMIC_RELAXED) == key)
            return entry; /* one that was made meanwhile stays unused */
    }
    return NULL;
}

PM_HOT struct pm_estimate *pm_estimate_find(struct pm_estimates *table, uint64_t key) {
    if (!table)
        return NULL;
    struct pm_estimate **front = &table->front[key % FRONT];
    struct pm_estimate *entry = __atomic_load_n(front, __ATOMIC_ACQUIRE);
    if (__builtin_expect(entry && __atomic_load_n(&entry->key, __ATOMIC_RELAXED) == key, 1))
        return entry;
    entry = search(table, key);
    if (entry)
        __atomic_store_n(front, entry, __ATOMIC_RELEASE);
    return entry;
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
