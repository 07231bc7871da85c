/*
 * A process with two contexts on a device, of which the second works: seats FOLDER. Prints what each of their seats on
 * the board shows: limit, softness and weight after the grant has changed, and whether it is starved once the second
 * had work without end and got less than its limit; and the same of the limit when the second context is new again.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "board.h"
#include "fake_driver.h"

static struct pm_process *self;

static void grant(const char *path, uint64_t limit_ppm, uint32_t soft, uint32_t weight) {
    struct pm_grant image;
    int fd = open(path, O_RDWR);
    if (fd < 0 || pread(fd, &image, sizeof image, 0) != (ssize_t)sizeof image)
        abort();
    image.devices[0].limit_ppm = limit_ppm;
    image.devices[0].soft = soft;
    image.devices[0].weight = weight;
    pm_grant_store(fd, &image);
    close(fd);
    pm_process_limits(self, 0);
}

static void show(uint32_t seat) {
    const struct pm_board_seat *at = &self->boards[0]->seats[seat];
    printf("[%llu, %u, %u, %d]", (unsigned long long)at->limit_ppm, at->soft, at->weight,
           pm_load(&at->starved_until_ns) > pm_now_ns());
}

int main(int argc, char **argv) {
    char path[512];
    if (argc < 2)
        return 2;
    setenv("POOLMETER_ALLOCATION_DIR", argv[1], 1);
    snprintf(path, sizeof path, "%s/grant", argv[1]);
    self = pm_self();
    if (!self)
        return 3;
    struct pm_context *first = pm_process_context(self, (void *)0x1000, 0, &fake_driver);
    struct pm_context *second = pm_process_context(self, (void *)0x2000, 0, &fake_driver);
    if (!first || !second || second->own_seat == PM_NO_SEAT)
        return 4;
    grant(path, 200000, 1, 7);
    printf("[");
    show(self->seats[0]);
    printf(", ");
    show(second->own_seat);
    grant(path, 700000, 0, 9);
    fake_launch(self, second, 1, (void *)10, 1000000); /* its length is known from here on */
    pm_tracker_close_all(&second->tracker, 0, 2);
    usleep(20000);
    pm_process_poll(self);
    fake_launch(self, second, 1, (void *)10, 1000000000);
    /* as if it had worked for long, and the neighbours had their turns */
    pm_poke(&self->limiters[0].idle_ns, pm_peek(&self->limiters[0].idle_ns) - 1000000000);
    for (int i = 0; i < 5; i++) {
        usleep(10000);
        pm_process_poll(self);
    }
    printf(", ");
    show(self->seats[0]);
    printf(", ");
    show(second->own_seat);
    uint32_t left = second->own_seat;
    pm_process_forget_context(self, (void *)0x2000, true, true);
    self->boards[0]->seats[left].limit_ppm = 5; /* another's now */
    grant(path, 600000, 0, 9);
    printf(", ");
    show(left);
    printf("]\n");
    return 0;
}
