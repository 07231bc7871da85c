/*
 * Known device time on a real card, through the driver API alone: every kernel notes its own start and end on the
 * device's clock.
 *
 *   probe DEVICE PATTERN KERNEL_US SECONDS [STREAMS]
 *
 * PATTERN: queue (a full queue), sync (wait after each), gaps (a host pause as long as the kernel after each), graph
 * (graphs of 20 kernels), streams (a full queue on each of STREAMS streams), mixed (lengths from 1x to 8x under one
 * function and shape), empty (the host's cost of a launch). Prints one JSON line; device_ns is the union of the
 * kernels' spans.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CALLS(X)                                                                                                       \
    X(cuInit, cuInit)                                                                                                  \
    X(cuDeviceGet, cuDeviceGet)                                                                                        \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                                                              \
    X(cuCtxSetCurrent, cuCtxSetCurrent)                                                                                \
    X(cuModuleLoadData, cuModuleLoadData)                                                                              \
    X(cuModuleGetFunction, cuModuleGetFunction)                                                                        \
    X(cuMemAlloc_v2, cuMemAlloc)                                                                                       \
    X(cuMemsetD8_v2, cuMemsetD8)                                                                                       \
    X(cuMemcpyDtoH_v2, cuMemcpyDtoH)                                                                                   \
    X(cuLaunchKernel, cuLaunchKernel)                                                                                  \
    X(cuStreamCreate, cuStreamCreate)                                                                                  \
    X(cuStreamSynchronize, cuStreamSynchronize)                                                                        \
    X(cuCtxSynchronize, cuCtxSynchronize)                                                                              \
    X(cuStreamBeginCapture_v2, cuStreamBeginCapture)                                                                   \
    X(cuStreamEndCapture, cuStreamEndCapture)                                                                          \
    X(cuGraphInstantiateWithFlags, cuGraphInstantiate) X(cuGraphLaunch, cuGraphLaunch)
#define POINTER(name, alias) static __typeof__(&alias) p_##name;
CALLS(POINTER)

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry spin(.param .u64 iters, .param .u64 records, .param .u64 counter, .param .u64 cap)\n{\n"
    " .reg .pred %p<4>; .reg .f32 %f<4>; .reg .b64 %rd<12>; .reg .b32 %r<4>;\n"
    " mov.u64 %rd1, %globaltimer;\n ld.param.u64 %rd2, [iters];\n mov.f32 %f1, 0f3F800000;\n mov.f32 %f2, 0f3F7FBE77;\n"
    " mov.f32 %f3, 0f33D6BF95;\n"
    "L:\n fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n"
    " fma.rn.f32 %f1, %f1, %f2, %f3;\n sub.u64 %rd2, %rd2, 1;\n setp.ne.u64 %p1, %rd2, 0;\n @%p1 bra L;\n"
    " ld.param.u64 %rd3, [counter];\n cvta.to.global.u64 %rd3, %rd3;\n atom.global.add.u32 %r1, [%rd3], 1;\n"
    " ld.param.u64 %rd4, [cap];\n cvt.u64.u32 %rd5, %r1;\n setp.ge.u64 %p2, %rd5, %rd4;\n @%p2 bra E;\n"
    " ld.param.u64 %rd6, [records];\n cvta.to.global.u64 %rd6, %rd6;\n shl.b64 %rd7, %rd5, 4;\n add.u64 %rd8, %rd6, "
    "%rd7;\n"
    " setp.eq.f32 %p3, %f1, 0f7F800000;\n @%p3 mov.u64 %rd1, 0;\n st.global.u64 [%rd8], %rd1;\n"
    " mov.u64 %rd9, %globaltimer;\n st.global.u64 [%rd8+8], %rd9;\nE:\n ret;\n}\n"
    ".visible .entry nothing()\n{\n ret;\n}\n";

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "%s: %d\n", #call, (int)result_);                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

struct span {
    uint64_t start, end;
};

static int by_start(const void *a, const void *b) {
    const struct span *x = a, *y = b;
    return x->start < y->start ? -1 : x->start > y->start;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define CAP 2000000u
static CUdeviceptr records, counter;
static CUfunction spin, nothing;

static void launch(CUstream stream, uint64_t iters) {
    uint64_t cap = CAP;
    void *params[] = {&iters, &records, &counter, &cap};
    CHECK(p_cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

static uint32_t fetch(struct span **spans) {
    uint32_t n = 0;
    CHECK(p_cuCtxSynchronize());
    CHECK(p_cuMemcpyDtoH_v2(&n, counter, sizeof n));
    n = n > CAP ? CAP : n;
    *spans = malloc((n + 1) * sizeof **spans);
    if (n)
        CHECK(p_cuMemcpyDtoH_v2(*spans, records, n * sizeof **spans));
    return n;
}

int main(int argc, char **argv) {
    if (argc < 5)
        return 2;
    const char *pattern = argv[2];
    double us = atof(argv[3]), seconds = atof(argv[4]);
    int streams = argc > 5 ? atoi(argv[5]) : 2;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return 3;
#define FIND(name, alias) p_##name = (__typeof__(p_##name))dlsym(driver, #name);
    CALLS(FIND)
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUstream stream[16];
    CHECK(p_cuInit(0));
    CHECK(p_cuDeviceGet(&device, atoi(argv[1])));
    CHECK(p_cuDevicePrimaryCtxRetain(&context, device));
    CHECK(p_cuCtxSetCurrent(context));
    CHECK(p_cuModuleLoadData(&module, ptx));
    CHECK(p_cuModuleGetFunction(&spin, module, "spin"));
    CHECK(p_cuModuleGetFunction(&nothing, module, "nothing"));
    CHECK(p_cuMemAlloc_v2(&records, CAP * sizeof(struct span)));
    CHECK(p_cuMemAlloc_v2(&counter, 256));
    CHECK(p_cuMemsetD8_v2(counter, 0, 256));
    for (int i = 0; i < streams && i < 16; i++)
        CHECK(p_cuStreamCreate(&stream[i], CU_STREAM_NON_BLOCKING));
    if (strcmp(pattern, "empty") == 0) {
        uint64_t best = UINT64_MAX;
        for (int round = 0; round < 200; round++) {
            uint64_t begin = now_ns();
            for (int i = 0; i < 500; i++)
                CHECK(p_cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, stream[0], NULL, NULL));
            uint64_t took = now_ns() - begin;
            best = took < best ? took : best;
            CHECK(p_cuStreamSynchronize(stream[0]));
        }
        printf("{\"pattern\": \"empty\", \"launch_ns\": %.1f}\n", (double)best / 500);
        return 0;
    }
    /* iterations for the wanted length, from the device's own clock; the kernels of this count like all others */
    struct span *spans;
    uint64_t iters = 20000;
    for (int i = 0; i < 6; i++) {
        launch(stream[0], iters);
        uint32_t n = fetch(&spans);
        uint64_t took = spans[n - 1].end - spans[n - 1].start;
        if (took > 1000)
            iters = (uint64_t)((double)iters * us * 1000 / (double)took) + 1;
        free(spans);
    }
    CUgraph graph;
    CUgraphExec exec = NULL;
    if (strcmp(pattern, "graph") == 0) {
        CHECK(p_cuStreamBeginCapture_v2(stream[0], CU_STREAM_CAPTURE_MODE_GLOBAL));
        for (int i = 0; i < 20; i++)
            launch(stream[0], iters);
        CHECK(p_cuStreamEndCapture(stream[0], &graph));
        CHECK(p_cuGraphInstantiateWithFlags(&exec, graph, 0));
    }
    uint64_t begin = now_ns(), end = begin + (uint64_t)(seconds * 1e9), issued = 0;
    uint64_t depth = (uint64_t)(200000 / us);
    depth = depth < 4 ? 4 : depth > 800 ? 800 : depth;
    uint32_t dice = 1;
    while (now_ns() < end) {
        CUstream s = stream[0];
        if (exec) {
            CHECK(p_cuGraphLaunch(exec, s));
        } else if (strcmp(pattern, "mixed") == 0) {
            dice = dice * 1664525u + 1013904223u;
            launch(s, iters * (1 + (dice >> 24) % 8));
        } else if (strcmp(pattern, "streams") == 0) {
            s = stream[issued % (uint64_t)streams];
            launch(s, iters);
        } else {
            launch(s, iters);
        }
        issued++;
        if (strcmp(pattern, "sync") == 0)
            CHECK(p_cuStreamSynchronize(s));
        else if (strcmp(pattern, "gaps") == 0)
            for (uint64_t until = now_ns() + (uint64_t)(us * 2000); now_ns() < until;)
                ;
        else if (issued % depth == 0)
            CHECK(p_cuStreamSynchronize(s));
    }
    uint32_t n = fetch(&spans);
    uint64_t wall = now_ns() - begin, total = 0, sum = 0, covered = 0;
    qsort(spans, n, sizeof *spans, by_start);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t from = spans[i].start > covered ? spans[i].start : covered;
        sum += spans[i].end - spans[i].start;
        if (spans[i].end > from) {
            total += spans[i].end - from;
            covered = spans[i].end;
        }
    }
    printf("{\"pattern\": \"%s\", \"kernel_us\": %g, \"kernels\": %u, \"device_ns\": %llu, \"sum_ns\": %llu, "
           "\"wall_ns\": %llu}\n",
           pattern, us, n, (unsigned long long)total, (unsigned long long)sum, (unsigned long long)wall);
    return 0;
}
