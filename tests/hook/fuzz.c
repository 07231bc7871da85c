/*
 * Processes of an allocation whose pages somebody scribbles over: fuzz FOLDER BOARD SEED ROUNDS [ONLY].
 *
 * Each round spoils copies of grant, meter and board in FOLDER (values, sizes, holes), then runs a process that
 * attaches, launches, takes memory, spoils words of its mapped pages as it goes, and truncates them. It may find itself
 * inert or refused; it must not be ended by a signal. A hold without end is an end in order. ONLY: that round alone.
 * Prints how many rounds there were and in how many of them the pages were taken for good.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "board.h"
#include "fake_driver.h"
#include "memory.h"
#include "slots.h"

#define OPERATIONS 160
#define SLEEPS 3000

static uint64_t dice, clock_ns = 1000000000000u;
static uint32_t *attached, *beside; /* shared with the children: attached, and with a board */
static int sleeps;
static const char *meter_path, *board_path;

static uint64_t roll(void) {
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    return dice >> 20;
}

static uint64_t now(void) {
    return pm_load(&clock_ns);
}

static void sleep_until(uint64_t until) {
    if (until > now())
        pm_store(&clock_ns, until);
    if (++sleeps > SLEEPS) /* the limit is next to nothing, or it is suspended */
        _exit(0);
}

static uint64_t odd_value(void) {
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      63,
                                      64,
                                      65,
                                      255,
                                      256,
                                      0x7f,
                                      0x7fffffff,
                                      1u << 31,
                                      0xffffffff,
                                      1ull << 32,
                                      1ull << 36,
                                      1ull << 62,
                                      1ull << 63,
                                      INT64_MAX,
                                      UINT64_MAX,
                                      UINT64_MAX - 1,
                                      1000000,
                                      999999,
                                      20000000,
                                      10000,
                                      UINT64_MAX - 99};
    uint64_t which = roll() % 32;
    return which < sizeof values / sizeof *values ? values[which] : roll() << 20 ^ roll();
}

struct page {
    char path[512];
    unsigned char *image;
    size_t size, head; /* most of the spoiling happens before `head` */
};

static struct page load(const char *path, size_t head) {
    struct page page = {.head = head};
    struct stat st;
    snprintf(page.path, sizeof page.path, "%s", path);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &st) != 0)
        exit(2);
    page.size = (size_t)st.st_size;
    page.image = malloc(page.size);
    if (!page.image || read(fd, page.image, page.size) != (ssize_t)page.size)
        exit(2);
    close(fd);
    return page;
}

static void spoil_bytes(unsigned char *at, size_t size, size_t head, uint64_t count) {
    while (count--) {
        uint64_t value = odd_value(), width = 1ull << roll() % 4;
        size_t range = roll() % 3 ? head : size, place = roll() % (range - 8) / width * width;
        memcpy(at + place, &value, width);
    }
}

/* Written anew under its name, as whole as it gets: `how` 0 leaves it alone. */
static void spoil(const struct page *page, uint64_t how) {
    unsigned char *copy = malloc(page->size + 4096);
    size_t size = page->size;
    memcpy(copy, page->image, size);
    memset(copy + size, 0, 4096);
    if (how == 1)
        spoil_bytes(copy, size, page->head, 1 + roll() % 4);
    else if (how == 2)
        spoil_bytes(copy, size, page->head, 1 + roll() % 60);
    else if (how == 3)
        size = roll() % (size + 1);
    else if (how == 4)
        size += 1 + roll() % 4096;
    else if (how == 5)
        memset(copy + roll() % size / 2, 0, size / 2);
    unlink(page->path);
    int fd = open(page->path, O_RDWR | O_CREAT | O_EXCL, 0666);
    if (fd < 0 || write(fd, copy, size) != (ssize_t)size || (how == 6 && ftruncate(fd, 0) != 0) ||
        (how == 6 && ftruncate(fd, (off_t)page->size) != 0)) /* all of it a hole */
        exit(2);
    close(fd);
    free(copy);
}

