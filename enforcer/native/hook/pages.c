#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int pm_open_page(const char *path, int flags) {
    int fd = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return -errno;
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return -EINVAL;
    }
    return fd;
}

static enum pm_page_fault fault_of(int error) {
    if (error == -ENOENT || error == -ENOTDIR)
        return PM_PAGE_ABSENT;
    return error == -EACCES || error == -EPERM || error == -EROFS ? PM_PAGE_DENIED : PM_PAGE_FOREIGN;
}

enum pm_page_fault pm_view_map_fd(int fd, struct pm_view *view) {
    struct pm_meter head;
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head ||
        head.magic != PM_METER_MAGIC)
        return PM_PAGE_FOREIGN;
    if (head.abi_major != PM_ABI_MAJOR)
        return PM_PAGE_VERSION;
    if (head.device_capacity == 0 || head.device_capacity > PM_MAX_DEVICES || head.device_count == 0 ||
        head.device_count > head.device_capacity || head.slot_count == 0 || head.slot_count > PM_MAX_SLOTS)
        return PM_PAGE_FOREIGN;
    struct pm_view found = {
        .device_count = head.device_count,
        .device_capacity = head.device_capacity,
        .slot_count = head.slot_count,
        .slot_size = sizeof(struct pm_slot) + head.device_capacity * sizeof(struct pm_counters),
    };
    uint64_t slots_offset = sizeof(struct pm_meter) + head.device_capacity * sizeof(struct pm_meter_device);
    found.size = slots_offset + found.slot_count * found.slot_size;
    if (head.header_size != sizeof(struct pm_meter) || head.device_size != sizeof(struct pm_meter_device) ||
        head.slot_header_size != sizeof(struct pm_slot) || head.counters_size != sizeof(struct pm_counters) ||
        head.slot_size != found.slot_size || head.devices_offset != sizeof(struct pm_meter) ||
        head.slots_offset != slots_offset || head.total_size != found.size || (uint64_t)st.st_size != found.size)
        return PM_PAGE_FOREIGN;
    void *at = mmap(NULL, found.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return PM_PAGE_DENIED;
    found.header = at;
    *view = found;
    return PM_PAGE_OK;
}

enum pm_page_fault pm_view_map(const char *path, struct pm_view *view) {
    int fd = pm_open_page(path, O_RDWR);
    if (fd < 0)
        return fault_of(fd);
    enum pm_page_fault fault = pm_view_map_fd(fd, view);
    close(fd);
    return fault;
}

void pm_view_unmap(struct pm_view *view) {
    if (view->header)
        munmap(view->header, view->size);
    memset(view, 0, sizeof *view);
}

enum pm_page_fault pm_grant_map(const char *path, const struct pm_grant **grant) {
    int fd = pm_open_page(path, O_RDONLY);
    if (fd < 0)
        return fault_of(fd);
    struct pm_grant head;
    struct stat st;
    enum pm_page_fault fault = PM_PAGE_FOREIGN;
    void *at = MAP_FAILED;
    if (fstat(fd, &st) == 0 && pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head &&
        head.magic == PM_GRANT_MAGIC) {
        if (head.abi_major != PM_ABI_MAJOR)
            fault = PM_PAGE_VERSION;
        else if (head.header_size == offsetof(struct pm_grant, devices) &&
                 head.entry_size == sizeof(struct pm_grant_device) && head.total_size == sizeof head &&
                 head.device_count <= PM_MAX_DEVICES && (uint64_t)st.st_size >= sizeof head)
            at = mmap(NULL, sizeof head, PROT_READ, MAP_SHARED, fd, 0);
    }
    close(fd);
    if (at == MAP_FAILED)
        return fault;
    *grant = at;
    return PM_PAGE_OK;
}

bool pm_grant_read(const struct pm_grant *grant, struct pm_grant *copy) {
    const uint64_t *from = (const uint64_t *)grant;
    uint64_t words[sizeof *copy / 8];
    for (int attempt = 0; attempt < 1000; attempt++) {
        uint64_t before = pm_load(&grant->generation);
        if (before % 2 == 0) {
            for (size_t i = 0; i < sizeof words / sizeof *words; i++)
                words[i] = pm_load(&from[i]); /* in order, and before the generation is read again */
            if (pm_peek(&grant->generation) == before) {
                memcpy(copy, words, sizeof words);
                if (copy->device_count > PM_MAX_DEVICES)
                    copy->device_count = PM_MAX_DEVICES;
                return true;
            }
        }
        if (attempt > 10)
            sched_yield();
    }
    return false;
}

int pm_grant_store(int fd, const struct pm_grant *image) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    if ((uint64_t)st.st_size < sizeof *image)
        return -EINVAL;
    struct pm_grant *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return -errno;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    if (fcntl(fd, F_OFD_SETLKW, &lock) != 0) { /* two writers at once would leave a mixture under an even generation */
        int error = errno;
        munmap(page, sizeof *page);
        return -error;
    }
    uint64_t generation = pm_peek(&page->generation) | 1; /* already odd when a writer died at work */
    __atomic_exchange_n(&page->generation, generation, __ATOMIC_SEQ_CST);
    const uint64_t *from = (const uint64_t *)image;
    uint64_t *to = (uint64_t *)page;
    for (size_t i = 0; i < sizeof *image / 8; i++)
        if (i != offsetof(struct pm_grant, generation) / 8)
            pm_store(&to[i], from[i]); /* each after the odd generation */
    pm_store(&page->generation, generation + 1);
    lock.l_type = F_UNLCK;
    fcntl(fd, F_OFD_SETLK, &lock);
    munmap(page, sizeof *page);
    return 0;
}
