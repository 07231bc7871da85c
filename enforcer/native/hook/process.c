#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "board.h"
#include "clock.h"
#include "guard.h"
#include "memory.h"
#include "settler.h"
#include "slots.h"

#define SELF_FOLDER "/run/poolmeter/self"

struct pm_process *pm_process_page;

/* Outlives a fork on purpose: the child closes the descriptor, which would keep its parent's lock alive. */
static int inherited_fd = -1;
static dev_t inherited_device;
static ino_t inherited_inode;

static void say(const char *what, const char *path) {
    fprintf(stderr, "poolmeter: %s%s%s\n", what, path ? ": " : "", path ? path : "");
}

static void close_inherited(void) {
    struct stat st;
    int fd = inherited_fd;
    inherited_fd = -1;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_dev == inherited_device && st.st_ino == inherited_inode)
        close(fd);
}

static void in_child(void) {
    close_inherited();
    if (pm_process_page) /* already wiped by the kernel where it knows how */
        memset(pm_process_page, 0, sizeof *pm_process_page);
}

__attribute__((constructor)) static void make_page(void) {
    if (pm_process_page)
        return;
    size_t size = (sizeof(struct pm_process) + 4095) & ~(size_t)4095;
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return;
    /* A raw clone runs no atfork handler; a wiped page tells any child that it is one. */
    madvise(at, size, MADV_WIPEONFORK);
    pm_process_page = at;
    pthread_atfork(NULL, NULL, in_child);
}

static void at_exit(void) {
    struct pm_process *self = pm_process_page;
    if (!self || pm_load(&self->state) != PM_ATTACHED)
        return;
    for (uint32_t i = 0; i < self->context_count; i++)
        if (self->contexts[i] && self->contexts[i]->handle)
            pm_tracker_finish(&self->contexts[i]->tracker, true, false);
    pm_store(&self->state, PM_INERT);
    for (uint32_t i = 0; i < self->context_count; i++)
        if (self->contexts[i])
            pm_board_leave(self->boards[self->contexts[i]->device], self->contexts[i]->own_seat);
    for (uint32_t d = 0; d < self->view.device_count; d++)
        pm_board_leave(self->boards[d], self->seats[d]);
    pm_slot_release(&self->view, self->lock_fd, self->slot);
}

bool pm_process_refuses(void) {
    struct pm_process *self = pm_process_page;
    return self && pm_load(&self->state) == PM_REFUSED;
}

static uint64_t hash_text(const char *text) {
    uint64_t hash = 1469598103934665603u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 1099511628211u;
    return hash ? hash : 1;
}

/* Its low half is the allocation's, whose processes differ in the high one. */
static uint64_t owner_of(const struct pm_process *self) {
    return hash_text(self->folder) ^ (uint64_t)getpid() << 32;
}

bool pm_process_alone(const struct pm_process *self, uint32_t device) {
    return pm_board_alone(self->boards[device], owner_of(self));
}

static void refresh_limits(struct pm_process *self) {
    if (pm_guard_torn() & PM_TORN_GRANT) { /* what it said last holds */
        pm_store(&self->grant_generation, pm_load(&self->grant->generation));
        return;
    }
    struct pm_grant *copy = malloc(sizeof *copy);
    if (copy && self->grant && pm_grant_read(self->grant, copy)) {
        for (uint32_t d = 0; d < self->view.device_count; d++) {
            struct pm_limits limits = {.limit_ppm = PM_UNLIMITED, .memory_limit = 0};
            const struct pm_grant_device *listed = NULL;
            for (uint32_t i = 0; i < copy->device_count; i++) {
                const struct pm_grant_device *entry = &copy->devices[i];
                if (strncmp(entry->uuid, self->uuids[d], PM_UUID_BYTES) == 0)
                    listed = entry;
            }
            if (listed)
                limits = (struct pm_limits){listed->limit_ppm, listed->memory_limit, 1, listed->show_memory,
                                            copy->charge_copies};
            pm_limiter_set(&self->limiters[d], copy->generation, limits.limit_ppm,
                           listed && (listed->soft || copy->soft), listed ? listed->weight : 0, copy->suspended != 0);
            pm_poke(&self->limits[d].limit_ppm, limits.limit_ppm);
            pm_poke(&self->limits[d].memory_limit, limits.memory_limit);
            pm_poke(&self->limits[d].show_memory, limits.show_memory);
            pm_poke(&self->limits[d].charge_copies, limits.charge_copies);
            pm_poke(&self->limits[d].listed, limits.listed);
        }
        for (uint32_t i = 0; i < self->context_count; i++)
            pm_limiter_present(&self->limiters[self->contexts[i]->device], self->contexts[i]->own_seat);
        pm_store(&self->grant_generation, copy->generation);
    }
    free(copy);
}

