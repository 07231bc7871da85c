#include "claim.h"

#include <string.h>

#include "board.h"
#include "clock.h"

#define SETTING_UP_NS 1000000000u

uint32_t pm_captures;

static int event_create(void **event) {
    return (int)PM_NEED(cuEventCreate)((CUevent *)event, CU_EVENT_DEFAULT);
}

static int event_destroy(void *event) {
    return (int)PM_NEED(cuEventDestroy_v2)(event);
}

static int event_record(void *event, void *stream) {
    return (int)PM_NEED(cuEventRecord)(event, stream);
}

static int event_query(void *event) {
    return (int)PM_NEED(cuEventQuery)(event);
}

static int event_elapsed(float *ms, void *start, void *end) {
    return ((int (*)(float *, void *, void *))pm_need[PM_NEED_cuEventElapsedTime])(ms, start, end);
}

static int context_enter(void *context) {
    if (!pm_need[PM_NEED_cuCtxPushCurrent_v2] || !pm_need[PM_NEED_cuCtxPopCurrent_v2])
        return (int)CUDA_ERROR_NOT_FOUND;
    return (int)PM_NEED(cuCtxPushCurrent_v2)(context);
}

static void context_leave(void) {
    CUcontext left;
    PM_NEED(cuCtxPopCurrent_v2)(&left);
}

const struct pm_driver pm_cuda_driver = {event_create,  event_destroy, event_record,  event_query,
                                         event_elapsed, context_enter, context_leave, &pm_captures};

static bool events_there(void) {
    return pm_need[PM_NEED_cuEventCreate] && pm_need[PM_NEED_cuEventDestroy_v2] && pm_need[PM_NEED_cuEventRecord] &&
           pm_need[PM_NEED_cuEventQuery] && pm_need[PM_NEED_cuEventElapsedTime];
}

/* The driver did not say what it always says: whatever goes unmetered for that is at least known to. */
static void not_told(struct pm_process *self, CUresult result) {
    if (result != CUDA_ERROR_NOT_INITIALIZED && result != CUDA_ERROR_DEINITIALIZED &&
        result != CUDA_ERROR_INVALID_CONTEXT && result != CUDA_ERROR_CONTEXT_IS_DESTROYED &&
        result != CUDA_ERROR_INVALID_DEVICE)
        pm_add(&self->view.header->faults, 1);
}

uint32_t pm_device_of(struct pm_process *self, CUdevice ordinal) {
    if (ordinal < 0 || ordinal >= PM_MAX_ORDINALS)
        return PM_NO_DEVICE;
    uint32_t known = pm_peek(&self->device_of_ordinal[ordinal]);
    if (known == 0) {
        CUuuid uuid;
        CUresult result = CUDA_ERROR_NOT_FOUND;
        if (pm_need[PM_NEED_cuDeviceGetUuid_v2]) /* names the instance where the device is one */
            result = PM_NEED(cuDeviceGetUuid_v2)(&uuid, ordinal);
        if (result != CUDA_SUCCESS && pm_need[PM_NEED_cuDeviceGetUuid])
            result = ((CUresult (*)(CUuuid *, CUdevice))pm_need[PM_NEED_cuDeviceGetUuid])(&uuid, ordinal);
        if (result != CUDA_SUCCESS) {
            not_told(self, result);
            return PM_NO_DEVICE;
        }
        uint32_t device = pm_process_device(self, (const unsigned char *)uuid.bytes);
        known = device == PM_NO_DEVICE ? PM_NO_DEVICE : device + 1;
        pm_poke(&self->device_of_ordinal[ordinal], known);
    }
    return known == PM_NO_DEVICE ? PM_NO_DEVICE : known - 1;
}

uint32_t pm_current_device(struct pm_process *self) {
    CUdevice ordinal;
    CUresult result = pm_need[PM_NEED_cuCtxGetDevice] ? PM_NEED(cuCtxGetDevice)(&ordinal) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        return pm_device_of(self, ordinal);
    not_told(self, result);
    return PM_NO_DEVICE;
}

/*
 * A process that has never had more than one context needs not ask which one is current: it is that one, or the driver
 * refuses the call. Contexts come from the calls below, whether or not they succeed; a primary one counts once.
 */
