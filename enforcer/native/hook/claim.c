#include "claim.h"

#include <stdlib.h>

#include "memory.h"

bool pm_claim_begin(struct pm_claim *claim, uint32_t device, uint32_t kind, uint64_t bytes) {
    *claim = (struct pm_claim){NULL, device, kind, bytes};
    struct pm_process *self = pm_self();
    if (!self || device == PM_NO_DEVICE)
        return true;
    pm_process_change_begins(self, device);
    if (!pm_process_take(self, device, kind, bytes)) {
        pm_process_change_ends(self, device);
        return false;
    }
    claim->self = self;
    return true;
}

bool pm_claim_here(struct pm_claim *claim, uint32_t kind, uint64_t bytes) {
    struct pm_process *self = pm_self();
    return pm_claim_begin(claim, self ? pm_current_device(self) : PM_NO_DEVICE, kind, bytes);
}

bool pm_claim_change(struct pm_claim *claim, uint64_t bytes) {
    if (!claim->self)
        return true;
    uint64_t before = PM_UNITS(claim->bytes), after = PM_UNITS(bytes);
    if (after > before && !pm_process_take(claim->self, claim->device, claim->kind, (after - before) * PM_MEMORY_UNIT))
        return false;
    if (after < before)
        pm_process_give_back(claim->self, claim->device, claim->kind, (before - after) * PM_MEMORY_UNIT);
    claim->bytes = bytes;
    return true;
}

void pm_claim_undo(const struct pm_claim *claim, CUresult result) {
    if (!claim->self)
        return;
    pm_process_give_back(claim->self, claim->device, claim->kind, claim->bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        pm_process_denied_by_card(claim->self, claim->device, claim->bytes);
    pm_process_change_ends(claim->self, claim->device);
}

void pm_claim_end(const struct pm_claim *claim, CUresult result, enum pm_holding_class of, uint64_t key,
                  uint64_t other) {
    if (!claim->self)
        return;
    struct pm_holding holding = {key, claim->bytes, other, claim->device, (uint16_t)claim->kind, 1, 0};
    if (result != CUDA_SUCCESS) {
        pm_claim_undo(claim, result);
        return;
    }
    if (claim->bytes && !pm_pointers_put(claim->self->pointers, of, &holding)) {
        /* it could never be given back by name, and would stay reserved for ever */
        pm_process_give_back(claim->self, claim->device, claim->kind, claim->bytes);
        pm_add(&pm_process_counters(claim->self, claim->device)->internal_faults, 1);
    }
    pm_process_change_ends(claim->self, claim->device);
}

bool pm_holding_out(enum pm_holding_class of, uint64_t key, struct pm_holding *holding) {
    struct pm_process *self = pm_self();
    bool had = self && pm_pointers_take(self->pointers, of, key, holding);
    if (had)
        pm_process_change_begins(self, holding->device);
    return had;
}

void pm_holding_gone(bool had, enum pm_holding_class of, const struct pm_holding *holding, CUresult result) {
    struct pm_process *self = pm_self();
    if (!had || !self)
        return;
    if (result == CUDA_SUCCESS)
        pm_process_give_back(self, holding->device, holding->kind, holding->bytes);
    else
        pm_pointers_put(self->pointers, of, holding);
    pm_process_change_ends(self, holding->device);
}

bool pm_handle_out(uint64_t handle, struct pm_holding *holding) {
    struct pm_process *self = pm_self();
    bool had = self && pm_pointers_use(self->pointers, PM_HOLD_HANDLE, handle, -1, holding);
    if (had)
        pm_process_change_begins(self, holding->device);
    return had;
}

void pm_handle_gone(bool had, const struct pm_holding *holding, CUresult result) {
    struct pm_process *self = pm_self();
    if (!had || !self)
        return;
    struct pm_holding memory = *holding;
    memory.uses = 1;
    if (result != CUDA_SUCCESS && holding->uses)
        pm_pointers_use(self->pointers, PM_HOLD_HANDLE, holding->key, 1, &memory);
    else if (result != CUDA_SUCCESS)
        pm_pointers_put(self->pointers, PM_HOLD_HANDLE, &memory);
    else if (holding->uses == 0)
        pm_process_give_back(self, holding->device, holding->kind, holding->bytes);
    pm_process_change_ends(self, holding->device);
}

struct pm_use {
    struct pm_holding use, memory;
    bool had;
};

void pm_uses_add(struct pm_uses *uses, const struct pm_holding *use, uint64_t handle) {
    struct pm_use one = {.use = *use};
    one.had = pm_handle_out(handle, &one.memory);
    if ((uses->count & (uses->count - 1)) == 0) {
        struct pm_use *list = realloc(uses->list, (uses->count ? 2 * uses->count : 1) * sizeof *list);
        if (!list) { /* it cannot be remembered, so it ends now */
            pm_handle_gone(one.had, &one.memory, CUDA_SUCCESS);
            return;
        }
        uses->list = list;
    }
    uses->list[uses->count++] = one;
}

void pm_uses_gone(struct pm_uses *uses, enum pm_holding_class of, CUresult result) {
    struct pm_process *self = pm_self();
    while (uses->count > 0) { /* the last first: several may be of the same memory */
        const struct pm_use *one = &uses->list[--uses->count];
        if (self && result != CUDA_SUCCESS)
            pm_pointers_put(self->pointers, of, &one->use);
        pm_handle_gone(one->had, &one->memory, result);
    }
    free(uses->list);
}

uint64_t pm_this_context(void) {
    CUcontext handle = NULL;
    if (pm_need[PM_NEED_cuCtxGetCurrent])
        PM_NEED(cuCtxGetCurrent)(&handle);
    return pm_key(handle);
}

uint64_t pm_memory_context(void) {
    struct pm_process *self = pm_self();
    struct pm_holding green;
    uint64_t current = pm_this_context();
    return self && pm_pointers_get(self->pointers, PM_HOLD_GREEN, current, &green) ? green.other : current;
}
