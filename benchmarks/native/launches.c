// Host time of a kernel launch that waits for nothing: `launches [--image FILE] [--core N] [--batch N] [--batches N]
// [--cold KIB]`.
//
// Says what some parts of a hook's path cost here (asking the driver for the context, a coarse clock, an atomic
// addition) and then, for each line on stdin, takes a turn: one batch that does not count, then --batches of them, each
// one launch after another between two readings of the clock, and outside of these a wait for the stream, so that no
// queue ever fills. With --cold KIB each launch is timed by itself, and before it so much memory is written to, which
// takes the place of everything else in the processor's caches. One JSON line a turn: median and mean over the batches
// of the time of one launch, in ns. The thread that launches is pinned to --core; threads that a library made are where
// they were. Driver calls come from cuGetProcAddress, as the runtime's do. The image is PTX of a kernel that does
// nothing.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int status;
typedef void *handle;

static const char *const nothing = ".version 7.0\n.target sm_75\n.address_size 64\n"
                                   ".visible .entry spin(.param .u64 ns)\n{\nret;\n}\n";

static status (*get)(const char *, void **, int, uint64_t, int *);

static void *find(const char *name) {
    void *found = NULL;
    int how = 0;
    if (get(name, &found, 12000, 0, &how) != 0 || !found) {
        fprintf(stderr, "launches: the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void check(status result, const char *what) {
    if (result == 0)
        return;
    fprintf(stderr, "launches: %s returned %d\n", what, result);
    exit(1);
}
#define CHECK(call) check(call, #call)

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = calloc(1, 1 << 16);
    if (!file || !text || fread(text, 1, (1 << 16) - 1, file) == 0) {
        fprintf(stderr, "launches: no image in %s\n", path);
        exit(1);
    }
    fclose(file);
    return text;
}

int main(int argc, char **argv) {
    const char *image = nothing;
    int core = -1, batch = 256, batches = 5, cold = 0, kinds = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--image") == 0)
            image = read_file(argv[i + 1]);
        else if (strcmp(argv[i], "--core") == 0)
            core = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--batch") == 0)
            batch = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--batches") == 0)
            batches = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--cold") == 0)
            cold = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--kinds") == 0)
            kinds = atoi(argv[i + 1]);
        else
            return fprintf(stderr, "launches: unknown flag %s\n", argv[i]), 2;
    }
    if (batch < 1 || batches < 1 || kinds < 1)
        return fprintf(stderr, "launches: --batch, --batches and --kinds are at least 1\n"), 2;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return fprintf(stderr, "launches: %s\n", dlerror()), 1;
    *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
    if (!get)
        return fprintf(stderr, "launches: the driver has no cuGetProcAddress_v2\n"), 1;
    status (*init)(unsigned), (*retain)(handle *, int), (*make_current)(handle), (*load)(handle *, const void *);
    status (*function_of)(handle *, handle, const char *), (*stream_create)(handle *, unsigned), (*wait)(handle),
        (*get_current)(handle *);
    status (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **,
                     void **);
    *(void **)&init = find("cuInit");
    *(void **)&retain = find("cuDevicePrimaryCtxRetain");
    *(void **)&make_current = find("cuCtxSetCurrent");
    *(void **)&get_current = find("cuCtxGetCurrent");
    *(void **)&load = find("cuModuleLoadData");
    *(void **)&function_of = find("cuModuleGetFunction");
    *(void **)&stream_create = find("cuStreamCreate");
    *(void **)&wait = find("cuStreamSynchronize");
    *(void **)&launch = find("cuLaunchKernel");
    handle context, module, function, stream;
    CHECK(init(0));
    CHECK(retain(&context, 0));
    CHECK(make_current(context));
    CHECK(load(&module, image));
    CHECK(function_of(&function, module, "spin"));
    CHECK(stream_create(&stream, 1));
    uint64_t length = 1000;
    void *parameters[] = {&length};
    size_t kept = (size_t)cold << 10;
    volatile char *other = calloc(1, kept + 1);
    double *costs = calloc((size_t)batches, sizeof *costs);
    if (!costs || !other)
        return 1;
    if (core >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        if (sched_setaffinity(0, sizeof set, &set) != 0)
            return fprintf(stderr, "launches: no core %d\n", core), 1;
    }
    for (int i = 0; i < 8 * batch; i++) {
        CHECK(launch(function, 1 + (unsigned)(i % kinds), 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
        if (i % batch == batch - 1)
            CHECK(wait(stream));
    }
    /* What the hook's own path is made of, on this machine and driver. */
    enum { TIMES = 200000 };
    handle current;
    struct timespec t;
    volatile uint64_t word = 0;
    uint64_t began = now();
    for (int i = 0; i < TIMES; i++)
        get_current(&current);
    double context_ns = (double)(now() - began) / TIMES;
    began = now();
    for (int i = 0; i < TIMES; i++)
        clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    double coarse_ns = (double)(now() - began) / TIMES;
    began = now();
    for (int i = 0; i < TIMES; i++)
        __atomic_fetch_add(&word, 1, __ATOMIC_RELAXED);
    double atomic_ns = (double)(now() - began) / TIMES;
    printf("{\"context_ns\": %.1f, \"coarse_clock_ns\": %.1f, \"atomic_add_ns\": %.1f}\n", context_ns, coarse_ns,
           atomic_ns);
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        double sum = 0;
        for (int turn = -1; turn < batches; turn++) {
            status result = 0;
            uint64_t spent = 0;
            began = now();
            for (int i = 0; i < batch; i++) {
                if (cold) { /* as a program does that works for tens of microseconds between two launches */
                    for (size_t at = 0; at < kept; at += 64)
                        other[at]++;
                    began = now();
                }
                result |= launch(function, 1 + (unsigned)(i % kinds), 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
                spent += cold ? now() - began : 0;
            }
            double took = (double)(cold ? spent : now() - began) / batch;
            check(result, "cuLaunchKernel");
            CHECK(wait(stream));
            if (turn < 0)
                continue;
            costs[turn] = took;
            sum += took;
        }
        qsort(costs, (size_t)batches, sizeof *costs, ascending);
        printf("{\"median_ns\": %.1f, \"mean_ns\": %.1f}\n", costs[batches / 2], sum / batches);
        fflush(stdout);
    }
    return 0;
}
