/* Types and entry code of the simulated libnvidia-ml. Layouts are those of NVML's API 13, as nvidia-ml-py declares
 * them. */
#ifndef POOLMETER_SIM_NVML_STATE_H
#define POOLMETER_SIM_NVML_STATE_H

#include "calls.h"
#include "machine.h"

#include <string.h>

#define NVML_EXPORT __attribute__((visibility("default")))

typedef enum nvmlReturn {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

struct nvmlDevice_st {
    uint32_t magic;
    uint32_t index;
    uint32_t instance; /* of a MIG device: its slot */
};
typedef struct nvmlDevice_st *nvmlDevice_t;
#define NVML_DEVICE_MAGIC 0x4e564431u
#define NVML_MIG_MAGIC 0x4e564432u

extern struct sim_machine *nvml_machine;
extern struct nvmlDevice_st nvml_devices[SIM_MAX_DEVICES];
extern struct nvmlDevice_st nvml_migs[SIM_MAX_DEVICES][SIM_MAX_INSTANCES];

/* Counts the call; the scripted code, or what stands in the way (not initialised, no such card, card lost). */
int nvml_enter(uint32_t call);
int nvml_enter_device(uint32_t call, nvmlDevice_t device);
int nvml_enter_any(uint32_t call, nvmlDevice_t device, struct sim_instance **mig); /* *mig NULL: a whole card */
int nvml_unimplemented(uint32_t call, const char *name);

#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        int code_ = nvml_enter(CALL_##name);                                                                           \
        if (code_ != 0)                                                                                                \
            return (nvmlReturn_t)code_;                                                                                \
    } while (0)

/* Declares `m` and `d`: the machine and the card of the handle. */
#define ENTER_DEVICE(name, device)                                                                                     \
    do {                                                                                                               \
        int code_ = nvml_enter_device(CALL_##name, device);                                                            \
        if (code_ != 0)                                                                                                \
            return (nvmlReturn_t)code_;                                                                                \
    } while (0);                                                                                                       \
    struct sim_machine *m = nvml_machine;                                                                              \
    struct sim_device *d = &m->device[(device)->index];                                                                \
    (void)m;                                                                                                           \
    (void)d

/* As ENTER_DEVICE for calls that also take the handle of a MIG device; declares `mig` too. */
#define ENTER_ANY(name, device)                                                                                        \
    struct sim_instance *mig = NULL;                                                                                   \
    do {                                                                                                               \
        int code_ = nvml_enter_any(CALL_##name, device, &mig);                                                         \
        if (code_ != 0)                                                                                                \
            return (nvmlReturn_t)code_;                                                                                \
    } while (0);                                                                                                       \
    struct sim_machine *m = nvml_machine;                                                                              \
    struct sim_device *d = &m->device[(device)->index];                                                                \
    (void)m;                                                                                                           \
    (void)d

/* Defines a getter of one value of the card `d`. (A line that begins with CARD_...(nvmlName defines nvmlName:
 * generate.py looks for that.) */
#define CARD_VALUE(name, type, expression)                                                                             \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, type *value);                                                   \
    nvmlReturn_t name(nvmlDevice_t device, type *value) {                                                              \
        ENTER_DEVICE(name, device);                                                                                    \
        REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);                                                           \
        *value = (type)(expression);                                                                                   \
        return NVML_SUCCESS;                                                                                           \
    }

/* The same of the machine. */
#define CARD_MACHINE_VALUE(name, type, expression)                                                                     \
    NVML_EXPORT nvmlReturn_t name(type *value);                                                                        \
    nvmlReturn_t name(type *value) {                                                                                   \
        ENTER(name);                                                                                                   \
        REQUIRE(value != NULL, NVML_ERROR_INVALID_ARGUMENT);                                                           \
        *value = (type)(expression);                                                                                   \
        return NVML_SUCCESS;                                                                                           \
    }

#define REQUIRE(condition, code)                                                                                       \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return (code);                                                                                             \
    } while (0)

static inline nvmlReturn_t give_text(char *to, unsigned length, const char *from) {
    REQUIRE(to != NULL, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(strlen(from) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(to, from);
    return NVML_SUCCESS;
}

/* Locks the machine with the card brought up to now. */
static inline void card_lock(uint32_t index) {
    machine_enter(nvml_machine);
    engine_touch(nvml_machine, index);
}
static inline void card_unlock(void) {
    machine_unlock(nvml_machine);
}
bool process_on(const struct sim_process *p, uint32_t device, const struct sim_instance *mig); /* locked; NULL: card */
uint64_t instance_memory_used(const struct sim_machine *m, uint32_t device,
                              const struct sim_instance *mig);                                           /* locked */
uint64_t instance_busy_ns(const struct sim_machine *m, uint32_t device, const struct sim_instance *mig); /* locked */
uint32_t card_busy_percent(const struct sim_device *d); /* mean of the last second's samples */
unsigned card_temperature(const struct sim_device *d);

#endif
