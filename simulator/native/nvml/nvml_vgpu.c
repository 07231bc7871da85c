/* vGPU: the active instances of a host, as the machine file names them, and the licence of a guest. */
#include "nvml_state.h"

#include <string.h>

#define HOST_VGPU 3u
#define GUEST 2u

/* An instance's number says its card and its place there. */
static unsigned number_of(uint32_t device, uint32_t place) {
    return 0xc0000000u | device << 8 | place;
}

static struct sim_vgpu *vgpu_of(unsigned number) {
    uint32_t device = number >> 8 & 0xff, place = number & 0xff;
    if ((number & 0xffff0000u) != 0xc0000000u || device >= nvml_machine->devices || place >= SIM_MAX_VGPUS)
        return NULL;
    struct sim_vgpu *v = &nvml_machine->device[device].vgpu[place];
    return v->used ? v : NULL;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetActiveVgpus(nvmlDevice_t device, unsigned *count, unsigned *out);
nvmlReturn_t nvmlDeviceGetActiveVgpus(nvmlDevice_t device, unsigned *count, unsigned *out) {
    ENTER_DEVICE(nvmlDeviceGetActiveVgpus, device);
    REQUIRE(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->virtualization == HOST_VGPU, NVML_ERROR_NOT_SUPPORTED);
    unsigned n = 0, room = out != NULL ? *count : 0;
    for (uint32_t i = 0; i < SIM_MAX_VGPUS; i++)
        if (d->vgpu[i].used) {
            if (n < room)
                out[n] = number_of(device->index, i);
            n++;
        }
    *count = n;
    return n <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

#define ENTER_VGPU(name, number)                                                                                       \
    ENTER(name);                                                                                                       \
    const struct sim_vgpu *v = vgpu_of(number);                                                                        \
    REQUIRE(v != NULL, NVML_ERROR_NOT_FOUND)

NVML_EXPORT nvmlReturn_t nvmlVgpuInstanceGetVmID(unsigned number, char *text, unsigned length, unsigned *kind);
nvmlReturn_t nvmlVgpuInstanceGetVmID(unsigned number, char *text, unsigned length, unsigned *kind) {
    ENTER_VGPU(nvmlVgpuInstanceGetVmID, number);
    REQUIRE(kind != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *kind = 1; /* a UUID */
    return give_text(text, length, v->vm_id);
}

NVML_EXPORT nvmlReturn_t nvmlVgpuInstanceGetUUID(unsigned number, char *text, unsigned length);
nvmlReturn_t nvmlVgpuInstanceGetUUID(unsigned number, char *text, unsigned length) {
    ENTER_VGPU(nvmlVgpuInstanceGetUUID, number);
    return give_text(text, length, v->uuid);
}

NVML_EXPORT nvmlReturn_t nvmlVgpuInstanceGetFbUsage(unsigned number, unsigned long long *bytes);
nvmlReturn_t nvmlVgpuInstanceGetFbUsage(unsigned number, unsigned long long *bytes) {
    ENTER_VGPU(nvmlVgpuInstanceGetFbUsage, number);
    REQUIRE(bytes != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *bytes = v->framebuffer_used;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlVgpuInstanceGetType(unsigned number, unsigned *type);
nvmlReturn_t nvmlVgpuInstanceGetType(unsigned number, unsigned *type) {
    ENTER_VGPU(nvmlVgpuInstanceGetType, number);
    REQUIRE(type != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *type = v->type_id;
    return NVML_SUCCESS;
}

struct license_info {
    unsigned char licensed;
    struct {
        unsigned year;
        unsigned short month, day, hour, min, sec;
        unsigned char status;
    } expiry;
    unsigned state;
};

NVML_EXPORT nvmlReturn_t nvmlVgpuInstanceGetLicenseInfo_v2(unsigned number, struct license_info *out);
nvmlReturn_t nvmlVgpuInstanceGetLicenseInfo_v2(unsigned number, struct license_info *out) {
    ENTER_VGPU(nvmlVgpuInstanceGetLicenseInfo_v2, number);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    memset(out, 0, sizeof *out);
    out->licensed = v->licensed != 0;
    out->state = v->licensed ? 5 : 4;
    return NVML_SUCCESS;
}

static const struct sim_vgpu *of_type(unsigned type) {
    for (uint32_t k = 0; k < nvml_machine->devices; k++)
        for (uint32_t i = 0; i < SIM_MAX_VGPUS; i++)
            if (nvml_machine->device[k].vgpu[i].used && nvml_machine->device[k].vgpu[i].type_id == type)
                return &nvml_machine->device[k].vgpu[i];
    return NULL;
}

NVML_EXPORT nvmlReturn_t nvmlVgpuTypeGetName(unsigned type, char *text, unsigned *length);
nvmlReturn_t nvmlVgpuTypeGetName(unsigned type, char *text, unsigned *length) {
    ENTER(nvmlVgpuTypeGetName);
    const struct sim_vgpu *v = of_type(type);
    REQUIRE(v != NULL && length != NULL, NVML_ERROR_INVALID_ARGUMENT);
    return give_text(text, *length, v->type_name);
}

NVML_EXPORT nvmlReturn_t nvmlVgpuTypeGetFramebufferSize(unsigned type, unsigned long long *bytes);
nvmlReturn_t nvmlVgpuTypeGetFramebufferSize(unsigned type, unsigned long long *bytes) {
    ENTER(nvmlVgpuTypeGetFramebufferSize);
    const struct sim_vgpu *v = of_type(type);
    REQUIRE(v != NULL && bytes != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *bytes = v->framebuffer;
    return NVML_SUCCESS;
}

union value {
    double real;
    unsigned number;
    unsigned long long wide;
};

struct vgpu_sample {
    unsigned instance;
    unsigned long long time_us;
    union value sm, memory, encoder, decoder;
};

/* One sample a vGPU: what it is said to use, as of the card's newest sample. */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetVgpuUtilization(nvmlDevice_t device, unsigned long long last_us,
                                                      unsigned *value_type, unsigned *count, struct vgpu_sample *out);
nvmlReturn_t nvmlDeviceGetVgpuUtilization(nvmlDevice_t device, unsigned long long last_us, unsigned *value_type,
                                          unsigned *count, struct vgpu_sample *out) {
    ENTER_DEVICE(nvmlDeviceGetVgpuUtilization, device);
    REQUIRE(value_type != NULL && count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->virtualization == HOST_VGPU, NVML_ERROR_NOT_SUPPORTED);
    *value_type = 1;
    card_lock(device->index);
    uint64_t at = d->samples[(d->samples_head - 1) % SIM_DEVICE_SAMPLES].end_us;
    card_unlock();
    unsigned n = 0, room = out != NULL ? *count : 0;
    for (uint32_t i = 0; i < SIM_MAX_VGPUS; i++)
        if (d->vgpu[i].used) {
            if (n < room)
                out[n] = (struct vgpu_sample){
                    number_of(device->index, i), at, {.wide = d->vgpu[i].busy_percent}, {0}, {0}, {0}};
            n++;
        }
    *count = n;
    REQUIRE(n <= room, NVML_ERROR_INSUFFICIENT_SIZE);
    return n > 0 && at <= last_us ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

struct licensable_feature {
    unsigned code, state;
    char info[128], product[128];
    unsigned enabled;
    struct {
        unsigned year;
        unsigned short month, day, hour, min, sec;
        unsigned char status;
    } expiry;
};

struct licensable_features {
    int supported;
    unsigned count;
    struct licensable_feature feature[3];
};

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, struct licensable_features *out);
nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, struct licensable_features *out) {
    ENTER_DEVICE(nvmlDeviceGetGridLicensableFeatures_v4, device);
    REQUIRE(out != NULL, NVML_ERROR_INVALID_ARGUMENT);
    memset(out, 0, sizeof *out);
    if (d->virtualization != GUEST)
        return NVML_SUCCESS;
    out->supported = 1;
    out->count = 1;
    out->feature[0].code = 4;
    out->feature[0].state = d->licensed != 0;
    out->feature[0].enabled = d->licensed != 0;
    strcpy(out->feature[0].product, "NVIDIA Virtual Compute Server");
    return NVML_SUCCESS;
}
