/* Process state, initialisation, forks, devices. */
#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct cuda_state cuda = {.lock = PTHREAD_MUTEX_INITIALIZER};
__thread struct thread_state thread_state;

static pthread_once_t mapped_once = PTHREAD_ONCE_INIT;
static pthread_key_t leave_key;

static void leave_at_exit(void *unused) {
    (void)unused;
    if (cuda.m != NULL)
        machine_leave(cuda.m);
}

static void in_child(void) {
    pthread_mutex_init(&cuda.lock, NULL);
    machine_forget_thread();
    thread_state.joined = false;
    if (cuda.initialised) {
        cuda.child_of_user = true;
        cuda.initialised = false;
    }
}

static void before_fork(void) {
    pthread_mutex_lock(&cuda.lock);
}
static void in_parent(void) {
    pthread_mutex_unlock(&cuda.lock);
}

static void map_machine(void) {
    pthread_key_create(&leave_key, leave_at_exit);
    pthread_atfork(before_fork, in_parent, in_child);
    const char *path = getenv(SIM_ENV);
    if (path == NULL || path[0] == 0) {
        fprintf(stderr, "poolmeter simulator: libcuda finds no machine: the variable " SIM_ENV " is not set\n");
        return;
    }
    char error[512];
    cuda.m = machine_map(path, false, error, sizeof error);
    if (cuda.m == NULL)
        fprintf(stderr, "poolmeter simulator: %s\n", error);
}

static struct sim_machine *the_machine(void) {
    if (__builtin_expect(cuda.m == NULL, 0))
        pthread_once(&mapped_once, map_machine);
    return cuda.m;
}

static int enter(uint32_t call, bool needs_init, int device) {
    struct sim_machine *m = the_machine();
    if (m != NULL) {
        int code = machine_call(m, call, device);
        if (code != 0)
            return code;
    }
    if (!needs_init)
        return 0;
    if (__builtin_expect(!cuda.initialised, 0))
        return CUDA_ERROR_NOT_INITIALIZED;
    __atomic_store_n(&m->process[cuda.process].seen_ns, machine_now(m), __ATOMIC_RELAXED);
    if (__builtin_expect(m->clock == SIM_CLOCK_VIRTUAL, 0)) {
        if (!thread_state.joined) {
            thread_state.joined = true;
            pthread_setspecific(leave_key, (void *)1);
            machine_join(m, cuda.process);
        } else {
            machine_return(m);
        }
    }
    if (device >= 0 && __builtin_expect(m->device[device].lost, 0))
        return CUDA_ERROR_UNKNOWN;
    return 0;
}

int sim_enter(uint32_t call, bool needs_init) {
    if (thread_state.per_thread_default > 0)
        return 0; /* counted by the per-thread variant that runs this */
    const struct CUctx_st *ctx = current_context();
    return enter(call, needs_init, ctx != NULL ? ctx->device : -1);
}

int sim_enter_device(uint32_t call, CUdevice dev) {
    int device = dev >= 0 && dev < cuda.visible_count ? cuda.visible[dev] : -1;
    return enter(call, true, device);
}

