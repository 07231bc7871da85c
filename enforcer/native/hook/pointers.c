#include "pointers.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SHARDS 64u

struct shard {
    pthread_mutex_t lock;
    struct pm_holding *entries; /* open addressing; key 0 is free */
    uint32_t capacity, count;
};

struct pm_pointers {
    struct shard shards[PM_HOLD_CLASSES][SHARDS];
};

static uint64_t hash(uint64_t key) {
    key *= 0x9e3779b97f4a7c15u;
    return key ^ key >> 32;
}

static struct shard *shard_of(struct pm_pointers *table, enum pm_holding_class of, uint64_t key) {
    return &table->shards[of][hash(key) % SHARDS];
}

struct pm_pointers *pm_pointers_create(void) {
    struct pm_pointers *table = calloc(1, sizeof *table);
    for (unsigned c = 0; table && c < PM_HOLD_CLASSES; c++)
        for (unsigned s = 0; s < SHARDS; s++)
            pthread_mutex_init(&table->shards[c][s].lock, NULL);
    return table;
}

static struct pm_holding *probe(struct shard *shard, uint64_t key) {
    if (shard->capacity == 0)
        return NULL;
    for (uint32_t i = (uint32_t)(hash(key) >> 8) % shard->capacity;; i = (i + 1) % shard->capacity)
        if (shard->entries[i].key == key || shard->entries[i].key == 0)
            return &shard->entries[i];
}

static bool grow(struct shard *shard) {
    uint32_t capacity = shard->capacity ? shard->capacity * 2 : 16;
    struct pm_holding *entries = calloc(capacity, sizeof *entries), *old = shard->entries;
    if (!entries)
        return false;
    uint32_t before = shard->capacity;
    shard->entries = entries;
    shard->capacity = capacity;
    for (uint32_t i = 0; i < before; i++)
        if (old[i].key)
            *probe(shard, old[i].key) = old[i];
    free(old);
    return true;
}

static void erase(struct shard *shard, struct pm_holding *at) {
    uint32_t hole = (uint32_t)(at - shard->entries);
    shard->count--;
    for (uint32_t i = (hole + 1) % shard->capacity; shard->entries[i].key; i = (i + 1) % shard->capacity) {
        uint32_t home = (uint32_t)(hash(shard->entries[i].key) >> 8) % shard->capacity;
        /* an entry may move into the hole when its home is not between the hole and it */
        if ((i > hole && (home <= hole || home > i)) || (i < hole && home <= hole && home > i)) {
            shard->entries[hole] = shard->entries[i];
            hole = i;
        }
    }
    memset(&shard->entries[hole], 0, sizeof shard->entries[hole]);
}

bool pm_pointers_put(struct pm_pointers *table, enum pm_holding_class of, const struct pm_holding *holding) {
    if (!table || holding->key == 0)
        return false;
    struct shard *shard = shard_of(table, of, holding->key);
    pthread_mutex_lock(&shard->lock);
    bool room = (shard->count + 1) * 4 <= shard->capacity * 3 || grow(shard);
    if (room) {
        struct pm_holding *at = probe(shard, holding->key);
        shard->count += at->key == 0;
        *at = *holding;
    }
    pthread_mutex_unlock(&shard->lock);
    return room;
}

bool pm_pointers_use(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, int by,
                     struct pm_holding *holding) {
    if (!table || key == 0)
        return false;
    struct shard *shard = shard_of(table, of, key);
    pthread_mutex_lock(&shard->lock);
    struct pm_holding *at = probe(shard, key);
    bool found = at && at->key == key;
    if (found) {
        at->uses = (at->uses + (uint32_t)by) & 0x3ffffff;
        *holding = *at;
        if (at->uses == 0)
            erase(shard, at);
    }
    pthread_mutex_unlock(&shard->lock);
    return found;
}

bool pm_pointers_take(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, struct pm_holding *holding) {
    if (!table || key == 0)
        return false;
    struct shard *shard = shard_of(table, of, key);
    pthread_mutex_lock(&shard->lock);
    struct pm_holding *at = probe(shard, key);
    bool found = at && at->key == key;
    if (found) {
        *holding = *at;
        erase(shard, at);
    }
    pthread_mutex_unlock(&shard->lock);
    return found;
}

bool pm_pointers_get(struct pm_pointers *table, enum pm_holding_class of, uint64_t key, struct pm_holding *holding) {
    return pm_pointers_use(table, of, key, 0, holding);
}

bool pm_pointers_take_any(struct pm_pointers *table, enum pm_holding_class of, uint64_t other, size_t *at,
                          struct pm_holding *holding) {
    /* `*at` is shard << 32 | place; what is left may have moved to before it, so a shard is left after a whole round */
    for (size_t s = *at >> 32; table && s < SHARDS; s++, *at = s << 32) {
        struct shard *shard = &table->shards[of][s];
        bool found = false;
        pthread_mutex_lock(&shard->lock);
        for (uint32_t n = 0; n < shard->capacity && !found; n++) {
            uint32_t i = ((uint32_t)*at + n) % shard->capacity;
            if (shard->entries[i].key && shard->entries[i].other == other) {
                *holding = shard->entries[i];
                *at = s << 32 | i;
                erase(shard, &shard->entries[i]);
                found = true;
            }
        }
        pthread_mutex_unlock(&shard->lock);
        if (found)
            return true;
    }
    return false;
}

bool pm_pointers_next(struct pm_pointers *table, enum pm_holding_class of, size_t *at, struct pm_holding *holding) {
    /* `*at` is shard << 32 | place */
    for (size_t s = *at >> 32; table && s < SHARDS; s++, *at = s << 32) {
        struct shard *shard = &table->shards[of][s];
        bool found = false;
        pthread_mutex_lock(&shard->lock);
        for (uint32_t i = (uint32_t)*at; i < shard->capacity && !found; i++)
            if (shard->entries[i].key) {
                *holding = shard->entries[i];
                *at = s << 32 | (i + 1);
                found = true;
            }
        pthread_mutex_unlock(&shard->lock);
        if (found)
            return true;
    }
    return false;
}