static void map_boards(struct pm_process *self, bool own_folder) {
    for (uint32_t d = 0; d < self->view.device_count; d++) {
        char path[512];
        snprintf(path, sizeof path, own_folder ? "%s/devices/%s" : "%s/../../devices/%s", self->folder, self->uuids[d]);
        self->boards[d] = strchr(self->uuids[d], '/') ? NULL : pm_board_map(path, self->uuids[d]);
        pm_guard_add(self->boards[d], sizeof(struct pm_board), PM_TORN_BOARD);
        self->seats[d] = pm_board_sit(self->boards[d], owner_of(self));
        self->limiters[d].board = self->boards[d];
        self->limiters[d].seat = self->seats[d];
        pm_limiter_present(&self->limiters[d], self->seats[d]);
    }
}

static const char *fault_text(enum pm_page_fault fault) {
    switch (fault) {
    case PM_PAGE_ABSENT:
        return "page is absent, expected a file";
    case PM_PAGE_DENIED:
        return "page cannot be opened, expected permission to";
    default:
        return "file is no page of poolmeter, expected one";
    }
}

static void say_fault(enum pm_page_fault fault, const char *path) {
    uint32_t found[4] = {0}; /* grant and meter begin alike: magic, then the two numbers */
    int fd = fault == PM_PAGE_VERSION ? pm_open_page(path, O_RDONLY) : -1;
    if (fd >= 0 && pread(fd, found, sizeof found, 0) == (ssize_t)sizeof found)
        fprintf(stderr, "poolmeter: page %s has ABI version %u.%u, expected %d.x\n", path, found[2], found[3],
                PM_ABI_MAJOR);
    else
        say(fault_text(fault), path);
    if (fd >= 0)
        close(fd);
}

/* In the meter, where there is one: who cannot attach has no slot. */
static void count_fault(const char *folder) {
    char path[512];
    struct pm_view view;
    snprintf(path, sizeof path, "%s/meter", folder);
    if (pm_view_map(path, &view) == PM_PAGE_OK) {
        pm_add(&view.header->faults, 1);
        pm_view_unmap(&view);
    }
}

static int open_for_lock(const char *folder) {
    char path[512];
    snprintf(path, sizeof path, "%s/meter", folder);
    int fd = pm_open_page(path, O_RDWR);
    /* out of the way of programs that expect the next number, or close the first few */
    int moved = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 512);
    if (moved >= 0) {
        close(fd);
        fd = moved;
    }
    return fd;
}

static void remember_fd(int fd) {
    struct stat st;
    if (fstat(fd, &st) == 0) {
        inherited_device = st.st_dev;
        inherited_inode = st.st_ino;
        inherited_fd = fd;
    }
}

static bool is_ours(int fd) {
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 && st.st_dev == inherited_device && st.st_ino == inherited_inode;
}

static uint32_t attach_locked(struct pm_process *self) {
    char path[512];
    bool own_folder = access(SELF_FOLDER "/meter", F_OK) == 0;
    const char *folder = own_folder ? SELF_FOLDER : secure_getenv("POOLMETER_ALLOCATION_DIR");
    const char *on_fault = secure_getenv("POOLMETER_ON_FAULT");
    uint32_t failed = on_fault && strcmp(on_fault, "refuse") == 0 ? PM_REFUSED : PM_INERT;
    close_inherited();
    if (!folder || !*folder || strlen(folder) >= sizeof self->folder)
        return failed;
    snprintf(self->folder, sizeof self->folder, "%s", folder);

    snprintf(path, sizeof path, "%s/grant", folder);
    enum pm_page_fault fault = pm_grant_map(path, &self->grant);
    if (fault == PM_PAGE_OK && pm_peek(&self->grant->on_fault) == PM_ON_FAULT_REFUSE)
        failed = PM_REFUSED;
    if (fault == PM_PAGE_OK) {
        snprintf(path, sizeof path, "%s/meter", folder);
        fault = pm_view_map(path, &self->view);
    }
    if (fault != PM_PAGE_OK) {
        say_fault(fault, path);
        count_fault(folder);
        return failed;
    }
    pm_guard_reset();
    pm_guard_add(self->grant, sizeof *self->grant, PM_TORN_GRANT);
    pm_guard_add(self->view.header, self->view.size, PM_TORN_METER);
    pm_guard_install();
    for (uint32_t d = 0; d < self->view.device_count; d++) {
        memcpy(self->uuids[d], pm_view_device(&self->view, d)->uuid, PM_UUID_BYTES);
        self->uuids[d][PM_UUID_BYTES - 1] = 0;
        self->limiters[d].bucket = &pm_view_device(&self->view, d)->bucket;
    }
    self->lock_fd = open_for_lock(self->folder);
    if (self->lock_fd < 0) {
        say("page cannot be opened again, expected permission to", path);
        pm_add(&self->view.header->faults, 1);
        return failed;
    }
    struct pm_identity identity;
    pm_identity_read(&identity);
    self->slot = pm_slot_claim(&self->view, self->lock_fd, &identity);
    if (self->slot == PM_NO_SLOT) {
        say("all slots of the page are taken, expected a free one", path);
        pm_add(&self->view.header->faults, 1);
        close(self->lock_fd);
        return failed;
    }
    remember_fd(self->lock_fd);
    self->slot_generation = pm_view_slot(&self->view, self->slot)->generation;
    refresh_limits(self);
    map_boards(self, own_folder);
    self->estimates = pm_estimates_create();
    self->pointers = pm_pointers_create();
    self->generation = (uint64_t)getpid() << 32 | 1;
    atexit(at_exit);
    return PM_ATTACHED;
}

