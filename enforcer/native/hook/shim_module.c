/*
 * Code and globals of modules and libraries. The driver does not say what one takes: it is what the card's free memory
 * shrinks by, less what the allocation's own calls took meanwhile; at least its globals whose sizes are known, and
 * these alone where a neighbour's calls are in it as well. See docs/decisions/module-memory.md.
 */
#include "claim.h"
#include "memory.h"

/* What the card and the account say at one time. */
struct sight {
    size_t free_bytes;
    uint64_t used;
    uint64_t begun;  /* changes of the device's memory */
    uint64_t others; /* steps of such changes by other processes, up to now */
    bool clear;      /* of these none was under way but the load itself */
};

/* A load between its two halves. */
struct load {
    struct pm_process *self; /* NULL: not measured */
    uint32_t device;
    struct sight before;
};

static struct sight look(const struct load *load) {
    struct pm_process *self = load->self;
    struct sight seen;
    size_t total;
    CUresult (*info)(size_t *, size_t *) = (CUresult (*)(size_t *, size_t *))pm_real[PM_HOOK_cuMemGetInfo_v2];
    uint64_t ended = pm_load(&self->changes_ended[load->device]);
    seen.begun = pm_load(&self->changes_begun[load->device]);
    /* The process's own are all over or not begun, if it is clear; then they are exactly what is not the others'. */
    seen.others = self->boards[load->device] ? pm_load(&self->boards[load->device]->changes) - seen.begun - ended : 0;
    seen.used = pm_memory_used(&self->view, load->device);
    seen.clear = info && info(&seen.free_bytes, &total) == CUDA_SUCCESS && seen.begun == ended + 1 &&
                 pm_load(&self->changes_begun[load->device]) == seen.begun;
    return seen;
}

static struct load load_begins(void) {
    struct load load = {.self = pm_self(), .device = PM_NO_DEVICE};
    if (load.self && pm_load(&pm_captures) == 0)
        load.device = pm_current_device(load.self);
    if (load.device == PM_NO_DEVICE) {
        load.self = NULL;
        return load;
    }
    pm_process_change_begins(load.self, load.device);
    load.before = look(&load);
    return load;
}

static void load_ends(const struct load *load) {
    pm_process_change_ends(load->self, load->device);
}

/* `sure`: nobody but the load can have taken it. What cannot be told from other calls is 0, also from those of
 * neighbours, of which their board tells. */
static uint64_t grown_by(const struct load *load, bool *sure) {
    const struct sight *before = &load->before, after = look(load);
    *sure = before->clear && after.clear && before->begun == after.begun && pm_process_alone(load->self, load->device);
    if (!before->clear || !after.clear || !load->self->boards[load->device] || before->others != after.others)
        return 0;
    int64_t less = (int64_t)(before->free_bytes - after.free_bytes), ours = (int64_t)(after.used - before->used);
    return less > ours ? (uint64_t)(less - ours) : 0;
}

/* False: over the limit, and the module has to go again. */
static bool keep(const struct load *load, const void *module, uint64_t context) {
    struct pm_process *self = load->self;
    bool sure;
    uint64_t bytes = grown_by(load, &sure);
    if (!sure)
        pm_process_take_used(self, load->device, PM_MEMORY_MODULE, bytes);
    else if (!pm_process_take(self, load->device, PM_MEMORY_MODULE, bytes))
        return false;
    struct pm_holding holding = {pm_key(module), bytes, context, load->device, PM_MEMORY_MODULE, 1, 0};
    if (!pm_pointers_put(self->pointers, PM_HOLD_MODULE, &holding))
        pm_process_give_back(self, load->device, PM_MEMORY_MODULE, bytes);
    return true;
}

#define LOAD(name, out_type, unload, context, params, ...)                                                             \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        struct load load = load_begins();                                                                              \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (load.self && result == CUDA_SUCCESS && out && !keep(&load, *out, context)) {                               \
            if (pm_real[PM_HOOK_##unload])                                                                             \
                PM_REAL(unload)(*out);                                                                                 \
            *out = NULL;                                                                                               \
            result = CUDA_ERROR_OUT_OF_MEMORY;                                                                         \
        }                                                                                                              \
        load_ends(&load);                                                                                              \
        return result;                                                                                                 \
    }
LOAD(cuModuleLoad, CUmodule, cuModuleUnload, pm_memory_context(), (CUmodule * out, const char *path), out, path)
LOAD(cuModuleLoadData, CUmodule, cuModuleUnload, pm_memory_context(), (CUmodule * out, const void *image), out, image)
LOAD(cuModuleLoadDataEx, CUmodule, cuModuleUnload, pm_memory_context(),
     (CUmodule * out, const void *image, unsigned count, CUjit_option *options, void **values), out, image, count,
     options, values)
