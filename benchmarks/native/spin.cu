// A tenant whose device time is known: kernels of a fixed amount of work that note on the card when they began and ended.
//
//   spin --kernel-us N --seconds S [--pattern stream|sync|graph|streams|duty] [--blocks-per-sm B] [--gap-us N] [--allocate BYTES] [--rounds N]
//        [--start-at NS] [--warm-up S] [--window-ms N]
//
// duty works for 10 ms, waits for the end, and rests for 10 ms. --start-at (CLOCK_MONOTONIC) begins at the same time as others. The figures
// measured_* leave out the first --warm-up seconds after the first kernel (and what the card was calibrated with); windows are the busy
// shares, in percent, of consecutive stretches of --window-ms from the first kernel on.
//
// --rounds takes the amount of work of a kernel from an earlier run (it is printed) instead of timing it: beside another tenant there is
// no timing it. Prints one JSON line: kernels, truth_ns (union of the kernels' own spans by %globaltimer: what the card worked for us when alone),
// wall_ns, launch_ns (host time per launch), allocated_bytes, error. The work is arithmetic, not a wait for a clock, so a kernel that
// shares the card takes longer and does no less.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

struct Span {
    unsigned long long begin, end;
};

// One per stream; kernels of a stream follow each other, so all blocks of a kernel read the same `index`.
struct Log {
    unsigned int index, finished;
};

__device__ __forceinline__ unsigned long long device_now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__global__ void spin(unsigned long long rounds, Log *log, Span *spans, unsigned int capacity, float *sink) {
    __shared__ unsigned int index;
    // The clock is read first and last, so that what the kernel does to keep this log is in its span.
    const unsigned long long began = device_now();
    if (threadIdx.x == 0) {
        index = *(volatile unsigned int *)&log->index;
        if (index < capacity) atomicMin(&spans[index].begin, began);
    }
    __syncthreads();
    float a = 1.0f + threadIdx.x * 1e-6f;
    for (unsigned long long i = 0; i < rounds; i++) {
#pragma unroll
        for (int k = 0; k < 16; k++) a = fmaf(a, 0.999f, 1e-7f);
    }
    if (a == 123.456f) *sink = a;  // never: it keeps the loop
    __syncthreads();
    if (threadIdx.x == 0) {
        if (atomicAdd(&log->finished, 1u) == gridDim.x - 1) {
            log->finished = 0;
            __threadfence();
            log->index = index + 1;
        }
        if (index < capacity) atomicMax(&spans[index].end, device_now());
    }
}

static void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorName(status));
    exit(1);
}
#define CHECK(call) check(call, #call)

static uint64_t host_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

