/*
 * A program that uses a card: launches kernels of a given length for a given time, and says what it did.
 *
 * It speaks the driver API as an ordinary program does, by whichever of the three ways a program finds its functions
 * (linked, dlsym, cuGetProcAddress). Its kernels come from the text image that only the simulated driver loads.
 */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cuda.h>

#define FUNCTIONS(X)                                                                                                   \
    X(cuInit, cuInit, CUresult, (unsigned))                                                                            \
    X(cuDeviceGet, cuDeviceGet, CUresult, (CUdevice *, int))                                                           \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, CUresult, (int *, CUdevice_attribute, CUdevice))                     \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, CUresult, (CUcontext *, CUdevice))                           \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, CUresult, (CUdevice))                                   \
    X(cuCtxSetCurrent, cuCtxSetCurrent, CUresult, (CUcontext))                                                         \
    X(cuCtxSynchronize, cuCtxSynchronize, CUresult, (void))                                                            \
    X(cuModuleLoadData, cuModuleLoadData, CUresult, (CUmodule *, const void *))                                        \
    X(cuModuleGetFunction, cuModuleGetFunction, CUresult, (CUfunction *, CUmodule, const char *))                      \
    X(cuStreamCreate, cuStreamCreate, CUresult, (CUstream *, unsigned))                                                \
    X(cuStreamSynchronize, cuStreamSynchronize, CUresult, (CUstream))                                                  \
    X(cuEventCreate, cuEventCreate, CUresult, (CUevent *, unsigned))                                                   \
    X(cuEventRecord, cuEventRecord, CUresult, (CUevent, CUstream))                                                     \
    X(cuEventSynchronize, cuEventSynchronize, CUresult, (CUevent))                                                     \
    X(cuLaunchKernel, cuLaunchKernel, CUresult,                                                                        \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))  \
    X(cuMemAlloc, cuMemAlloc_v2, CUresult, (CUdeviceptr *, size_t))                                                    \
    X(cuMemFree, cuMemFree_v2, CUresult, (CUdeviceptr))                                                                \
    X(cuGraphCreate, cuGraphCreate, CUresult, (CUgraph *, unsigned))                                                   \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, CUresult, (CUstream, CUstreamCaptureMode))                        \
    X(cuStreamEndCapture, cuStreamEndCapture, CUresult, (CUstream, CUgraph *))                                         \
    X(cuGraphInstantiate, cuGraphInstantiateWithFlags, CUresult, (CUgraphExec *, CUgraph, unsigned long long))         \
    X(cuGraphLaunch, cuGraphLaunch, CUresult, (CUgraphExec, CUstream))                                                 \
    X(cuGetErrorName, cuGetErrorName, CUresult, (CUresult, const char **))

static struct {
#define MEMBER(field, symbol, result, arguments) result(*field) arguments;
    FUNCTIONS(MEMBER)
} cu;

static const char image[] = "poolmeter-sim-module 1\nkernel spin parameter\n";

struct options {
    uint64_t kernel_ns;
    double seconds; /* 0: until a signal comes */
    bool counted;   /* a fixed number of kernels, else as many as fit the time */
    uint64_t kernels;
    unsigned graph;
    unsigned long long allocate;
    unsigned processes;
    unsigned streams;
    uint64_t gap_ns;
    unsigned sync_every;
    int device;
    unsigned blocks;
    const char *resolve;
    bool hold;
};

struct outcome {
    uint64_t kernels;
    uint64_t allocated;
    double seconds;
    int error;  /* the first CUresult that was no success */
    int failed; /* could not work at all */
};

static void die(const char *what, CUresult rc) {
    const char *name = NULL;
    if (cu.cuGetErrorName != NULL)
        cu.cuGetErrorName(rc, &name);
    fprintf(stderr, "poolmeter-sim-tenant: %s gave %s (%d)\n", what, name != NULL ? name : "an unnamed error", (int)rc);
}

#if TENANT_LINKED
static void resolve(const char *how) {
    (void)how;
#define LINKED(field, symbol, result, arguments) cu.field = (result(*) arguments)symbol;
    FUNCTIONS(LINKED)
}
#else
static void *open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "poolmeter-sim-tenant: no CUDA driver: %s\n", dlerror());
        exit(3);
    }
    return library;
}