LOAD(cuModuleLoadFatBinary, CUmodule, cuModuleUnload, pm_memory_context(), (CUmodule * out, const void *image), out,
     image)
/* A library belongs to no context; it is charged where it was loaded into one, which is the current one's device. */
LOAD(cuLibraryLoadData, CUlibrary, cuLibraryUnload, 0,
     (CUlibrary * out, const void *code, CUjit_option *jit, void **jit_values, unsigned jit_count,
      CUlibraryOption *options, void **values, unsigned count),
     out, code, jit, jit_values, jit_count, options, values, count)
LOAD(cuLibraryLoadFromFile, CUlibrary, cuLibraryUnload, 0,
     (CUlibrary * out, const char *path, CUjit_option *jit, void **jit_values, unsigned jit_count,
      CUlibraryOption *options, void **values, unsigned count),
     out, path, jit, jit_values, jit_count, options, values, count)

#define UNLOAD(name, type)                                                                                             \
    PM_EXPORT CUresult name(type module) {                                                                             \
        PM_MISSING(name);                                                                                              \
        struct pm_holding holding, global;                                                                             \
        bool had = pm_holding_out(PM_HOLD_MODULE, pm_key(module), &holding);                                           \
        CUresult result = PM_REAL(name)(module);                                                                       \
        pm_holding_gone(had, PM_HOLD_MODULE, &holding, result);                                                        \
        struct pm_process *self = had && result == CUDA_SUCCESS ? pm_self() : NULL;                                    \
        for (size_t at = 0;                                                                                            \
             self && pm_pointers_take_any(self->pointers, PM_HOLD_GLOBAL, pm_key(module), &at, &global);)              \
            ;                                                                                                          \
        return result;                                                                                                 \
    }
UNLOAD(cuModuleUnload, CUmodule)
UNLOAD(cuLibraryUnload, CUlibrary)

/*
 * Asking for a global may load it, as libraries and lazily loaded modules do: the module is charged what the question
 * took, and at least the sum of its globals, whose sizes are exact. The memory is in use already, so the limit is not
 * asked.
 */
static void global_known(const struct load *load, const void *module, CUdeviceptr at, uint64_t bytes) {
    struct pm_process *self = load->self;
    struct pm_holding holding, seen;
    if (!self || !at || !bytes || pm_pointers_get(self->pointers, PM_HOLD_GLOBAL, at, &seen) ||
        !pm_pointers_take(self->pointers, PM_HOLD_MODULE, pm_key(module), &holding))
        return;
    seen = (struct pm_holding){.key = at, .other = pm_key(module), .uses = 1};
    if (pm_pointers_put(self->pointers, PM_HOLD_GLOBAL, &seen))
        holding.note += bytes;
    bool sure;
    uint64_t grown = holding.device == load->device ? grown_by(load, &sure) : 0, now = holding.bytes + grown;
    now = now < holding.note ? holding.note : now;
    if (now > holding.bytes) {
        uint64_t more = PM_UNITS(now) - PM_UNITS(holding.bytes);
        pm_process_take_used(self, holding.device, PM_MEMORY_MODULE, more * PM_MEMORY_UNIT);
        holding.bytes = now;
    }
    pm_pointers_put(self->pointers, PM_HOLD_MODULE, &holding);
}

#define GET_GLOBAL(name, type)                                                                                         \
    PM_EXPORT CUresult name(CUdeviceptr *at, size_t *bytes, type module, const char *symbol) {                         \
        PM_MISSING(name);                                                                                              \
        CUdeviceptr here = 0;                                                                                          \
        size_t size = 0;                                                                                               \
        struct load load = load_begins();                                                                              \
        CUresult result = PM_REAL(name)(at ? at : &here, bytes ? bytes : &size, module, symbol);                       \
        if (result == CUDA_SUCCESS)                                                                                    \
            global_known(&load, module, at ? *at : here, bytes ? *bytes : size);                                       \
        load_ends(&load);                                                                                              \
        return result;                                                                                                 \
    }
GET_GLOBAL(cuModuleGetGlobal_v2, CUmodule)
GET_GLOBAL(cuLibraryGetGlobal, CUlibrary)
GET_GLOBAL(cuLibraryGetManaged, CUlibrary)

PM_EXPORT CUresult cuModuleGetGlobal(uint32_t *at, unsigned *bytes, CUmodule module, const char *symbol) {
    PM_MISSING(cuModuleGetGlobal);
    struct load load = load_begins();
    CUresult result = ((CUresult (*)(uint32_t *, unsigned *, CUmodule,
                                     const char *))pm_real[PM_HOOK_cuModuleGetGlobal])(at, bytes, module, symbol);
    if (result == CUDA_SUCCESS && at && bytes)
        global_known(&load, module, *at, *bytes);
    load_ends(&load);
    return result;
}