int main(int argc, char **argv) {
    double kernel_us = 1000, seconds = 3, gap_us = 0, warm_up = 0, window_ms = 0;
    uint64_t start_at = 0;
    unsigned int calibrations = 0;
    long blocks_per_sm = 1;
    unsigned long long allocate = 0, rounds = 0;
    std::string pattern = "stream";
    for (int i = 1; i + 1 < argc; i += 2) {
        std::string flag = argv[i], value = argv[i + 1];
        if (flag == "--kernel-us") kernel_us = atof(value.c_str());
        else if (flag == "--seconds") seconds = atof(value.c_str());
        else if (flag == "--gap-us") gap_us = atof(value.c_str());
        else if (flag == "--blocks-per-sm") blocks_per_sm = atol(value.c_str());
        else if (flag == "--allocate") allocate = strtoull(value.c_str(), nullptr, 10);
        else if (flag == "--rounds") rounds = strtoull(value.c_str(), nullptr, 10);
        else if (flag == "--start-at") start_at = strtoull(value.c_str(), nullptr, 10);
        else if (flag == "--warm-up") warm_up = atof(value.c_str());
        else if (flag == "--window-ms") window_ms = atof(value.c_str());
        else if (flag == "--pattern") pattern = value;
        else return fprintf(stderr, "spin: unknown flag %s\n", flag.c_str()), 2;
    }
    int multiprocessors = 0;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    const unsigned int blocks = multiprocessors * blocks_per_sm, threads = 128;
    const int streams = pattern == "streams" ? 4 : 1, nodes = 20;
    const unsigned int capacity = (unsigned int)std::min(4e6, seconds * 1e6 / kernel_us * 1.5 + 100000);

    unsigned long long allocated = 0;
    void *extra = nullptr;
    const char *error = nullptr;
    if (allocate) {
        cudaError_t status = cudaMalloc(&extra, allocate);
        if (status == cudaSuccess) allocated = allocate;
        else error = cudaGetErrorName(status), cudaGetLastError();
    }
    float *sink;
    Log *logs;
    Span *spans;
    CHECK(cudaMalloc(&sink, 4));
    CHECK(cudaMalloc(&logs, streams * sizeof(Log)));
    CHECK(cudaMalloc(&spans, sizeof(Span) * capacity * streams));
    CHECK(cudaMemset(logs, 0, streams * sizeof(Log)));
    std::vector<Span> host((size_t)capacity * streams, Span{~0ull, 0});
    CHECK(cudaMemcpy(spans, host.data(), host.size() * sizeof(Span), cudaMemcpyHostToDevice));
    std::vector<cudaStream_t> queue(streams);
    for (auto &stream : queue) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // How many rounds make the wanted length: doubled until long enough to time, then scaled.
    if (!rounds) {
        cudaEvent_t before, after;
        CHECK(cudaEventCreate(&before));
        CHECK(cudaEventCreate(&after));
        rounds = 64;
        for (float ms = 0;; rounds *= 2) {
            calibrations++;
            CHECK(cudaEventRecord(before, queue[0]));
            spin<<<blocks, threads, 0, queue[0]>>>(rounds, &logs[0], spans, capacity, sink);
            CHECK(cudaEventRecord(after, queue[0]));
            CHECK(cudaEventSynchronize(after));
            CHECK(cudaEventElapsedTime(&ms, before, after));
            if (ms > 20) {
                rounds = std::max(1ull, (unsigned long long)(rounds * (kernel_us / 1000.0 / ms)));
                break;
            }
        }
    }

    cudaGraphExec_t graph = nullptr;
    if (pattern == "graph") {
        cudaGraph_t captured;
        CHECK(cudaStreamBeginCapture(queue[0], cudaStreamCaptureModeGlobal));
        for (int i = 0; i < nodes; i++) spin<<<blocks, threads, 0, queue[0]>>>(rounds, &logs[0], spans, capacity, sink);
        CHECK(cudaStreamEndCapture(queue[0], &captured));
        CHECK(cudaGraphInstantiate(&graph, captured, 0));
    }
    // Enough work in flight to keep the card busy, little enough to stop in time.
    const bool duty = pattern == "duty";
    const int batch = duty ? std::max(1, (int)(10000 / kernel_us)) : std::max(1, (int)(20000 / (kernel_us * (graph ? nodes : 1))));
    std::vector<cudaEvent_t> fence(2);
    for (auto &event : fence) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    if (start_at) {
        timespec t = {(time_t)(start_at / 1000000000), (long)(start_at % 1000000000)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
    }
    uint64_t began = host_now(), launching = 0, launches = 0, cycles = 0;
    const uint64_t stop = began + (uint64_t)(seconds * 1e9);
    for (int turn = 0; host_now() < stop; turn ^= 1) {
        for (int i = 0; i < batch; i++) {
            for (int s = 0; s < streams; s++) {
                uint64_t t = host_now();
                if (graph) CHECK(cudaGraphLaunch(graph, queue[s]));
                else spin<<<blocks / streams, threads, 0, queue[s]>>>(rounds, &logs[s], spans + (size_t)capacity * s, capacity, sink);
                launching += host_now() - t;
                launches++;
            }
            if (pattern == "sync" || gap_us > 0) {
                CHECK(cudaStreamSynchronize(queue[0]));
                for (uint64_t until = host_now() + (uint64_t)(gap_us * 1e3); host_now() < until;) {}
            }
        }
        if (duty) CHECK(cudaStreamSynchronize(queue[0]));
        if (duty) {
            cycles++;
            timespec rest = {0, 10000000};
            nanosleep(&rest, nullptr);
            continue;
        }
        CHECK(cudaEventRecord(fence[turn], queue[0]));
        CHECK(cudaEventSynchronize(fence[turn ^ 1]));
    }
    CHECK(cudaDeviceSynchronize());
    uint64_t wall = host_now() - began;
    CHECK(cudaMemcpy(host.data(), spans, host.size() * sizeof(Span), cudaMemcpyDeviceToHost));
    std::vector<Span> done;
    unsigned long long first = ~0ull;
    for (size_t i = 0; i < host.size(); i++) {
        if (!host[i].end) continue;
        done.push_back(host[i]);
        if (i >= calibrations) first = std::min(first, host[i].begin);
    }
    std::sort(done.begin(), done.end(), [](const Span &a, const Span &b) { return a.begin < b.begin; });
    unsigned long long truth = 0, covered = 0, measured_truth = 0, measured_kernels = 0;
    const unsigned long long from_ns = first + (unsigned long long)(warm_up * 1e9), until_ns = first + (unsigned long long)(seconds * 1e9);
    const unsigned long long window_ns = (unsigned long long)(window_ms * 1e6);
    std::vector<unsigned long long> windows(window_ns ? (size_t)(seconds * 1e9 / window_ns) : 0, 0);
    for (const Span &span : done) {
        unsigned long long from = std::max(covered, span.begin);
        if (span.end >= from_ns && span.end < until_ns) measured_kernels++;
        if (span.end <= from) continue;
        truth += span.end - from, covered = span.end;
        if (std::min(span.end, until_ns) > std::max(from, from_ns)) measured_truth += std::min(span.end, until_ns) - std::max(from, from_ns);
        for (unsigned long long at = std::max(from, first); window_ns && at < span.end;) {
            size_t window = (at - first) / window_ns;
            unsigned long long to = std::min(span.end, first + (window + 1) * window_ns);
            if (window < windows.size()) windows[window] += to - at;
            at = to;
        }
    }
    printf("{\"kernels\": %zu, \"rounds\": %llu, \"truth_ns\": %llu, \"wall_ns\": %llu, \"launch_ns\": %.1f, \"allocated_bytes\": %llu, \"measured_ns\": %llu, "
           "\"measured_truth_ns\": %llu, \"measured_kernels\": %llu, \"cycles\": %llu, \"windows\": [",
           done.size(), rounds, truth, (unsigned long long)wall, (double)launching / std::max<uint64_t>(1, launches), allocated,
           done.empty() ? 0 : until_ns - from_ns, measured_truth, measured_kernels, (unsigned long long)cycles);
    for (size_t i = 0; i < windows.size(); i++) printf("%s%.2f", i ? ", " : "", 100.0 * windows[i] / window_ns);
    printf("], \"error\": %s%s%s}\n", error ? "\"" : "", error ? error : "null", error ? "\"" : "");
    return 0;
}
