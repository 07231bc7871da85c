/*
 * A process of an allocation without a driver: attaches, takes and gives back memory, counts launches, until it is
 * killed.
 *
 *   worker FOLDER RESULT MODE...
 *
 * RESULT is a file of two counters that outlive it: launches counted before, and after, each step. Modes:
 *
 *   churn                       memory and launches for ever
 *
 *   take BYTES                  one allocation; prints taken or denied; then waits for its standard input to end
 *
 *   fork | clone | vfork        a child by that call; prints the slots of parent and child
 *
 *   exit N                      N launches, then a normal exit
 *
 *   fold-race                   attaches, prints ready, then sleeps
 *
 *   initialiser                 in the middle of starting: holds the fold lock and a claimed slot, prints ready, sleeps
 *
 *   torn                        launches counted and memory taken for each line read; prints what it has
 *
 *   close                       holds memory, closes all descriptors; each line read: goes on and prints its slot
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "board.h"
#include "memory.h"
#include "process.h"
#include "slots.h"

static void report(const char *who) {
    struct pm_process *self = pm_self();
    printf("%s %d %d\n", who, (int)getpid(), self ? (int)self->slot : -1);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    setenv("POOLMETER_ALLOCATION_DIR", argv[1], 1);
    int fd = open(argv[2], O_RDWR | O_CREAT, 0666);
    if (fd < 0 || ftruncate(fd, 16) != 0)
        return 2;
    volatile uint64_t *result = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    const char *mode = argv[3];
    if (strcmp(mode, "vfork") == 0) { /* before the parent attaches: the child must not attach in its place */
        report("parent");
        pid_t child = vfork();
        if (child == 0)
            execl("/bin/true", "true", NULL);
        waitpid(child, NULL, 0);
        report("parent");
        return 0;
    }
    if (strcmp(mode, "initialiser") == 0) {
        struct pm_view view;
        char path[512];
        snprintf(path, sizeof path, "%s/meter", argv[1]);
        int lock_fd = pm_open_page(path, O_RDWR);
        if (lock_fd < 0 || pm_view_map(path, &view) != PM_PAGE_OK)
            return 2;
        const off_t places[] = {PM_LOCK_FOLD, PM_LOCK_SLOTS};
        for (int i = 0; i < 2; i++) {
            struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = places[i], .l_len = 1};
            if (fcntl(lock_fd, F_OFD_SETLK, &lock) != 0)
                return 2;
        }
        pm_store(&view.header->slots_used, 1);
        pm_store(&pm_view_slot(&view, 0)->state, PM_SLOT_CLAIMED);
        printf("ready\n");
        fflush(stdout);
        pause();
    }
    struct pm_process *self = pm_self();
    if (!self) {
        printf("inert %u\n", pm_process_page->state);
        return 3;
    }
    struct pm_counters *counters = pm_process_counters(self, 0);
    if (strcmp(mode, "take") == 0) {
        char line[16];
        printf("ready\n");
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin))
            return 2;
        printf("%s\n", pm_process_take(self, 0, PM_MEMORY_DEVICE, strtoull(argv[4], NULL, 10)) ? "taken" : "denied");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin))
            ;
        return 0;
    }
    if (strcmp(mode, "exit") == 0) {
        pm_add(&counters->launches, strtoull(argv[4], NULL, 10));
        pm_add(&counters->busy_ns, 1000);
        pm_add(&counters->pending_ns, 234);
        return 0;
    }
    if (strcmp(mode, "fold-race") == 0) {
        report("ready");
        pause();
    }
    if (strcmp(mode, "torn") == 0) {
        char line[16];
        report("ready");
        while (fgets(line, sizeof line, stdin)) {
            int taken = pm_process_take(self, 0, PM_MEMORY_DEVICE, 1 << 20);
            pm_add(&pm_process_counters(self, 0)->launches, 1);
            pm_board_busy(self->boards[0], self->seats[0], 1);
            pm_process_give_back(self, 0, PM_MEMORY_DEVICE, taken << 20);
            printf("%s %llu\n", taken ? "taken" : "denied", (unsigned long long)pm_process_limits(self, 0).limit_ppm);
            fflush(stdout);
        }
        return 0;
    }
    if (strcmp(mode, "close") == 0) {
        char line[16];
        struct pm_holding held = {.key = 4711, .bytes = 1 << 20, .kind = PM_MEMORY_DEVICE, .uses = 1};
        pm_process_take(self, 0, PM_MEMORY_DEVICE, held.bytes);
        pm_pointers_put(self->pointers, PM_HOLD_ADDRESS, &held);
        close_range(3, ~0u, 0);
        report("closed");
        while (fgets(line, sizeof line, stdin)) {
            pm_process_keep_slot(self);
            report("kept");
        }
        pm_process_give_back(self, 0, PM_MEMORY_DEVICE, held.bytes);
        return 0;
    }
    if (strcmp(mode, "fork") == 0 || strcmp(mode, "clone") == 0) {
        report("parent");
        pid_t child = strcmp(mode, "fork") == 0 ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (child == 0) {
            report("child");
            struct pm_process *own = pm_self();
            pm_add(&pm_process_counters(own, 0)->launches, 5);
            if (strcmp(mode, "fork") == 0)
                exit(0);
            _exit(0);
        }
        waitpid(child, NULL, 0);
        pm_add(&counters->launches, 2);
        report("parent");
        return 0;
    }
    uint64_t random = (uint64_t)getpid() * 0x9e3779b97f4a7c15u, held[8] = {0};
    for (;;) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint32_t i = random >> 61, kind = random >> 40 & 7;
        (void)kind;
        if (held[i]) {
            pm_process_give_back(self, 0, i, held[i]);
            held[i] = 0;
        } else {
            uint64_t bytes = (random >> 33 & 0xfffff) + 1;
            if (pm_process_take(self, 0, i, bytes))
                held[i] = bytes;
        }
        result[0]++;
        pm_add(&counters->launches, 1);
        pm_add(&counters->busy_ns, 3);
        result[1]++;
    }
}
