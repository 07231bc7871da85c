/*
 * Threads that launch under a limit while it changes: launch_threads FOLDER THREADS MS. Built with a thread sanitizer.
 *
 * Each launches into a stream of its own and waits now and then; others take and give back memory, let contexts go, and
 * make the grant say something else, all through one process's state, with the settling thread at work. Prints what was
 * launched and what the account says at the end.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fake_driver.h"

static uint32_t stop;
static struct pm_process *self;
static const char *grant_path;
static uint64_t launched;

static struct pm_context *context(uintptr_t handle) {
    return pm_process_context(self, (void *)handle, 0, &fake_driver);
}

static void *launch(void *argument) {
    uintptr_t own = (uintptr_t)argument, n = 0;
    while (!pm_load(&stop)) {
        struct pm_context *mine = context(0x1000);
        fake_launch(self, mine, 1 + n % 3, (void *)(own + 10), 20000 << n % 3);
        pm_add(&launched, 1);
        if (++n % 64 == 0) {
            uint64_t key = pm_mix(17, own + 10) | 1;
            pm_tracker_close(&mine->tracker, (void *)(own + 10), key);
            struct pm_wait wait = pm_tracker_waits(&mine->tracker);
            while (!pm_load(&stop) && pm_load(&fake_free_ns) > pm_now_ns())
                usleep(200);
            pm_tracker_waited(&mine->tracker, &wait, key);
        }
        if (n % 50 == 0)
            pm_tracker_taint(&mine->tracker, pm_mix(17, own + 10) | 1);
    }
    return NULL;
}

static void *churn(void *argument) {
    (void)argument;
    for (uint64_t n = 0; !pm_load(&stop); n++) {
        struct pm_holding held = {.key = n + 1, .bytes = 1 << 20, .other = 0x2000, .kind = PM_MEMORY_DEVICE, .uses = 1};
        if (pm_process_take(self, 0, PM_MEMORY_DEVICE, held.bytes) &&
            !pm_pointers_put(self->pointers, PM_HOLD_ADDRESS, &held))
            pm_process_give_back(self, 0, PM_MEMORY_DEVICE, held.bytes);
        fake_launch(self, context(0x2000), 9, (void *)3, 10000);
        pm_add(&launched, 1);
        pm_process_keep_slot(self);
        pm_process_poll(self);
        if (n % 8 == 0) {
            pm_process_forget_context(self, (void *)0x2000, true, true);
            pm_process_forget_memory(self, (void *)0x2000);
        }
        usleep(500);
    }
    return NULL;
}

static void *change(void *argument) {
    (void)argument;
    struct pm_grant image;
    int fd = open(grant_path, O_RDWR);
    if (fd < 0 || pread(fd, &image, sizeof image, 0) != (ssize_t)sizeof image)
        return (void *)1;
    static const struct {
        uint64_t ppm;
        uint32_t soft, suspended;
    } states[] = {{300000, 0, 0}, {700000, 0, 0}, {50000, 1, 0}, {PM_UNLIMITED, 0, 0}, {300000, 0, 1}, {900000, 0, 0}};
    for (int n = 0; !pm_load(&stop); n++) {
        image.devices[0].limit_ppm = states[n % 6].ppm;
        image.devices[0].soft = states[n % 6].soft;
        image.suspended = states[n % 6].suspended;
        pm_grant_store(fd, &image);
        usleep(30000);
    }
    image.suspended = 0;
    image.devices[0].limit_ppm = PM_UNLIMITED; /* whoever waits goes on */
    pm_grant_store(fd, &image);
    close(fd);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    char path[512];
    pthread_t threads[18];
    int count = atoi(argv[2]);
    setenv("POOLMETER_ALLOCATION_DIR", argv[1], 1);
    snprintf(path, sizeof path, "%s/grant", argv[1]);
    grant_path = path;
    self = pm_self();
    if (!self)
        return 3;
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, launch, (void *)(uintptr_t)i);
    pthread_create(&threads[count], NULL, churn, NULL);
    pthread_create(&threads[count + 1], NULL, change, NULL);
    usleep((useconds_t)atoi(argv[3]) * 1000);
    pm_store(&stop, 1);
    for (int i = 0; i < count + 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2000 && pm_load(&fake_free_ns) > pm_now_ns(); i++)
        usleep(1000);
    pm_process_forget_context(self, (void *)0x1000, true, true);
    pm_process_forget_context(self, (void *)0x2000, true, true);
    pm_process_forget_memory(self, (void *)0x2000);
    struct pm_counters *counters = pm_process_counters(self, 0);
    struct pm_bucket *bucket = self->limiters[0].bucket;
    printf("{\"launched\": %llu, \"counted\": %llu, \"pending_ns\": %lld, \"memory\": %llu, \"faults\": %llu, "
           "\"waits\": %llu, \"waiters\": %u, \"balance\": %lld, \"account\": %lld}\n",
           (unsigned long long)launched, (unsigned long long)pm_load(&counters->launches),
           (long long)pm_load(&counters->pending_ns), (unsigned long long)pm_load(&counters->memory[PM_MEMORY_DEVICE]),
           (unsigned long long)pm_load(&counters->internal_faults),
           (unsigned long long)pm_load(&counters->throttle_waits), pm_load(&bucket->waiters),
           (long long)pm_load(&bucket->balance_ns),
           (long long)(pm_load(&bucket->refilled_ns) - pm_load(&bucket->charged_ns)));
    return 0;
}
