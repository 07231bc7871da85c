/*
 * Many threads at one bucket: bucket_threads THREADS ROUNDS. Prints balance, refilled and charged, and the most that
 * the elapsed time can have brought in. Built with a thread sanitizer where the compiler has one.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "bucket.h"

static struct pm_bucket bucket;
static uint64_t clock_ns = 1000000000;
static long rounds;

static void *work(void *argument) {
    uint32_t dice = (uint32_t)(uintptr_t)argument;
    for (long i = 0; i < rounds; i++) {
        dice = dice * 1664525u + 1013904223u;
        uint64_t now = __atomic_add_fetch(&clock_ns, dice >> 20, __ATOMIC_RELAXED);
        switch (dice >> 8 & 7) {
        case 0:
            pm_bucket_adopt(&bucket, 2 + (dice >> 16 & 2), 300000, now);
            break;
        case 1:
            pm_bucket_forgive(&bucket);
            break;
        case 2:
        case 3:
            pm_bucket_take(&bucket, (int64_t)(dice >> 22) - 256); /* a correction may give back */
            break;
        default:
            pm_bucket_refill(&bucket, 300000, now, PM_BURST_NS);
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[16];
    int count = argc > 1 ? atoi(argv[1]) : 4;
    rounds = argc > 2 ? atol(argv[2]) : 10000;
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    printf("{\"balance_ns\": %lld, \"refilled_ns\": %lld, \"charged_ns\": %lld}\n", (long long)bucket.balance_ns,
           (long long)bucket.refilled_ns, (long long)bucket.charged_ns);
    return 0;
}
