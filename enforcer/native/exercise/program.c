/*
 * A program of the driver API that puts the hook through its paces: `program MODE [ARGUMENT...]`, one JSON object on
 * standard output. Finds its functions by dlsym; `resolve` says where each way of finding them leads. Linked against
 * nothing but libc.
 */
#define _GNU_SOURCE
#define CUDA_ENABLE_DEPRECATED
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *driver;
#define F(name) ((__typeof__(&name))find(#name))

static void *find(const char *name) {
    void *at = dlsym(driver, name);
    if (!at) {
        fprintf(stderr, "no %s\n", name);
        exit(4);
    }
    return at;
}

static int first = 1;
static void say(const char *key, long long value) {
    printf("%s\"%s\": %lld", first ? "{" : ", ", key, value);
    first = 0;
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "%s: %d\n", #call, (int)result_);                                                          \
            exit(5);                                                                                                   \
        }                                                                                                              \
    } while (0)

static CUcontext context;
static CUfunction spin;

static void start(void) {
    CUmodule module;
    CUdevice device;
    CHECK(F(cuInit)(0));
    CHECK(F(cuDeviceGet)(&device, 0));
    CHECK(F(cuDevicePrimaryCtxRetain)(&context, device));
    CHECK(F(cuCtxSetCurrent)(context));
    CHECK(F(cuModuleLoadData)(&module, "poolmeter-sim-module 1\nkernel spin parameter\n"));
    CHECK(F(cuModuleGetFunction)(&spin, module, "spin"));
}

static CUresult launch(CUstream stream, uint64_t ns) {
    void *params[] = {&ns};
    return F(cuLaunchKernel)(spin, 64, 1, 1, 128, 1, 1, 0, stream, params, NULL);
}

#define MIB (1ull << 20)

static void memory(void) {
    CUdeviceptr a = 0, b = 0, c = 0;
    size_t free_bytes, total, pitch;
    CUmemGenericAllocationHandle handle = 0, host = 0;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUdevice device;
    CHECK(F(cuInit)(0));
    CHECK(F(cuDeviceGet)(&device, 0));
    CHECK(F(cuDeviceTotalMem_v2)(&total, device));
    say("total", (long long)total);
    say("create_without_context", F(cuMemCreate)(&handle, 64 * MIB, &prop, 0));
    prop.location.id = 77;
    CUmemGenericAllocationHandle none = 0;
    say("create_bad_device", F(cuMemCreate)(&none, 64 * MIB, &prop, 0));
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST, 0};
    say("create_on_host", F(cuMemCreate)(&host, 64 * MIB, &prop, 0));
    start();
    CHECK(F(cuMemRelease)(handle));
    say("alloc_600", F(cuMemAlloc_v2)(&a, 600 * MIB));
    say("alloc_600_more", F(cuMemAlloc_v2)(&b, 600 * MIB));
    say("managed_600_more", F(cuMemAllocManaged)(&b, 600 * MIB, CU_MEM_ATTACH_GLOBAL));
    say("async_600_more", F(cuMemAllocAsync)(&b, 600 * MIB, NULL));
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
    say("create_600_more", F(cuMemCreate)(&handle, 600 * MIB, &prop, 0));
    CHECK(F(cuMemGetInfo_v2)(&free_bytes, &total));
    say("info_free", (long long)free_bytes);
    say("info_total", (long long)total);
    say("info_null_total", F(cuMemGetInfo_v2)(&free_bytes, NULL));
    say("alloc_null", F(cuMemAlloc_v2)(NULL, 16));
    say("alloc_zero", F(cuMemAlloc_v2)(&b, 0));
    say("alloc_rest", F(cuMemAlloc_v2)(&b, 424 * MIB));
    say("alloc_a_byte", F(cuMemAlloc_v2)(&c, 1));
    CHECK(F(cuMemFree_v2)(b));
    say("free_twice", F(cuMemFree_v2)(b));
    say("free_unknown", F(cuMemFree_v2)(0x123456));
    say("pitch", F(cuMemAllocPitch_v2)(&b, &pitch, 1000, 1000, 4));
    say("pitch_bytes", (long long)pitch * 1000);
    CHECK(F(cuMemGetInfo_v2)(&free_bytes, &total));
    say("info_free_after_pitch", (long long)free_bytes);
    CHECK(F(cuMemFree_v2)(b));
    CHECK(F(cuMemFree_v2)(a));
    say("alloc_whole", F(cuMemAlloc_v2)(&a, 1024 * MIB));
    CHECK(F(cuMemFree_v2)(a));
    CHECK(F(cuMemGetInfo_v2)(&free_bytes, &total));
    say("info_free_at_end", (long long)free_bytes);
}