static void operate(struct pm_process *self, unsigned char *grant) {
    struct pm_context *context = pm_process_context(self, (void *)0x1000, 0, &fake_driver);
    uint64_t held[4] = {0};
    for (int i = 0; i < OPERATIONS && context; i++) {
        uint64_t which = roll() % 16, k = roll() % 4;
        clock_ns += roll() % 300000;
        if (which < 6)
            fake_launch(self, context, 1 + k, (void *)(1 + roll() % 3), 1000ull << roll() % 14);
        else if (which == 6 && held[k]) {
            pm_process_give_back(self, 0, (uint32_t)k, held[k]);
            held[k] = 0;
        } else if (which <= 7) {
            uint64_t bytes = roll() % 5 ? roll() % (1 << 24) : odd_value();
            if (pm_process_take(self, 0, (uint32_t)k, bytes))
                held[k] += bytes;
        } else if (which == 8)
            pm_process_keep_slot(self);
        else if (which == 9) {
            struct pm_wait wait = pm_tracker_waits(&context->tracker);
            pm_tracker_waited(&context->tracker, &wait, 0);
        } else if (which == 10)
            pm_process_poll(self);
        else if (which == 11)
            pm_process_limits(self, 0);
        else if (which == 12 && self->boards[0])
            spoil_bytes((unsigned char *)self->boards[0], sizeof(struct pm_board), 1024, 3);
        else if (which == 13 && grant)
            spoil_bytes(grant, sizeof(struct pm_grant), 1024, 2);
        else
            spoil_bytes((unsigned char *)self->view.header, self->view.size, 8192, 2);
    }
}

static void child(const char *folder) {
    char path[512];
    alarm(30);
    pm_clock_use(now, sleep_until);
    setenv("POOLMETER_ALLOCATION_DIR", folder, 1);
    struct pm_process *self = pm_self();
    if (!self)
        exit(0);
    pm_add(attached, 1);
    pm_add(beside, self->boards[0] != NULL);
    snprintf(path, sizeof path, "%s/grant", folder);
    int fd = open(path, O_RDWR);
    void *grant = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct pm_grant), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    operate(self, grant == MAP_FAILED ? NULL : grant);
    exit(0);
}

int main(int argc, char **argv) {
    if (argc < 5)
        return 2;
    char path[512];
    uint64_t seed = strtoull(argv[3], NULL, 10), rounds = strtoull(argv[4], NULL, 10);
    attached = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (attached == MAP_FAILED)
        return 2;
    beside = attached + 1;
    snprintf(path, sizeof path, "%s/grant", argv[1]);
    struct page grant = load(path, 1024);
    snprintf(path, sizeof path, "%s/meter", argv[1]);
    struct page meter = load(path, 8192);
    struct page board = load(argv[2], 1024);
    meter_path = meter.path;
    board_path = board.path;
    for (uint64_t round = 0; round < rounds; round++) {
        if (argc > 5 && round != strtoull(argv[5], NULL, 10))
            continue;
        dice = (seed + 1) * 0x9e3779b97f4a7c15u ^ round * 0xbf58476d1ce4e5b9u;
        roll();
        spoil(&grant, roll() % 3 ? 0 : roll() % 7);
        spoil(&meter, roll() % 3 ? 0 : roll() % 7);
        spoil(&board, roll() % 3 ? 0 : roll() % 7);
        pid_t pid = fork();
        if (pid == 0)
            child(argv[1]);
        int status;
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "seed %llu round %llu: status %#x\n", (unsigned long long)seed, (unsigned long long)round,
                    status);
            return 1;
        }
    }
    printf("{\"rounds\": %llu, \"attached\": %u, \"beside\": %u}\n", (unsigned long long)rounds, *attached, *beside);
    return 0;
}