static void count_context(struct pm_process *self, CUdevice ordinal, bool primary) {
    bool known = false;
    if (primary && ordinal >= 0 && ordinal < PM_MAX_ORDINALS)
        known = __atomic_exchange_n(&self->retained[ordinal], 1, __ATOMIC_RELAXED) != 0;
    if (!known)
        pm_add(&self->possible_contexts, 1);
}

static bool device_refused(CUdevice ordinal, bool primary) {
    struct pm_process *self = pm_self();
    if (!self)
        return pm_process_refuses();
    uint32_t device = pm_device_of(self, ordinal);
    if (device != PM_NO_DEVICE && pm_process_limits(self, device).listed) {
        if (pm_load(&self->context_count) == 0) /* its setting up has turns of the device as well */
            pm_board_busy(self->boards[device], self->seats[device], pm_now_ns() + SETTING_UP_NS);
        count_context(self, ordinal, primary);
        return false;
    }
    if (device == PM_NO_DEVICE &&
        (ordinal < 0 || ordinal >= PM_MAX_ORDINALS || !pm_peek(&self->device_of_ordinal[ordinal]))) {
        count_context(self, ordinal, primary);
        return false; /* the driver did not say which device this is: no ground to refuse it */
    }
    pm_add(&pm_process_counters(self, device == PM_NO_DEVICE ? 0 : device)->denied_device, 1);
    return true;
}

/* What the calling thread found last. */
static __thread struct {
    uint64_t generation;
    CUcontext handle;
    struct pm_context *context;
} known;

PM_SELDOM static struct pm_context *find_current(struct pm_process *self) {
    CUcontext handle = NULL;
    CUresult result = pm_need[PM_NEED_cuCtxGetCurrent] ? PM_NEED(cuCtxGetCurrent)(&handle) : CUDA_ERROR_NOT_FOUND;
    if (result != CUDA_SUCCESS)
        not_told(self, result);
    if (result != CUDA_SUCCESS || !handle)
        return NULL;
    uint64_t generation = pm_load(&self->generation);
    if (known.handle == handle && known.generation == generation)
        return known.context;
    uint32_t device = pm_current_device(self);
    struct pm_context *context = NULL;
    if (device != PM_NO_DEVICE && events_there())
        context = pm_process_context(self, handle, device, &pm_cuda_driver);
    known.handle = context ? handle : NULL; /* what could not be found out is asked again */
    known.generation = generation;
    known.context = context;
    return context;
}

PM_HOT struct pm_context *pm_current(struct pm_process *self) {
    if (known.context && pm_peek(&self->possible_contexts) == 1 && known.generation == pm_load(&self->generation))
        return known.context;
    return find_current(self);
}

bool pm_capturing(CUstream stream) {
    if (pm_peek(&pm_captures) == 0 || !pm_need[PM_NEED_cuStreamIsCapturing])
        return false;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = PM_NEED(cuStreamIsCapturing)(stream, &status);
    if (result != CUDA_SUCCESS &&
        (result < CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED || result > CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)) {
        struct pm_process *self = pm_self();
        if (self)
            pm_add(&self->view.header->faults, 1);
    }
    return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void pm_taint(CUstream stream) {
    struct pm_process *self = pm_self();
    struct pm_context *context = self ? pm_current(self) : NULL;
    if (context)
        pm_tracker_taint(&context->tracker, pm_lane_key(stream));
}

/* ---- starting ---------------------------------------------------------------------------------------------------- */

PM_EXPORT CUresult cuInit(unsigned int flags) {
    if (!pm_ready() || !PM_REAL(cuInit))
        return CUDA_ERROR_NO_DEVICE;
    CUresult result = PM_REAL(cuInit)(flags);
    if (result == CUDA_SUCCESS) {
        pm_self();
        if (pm_process_refuses())
            return CUDA_ERROR_NOT_PERMITTED;
    }
    return result;
}

PM_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    if (!pm_ready() || !pm_real[PM_HOOK_cuGetProcAddress])
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = ((CUresult (*)(const char *, void **, int, cuuint64_t))pm_real[PM_HOOK_cuGetProcAddress])(
        symbol, pfn, version, flags);
    if (result == CUDA_SUCCESS && pfn)
        *pfn = pm_shim_of(*pfn);
    return result;
}

