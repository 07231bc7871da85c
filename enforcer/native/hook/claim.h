/* An allocation on its way: taken from the limit before the driver is asked, given back when the driver refuses. */
#ifndef PM_CLAIM_H
#define PM_CLAIM_H

#include "shim.h"

#define PM_MISSING(name)                                                                                               \
    if (!pm_ready() || !pm_real[PM_HOOK_##name])                                                                       \
    return CUDA_ERROR_NOT_FOUND

/* The shim of other work than a launch, that goes into `queue`; and both variants of one that names its `stream`. */
#define PM_TAINTING(name, queue, params, ...)                                                                          \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        pm_taint(queue);                                                                                               \
        return ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                             \
    }
#define PM_TAINTING_STREAM(name, params, ...)                                                                          \
    PM_TAINTING(name, pm_stream(stream, PM_LEGACY), params, __VA_ARGS__)                                               \
    PM_TAINTING(name##_ptsz, pm_stream(stream, PM_PER_THREAD), params, __VA_ARGS__)

/* Without `self` it is not accounted. */
struct pm_claim {
    struct pm_process *self;
    uint32_t device;
    uint32_t kind;
    uint64_t bytes;
};

/* False: over the limit. */
bool pm_claim_begin(struct pm_claim *claim, uint32_t device, uint32_t kind, uint64_t bytes);
/* On the current context's device. */
bool pm_claim_here(struct pm_claim *claim, uint32_t kind, uint64_t bytes);
/* It turned out to be another number of bytes; false: over the limit, the claim is as it was. */
bool pm_claim_change(struct pm_claim *claim, uint64_t bytes);
/* The driver said so; counts a refusal of the card's own. */
void pm_claim_undo(const struct pm_claim *claim, CUresult result);
/* Keeps the claim under `key` when the driver gave the memory, else gives it back. */
void pm_claim_end(const struct pm_claim *claim, CUresult result, enum pm_holding_class of, uint64_t key,
                  uint64_t other);

/* Memory that is held: takes the holding out before the driver frees: afterwards the key may be another thread's new
 * allocation. */
bool pm_holding_out(enum pm_holding_class of, uint64_t key, struct pm_holding *holding);
/* Gives it back, or puts it back when the driver did not free. */
void pm_holding_gone(bool had, enum pm_holding_class of, const struct pm_holding *holding, CUresult result);
/* The same for one use of physical memory, which goes with its last handle and mapping. */
bool pm_handle_out(uint64_t handle, struct pm_holding *holding);
void pm_handle_gone(bool had, const struct pm_holding *holding, CUresult result);

/* Mappings, or tiles of arrays, that a call is about to end, and with each a use of its memory. Begins as {0}. */
struct pm_uses {
    struct pm_use *list;
    size_t count;
};
void pm_uses_add(struct pm_uses *uses, const struct pm_holding *use, uint64_t handle);
void pm_uses_gone(struct pm_uses *uses, enum pm_holding_class of, CUresult result);

/* The current context; 0: none. */
uint64_t pm_this_context(void);
/* The one that memory allocated now goes away with: the primary one where a green context is current, for cuda.h calls
 * that "a normal primary context but with the resources of the specified green context". */
uint64_t pm_memory_context(void);

static inline uint64_t pm_key(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

#endif