static void resolve(const char *how) {
    void *library = open_driver();
    if (strcmp(how, "dlsym") == 0) {
#define BY_NAME(field, symbol, result, arguments)                                                                      \
    cu.field = (result(*) arguments)dlsym(library, #symbol);                                                           \
    if (cu.field == NULL) {                                                                                            \
        fprintf(stderr, "poolmeter-sim-tenant: the driver has no %s\n", #symbol);                                      \
        exit(3);                                                                                                       \
    }
        FUNCTIONS(BY_NAME)
        return;
    }
    CUresult (*lookup)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = (CUresult (*)(
        const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *))dlsym(library, "cuGetProcAddress_v2");
    if (lookup == NULL) {
        fprintf(stderr, "poolmeter-sim-tenant: the driver has no cuGetProcAddress_v2\n");
        exit(3);
    }
#define BY_LOOKUP(field, symbol, result, arguments)                                                                    \
    {                                                                                                                  \
        void *at = NULL;                                                                                               \
        CUdriverProcAddressQueryResult status;                                                                         \
        const char *name = strcmp(#field, "cuGraphInstantiate") == 0 ? "cuGraphInstantiateWithFlags" : #field;         \
        if (lookup(name, &at, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS || at == NULL) {            \
            fprintf(stderr, "poolmeter-sim-tenant: cuGetProcAddress knows no %s\n", name);                             \
            exit(3);                                                                                                   \
        }                                                                                                              \
        cu.field = (result(*) arguments)at;                                                                            \
    }
    FUNCTIONS(BY_LOOKUP)
}
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* On a virtual clock time passes only inside the driver, which then says what time it is. */
static uint64_t (*sim_now)(void);
static void (*sim_sleep_until)(uint64_t);

static double clock_seconds(void) {
    return sim_now != NULL ? (double)sim_now() / 1e9 : now();
}

static void pause_ns(uint64_t ns) {
    if (sim_sleep_until != NULL) {
        sim_sleep_until(sim_now() + ns);
        return;
    }
    struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    nanosleep(&t, NULL);
}

static volatile sig_atomic_t stopping;
static void stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        CUresult rc_ = (call);                                                                                         \
        if (rc_ != CUDA_SUCCESS) {                                                                                     \
            die(#call, rc_);                                                                                           \
            if (out.error == 0)                                                                                        \
                out.error = (int)rc_;                                                                                  \
            goto done;                                                                                                 \
        }                                                                                                              \
    } while (0)

static struct outcome run(const struct options *o) {
    struct outcome out = {0};
    CUdevice device;
    CUcontext context = NULL;
    CUmodule module;
    CUfunction spin;
    CUstream streams[64] = {0};
    CUgraphExec exec = NULL;
    CUdeviceptr memory = 0;
    uint64_t length = o->kernel_ns;
    void *params[1] = {&length};
    bool worked = false;
    double start = now();
    resolve(o->resolve);
    TRY(cu.cuInit(0));
    sim_now = (uint64_t (*)(void))dlsym(RTLD_DEFAULT, "poolmeter_sim_now_ns");
    sim_sleep_until = (void (*)(uint64_t))dlsym(RTLD_DEFAULT, "poolmeter_sim_sleep_until_ns");
    if (sim_now == NULL) {
        fprintf(stderr, "poolmeter-sim-tenant: the CUDA driver found is a real one; its kernels exist on the simulated "
                        "card only\n");
        out.failed = 1;
        return out;
    }
    start = clock_seconds();
    TRY(cu.cuDeviceGet(&device, o->device));
    TRY(cu.cuDevicePrimaryCtxRetain(&context, device));
    TRY(cu.cuCtxSetCurrent(context));
    TRY(cu.cuModuleLoadData(&module, image));
    TRY(cu.cuModuleGetFunction(&spin, module, "spin"));
    unsigned blocks = o->blocks;
    if (blocks == 0) {
        int sms = 0;
        TRY(cu.cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
        blocks = (unsigned)sms;
    }
    for (unsigned i = 0; i < o->streams; i++)
        TRY(cu.cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    if (o->allocate > 0) {
        CUresult rc = cu.cuMemAlloc(&memory, o->allocate);
        if (rc == CUDA_SUCCESS)
            out.allocated = o->allocate;
        else
            out.error = (int)rc; /* reported; the computing goes on without it */
    }
    if (o->graph > 0) {
        CUgraph graph;
        TRY(cu.cuStreamBeginCapture(streams[0], CU_STREAM_CAPTURE_MODE_RELAXED));
        for (unsigned i = 0; i < o->graph; i++)
            TRY(cu.cuLaunchKernel(spin, blocks, 1, 1, 128, 1, 1, 0, streams[0], params, NULL));
        TRY(cu.cuStreamEndCapture(streams[0], &graph));
        TRY(cu.cuGraphInstantiate(&exec, graph, 0));
    }
    worked = true;
    unsigned each = o->graph > 0 ? o->graph : 1;
    /* At most two batches of about 10 ms are under way: enough to keep the card full, and little to wait for at the
     * end. */
    uint64_t length_ns = o->kernel_ns * each;
    uint64_t batch = length_ns > 0 && length_ns < 10000000 ? 10000000 / length_ns : 1;
    if (batch > 500)
        batch = 500;
    CUevent marks[64][2];
    for (unsigned i = 0; i < o->streams; i++)
        for (int k = 0; k < 2; k++)
            TRY(cu.cuEventCreate(&marks[i][k], CU_EVENT_DISABLE_TIMING));
    for (uint64_t n = 0; !stopping && (!o->counted || o->kernels > 0); n++) {
        if (o->counted && out.kernels >= o->kernels)
            break;
        if (o->seconds > 0 && (n % 16 == 0 || length_ns > 1000000 || o->gap_ns > 0) &&
            clock_seconds() - start >= o->seconds)
            break;
        CUstream stream = streams[n % o->streams];
        if (exec != NULL)
            TRY(cu.cuGraphLaunch(exec, stream));
        else if (o->kernel_ns > 0)
            TRY(cu.cuLaunchKernel(spin, blocks, 1, 1, 128, 1, 1, 0, stream, params, NULL));
        if (o->kernel_ns > 0 || exec != NULL)
            out.kernels += each;
        uint64_t turn = n / o->streams;
        if ((turn + 1) % batch == 0) {
            CUevent *mark = marks[n % o->streams];
            uint64_t which = (turn + 1) / batch % 2;
            TRY(cu.cuEventRecord(mark[which], stream));
            if (turn + 1 > batch)
                TRY(cu.cuEventSynchronize(mark[1 - which]));
        }
        if (o->sync_every > 0 && (n + 1) % o->sync_every == 0)
            TRY(cu.cuStreamSynchronize(stream));
        if (o->gap_ns > 0 || o->kernel_ns == 0)
            pause_ns(o->gap_ns > 0 ? o->gap_ns : 10000000);
    }
    TRY(cu.cuCtxSynchronize());
    while (o->counted && !stopping &&
           (o->hold || (o->kernels == 0 && (o->seconds == 0 || clock_seconds() - start < o->seconds))))
        pause_ns(o->seconds > 0 && o->seconds < 0.2 ? 5000000 : 50000000); /* holds its memory */
done:
    out.seconds = clock_seconds() - start;
    out.failed = !worked;
    if (memory != 0)
        cu.cuMemFree(memory);
    if (context != NULL)
        cu.cuDevicePrimaryCtxRelease(device);
    return out;
}

static void print_outcome(const struct outcome *o, unsigned processes) {
    const char *name = NULL;
    if (o->error != 0 && cu.cuGetErrorName != NULL)
        cu.cuGetErrorName((CUresult)o->error, &name);
    printf("{\"schema\":\"poolmeter.tenant.process/1\",\"pid\":%d,\"kernels\":%" PRIu64
           ",\"wall_seconds\":%.6f,\"allocated_bytes\":%" PRIu64 ",\"processes\":%u,\"cuda_error\":",
           (int)getpid(), o->kernels, o->seconds, o->allocated, processes);
    if (o->error == 0)
        printf("null}\n");
    else if (name != NULL)
        printf("\"%s\"}\n", name);
    else
        printf("\"CUresult %d\"}\n", o->error);
    fflush(stdout);
}

static uint64_t number(const char *text, const char *flag) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != 0) {
        fprintf(stderr, "poolmeter-sim-tenant: --%s is %s, a whole number was expected\n", flag, text);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv) {
    static const struct option flags[] = {
        {"kernel-us", required_argument, NULL, 'k'}, {"kernel-ns", required_argument, NULL, 'n'},
        {"seconds", required_argument, NULL, 's'},   {"kernels", required_argument, NULL, 'c'},
        {"graph", required_argument, NULL, 'g'},     {"allocate", required_argument, NULL, 'a'},
        {"processes", required_argument, NULL, 'p'}, {"streams", required_argument, NULL, 't'},
        {"gap-us", required_argument, NULL, 'i'},    {"sync-every", required_argument, NULL, 'y'},
        {"device", required_argument, NULL, 'd'},    {"blocks", required_argument, NULL, 'b'},
        {"resolve", required_argument, NULL, 'r'},   {"hold", no_argument, NULL, 'h'},
        {"die-with-parent", no_argument, NULL, 'x'}, {NULL, 0, NULL, 0},
    };
    struct options o = {.kernel_ns = 1000000, .seconds = 1, .processes = 1, .streams = 1, .resolve = "gpa"};
    for (int c; (c = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        switch (c) {
        case 'k':
            o.kernel_ns = number(optarg, "kernel-us") * 1000;
            break;
        case 'n':
            o.kernel_ns = number(optarg, "kernel-ns");
            break;
        case 's': {
            char *end = NULL;
            o.seconds = strtod(optarg, &end);
            if (end == optarg || *end != 0 || !(o.seconds >= 0)) {
                fprintf(stderr, "poolmeter-sim-tenant: --seconds is %s, a number of seconds was expected\n", optarg);
                return 2;
            }
            break;
        }
        case 'c':
            o.counted = true;
            o.kernels = number(optarg, "kernels");
            break;
        case 'g':
            o.graph = (unsigned)number(optarg, "graph");
            break;
        case 'a':
            o.allocate = number(optarg, "allocate");
            break;
        case 'p':
            o.processes = (unsigned)number(optarg, "processes");
            break;
        case 't':
            o.streams = (unsigned)number(optarg, "streams");
            break;
        case 'i':
            o.gap_ns = number(optarg, "gap-us") * 1000;
            break;
        case 'y':
            o.sync_every = (unsigned)number(optarg, "sync-every");
            break;
        case 'd':
            o.device = (int)number(optarg, "device");
            break;
        case 'b':
            o.blocks = (unsigned)number(optarg, "blocks");
            break;
        case 'r':
            o.resolve = optarg;
            break;
        case 'h':
            o.hold = true;
            break;
        case 'x':
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() == 1)
                return 3;
            break;
        default:
            return 2;
        }
    }
    if (o.streams < 1 || o.streams > 64 || o.processes < 1 || o.processes > 256) {
        fprintf(stderr,
                "poolmeter-sim-tenant: --streams is %u (1 to 64 expected), --processes is %u (1 to 256 expected)\n",
                o.streams, o.processes);
        return 2;
    }
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    if (o.processes == 1) {
        struct outcome out = run(&o);
        if (!out.failed || out.error != 0)
            print_outcome(&out, 1);
        return out.failed ? 3 : 0;
    }
    /* Children start before this process touches the driver, which survives no fork. */
    pid_t children[256];
    for (unsigned i = 0; i < o.processes; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            struct outcome out = run(&o);
            if (!out.failed || out.error != 0)
                print_outcome(&out, o.processes);
            exit(out.failed ? 3 : 0);
        }
    }
    int worst = 0;
    for (unsigned i = 0; i < o.processes; i++) {
        int status = 0;
        while (waitpid(children[i], &status, 0) < 0 && errno == EINTR)
            if (stopping)
                for (unsigned k = 0; k < o.processes; k++)
                    kill(children[k], SIGTERM);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        worst = code > worst ? code : worst;
    }
    return worst;
}
