#include "bucket.h"

typedef unsigned __int128 u128;

/* Up to `most`; what does not fit is not added. */
static int64_t pour(struct pm_bucket *bucket, int64_t income, int64_t most) {
    int64_t balance = pm_load(&bucket->balance_ns), added;
    do {
        int64_t room = 0;
        if (most > balance && __builtin_sub_overflow(most, balance, &room))
            room = INT64_MAX; /* a balance that nobody can have run up: the page is the tenant's to write */
        added = income < room ? income : room;
    } while (!__atomic_compare_exchange_n(&bucket->balance_ns, &balance, balance + added, true, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    pm_add(&bucket->refilled_ns, (uint64_t)added);
    return balance + added;
}

int64_t pm_bucket_refill(struct pm_bucket *bucket, uint64_t rate_ppm, uint64_t now_ns, int64_t most_ns) {
    uint64_t last = pm_load(&bucket->last_refill_ns);
    if (last > now_ns) { /* of another clock: before a restart of the machine */
        if (last > now_ns + 1000000000u)
            __atomic_compare_exchange_n(&bucket->last_refill_ns, &last, now_ns, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED);
        return pm_bucket_balance(bucket);
    }
    u128 income = (u128)(now_ns - last) * rate_ppm / PM_WHOLE_PPM;
    if (income == 0)
        return pm_bucket_balance(bucket);
    /* Only the time that made whole nanoseconds is used up; whoever wins the exchange adds them, so nobody else does.
     */
    uint64_t used_until = last + (uint64_t)((income * PM_WHOLE_PPM + rate_ppm - 1) / rate_ppm);
    if (!__atomic_compare_exchange_n(&bucket->last_refill_ns, &last, used_until, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
        return pm_bucket_balance(bucket);
    return pour(bucket, income > INT64_MAX / 4 ? INT64_MAX / 4 : (int64_t)income, most_ns);
}

void pm_bucket_forgive(struct pm_bucket *bucket) {
    int64_t balance = pm_load(&bucket->balance_ns);
    if (balance < 0)
        pour(bucket, INT64_MAX, 0);
}

void pm_bucket_adopt(struct pm_bucket *bucket, uint64_t generation, uint64_t limit_ppm, uint64_t now_ns) {
    uint64_t known = pm_load(&bucket->generation);
    do {
        if (known >= generation)
            return;
    } while (!__atomic_compare_exchange_n(&bucket->generation, &known, generation, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    uint64_t before = __atomic_exchange_n(&bucket->limit_ppm, limit_ppm, __ATOMIC_ACQ_REL);
    if (!pm_bucket_limits(limit_ppm) || (known != 0 && pm_bucket_limits(before)))
        return;
    pm_store(&bucket->last_refill_ns, now_ns);
    int64_t balance = pm_load(&bucket->balance_ns);
    while (!__atomic_compare_exchange_n(&bucket->balance_ns, &balance, PM_QUANTUM_NS, true, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
        ;
    pm_add(&bucket->refilled_ns, (uint64_t)PM_QUANTUM_NS - (uint64_t)balance);
}

uint64_t pm_bucket_wait(int64_t balance_ns, int64_t enough_ns, uint64_t rate_ppm) {
    if (balance_ns >= enough_ns)
        return 0;
    if (rate_ppm == 0)
        return UINT64_MAX;
    u128 wait = ((u128)((__int128)enough_ns - balance_ns) * PM_WHOLE_PPM + rate_ppm - 1) / rate_ppm;
    return wait > UINT64_MAX / 2 ? UINT64_MAX / 2 : (uint64_t)wait;
}
