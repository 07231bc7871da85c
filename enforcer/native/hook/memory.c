/*
 * memory_word = units | slot << 36 | sequence << 44. A change is: intent in the own slot, compare-and-swap of the word
 * (which names slot and sequence), memory[kind] of the slot, intent cleared. Whoever is about to replace a word first
 * notes in the slot it names that the change has happened. So a survivor that finds an intent knows whether the word
 * had been changed.
 */
#include "memory.h"

#define UNITS_MASK ((1ull << 36) - 1)
#define WORD_SLOT(word) ((uint32_t)((word) >> 36 & 0xff))
#define WORD_SEQUENCE(word) ((word) >> 44)
#define SEQUENCE_MASK 0xfffffull
#define INTENT_BACK (1ull << 46)
#define INTENT_VALID (1ull << 63)

static void confirm(const struct pm_view *view, uint64_t word) {
    uint32_t owner = WORD_SLOT(word);
    if (owner >= view->slot_count)
        return;
    uint64_t *confirmed = &pm_view_slot(view, owner)->confirmed;
    uint64_t old = pm_load(confirmed);
    /* forward only, modulo the sequence's width */
    while (((WORD_SEQUENCE(word) - old) & SEQUENCE_MASK) - 1 < SEQUENCE_MASK / 2)
        if (__atomic_compare_exchange_n(confirmed, &old, WORD_SEQUENCE(word), false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            break;
}

static void settle_intent(const struct pm_view *view, uint32_t index) {
    struct pm_slot *slot = pm_view_slot(view, index);
    uint64_t intent = pm_load(&slot->intent);
    if (!(intent & INTENT_VALID))
        return;
    uint32_t device = intent >> 36 & 63, kind = intent >> 42 & 15;
    if (device < view->device_capacity && kind < PM_MEMORY_KINDS) {
        uint64_t sequence = slot->intent_sequence & SEQUENCE_MASK;
        uint64_t word = pm_load(&pm_view_device(view, device)->memory_word);
        bool happened = WORD_SLOT(word) == index && WORD_SEQUENCE(word) == sequence;
        if (happened || (pm_load(&slot->confirmed) & SEQUENCE_MASK) == sequence)
            pm_store(&pm_view_counters(view, index, device)->memory[kind], slot->intent_value);
    }
    pm_store(&slot->intent, 0);
}

static bool change(const struct pm_view *view, uint32_t index, uint32_t device, uint32_t kind, uint64_t units,
                   bool back, uint64_t limit_units) {
    struct pm_slot *slot = pm_view_slot(view, index);
    struct pm_meter_device *line = pm_view_device(view, device);
    struct pm_counters *counters = pm_view_counters(view, index, device);
    settle_intent(view, index);
    uint64_t held = pm_peek(&counters->memory[kind]), bytes = units * PM_MEMORY_UNIT;
    uint64_t value = back ? (held > bytes ? held - bytes : 0) : held + bytes;
    uint64_t sequence = (slot->intent_sequence + 1) & SEQUENCE_MASK;
    bool announced = false;
    uint64_t word = pm_load(&line->memory_word), next;
    do {
        uint64_t used = word & UNITS_MASK;
        if (!back && (units > limit_units || used > limit_units - units)) {
            pm_store(&slot->intent, 0);
            return false;
        }
        confirm(view, word);
        if (!announced) { /* the sequence first: an intent must never be read with an older one */
            pm_store(&slot->intent_sequence, sequence);
            pm_store(&slot->intent_value, value);
            pm_store(&slot->intent, INTENT_VALID | (back ? INTENT_BACK : 0) | (uint64_t)kind << 42 |
                                        (uint64_t)device << 36 | (units & UNITS_MASK));
            announced = true;
        }
        uint64_t after = back ? (used > units ? used - units : 0) : used + units;
        next = after | (uint64_t)index << 36 | sequence << 44;
    } while (!__atomic_compare_exchange_n(&line->memory_word, &word, next, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE));
    pm_store(&counters->memory[kind], value);
    pm_store(&slot->intent, 0);
    if (!back) {
        pm_raise(&line->memory_peak, (next & UNITS_MASK) * PM_MEMORY_UNIT);
        uint64_t sum = 0;
        for (int k = 0; k < PM_MEMORY_KINDS; k++)
            sum += pm_peek(&counters->memory[k]);
        pm_raise(&counters->memory_peak, sum);
    }
    return true;
}

bool pm_memory_take(const struct pm_view *view, uint32_t slot, uint32_t device, uint32_t kind, uint64_t bytes,
                    uint64_t limit) {
    uint64_t units = PM_UNITS(bytes), limit_units = limit == PM_UNLIMITED ? UNITS_MASK : limit / PM_MEMORY_UNIT;
    if (limit_units > UNITS_MASK)
        limit_units = UNITS_MASK;
    return units == 0 || change(view, slot, device, kind, units, false, limit_units);
}

void pm_memory_give_back(const struct pm_view *view, uint32_t slot, uint32_t device, uint32_t kind, uint64_t bytes) {
    if (bytes)
        change(view, slot, device, kind, PM_UNITS(bytes), true, 0);
}

void pm_memory_give_back_all(const struct pm_view *view, uint32_t slot) {
    settle_intent(view, slot);
    for (uint32_t d = 0; d < view->device_count; d++)
        for (uint32_t kind = 0; kind < PM_MEMORY_KINDS; kind++) {
            uint64_t held = pm_peek(&pm_view_counters(view, slot, d)->memory[kind]);
            if (held)
                change(view, slot, d, kind, PM_UNITS(held), true, 0);
        }
}

uint64_t pm_memory_used(const struct pm_view *view, uint32_t device) {
    return (pm_load(&pm_view_device(view, device)->memory_word) & UNITS_MASK) * PM_MEMORY_UNIT;
}
