/* Mapping the pages of an allocation. What a page says about itself is checked once and never believed again. */
#ifndef PM_PAGES_H
#define PM_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "poolmeter_abi.h"

struct pm_view {
    struct pm_meter *header;
    size_t size;
    uint32_t device_count;
    uint32_t device_capacity;
    uint32_t slot_count;
    size_t slot_size;
};

enum pm_page_fault { PM_PAGE_OK, PM_PAGE_ABSENT, PM_PAGE_DENIED, PM_PAGE_FOREIGN, PM_PAGE_VERSION };

/* Opens a regular file, never a link and never waiting for a FIFO; -errno when it cannot. */
int pm_open_page(const char *path, int flags);
/* Maps the meter behind an open descriptor; the descriptor may be closed afterwards. */
enum pm_page_fault pm_view_map_fd(int fd, struct pm_view *view);
/* By path, through an open of its own: a mapping pins its open file, and with it every lock taken through that. */
enum pm_page_fault pm_view_map(const char *path, struct pm_view *view);
void pm_view_unmap(struct pm_view *view);
/* Maps the grant read-only. */
enum pm_page_fault pm_grant_map(const char *path, const struct pm_grant **grant);
/* Copies one consistent instant of the grant; false when a writer died at work (the copy is then as it was before). */
bool pm_grant_read(const struct pm_grant *grant, struct pm_grant *copy);
/* Makes the grant behind `fd` say `image`, by whole words between an odd and an even generation; 0 or -errno. */
int pm_grant_store(int fd, const struct pm_grant *image);

static inline struct pm_meter_device *pm_view_device(const struct pm_view *view, uint32_t device) {
    return (struct pm_meter_device *)((char *)view->header + sizeof(struct pm_meter)) + device;
}

static inline struct pm_slot *pm_view_slot(const struct pm_view *view, uint32_t slot) {
    char *first = (char *)(pm_view_device(view, view->device_capacity));
    return (struct pm_slot *)(first + slot * view->slot_size);
}

static inline struct pm_counters *pm_view_counters(const struct pm_view *view, uint32_t slot, uint32_t device) {
    return (struct pm_counters *)(pm_view_slot(view, slot) + 1) + device;
}

#define pm_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define pm_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define pm_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define pm_peek(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define pm_poke(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)

static inline void pm_raise(uint64_t *p, uint64_t value) {
    uint64_t old = pm_peek(p);
    while (old < value && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

#endif