static void mappings(void) {
    CUmemGenericAllocationHandle handle, again;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUdeviceptr at;
    size_t left, total;
    start();
    CHECK(F(cuMemAddressReserve)(&at, 64 * MIB, 0, 0, 0));
    CHECK(F(cuMemCreate)(&handle, 64 * MIB, &prop, 0));
    CHECK(F(cuMemMap)(at, 64 * MIB, 0, handle, 0));
    CHECK(F(cuMemRelease)(handle));
    CHECK(F(cuMemGetInfo_v2)(&left, &total));
    say("mapped_only", (long long)(total - left));
    if (F(cuMemRetainAllocationHandle)(&again, (void *)at) == CUDA_SUCCESS) {
        CHECK(F(cuMemUnmap)(at, 64 * MIB));
        CHECK(F(cuMemGetInfo_v2)(&left, &total));
        say("retained_only", (long long)(total - left));
        CHECK(F(cuMemRelease)(again));
    } else {
        CHECK(F(cuMemUnmap)(at, 64 * MIB));
        say("retained_only", 64 * MIB);
    }
    CHECK(F(cuMemGetInfo_v2)(&left, &total));
    say("after", (long long)(total - left));
}

static void async(long pairs) {
    CUdeviceptr at[8] = {0};
    CUstream stream;
    CUmemoryPool pool;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    long denied = 0;
    start();
    CHECK(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(F(cuMemPoolCreate)(&pool, &props));
    for (long i = 0; i < pairs; i++) {
        CUdeviceptr *slot = &at[i % 8];
        if (*slot)
            CHECK(F(cuMemFreeAsync)(*slot, stream));
        *slot = 0;
        CUresult result = i % 2 ? F(cuMemAllocAsync)(slot, (size_t)(i % 7 + 1) * MIB, stream)
                                : F(cuMemAllocFromPoolAsync)(slot, (size_t)(i % 5 + 1) * MIB, pool, stream);
        if (result != CUDA_SUCCESS)
            *slot = 0;
        denied += result == CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (int i = 0; i < 8; i++)
        if (at[i])
            CHECK(F(cuMemFreeAsync)(at[i], stream));
    CHECK(F(cuStreamSynchronize)(stream));
    CHECK(F(cuMemPoolDestroy)(pool));
    say("denied", denied);
}

static int ours(void *at) {
    Dl_info info;
    return at && dladdr(at, &info) && strstr(info.dli_fname, "libpoolmeter_hook") != NULL;
}

static void resolve(void) {
    static const char names[][32] = {"cuLaunchKernel", "cuMemAlloc_v2", "cuGraphLaunch", "cuGetProcAddress_v2"};
    CHECK(F(cuInit)(0));
    for (int i = 0; i < 4; i++) {
        char key[256];
        snprintf(key, sizeof key, "dlsym %s", names[i]);
        say(key, ours(dlsym(driver, names[i])));
        snprintf(key, sizeof key, "default %s", names[i]);
        say(key, ours(dlsym(RTLD_DEFAULT, names[i])));
        void *(*old)(void *, const char *) =
            (void *(*)(void *, const char *))dlvsym(RTLD_DEFAULT, "dlsym", "GLIBC_2.2.5");
        snprintf(key, sizeof key, "old dlsym %s", names[i]);
        say(key, old ? ours(old(driver, names[i])) : -1);
    }
    static const char asked[][32] = {"cuLaunchKernel", "cuMemAlloc", "cuGraphLaunch", "cuGetProcAddress"};
    for (int i = 0; i < 4; i++) {
        char key[256];
        void *at = NULL;
        CUdriverProcAddressQueryResult status;
        CUresult result = F(cuGetProcAddress_v2)(asked[i], &at, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status);
        snprintf(key, sizeof key, "gpa %s", asked[i]);
        say(key, result == CUDA_SUCCESS ? ours(at) : -1);
        result = F(cuGetProcAddress_v2)(asked[i], &at, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status);
        snprintf(key, sizeof key, "gpa per-thread %s", asked[i]);
        say(key, result == CUDA_SUCCESS ? ours(at) : -1);
    }
    void *at = NULL;
    CUdriverProcAddressQueryResult status = 99;
    say("gpa unknown", F(cuGetProcAddress_v2)("cuNoSuchThing", &at, 12000, 0, &status));
    say("gpa unknown address", at != NULL);
    say("dlsym unknown", dlsym(driver, "cuNoSuchThing") != NULL);
    say("next puts", dlsym(RTLD_NEXT, "puts") != NULL);
    say("default puts", dlsym(RTLD_DEFAULT, "puts") == dlsym(RTLD_NEXT, "puts"));
    say("error text", dlerror() != NULL || dlsym(driver, "cuNoSuchThing") != NULL || dlerror() != NULL);
}

static int stop, only_launch;

static void *launch_for_ever(void *unused) {
    CUstream stream;
    (void)unused;
    CHECK(F(cuCtxSetCurrent)(context));
    CHECK(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    long n = 0;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        CHECK(launch(stream, 20000));
        if (++n % 64 != 0)
            continue;
        if (only_launch) /* waiting is not allowed while another thread captures in the global mode */
            usleep(1500);
        else
            CHECK(F(cuStreamSynchronize)(stream));
    }
    CHECK(F(cuStreamSynchronize)(stream));
    CHECK(F(cuStreamDestroy_v2)(stream));
    return (void *)n;
}

static void capture(void) {
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    pthread_t thread;
    void *other;
    start();
    CHECK(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    only_launch = 1;
    pthread_create(&thread, NULL, launch_for_ever, NULL);
    for (int round = 0; round < 20; round++) {
        CHECK(F(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        for (int i = 0; i < 10; i++) {
            CHECK(launch(stream, 30000));
            usleep(200);
        }
        CHECK(F(cuStreamEndCapture)(stream, &graph));
        CHECK(F(cuGraphInstantiateWithFlags)(&exec, graph, 0));
        for (int i = 0; i < 5; i++)
            CHECK(F(cuGraphLaunch)(exec, stream));
        CHECK(F(cuStreamSynchronize)(stream));
        CHECK(F(cuGraphExecDestroy)(exec));
        CHECK(F(cuGraphDestroy)(graph));
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, &other);
    CHECK(F(cuCtxSynchronize)());
    say("other_launches", (long)other);
}

static void threads(int count) {
    pthread_t thread[16];
    long total = 0;
    start();
    for (int i = 0; i < count; i++)
        pthread_create(&thread[i], NULL, launch_for_ever, NULL);
    usleep(500000);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < count; i++) {
        void *n;
        pthread_join(thread[i], &n);
        total += (long)n;
    }
    say("launches", total);
}

static void streams(void) {
    CUstream stream;
    start();
    for (int i = 0; i < 50; i++) { /* destroyed with work under way */
        CHECK(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
        for (int k = 0; k < 10; k++)
            CHECK(launch(stream, 100000));
        CHECK(F(cuStreamDestroy_v2)(stream));
    }
    for (int i = 0; i < 200; i++) {
        CHECK(launch(NULL, 50000));
        CHECK(launch((CUstream)1, 50000));
        CHECK(launch((CUstream)2, 50000));
    }
    CHECK(F(cuCtxSynchronize)());
    CUdevice device;
    CHECK(F(cuDeviceGet)(&device, 0));
    for (int i = 0; i < 5; i++) { /* a context that goes with its events pending, and comes back */
        for (int k = 0; k < 50; k++)
            CHECK(launch(NULL, 100000));
        CHECK(F(cuDevicePrimaryCtxReset_v2)(device));
        start();
    }
    CHECK(F(cuCtxSynchronize)());
    say("launches", 50 * 10 + 600 + 250);
}

static void launches(int count) {
    start();
    for (int i = 0; i < count; i++)
        CHECK(launch(NULL, 50000));
    CHECK(F(cuCtxSynchronize)());
}

static void left_behind(void) {
    CUstream stream, other;
    CUgraph graph;
    start();
    CHECK(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(F(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 200; i++)
        CHECK(launch(other, 50000));
    CHECK(F(cuStreamSynchronize)(other));
    CHECK(F(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (int i = 0; i < 10000; i++)
        CHECK(launch(other, 50000));
    say("ended", F(cuStreamEndCapture)(other, &graph)); /* the wrong stream: the capture goes on */
    CHECK(F(cuStreamDestroy_v2)(stream));
}

static void children(void) {
    fflush(stdout);
    pid_t child = fork(); /* before the driver starts: each is a process of its own */
    start();
    for (int i = 0; i < 100; i++)
        CHECK(launch(NULL, 50000));
    CHECK(F(cuCtxSynchronize)());
    if (child == 0)
        exit(0);
    int status;
    waitpid(child, &status, 0);
    pid_t late = fork(); /* after it: the child cannot use the device, and must not harm the parent's slot */
    if (late == 0) {
        launch(NULL, 50000);
        exit(0);
    }
    waitpid(late, &status, 0);
    say("late_child", status);
    for (int i = 0; i < 100; i++)
        CHECK(launch(NULL, 50000));
    CHECK(F(cuCtxSynchronize)());
}

static void copies(void) {
    CUdeviceptr a, b;
    static char host[1 << 20];
    start();
    CHECK(F(cuMemAlloc_v2)(&a, MIB));
    CHECK(F(cuMemAlloc_v2)(&b, MIB));
    CHECK(F(cuMemcpyHtoD_v2)(a, host, 1000));
    CHECK(F(cuMemcpyDtoH_v2)(host, a, 300));
    CHECK(F(cuMemcpyDtoD_v2)(b, a, 70));
    CHECK(F(cuMemcpyHtoDAsync_v2)(a, host, 20000, NULL));
    CHECK(F(cuMemcpyDtoHAsync_v2)(host, a, 4000, NULL));
    CHECK(F(cuMemcpyAsync)(b, a, 5, NULL));
    CHECK(F(cuCtxSynchronize)());
}

static void refused(void) {
    CUdevice device;
    CUcontext made;
    say("init", F(cuInit)(0));
    say("device", F(cuDeviceGet)(&device, 0));
    say("retain", F(cuDevicePrimaryCtxRetain)(&made, device));
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return 3;
    if (!strcmp(mode, "memory"))
        memory();
    else if (!strcmp(mode, "mappings"))
        mappings();
    else if (!strcmp(mode, "async"))
        async(atol(argv[2]));
    else if (!strcmp(mode, "resolve"))
        resolve();
    else if (!strcmp(mode, "capture"))
        capture();
    else if (!strcmp(mode, "threads"))
        threads(atoi(argv[2]));
    else if (!strcmp(mode, "streams"))
        streams();
    else if (!strcmp(mode, "launches"))
        launches(atoi(argv[2]));
    else if (!strcmp(mode, "left-behind"))
        left_behind();
    else if (!strcmp(mode, "children"))
        children();
    else if (!strcmp(mode, "copies"))
        copies();
    else if (!strcmp(mode, "refused"))
        refused();
    else
        return 2;
    printf("%s}\n", first ? "{" : "");
    return 0;
}
