/* This process as its allocation knows it: pages, slot, limits. Wiped in any child, which attaches anew when it needs
 * to. */
#ifndef PM_PROCESS_H
#define PM_PROCESS_H

#include <pthread.h>

#include "pages.h"
#include "pointers.h"
#include "tracker.h"

#define PM_NO_DEVICE UINT32_MAX
#define PM_MAX_CONTEXTS 64
#define PM_MAX_ORDINALS 128

enum pm_state { PM_UNTOUCHED, PM_ATTACHED, PM_INERT, PM_REFUSED };

struct pm_limits {
    uint64_t limit_ppm;
    uint64_t memory_limit;
    uint32_t listed;
    uint32_t show_memory;
    uint32_t charge_copies;
};

struct pm_context {
    void *handle; /* CUcontext; NULL: gone */
    uint32_t device;
    uint32_t own_seat; /* of the board, beside the process' own; PM_NO_SEAT: none */
    struct pm_tracker tracker;
};

struct pm_process {             /* what every launch touches first */
    uint32_t state;             /* enum pm_state; 0 in a child that was forked */
    uint32_t possible_contexts; /* that this process ever had, at most */
    uint64_t generation;        /* of the contexts; differs between parent and child */
    struct pm_estimates *estimates;
    const struct pm_grant *grant;
    uint64_t grant_generation;
    uint32_t graphs_allocate; /* a graph with memory nodes was made: launches of graphs look */
    struct pm_limiter limiters[PM_MAX_DEVICES];
    pthread_mutex_t lock;        /* attaching, contexts, limits */
    pthread_mutex_t memory_lock; /* changes of the slot's memory */
    pthread_mutex_t graph_lock;  /* asking what is kept for graphs, and taking it over */
    struct pm_view view;
    uint32_t slot;
    uint64_t slot_generation;
    int lock_fd;
    struct pm_limits limits[PM_MAX_DEVICES];
    char uuids[PM_MAX_DEVICES][PM_UUID_BYTES];
    struct pm_board *boards[PM_MAX_DEVICES];
    uint32_t seats[PM_MAX_DEVICES];
    uint32_t device_of_ordinal[PM_MAX_ORDINALS]; /* meter index + 1; 0: not asked yet; PM_NO_DEVICE: not granted */
    uint8_t retained[PM_MAX_ORDINALS];           /* 1: its primary context was asked for */
    struct pm_context *contexts[PM_MAX_CONTEXTS];
    uint32_t context_count;
    uint32_t settler; /* futex word of the settling thread */
    bool settling;
    uint32_t told_torn;
    struct pm_pointers *pointers;
    uint64_t graph_bytes[PM_MAX_DEVICES];   /* what the driver keeps for graphs here; changed under memory_lock */
    uint64_t changes_begun[PM_MAX_DEVICES]; /* calls that take or give back memory of the device; only grow */
    uint64_t changes_ended[PM_MAX_DEVICES];
    char folder[256];
};

extern struct pm_process *pm_process_page;

/* Attaches when it was not tried yet. */
uint32_t pm_process_attach(void);

/* The attached process; NULL: the hook is inert. */
static inline struct pm_process *pm_self(void) {
    struct pm_process *self = pm_process_page;
    if (!self)
        return NULL;
    uint32_t state = pm_load(&self->state);
    if (state == PM_UNTOUCHED)
        state = pm_process_attach();
    return state == PM_ATTACHED ? self : NULL;
}

/* True when a fault of ours is to keep the program from the devices (on_fault = refuse). */
bool pm_process_refuses(void);

/* Meter index of the device with this uuid; PM_NO_DEVICE: not in this allocation. */
uint32_t pm_process_device(struct pm_process *self, const unsigned char uuid[16]);
/* Limits as the grant says now. */
struct pm_limits pm_process_limits(struct pm_process *self, uint32_t device);
/* Takes memory within the limit, or counts the denial. */
bool pm_process_take(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes);
/* Takes memory that is in use already: the limit is not asked. */
void pm_process_take_used(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes);
void pm_process_give_back(struct pm_process *self, uint32_t device, uint32_t kind, uint64_t bytes);
/* What the driver keeps for the graphs of this process, as it says now; memory that is in use is not refused. */
void pm_process_settle_graph_memory(struct pm_process *self, uint32_t device, uint64_t bytes);
/* At least so much is about to be kept for graphs; false: over the limit. */
bool pm_process_reserve_graph_memory(struct pm_process *self, uint32_t device, uint64_t bytes);
/* Between the two the account and the card may say different things of the device's memory. PM_NO_DEVICE: nothing. */
void pm_process_change_begins(struct pm_process *self, uint32_t device);
void pm_process_change_ends(struct pm_process *self, uint32_t device);
/* No other process that the hook is in has anything to do with the device, as far as can be seen. */
bool pm_process_alone(const struct pm_process *self, uint32_t device);
/* The card itself had no room. */
void pm_process_denied_by_card(struct pm_process *self, uint32_t device, uint64_t bytes);

static inline struct pm_counters *pm_process_counters(struct pm_process *self, uint32_t device) {
    return pm_view_counters(&self->view, self->slot, device);
}

/* The context's state, made when new; NULL when there is no room or the device is not granted. */
struct pm_context *pm_process_context(struct pm_process *self, void *handle, uint32_t device,
                                      const struct pm_driver *driver);
/* The context is about to go (`gone`), or may be: charge and forget its events. */
void pm_process_forget_context(struct pm_process *self, void *handle, bool destroy_events, bool gone);
/* The memory that belongs to the context goes with it. */
void pm_process_forget_memory(struct pm_process *self, const void *handle);
/* Sees to it that the slot is still ours: a program that closes all descriptors closes the one that holds its lock. */
void pm_process_keep_slot(struct pm_process *self);
/* Charges what has passed in all contexts. */
void pm_process_poll(struct pm_process *self);

#endif