CUresult sim_unimplemented(uint32_t call, const char *name) {
    struct sim_machine *m = the_machine();
    if (m != NULL) {
        __atomic_fetch_add(&m->calls[call], 1, __ATOMIC_RELAXED);
        m->unimplemented[call] = 1;
    }
    fprintf(
        stderr,
        "poolmeter simulator: %s is not implemented by the simulated libcuda; it returns CUDA_ERROR_NOT_SUPPORTED\n",
        name);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* --- visible devices -------------------------------------------------------------------------------------------- */

/* CUDA_VISIBLE_DEVICES: ordinals or UUID prefixes; the list ends at the first entry that names no card, or one twice.
 */
static void read_visible(void) {
    const struct sim_machine *m = cuda.m;
    cuda.visible_count = 0;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (list == NULL) {
        for (uint32_t d = 0; d < m->devices; d++)
            cuda.visible[cuda.visible_count++] = (int)d;
        return;
    }
    char copy[4096];
    snprintf(copy, sizeof copy, "%s", list);
    char *save = NULL;
    for (char *item = strtok_r(copy, ",", &save); item != NULL; item = strtok_r(NULL, ",", &save)) {
        while (*item == ' ')
            item++;
        int found = -1;
        if (strncmp(item, "GPU-", 4) == 0) {
            size_t length = strcspn(item, " ");
            int matches = 0;
            for (uint32_t d = 0; d < m->devices; d++)
                if (strncasecmp(m->device[d].uuid, item, length) == 0) {
                    found = (int)d;
                    matches++;
                }
            if (matches != 1)
                found = -1;
        } else {
            char *end = NULL;
            long index = strtol(item, &end, 10);
            if (end != item && index >= 0 && index < (long)m->devices)
                found = (int)index;
        }
        bool twice = false;
        for (int i = 0; i < cuda.visible_count; i++)
            twice |= cuda.visible[i] == found;
        if (found < 0 || cuda.visible_count == SIM_MAX_DEVICES)
            return;
        if (twice) {
            cuda.visible_count = 0;
            return;
        }
        cuda.visible[cuda.visible_count++] = found;
    }
}

bool device_of(CUdevice ordinal, int *device) {
    if (ordinal < 0 || ordinal >= cuda.visible_count)
        return false;
    *device = cuda.visible[ordinal];
    return true;
}

int ordinal_of(int device) {
    for (int i = 0; i < cuda.visible_count; i++)
        if (cuda.visible[i] == device)
            return i;
    return -1;
}

/* --- initialisation --------------------------------------------------------------------------------------------- */

static void at_exit(void) {
    if (!cuda.initialised || cuda.child_of_user || cuda.pid != getpid())
        return;
    /* No lock of ours is taken: another thread may hold it for good at this point. */
    struct sim_machine *m = cuda.m;
    machine_leave(m);
    machine_enter(m);
    process_detach(m, cuda.process, false);
    machine_unlock(m);
    cuda.initialised = false;
}

__attribute__((destructor)) static void unload(void) {
    at_exit();
}

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (cuda.child_of_user)
        return CUDA_ERROR_NOT_INITIALIZED;
    ENTER_EARLY(cuInit);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(the_machine() != NULL, CUDA_ERROR_NO_DEVICE);
    cuda_lock();
    if (cuda.initialised) {
        cuda_unlock();
        return CUDA_SUCCESS;
    }
    read_visible();
    if (cuda.visible_count == 0) {
        cuda_unlock();
        return CUDA_ERROR_NO_DEVICE;
    }
    machine_enter(cuda.m);
    cuda.process = process_attach(cuda.m, (uint32_t)getpid());
    machine_unlock(cuda.m);
    if (cuda.process == SIM_NONE) {
        cuda_unlock();
        fprintf(stderr, "poolmeter simulator: the machine holds %d processes and has no room for another\n",
                SIM_MAX_PROCESSES);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    cuda.pid = getpid();
    cuda.initialised = true;
    cuda_unlock();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    ENTER_EARLY(cuDriverGetVersion);
    REQUIRE(version != NULL, CUDA_ERROR_INVALID_VALUE);
    *version = cuda.m != NULL ? (int)cuda.m->cuda_version : 13000;
    return CUDA_SUCCESS;
}

/* --- clock for programs that live on simulated time -------------------------------------------------------------- */

__attribute__((visibility("default"))) uint64_t poolmeter_sim_now_ns(void);
__attribute__((visibility("default"))) void poolmeter_sim_sleep_until_ns(uint64_t ns);
__attribute__((visibility("default"))) void poolmeter_sim_leave(void);

/* CLOCK_MONOTONIC on the real clock, so that its readings compare with anybody's; else the same origin plus virtual
 * time. */
uint64_t poolmeter_sim_now_ns(void) {
    const struct sim_machine *m = the_machine();
    if (m == NULL) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    }
    return m->base_ns + machine_now(m);
}

void poolmeter_sim_sleep_until_ns(uint64_t ns) {
    struct sim_machine *m = the_machine();
    if (m == NULL || ns <= m->base_ns)
        return;
    while (machine_now(m) < ns - m->base_ns)
        machine_wait(m, ns - m->base_ns);
}

/* The calling thread no longer holds up the virtual clock, until its next call into this library. */
void poolmeter_sim_leave(void) {
    if (the_machine() != NULL)
        machine_leave(cuda.m);
    thread_state.joined = false;
}
