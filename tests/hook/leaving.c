/*
 * A launch on several devices while another thread ends the process, by which the hook lets go of its pages: leaving
 * CODE. The driver is a table of functions here; asked for a stream's context it lets the other thread go first, and
 * answers CODE. Prints what the launch returned.
 */
#include "fake_cuda.h"

static CUresult code;

/* The parts that the linked files want, and nothing here reaches. */
uint64_t pm_graph_kind(CUgraphExec exec) {
    return pm_key(exec);
}

bool pm_graph_memory_begin(struct pm_graph_need *need, CUgraphExec exec) {
    return need && exec;
}

void pm_graph_memory_end(const struct pm_graph_need *need, CUresult result) {
    (void)need, (void)result;
}

void pm_graph_memory_settle(CUdevice ordinal) {
    (void)ordinal;
}

static CUresult stream_context(CUstream stream, CUcontext *context) {
    (void)stream;
    pm_store(&pm_process_page->state, PM_INERT);
    *context = (CUcontext)(uintptr_t)0x100;
    return code;
}

static CUresult launch(CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags) {
    (void)list, (void)count, (void)flags;
    return CUDA_ERROR_LAUNCH_FAILED;
}

int main(int argc, char **argv) {
    CUDA_LAUNCH_PARAMS list[2] = {0};
    if (argc < 2 || !pm_self())
        return 2;
    code = (CUresult)atoi(argv[1]);
    fake_needs();
    pm_need[PM_NEED_cuStreamGetCtx] = stream_context;
    pm_real[PM_HOOK_cuLaunchCooperativeKernelMultiDevice] = launch;
    printf("%d\n", (int)cuLaunchCooperativeKernelMultiDevice(list, 2, 0));
    return 0;
}