uint32_t pm_process_attach(void) {
    struct pm_process *self = pm_process_page;
    if (!self)
        return PM_INERT;
    int before = errno;
    pthread_mutex_lock(&self->lock);
    uint32_t state = pm_load(&self->state);
    if (state == PM_UNTOUCHED) {
        state = attach_locked(self);
        pm_store(&self->state, state);
    }
    pthread_mutex_unlock(&self->lock);
    errno = before;
    return state;
}

uint32_t pm_process_device(struct pm_process *self, const unsigned char uuid[16]) {
    char text[40];
    snprintf(text, sizeof text, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", uuid[0],
             uuid[1], uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9], uuid[10], uuid[11],
             uuid[12], uuid[13], uuid[14], uuid[15]);
    for (uint32_t d = 0; d < self->view.device_count; d++) {
        const char *dash = strchr(self->uuids[d], '-'); /* "GPU-…" or "MIG-…" */
        if (dash && strcmp(dash + 1, text) == 0)
            return d;
    }
    return PM_NO_DEVICE;
}

struct pm_limits pm_process_limits(struct pm_process *self, uint32_t device) {
    if (pm_load(&self->grant->generation) != pm_load(&self->grant_generation)) {
        pthread_mutex_lock(&self->lock);
        refresh_limits(self);
        pthread_mutex_unlock(&self->lock);
    }
    struct pm_limits *now = &self->limits[device];
    return (struct pm_limits){pm_peek(&now->limit_ppm), pm_peek(&now->memory_limit), pm_peek(&now->listed),
                              pm_peek(&now->show_memory), pm_peek(&now->charge_copies)};
}

static struct pm_context *new_context(void) {
    struct pm_context *made = aligned_alloc(_Alignof(struct pm_context), sizeof *made);
    if (made)
        memset(made, 0, sizeof *made);
    return made;
}

/* A tracker that has served another context may be looked at by other threads just now: its lock stays what it is. */
static bool start_tracker(struct pm_process *self, struct pm_tracker *tracker, bool fresh, uint32_t device,
                          const struct pm_driver *driver) {
    struct pm_tracker *made = fresh ? tracker : aligned_alloc(_Alignof(struct pm_tracker), sizeof *made);
    if (!made)
        return false;
    pm_tracker_init(made, driver, pm_process_counters(self, device));
    made->limiter = &self->limiters[device];
    made->board = self->boards[device];
    made->seat = self->seats[device];
    made->settler = &self->settler;
    if (made == tracker)
        return true;
    pthread_mutex_lock(&tracker->lock);
    memcpy(tracker, made, offsetof(struct pm_tracker, lock));
    pthread_mutex_unlock(&tracker->lock);
    free(made);
    return true;
}

/* Contexts of one process take turns of the device like those of two, and have to see each other. */
static void seat_apart(struct pm_process *self, struct pm_context *context) {
    uint32_t device = context->device;
    bool first = true;
    context->own_seat = PM_NO_SEAT;
    for (uint32_t i = 0; i < self->context_count; i++)
        first &=
            self->contexts[i] == context || !pm_load(&self->contexts[i]->handle) || self->contexts[i]->device != device;
    if (first)
        return;
    context->own_seat = pm_board_sit(self->boards[device], owner_of(self));
    if (context->own_seat == PM_NO_SEAT)
        return;
    pm_limiter_present(&self->limiters[device], context->own_seat);
    context->tracker.seat = context->own_seat;
}

