/* Parts of cards: MIG devices, who runs on them, and vGPUs. */
#include <string.h>

#include "machine.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int psim_instance(struct sim_machine *m, uint32_t device, uint32_t slot, const char *uuid, const char *profile,
                         uint32_t slices, uint32_t start, uint32_t size, uint64_t memory);
EXPORT int psim_assign(struct sim_machine *m, uint32_t pid, uint32_t device, uint32_t slot);
EXPORT int psim_vgpu(struct sim_machine *m, uint32_t device, uint32_t place, const char *uuid, const char *type,
                     const char *vm_id, uint64_t framebuffer, uint64_t used, uint32_t percent, uint32_t licensed);

/* Makes the MIG device in a slot of the card's, or with no profile destroys the one there. */
int psim_instance(struct sim_machine *m, uint32_t device, uint32_t slot, const char *uuid, const char *profile,
                  uint32_t slices, uint32_t start, uint32_t size, uint64_t memory) {
    if (device >= m->devices || slot >= SIM_MAX_INSTANCES)
        return -1;
    struct sim_device *d = &m->device[device];
    struct sim_instance made = {.used = profile[0] != 0,
                                .gpu_instance = slot + (slices < 7 ? 1 : 0),
                                .slices = slices,
                                .sms = d->sms / 7 * slices,
                                .start = start,
                                .size = size,
                                .profile_id = slices == 1   ? 19
                                              : slices == 2 ? 14
                                              : slices == 3 ? 9
                                              : slices == 4 ? 5
                                                            : 0,
                                .memory = memory};
    if (strlen(uuid) >= sizeof made.uuid || strlen(profile) >= sizeof made.profile)
        return -1;
    strcpy(made.uuid, uuid);
    strcpy(made.profile, profile);
    machine_lock(m);
    for (uint32_t i = 0; i < m->process_high; i++) /* whoever ran on what was there runs on no instance now */
        if (m->process[i].account[device].instance == slot + 1)
            m->process[i].account[device].instance = 0;
    d->instance[slot] = made;
    machine_unlock(m);
    return 0;
}

/* The process runs on the MIG device in a slot of the card's. */
int psim_assign(struct sim_machine *m, uint32_t pid, uint32_t device, uint32_t slot) {
    if (device >= m->devices || slot >= SIM_MAX_INSTANCES)
        return -1;
    int found = -1;
    machine_lock(m);
    for (uint32_t i = 0; i < m->process_high; i++)
        if (m->process[i].state == SIM_PROCESS_LIVE && m->process[i].pid == pid) {
            m->process[i].account[device].instance = slot + 1;
            found = 0;
        }
    machine_unlock(m);
    return found;
}

/* Makes the vGPU in a place of the card's, or with no type ends the one there. */
int psim_vgpu(struct sim_machine *m, uint32_t device, uint32_t place, const char *uuid, const char *type,
              const char *vm_id, uint64_t framebuffer, uint64_t used, uint32_t percent, uint32_t licensed) {
    if (device >= m->devices || place >= SIM_MAX_VGPUS)
        return -1;
    uint32_t number = 0;
    for (const char *c = type; *c; c++)
        number = number * 31 + (unsigned char)*c;
    struct sim_vgpu made = {.used = type[0] != 0,
                            .licensed = licensed,
                            .type_id = number & 0xffff,
                            .busy_percent = percent,
                            .framebuffer = framebuffer,
                            .framebuffer_used = used};
    if (strlen(uuid) >= sizeof made.uuid || strlen(type) >= sizeof made.type_name || strlen(vm_id) >= sizeof made.vm_id)
        return -1;
    strcpy(made.uuid, uuid);
    strcpy(made.type_name, type);
    strcpy(made.vm_id, vm_id);
    machine_lock(m);
    m->device[device].vgpu[place] = made;
    machine_unlock(m);
    return 0;
}
