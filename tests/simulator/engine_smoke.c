/*
 * Drives the machine through its C interface: random submissions on several contexts of a manual clock, checked sums,
 * and children killed while they hold the mutex. Prints what it did; exits 1 with a sentence when a sum is wrong.
 */
#include "machine.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned long long seed = 88172645463325252ull;
static unsigned long long next(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static void check(int ok, const char *sentence) {
    if (!ok) {
        printf("%s\n", sentence);
        exit(1);
    }
}

static void child(struct sim_machine *m) {
    machine_lock(m);
    process_attach(m, (uint32_t)getpid());
    machine_unlock(m);
    uint32_t me = 0;
    while (m->process[me].state == SIM_PROCESS_FREE || m->process[me].pid != (uint32_t)getpid())
        me++;
    for (;;) { /* until it is killed, at whatever instruction */
        machine_enter(m);
        uint32_t c = context_create(m, me, 0);
        uint32_t s = c != SIM_NONE ? stream_create(m, c, true, false, 0) : SIM_NONE;
        machine_unlock(m);
        for (int i = 0; s != SIM_NONE && i < 50; i++) {
            machine_enter(m);
            if (!stream_full(m, s, 1))
                stream_push(
                    m, s, (struct sim_op){.kind = SIM_OP_KERNEL, .work_ns = 1000, .width_ppm = 1000000, .kernels = 1});
            memory_take(m, me, 0, 1 << 20);
            machine_unlock(m);
        }
        machine_enter(m);
        if (c != SIM_NONE)
            context_destroy(m, c);
        machine_unlock(m);
    }
}

int main(int argc, char **argv) {
    char error[256];
    struct sim_machine *m = machine_map(argv[1], true, error, sizeof error);
    check(m != NULL, error);
    int rounds = argc > 2 ? atoi(argv[2]) : 100;
    m->clock = SIM_CLOCK_MANUAL;
    m->devices = 2;
    for (int d = 0; d < SIM_MAX_DEVICES; d++) {
        struct sim_device *dev = &m->device[d];
        dev->active = dev->contexts = dev->target = SIM_NONE;
        dev->next_ns = SIM_NEVER;
        dev->sample_ns = dev->period_end_ns = 200000000;
        dev->memory = 16ull << 30;
        dev->context_overhead = 1 << 20;
        dev->slice_ns = 2000000;
        dev->switch_ns = 174000;
        dev->sms = 64;
    }
    m->ready = 1;
    machine_lock(m);
    uint32_t me = process_attach(m, (uint32_t)getpid());
    machine_unlock(m);
    uint32_t context[4], stream[4][3];
    machine_enter(m);
    for (int c = 0; c < 4; c++) {
        context[c] = context_create(m, me, (uint32_t)c % 2);
        for (int s = 0; s < 3; s++)
            stream[c][s] = stream_create(m, context[c], s > 0, s == 0, 0);
    }
    uint32_t event = event_create(m, context[0]);
    machine_unlock(m);
    uint64_t kernels = 0, generation = 0;
    for (int i = 0; i < rounds * 100; i++) {
        machine_enter(m);
        uint32_t s = stream[next() % 4][next() % 3];
        if (!stream_full(m, s, 2)) {
            switch (next() % 6) {
            case 0:
                m->event[event].submitted = ++generation;
                stream_push(m, s, (struct sim_op){.kind = SIM_OP_RECORD, .event = event, .arg = generation});
                break;
            case 1:
                if (generation > 0 && m->event[event].reached >= generation)
                    stream_push(m, s, (struct sim_op){.kind = SIM_OP_WAIT, .event = event, .arg = generation});
                break;
            case 2:
                stream_push(m, s, (struct sim_op){.kind = SIM_OP_COPY, .work_ns = next() % 100000, .arg = 10});
                break;
            case 3:
                stream_push(
                    m, s,
                    (struct sim_op){.kind = SIM_OP_FILL, .work_ns = next() % 100000, .width_ppm = 1000000, .arg = 10});
                break;
            default:
                stream_push(m, s,
                            (struct sim_op){.kind = SIM_OP_KERNEL,
                                            .work_ns = next() % 3000000,
                                            .width_ppm = (uint32_t)(next() % 1000000) + 1,
                                            .kernels = 1});
                kernels++;
            }
        }
        machine_unlock(m);
        machine_set_virtual(m, m->virtual_ns + next() % 2000000);
    }
    machine_set_virtual(m, m->virtual_ns + 3600000000000ull * 24);
    machine_enter(m);
    uint64_t done = 0, busy = 0;
    for (uint32_t d = 0; d < 2; d++) {
        engine_touch(m, d);
        const struct sim_device *dev = &m->device[d];
        done += m->process[me].account[d].kernels;
        busy = m->process[me].account[d].busy_ns;
        check(busy == dev->busy_ns, "the process's busy time is not the card's");
        check(m->process[me].account[d].fill_ns == dev->fill_ns, "the process's fills are not the card's");
        check(m->process[me].account[d].copy_ns == dev->copy_ns, "the process's copies are not the card's");
        check(m->process[me].account[d].copies == 0, "a copy is in flight although all work is done");
        check(dev->busy_ns + dev->fill_ns + dev->switched_ns <= dev->time_ns,
              "a card was busy for longer than there was time");
        check(dev->engine == SIM_ENGINE_IDLE && dev->copies == 0, "a card is not idle although all work is done");
    }
    for (int c = 0; c < 4; c++)
        for (int s = 0; s < 3; s++)
            check(m->stream[stream[c][s]].head == m->stream[stream[c][s]].tail, "a stream still holds work");
    machine_unlock(m);
    check(done == kernels, "kernels were lost or counted twice");
    int killed = 0;
    for (int i = 0; i < rounds / 2; i++) {
        pid_t pid = fork();
        if (pid == 0)
            child(m);
        usleep((useconds_t)(1500 + next() % 3000));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        killed++;
        machine_set_virtual(m, m->virtual_ns + 1000000);
        machine_lock(m);
        process_reap(m, true);
        machine_unlock(m);
    }
    machine_enter(m);
    process_reap(m, true);
    uint64_t overhead = 2 * m->device[0].context_overhead;
    check(m->device[0].memory_used == overhead, "memory of the dead stayed taken");
    uint32_t listed = 0;
    for (uint32_t c = m->device[0].contexts; c != SIM_NONE; c = m->context[c].next)
        listed++;
    check(listed == 2, "contexts of the dead stayed in the list");
    machine_unlock(m);
    printf("%llu kernels, %d killed, recovered %llu times, %llu reaped\n", (unsigned long long)kernels, killed,
           (unsigned long long)m->recoveries, (unsigned long long)m->reaped);
    machine_unmap(m);
    return 0;
}