struct pm_context *pm_process_context(struct pm_process *self, void *handle, uint32_t device,
                                      const struct pm_driver *driver) {
    struct pm_context *found = NULL, *spare = NULL;
    if (device >= self->view.device_count)
        return NULL;
    pthread_mutex_lock(&self->lock);
    for (uint32_t i = 0; i < self->context_count && !found; i++) {
        void *known = pm_load(&self->contexts[i]->handle);
        if (known == handle)
            found = self->contexts[i];
        else if (!known)
            spare = self->contexts[i];
    }
    if (!found) {
        bool fresh = !spare && self->context_count < PM_MAX_CONTEXTS;
        found = fresh ? new_context() : spare;
        if (found && !start_tracker(self, &found->tracker, fresh, device, driver))
            found = NULL;
        if (found) {
            if (self->context_count < 4)
                atexit(at_exit); /* the driver may have registered its own meanwhile; ours has to come first */
            found->device = device;
            seat_apart(self, found);
            pm_store(&found->handle, handle); /* from here on other threads may use it */
            if (fresh) {
                pm_store(&self->contexts[self->context_count], found);
                pm_store(&self->context_count, self->context_count + 1);
            }
        }
    }
    if (found) {
        pthread_mutex_lock(&found->tracker.lock);
        found->tracker.closed = false;
        pthread_mutex_unlock(&found->tracker.lock);
    }
    if (found && !self->settling) { /* not before: a program that uses no device keeps its number of threads */
        self->settling = true;
        pm_settler_start(self);
    }
    pthread_mutex_unlock(&self->lock);
    return found;
}

void pm_process_forget_context(struct pm_process *self, void *handle, bool destroy_events, bool gone) {
    pthread_mutex_lock(&self->lock);
    struct pm_context *found = NULL;
    for (uint32_t i = 0; i < self->context_count; i++)
        if (handle && self->contexts[i]->handle == handle)
            found = self->contexts[i];
    if (found)
        pm_store(&self->generation, self->generation + 1); /* what threads remember of contexts is stale */
    pthread_mutex_unlock(&self->lock);
    if (found) {
        pm_tracker_finish(&found->tracker, true, destroy_events);
        if (gone) { /* nobody presents a limit at a seat that may be another's */
            pthread_mutex_lock(&self->lock);
            pm_board_leave(self->boards[found->device], found->own_seat);
            found->own_seat = PM_NO_SEAT;
            pm_store(&found->handle, NULL);
            pthread_mutex_unlock(&self->lock);
        }
    }
}

void pm_process_forget_memory(struct pm_process *self, const void *handle) {
    struct pm_holding gone; /* physical memory belongs to no context: its `other` is 0 */
    for (int of = 0; handle && of < PM_HOLD_MEMORY; of++)
        for (size_t at = 0;
             pm_pointers_take_any(self->pointers, (enum pm_holding_class)of, (uint64_t)(uintptr_t)handle, &at, &gone);)
            pm_process_give_back(self, gone.device, gone.kind, gone.bytes);
}

/* Everything that is held goes to the new slot; the limit is not asked, for the memory is in use. */
static void take_again(struct pm_process *self) {
    for (int of = 0; of < PM_HOLD_MEMORY; of++) {
        struct pm_holding holding;
        for (size_t at = 0; pm_pointers_next(self->pointers, (enum pm_holding_class)of, &at, &holding);)
            pm_memory_take(&self->view, self->slot, holding.device, holding.kind, holding.bytes, PM_UNLIMITED);
    }
    for (uint32_t d = 0; d < self->view.device_count; d++)
        pm_memory_take(&self->view, self->slot, d, PM_MEMORY_GRAPH, self->graph_bytes[d], PM_UNLIMITED);
}

void pm_process_keep_slot(struct pm_process *self) {
    if (is_ours(self->lock_fd) && pm_load(&pm_view_slot(&self->view, self->slot)->generation) == self->slot_generation)
        return;
    pthread_mutex_lock(&self->lock);
    pthread_mutex_lock(&self->memory_lock);
    if (!is_ours(self->lock_fd)) {
        self->lock_fd = open_for_lock(self->folder);
        remember_fd(self->lock_fd);
    }
    if (self->lock_fd >= 0 && !pm_slot_relock(&self->view, self->lock_fd, self->slot, self->slot_generation)) {
        struct pm_identity identity; /* folded meanwhile: go on in another slot */
        pm_identity_read(&identity);
        uint32_t slot = pm_slot_claim(&self->view, self->lock_fd, &identity);
        if (slot != PM_NO_SLOT) {
            self->slot = slot;
            self->slot_generation = pm_view_slot(&self->view, slot)->generation;
            take_again(self);
            for (uint32_t i = 0; i < self->context_count; i++) {
                struct pm_context *context = self->contexts[i];
                pthread_mutex_lock(&context->tracker.lock);
                pm_store(&context->tracker.counters, pm_process_counters(self, context->device));
                pthread_mutex_unlock(&context->tracker.lock);
            }
        }
        pm_add(&self->view.header->faults, 1);
    }
    pthread_mutex_unlock(&self->memory_lock);
    pthread_mutex_unlock(&self->lock);
}

void pm_process_poll(struct pm_process *self) {
    for (uint32_t i = 0; i < pm_load(&self->context_count); i++)
        if (pm_load(&self->contexts[i]->handle))
            pm_tracker_poll(&self->contexts[i]->tracker);
}
