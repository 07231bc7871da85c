#include "copy.h"

#define COPY_KIND 11

/* Copies of about a length take about as long: eight kinds to an octave. */
static uint64_t length_class(uint64_t bytes) {
    if (bytes < 8)
        return bytes;
    int top = 63 - __builtin_clzll(bytes);
    return (uint64_t)top << 3 | (bytes >> (top - 3) & 7);
}

void pm_copy_begin(struct pm_copy *copy, CUstream stream, bool waits) {
    *copy = (struct pm_copy){.stream = stream};
    struct pm_process *self = pm_self();
    if (!self || (!waits && pm_capturing(stream)))
        return;
    copy->context = pm_current(self);
    if (copy->context)
        copy->charged = pm_process_limits(self, copy->context->device).charge_copies != 0;
}

void pm_copy_add(struct pm_copy *copy, enum pm_direction way, uint64_t bytes) {
    copy->copies++;
    if (way != PM_ON_HOST)
        copy->bytes[way] += bytes;
}

void pm_copy_go(struct pm_copy *copy) {
    if (!copy->context)
        return;
    uint64_t kind = pm_mix(COPY_KIND, 0), bytes = 0;
    for (int way = 0; way < PM_ON_HOST; way++) {
        kind = pm_mix(kind, length_class(copy->bytes[way]));
        bytes += copy->bytes[way];
    }
    copy->charged = copy->charged && bytes;
    if (copy->charged)
        pm_ticket_open(&copy->ticket, kind | 1, copy->stream);
    else
        pm_tracker_taint(&copy->context->tracker, pm_lane_key(copy->stream));
}

void pm_copy_end(struct pm_copy *copy, CUresult result, bool waited) {
    if (!copy->context)
        return;
    struct pm_counters *counters = copy->context->tracker.counters;
    if (copy->charged) {
        const struct pm_estimate *entry = copy->ticket.launch.tracker ? copy->ticket.launch.entry : NULL;
        pm_ticket_close(&copy->ticket, result);
        if (entry && result == CUDA_SUCCESS)
            pm_add(&counters->copy_busy_ns, pm_peek(&entry->ns) ? pm_peek(&entry->ns) : PM_UNKNOWN_NS);
    }
    if (result == CUDA_SUCCESS) {
        uint64_t *by[] = {&counters->copy_h2d_bytes, &counters->copy_d2h_bytes, &counters->copy_d2d_bytes,
                          &counters->copy_p2p_bytes};
        for (int way = 0; way < PM_ON_HOST; way++)
            if (copy->bytes[way])
                pm_add(by[way], copy->bytes[way]);
        pm_add(&counters->copies, copy->copies);
    }
    if (waited)
        pm_tracker_poll(&copy->context->tracker);
}

/* ---- directions -------------------------------------------------------------------------------------------------- */

/* An error means plain host memory. */
static bool on_device(CUdeviceptr at) {
    CUmemorytype type = 0;
    return PM_NEED(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

enum pm_direction pm_direction_of(CUdeviceptr to, CUdeviceptr from) {
    int to_device = -1, from_device = -1;
    if (!pm_need[PM_NEED_cuPointerGetAttribute])
        return PM_ON_DEVICE;
    bool device_to = on_device(to), device_from = on_device(from);
    if (!device_to || !device_from)
        return device_to ? PM_TO_DEVICE : device_from ? PM_TO_HOST : PM_ON_HOST;
    bool known =
        PM_NEED(cuPointerGetAttribute)(&to_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, to) == CUDA_SUCCESS &&
        PM_NEED(cuPointerGetAttribute)(&from_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, from) == CUDA_SUCCESS;
    return known && to_device != from_device ? PM_BETWEEN_DEVICES : PM_ON_DEVICE;
}

static bool is_device(CUmemorytype type, CUdeviceptr at) {
    return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY ||
           (type == CU_MEMORYTYPE_UNIFIED && pm_need[PM_NEED_cuPointerGetAttribute] && on_device(at));
}

enum pm_direction pm_direction_between(CUmemorytype to, CUdeviceptr to_at, CUmemorytype from, CUdeviceptr from_at) {
    bool pointers = to != CU_MEMORYTYPE_ARRAY && from != CU_MEMORYTYPE_ARRAY;
    bool device_to = is_device(to, to_at), device_from = is_device(from, from_at);
    if (device_to && device_from)
        return pointers ? pm_direction_of(to_at, from_at) : PM_ON_DEVICE;
    return device_to ? PM_TO_DEVICE : device_from ? PM_TO_HOST : PM_ON_HOST;
}