PM_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                                       CUdriverProcAddressQueryResult *status) {
    if (!pm_ready() || !PM_REAL(cuGetProcAddress_v2))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = PM_REAL(cuGetProcAddress_v2)(symbol, pfn, version, flags, status);
    if (result == CUDA_SUCCESS && pfn)
        *pfn = pm_shim_of(*pfn);
    return result;
}

/* ---- contexts ---------------------------------------------------------------------------------------------------- */

#define REFUSED CUDA_ERROR_DEVICE_UNAVAILABLE

/* A context comes or goes, and memory of the device with it: begins the change and says which device. */
static uint32_t change_begins(struct pm_process *self, CUdevice ordinal) {
    uint32_t device = self ? pm_device_of(self, ordinal) : PM_NO_DEVICE;
    pm_process_change_begins(self, device);
    return device;
}

#define CREATES(name, device, primary, ...)                                                                            \
    PM_MISSING(name);                                                                                                  \
    if (device_refused(device, primary))                                                                               \
        return REFUSED;                                                                                                \
    struct pm_process *self = pm_self();                                                                               \
    uint32_t index = change_begins(self, device);                                                                      \
    CUresult result = PM_REAL(name)(__VA_ARGS__);                                                                      \
    pm_process_change_ends(self, index);                                                                               \
    return result

PM_EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATES(cuCtxCreate, device, false, context, flags, device);
}

PM_EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATES(cuCtxCreate_v2, device, false, context, flags, device);
}

PM_EXPORT CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
                                  CUdevice device) {
    CREATES(cuCtxCreate_v3, device, false, context, params, count, flags, device);
}

PM_EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    CREATES(cuCtxCreate_v4, device, false, context, params, flags, device);
}

PM_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CREATES(cuDevicePrimaryCtxRetain, device, true, context, device);
}

/* Before the context goes: afterwards its events are gone as well, and asking about them is undefined. */
static void context_goes(CUcontext handle, bool destroy_events, bool gone) {
    struct pm_process *self = pm_self();
    if (!self || !handle)
        return;
    pm_process_forget_context(self, handle, destroy_events && pm_peek(&pm_captures) == 0, gone);
    if (gone)
        pm_process_forget_memory(self, handle);
}

static CUresult context_destroy(CUresult (*destroy)(CUcontext), CUcontext context) {
    struct pm_process *self = pm_self();
    uint32_t device = PM_NO_DEVICE;
    if (self && context && context_enter(context) == 0) {
        device = pm_current_device(self);
        context_leave();
    }
    pm_process_change_begins(self, device);
    context_goes(context, false, true);
    CUresult result = destroy(context);
    pm_process_change_ends(self, device);
    return result;
}

PM_EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    PM_MISSING(cuCtxDestroy_v2);
    return context_destroy(PM_REAL(cuCtxDestroy_v2), context);
}

PM_EXPORT CUresult cuCtxDestroy(CUcontext context) {
    PM_MISSING(cuCtxDestroy);
    return context_destroy(PM_REAL(cuCtxDestroy), context);
}

/* The handle of a primary context that is active; asking creates none. */
static CUcontext primary_of(CUdevice device) {
    struct pm_process *self = pm_self();
    unsigned int flags;
    int active = 0;
    CUcontext handle = NULL;
    if (!self || !pm_need[PM_NEED_cuDevicePrimaryCtxGetState] || !pm_real[PM_HOOK_cuDevicePrimaryCtxRetain])
        return NULL;
    CUresult result = PM_NEED(cuDevicePrimaryCtxGetState)(device, &flags, &active);
    if (result != CUDA_SUCCESS)
        not_told(self, result);
    if (result != CUDA_SUCCESS || !active)
        return NULL;
    if (PM_REAL(cuDevicePrimaryCtxRetain)(&handle, device) != CUDA_SUCCESS)
        return NULL;
    void *release = pm_real[PM_HOOK_cuDevicePrimaryCtxRelease_v2] ? pm_real[PM_HOOK_cuDevicePrimaryCtxRelease_v2]
                                                                  : pm_real[PM_HOOK_cuDevicePrimaryCtxRelease];
    if (release)
        ((CUresult (*)(CUdevice))release)(device);
    return handle;
}

