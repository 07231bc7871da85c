/* The library as such: initialisation, versions, error texts. */
#include "nvml_state.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sim_machine *nvml_machine;
struct nvmlDevice_st nvml_devices[SIM_MAX_DEVICES];
struct nvmlDevice_st nvml_migs[SIM_MAX_DEVICES][SIM_MAX_INSTANCES];

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static int init_count;
static char mapped_path[4096];

int nvml_enter(uint32_t call) {
    if (nvml_machine == NULL || __atomic_load_n(&init_count, __ATOMIC_ACQUIRE) == 0)
        return NVML_ERROR_UNINITIALIZED;
    return machine_call(nvml_machine, call, -1);
}

int nvml_enter_device(uint32_t call, nvmlDevice_t device) {
    if (nvml_machine == NULL || __atomic_load_n(&init_count, __ATOMIC_ACQUIRE) == 0)
        return NVML_ERROR_UNINITIALIZED;
    bool ours =
        device >= nvml_devices && device < nvml_devices + nvml_machine->devices && device->magic == NVML_DEVICE_MAGIC;
    int code = machine_call(nvml_machine, call, ours ? (int)device->index : -1);
    if (code != 0)
        return code;
    if (!ours)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvml_machine->device[device->index].lost ? NVML_ERROR_GPU_IS_LOST : 0;
}

int nvml_enter_any(uint32_t call, nvmlDevice_t device, struct sim_instance **mig) {
    *mig = NULL;
    struct nvmlDevice_st *first = &nvml_migs[0][0];
    if (nvml_machine == NULL || device < first || device >= first + SIM_MAX_DEVICES * SIM_MAX_INSTANCES ||
        device->magic != NVML_MIG_MAGIC)
        return nvml_enter_device(call, device);
    int code = nvml_enter_device(call, &nvml_devices[device->index]);
    if (code != 0)
        return code;
    struct sim_instance *found = &nvml_machine->device[device->index].instance[device->instance];
    if (!found->used)
        return NVML_ERROR_INVALID_ARGUMENT; /* destroyed since the handle was given */
    *mig = found;
    return 0;
}

int nvml_unimplemented(uint32_t call, const char *name) {
    if (nvml_machine != NULL) {
        __atomic_fetch_add(&nvml_machine->calls[call], 1, __ATOMIC_RELAXED);
        nvml_machine->unimplemented[call] = 1;
    }
    fprintf(stderr,
            "poolmeter simulator: %s is not implemented by the simulated libnvidia-ml; it returns "
            "NVML_ERROR_FUNCTION_NOT_FOUND\n",
            name);
    return NVML_ERROR_FUNCTION_NOT_FOUND;
}

static nvmlReturn_t initialise(uint32_t call) {
    const char *path = getenv(SIM_ENV);
    if (path == NULL || path[0] == 0) {
        fprintf(stderr, "poolmeter simulator: libnvidia-ml finds no machine: the variable " SIM_ENV " is not set\n");
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    pthread_mutex_lock(&init_lock);
    /* Another machine may be named after the last shutdown; the old mapping stays, a late caller may still be inside
     * it. */
    if (nvml_machine == NULL || (init_count == 0 && strcmp(path, mapped_path) != 0)) {
        char error[512];
        struct sim_machine *m = machine_map(path, false, error, sizeof error);
        if (m == NULL) {
            pthread_mutex_unlock(&init_lock);
            fprintf(stderr, "poolmeter simulator: %s\n", error);
            return NVML_ERROR_DRIVER_NOT_LOADED;
        }
        for (uint32_t i = 0; i < SIM_MAX_DEVICES; i++) {
            nvml_devices[i] = (struct nvmlDevice_st){NVML_DEVICE_MAGIC, i, 0};
            for (uint32_t k = 0; k < SIM_MAX_INSTANCES; k++)
                nvml_migs[i][k] = (struct nvmlDevice_st){NVML_MIG_MAGIC, i, k};
        }
        nvml_machine = m;
        snprintf(mapped_path, sizeof mapped_path, "%s", path);
    }
    int code = machine_call(nvml_machine, call, -1);
    if (code == 0)
        __atomic_fetch_add(&init_count, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&init_lock);
    return (nvmlReturn_t)code;
}

NVML_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags);
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return initialise(CALL_nvmlInitWithFlags);
}

NVML_EXPORT nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlInit_v2(void) {
    return initialise(CALL_nvmlInit_v2);
}

NVML_EXPORT nvmlReturn_t nvmlInit(void);
nvmlReturn_t nvmlInit(void) {
    return initialise(CALL_nvmlInit);
}

NVML_EXPORT nvmlReturn_t nvmlShutdown(void);
nvmlReturn_t nvmlShutdown(void) {
    ENTER(nvmlShutdown);
    __atomic_fetch_sub(&init_count, 1, __ATOMIC_ACQ_REL);
    return NVML_SUCCESS;
}

NVML_EXPORT const char *nvmlErrorString(nvmlReturn_t result);
const char *nvmlErrorString(nvmlReturn_t result) {
    switch ((int)result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case 16:
        return "GPU requires reset";
    case 17:
        return "The operating system has blocked the request";
    case 18:
        return "RM has detected an NVML/RM version mismatch";
    case NVML_ERROR_MEMORY:
        return "Insufficient Memory";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Mismatched Argument Version";
    default:
        return "Unknown Error";
    }
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length);
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) {
    ENTER(nvmlSystemGetDriverVersion);
    return give_text(text, length, nvml_machine->driver_version);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned length);
nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned length) {
    ENTER(nvmlSystemGetNVMLVersion);
    return give_text(text, length, nvml_machine->nvml_version);
}

CARD_MACHINE_VALUE(nvmlSystemGetCudaDriverVersion, int, nvml_machine->cuda_version)
CARD_MACHINE_VALUE(nvmlSystemGetCudaDriverVersion_v2, int, nvml_machine->cuda_version)

NVML_EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length);
nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length) {
    ENTER(nvmlSystemGetProcessName);
    REQUIRE(text != NULL && length > 0, NVML_ERROR_INVALID_ARGUMENT);
    char path[64], line[4096] = "";
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL, NVML_ERROR_NOT_FOUND);
    size_t n = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    REQUIRE(n > 0, NVML_ERROR_NOT_FOUND);
    snprintf(text, length, "%s", line);
    return NVML_SUCCESS;
}
