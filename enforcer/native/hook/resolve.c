/* Finding the driver's functions, and being found in their place: by link (the exports), by dlsym, by cuGetProcAddress.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "hooks.h"

void *pm_real[PM_HOOK_COUNT];
void *pm_need[PM_NEED_COUNT];
int pm_resolved;

#define PM_DECLARE(name) extern void shim_##name(void) __asm__(#name);
PM_HOOKS(PM_DECLARE)

#define PM_NAME(name) #name,
static const char *const hook_names[] = {PM_HOOKS(PM_NAME)};
static const char *const need_names[] = {PM_NEEDS(PM_NAME)};
#define PM_SHIM(name) (void *)shim_##name,
static void *const shims[] = {PM_HOOKS(PM_SHIM)};

void *(*pm_real_dlsym)(void *, const char *)__attribute__((visibility("hidden")));

static void find_dlsym(void) {
    if (__atomic_load_n(&pm_real_dlsym, __ATOMIC_ACQUIRE))
        return;
    /* dlvsym is nobody's target, so the real dlsym can be asked for by version without meeting our own. */
    void *found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!found)
        found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!found)
        found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
    __atomic_store_n(&pm_real_dlsym, (void *(*)(void *, const char *))found, __ATOMIC_RELEASE);
}

int pm_resolve(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    find_dlsym();
    pthread_mutex_lock(&lock);
    if (!pm_resolved && pm_real_dlsym) {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        if (!driver)
            driver = dlopen("libcuda.so.1", RTLD_LAZY);
        if (driver) {
            for (int i = 0; i < PM_HOOK_COUNT; i++) {
                void *found = pm_real_dlsym(driver, hook_names[i]);
                pm_real[i] = found == shims[i] ? NULL : found;
            }
            for (int i = 0; i < PM_NEED_COUNT; i++)
                pm_need[i] = pm_real_dlsym(driver, need_names[i]);
            if (getenv("POOLMETER_SIM_MACHINE")) {
                void *now = pm_real_dlsym(driver, "poolmeter_sim_now_ns");
                void *sleep = pm_real_dlsym(driver, "poolmeter_sim_sleep_until_ns");
                if (now && sleep)
                    pm_clock_use((uint64_t (*)(void))now, (void (*)(uint64_t))sleep);
            }
            __atomic_store_n(&pm_resolved, 1, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
    return pm_resolved;
}

void *pm_shim_of(void *real) {
    for (int i = 0; real && i < PM_HOOK_COUNT; i++)
        if (pm_real[i] == real)
            return shims[i];
    return real;
}

/* The shim that this dlsym call is to give; NULL: whatever the real one says. Called by the entry below. */
__attribute__((used, visibility("hidden"))) void *pm_dlsym_pick(void *handle, const char *name) {
    find_dlsym();
    if (handle == RTLD_NEXT || !name || name[0] != 'c' || name[1] != 'u')
        return NULL;
    for (int i = 0; i < PM_HOOK_COUNT; i++) {
        if (strcmp(name, hook_names[i]) != 0)
            continue;
        /* Only in the driver's place: another library may have a function of this name, and an old driver may have
         * none. */
        void *found = pm_real_dlsym(handle, name);
        return found && pm_ready() && found == pm_real[i] ? shims[i] : NULL;
    }
    return NULL;
}

/* Jumps to the real dlsym, so that RTLD_NEXT and RTLD_DEFAULT see the caller's own return address. */
#if defined(__x86_64__)
#define VERSION_OLD "GLIBC_2.2.5"
#define ENTRY(label)                                                                                                   \
    ".globl " label "\n.type " label ", @function\n" label ":\n"                                                       \
    ".cfi_startproc\n endbr64\n push %rdi\n .cfi_adjust_cfa_offset 8\n push %rsi\n .cfi_adjust_cfa_offset 8\n"         \
    " sub $8, %rsp\n .cfi_adjust_cfa_offset 8\n call pm_dlsym_pick\n add $8, %rsp\n .cfi_adjust_cfa_offset -8\n"       \
    " pop %rsi\n .cfi_adjust_cfa_offset -8\n pop %rdi\n .cfi_adjust_cfa_offset -8\n test %rax, %rax\n jne 1f\n"        \
    " jmp *pm_real_dlsym(%rip)\n1: ret\n.cfi_endproc\n.size " label ", .-" label "\n"
#elif defined(__aarch64__)
#define VERSION_OLD "GLIBC_2.17"
#define ENTRY(label)                                                                                                   \
    ".globl " label "\n.type " label ", %function\n" label ":\n"                                                       \
    " stp x29, x30, [sp, -32]!\n stp x0, x1, [sp, 16]\n bl pm_dlsym_pick\n mov x16, x0\n ldp x0, x1, [sp, 16]\n"       \
    " ldp x29, x30, [sp], 32\n cbnz x16, 1f\n adrp x17, pm_real_dlsym\n ldr x17, [x17, :lo12:pm_real_dlsym]\n"         \
    " br x17\n1: mov x0, x16\n ret\n.size " label ", .-" label "\n"
#else
#error "the dlsym entry exists for x86-64 and aarch64"
#endif

__asm__(".text\n" ENTRY("pm_dlsym_old")
            ENTRY("pm_dlsym_new") ".symver pm_dlsym_old, dlsym@" VERSION_OLD
                                  ", remove\n.symver pm_dlsym_new, dlsym@@GLIBC_2.34, remove\n");