/* Before the driver takes back a reference to it. */
static CUcontext primary_may_go(CUdevice device) {
    CUcontext handle = primary_of(device);
    context_goes(handle, true, false); /* it may live on, so its events are destroyed and not leaked */
    return handle;
}

static void primary_went(CUdevice device, CUcontext handle) {
    if (!handle || primary_of(device))
        return;
    context_goes(handle, false, true);
    pm_graph_memory_settle(device);
}

static CUresult primary_release(CUresult (*release)(CUdevice), CUdevice device) {
    struct pm_process *self = pm_self();
    uint32_t index = change_begins(self, device);
    CUcontext handle = primary_may_go(device);
    CUresult result = release(device);
    if (result == CUDA_SUCCESS)
        primary_went(device, handle);
    pm_process_change_ends(self, index);
    return result;
}

static CUresult primary_reset(CUresult (*reset)(CUdevice), CUdevice device) {
    struct pm_process *self = pm_self();
    uint32_t index = change_begins(self, device);
    context_goes(primary_of(device), false, true);
    CUresult result = reset(device);
    pm_graph_memory_settle(device);
    pm_process_change_ends(self, index);
    return result;
}

PM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    PM_MISSING(cuDevicePrimaryCtxRelease_v2);
    return primary_release(PM_REAL(cuDevicePrimaryCtxRelease_v2), device);
}

PM_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    PM_MISSING(cuDevicePrimaryCtxRelease);
    return primary_release(PM_REAL(cuDevicePrimaryCtxRelease), device);
}

PM_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    PM_MISSING(cuDevicePrimaryCtxReset_v2);
    return primary_reset(PM_REAL(cuDevicePrimaryCtxReset_v2), device);
}

PM_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    PM_MISSING(cuDevicePrimaryCtxReset);
    return primary_reset(PM_REAL(cuDevicePrimaryCtxReset), device);
}

/* ---- contexts on a part of the processors ------------------------------------------------------------------------ */

/* Its context; NULL: the driver does not say. */
static CUcontext context_of(CUgreenCtx green) {
    struct pm_process *self = pm_self();
    CUcontext handle = NULL;
    if (green && pm_need[PM_NEED_cuCtxFromGreenCtx] && PM_NEED(cuCtxFromGreenCtx)(&handle, green) == CUDA_SUCCESS)
        return handle;
    if (green && self)
        pm_add(&self->view.header->faults, 1);
    return NULL;
}

PM_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc part, CUdevice device, unsigned int flags) {
    PM_MISSING(cuGreenCtxCreate);
    if (device_refused(device, false))
        return REFUSED;
    struct pm_process *self = pm_self();
    uint32_t index = change_begins(self, device);
    CUresult result = PM_REAL(cuGreenCtxCreate)(context, part, device, flags);
    pm_process_change_ends(self, index);
    if (self && result == CUDA_SUCCESS && context) {
        struct pm_holding made = {.key = pm_key(context_of(*context)),
                                  .other = pm_key(primary_of(device)),
                                  .device = (uint32_t)device,
                                  .uses = 1};
        pm_pointers_put(self->pointers, PM_HOLD_GREEN, &made);
    }
    return result;
}

/*
 * Its context takes its events with it. Memory that was allocated in it is the primary context's and stays with that,
 * which goes if this was the last reference to it.
 */
PM_EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx context) {
    PM_MISSING(cuGreenCtxDestroy);
    struct pm_process *self = pm_self();
    CUcontext handle = self ? context_of(context) : NULL, primary = NULL;
    struct pm_holding green;
    bool known = handle && pm_pointers_take(self->pointers, PM_HOLD_GREEN, pm_key(handle), &green);
    if (handle)
        pm_process_forget_context(self, handle, false, true);
    uint32_t index = known ? change_begins(self, (CUdevice)green.device) : PM_NO_DEVICE;
    if (known)
        primary = primary_may_go((CUdevice)green.device);
    CUresult result = PM_REAL(cuGreenCtxDestroy)(context);
    if (known && result == CUDA_SUCCESS)
        primary_went((CUdevice)green.device, primary);
    else if (known)
        pm_pointers_put(self->pointers, PM_HOLD_GREEN, &green);
    pm_process_change_ends(self, index);
    return result;
}
