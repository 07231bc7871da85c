/* This process's memory in the allocation's account: taken within the limit, or as the driver says that it is in use.
 */
#include <stdio.h>

#include "guard.h"
#include "memory.h"
#include "process.h"
#include "slots.h"

/* Says so once. */
static bool torn_away(struct pm_process *self) {
    if (!(pm_guard_torn() & (PM_TORN_GRANT | PM_TORN_METER)))
        return false;
    if (!__atomic_exchange_n(&self->told_torn, 1, __ATOMIC_RELAXED))
        fprintf(stderr,
                "poolmeter: a page was torn away: new device memory is denied, expected the page to stay as it was "
                "made: %s\n",
                self->folder);
    return true;
}

bool pm_process_take(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes) {
    pm_process_keep_slot(self);
    uint64_t limit = pm_process_limits(self, device).memory_limit;
    if (limit != PM_UNLIMITED && torn_away(self))
        limit = 0; /* what the others hold is not known any more */
    pthread_mutex_lock(&self->memory_lock);
    bool taken = pm_memory_take(&self->view, self->slot, device, kind, bytes, limit);
    if (!taken) { /* a process that was killed may still hold what is missing */
        struct pm_identity identity;
        pm_identity_read(&identity);
        if (pm_slots_reclaim(&self->view, self->lock_fd, self->slot, &identity, 5) != 0)
            taken = pm_memory_take(&self->view, self->slot, device, kind, bytes, limit);
    }
    pthread_mutex_unlock(&self->memory_lock);
    if (!taken) {
        pm_add(&pm_process_counters(self, device)->denied_limit, 1);
        pm_add(&pm_process_counters(self, device)->denied_limit_bytes, bytes);
    }
    return taken;
}

void pm_process_take_used(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes) {
    pthread_mutex_lock(&self->memory_lock);
    pm_memory_take(&self->view, self->slot, device, kind, bytes, PM_UNLIMITED);
    pthread_mutex_unlock(&self->memory_lock);
}

void pm_process_settle_graph_memory(struct pm_process *self, uint32_t device, uint64_t bytes) {
    bytes = PM_UNITS(bytes) * PM_MEMORY_UNIT;
    pthread_mutex_lock(&self->memory_lock);
    uint64_t held = self->graph_bytes[device];
    if (bytes > held)
        pm_memory_take(&self->view, self->slot, device, PM_MEMORY_GRAPH, bytes - held, PM_UNLIMITED);
    else
        pm_memory_give_back(&self->view, self->slot, device, PM_MEMORY_GRAPH, held - bytes);
    pm_poke(&self->graph_bytes[device], bytes);
    pthread_mutex_unlock(&self->memory_lock);
}

bool pm_process_reserve_graph_memory(struct pm_process *self, uint32_t device, uint64_t bytes) {
    bytes = PM_UNITS(bytes) * PM_MEMORY_UNIT;
    uint64_t held = pm_peek(&self->graph_bytes[device]);
    if (bytes <= held)
        return true;
    if (!pm_process_take(self, device, PM_MEMORY_GRAPH, bytes - held))
        return false;
    pthread_mutex_lock(&self->memory_lock);
    pm_poke(&self->graph_bytes[device], self->graph_bytes[device] + bytes - held);
    pthread_mutex_unlock(&self->memory_lock);
    return true;
}

void pm_process_give_back(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes) {
    pthread_mutex_lock(&self->memory_lock);
    pm_memory_give_back(&self->view, self->slot, device, kind, bytes);
    pthread_mutex_unlock(&self->memory_lock);
}

void pm_process_change_begins(struct pm_process *self, uint32_t device) {
    if (device != PM_NO_DEVICE) {
        __atomic_fetch_add(&self->changes_begun[device], 1, __ATOMIC_SEQ_CST);
        pm_board_change(self->boards[device]);
    }
}

void pm_process_change_ends(struct pm_process *self, uint32_t device) {
    if (device != PM_NO_DEVICE) {
        pm_board_change(self->boards[device]);
        __atomic_fetch_add(&self->changes_ended[device], 1, __ATOMIC_SEQ_CST);
    }
}

void pm_process_denied_by_card(struct pm_process *self, uint32_t device, uint64_t bytes) {
    pm_add(&pm_process_counters(self, device)->denied_card, 1);
    pm_add(&pm_process_counters(self, device)->denied_card_bytes, bytes);
}
