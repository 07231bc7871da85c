/* What the shims ask of any driver, for programs that are linked with them and put functions of their own in `pm_real`.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "claim.h"
#include "memory.h"

void *pm_real[PM_HOOK_COUNT];
void *pm_need[PM_NEED_COUNT];
int pm_resolved = 1;

int pm_resolve(void) {
    return 1;
}

void *pm_shim_of(void *real) {
    return real;
}

static CUresult fake_uuid(CUuuid *uuid, CUdevice ordinal) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)(ordinal + 1);
    return CUDA_SUCCESS;
}

static CUresult fake_device(CUdevice *ordinal) {
    *ordinal = 0;
    return CUDA_SUCCESS;
}

static CUresult fake_context(CUcontext *handle) {
    *handle = (CUcontext)(uintptr_t)0x100;
    return CUDA_SUCCESS;
}

static CUresult fake_push(CUcontext handle) {
    (void)handle;
    return CUDA_SUCCESS;
}

/* One device, whose only context is current. */
static void fake_needs(void) {
    pm_need[PM_NEED_cuDeviceGetUuid_v2] = fake_uuid;
    pm_need[PM_NEED_cuCtxGetDevice] = fake_device;
    pm_need[PM_NEED_cuCtxGetCurrent] = fake_context;
    pm_need[PM_NEED_cuCtxPushCurrent_v2] = fake_push;
    pm_need[PM_NEED_cuCtxPopCurrent_v2] = fake_context;
}

static inline void done(CUresult result) {
    if (result != CUDA_SUCCESS)
        abort();
}

#endif
