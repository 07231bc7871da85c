/*
 * Code and globals of modules and libraries. The driver does not say what one takes: it is what the card's free memory
 * shrinks by, less what the allocation's own calls took meanwhile; at least its globals whose sizes are known. See
 * docs/decisions/module-memory.md.
 */
#include "claim.h"
#include "memory.h"

/* A load between its two halves. */
struct load {
    struct pm_process *self; /* NULL: not measured */
    uint32_t device;
    size_t free_bytes;
    uint64_t used;
};

static bool look(struct load *load) {
    size_t total;
    CUresult (*info)(size_t *, size_t *) = (CUresult (*)(size_t *, size_t *))pm_real[PM_HOOK_cuMemGetInfo_v2];
    load->used = pm_memory_used(&load->self->view, load->device);
    return info && info(&load->free_bytes, &total) == CUDA_SUCCESS;
}

static struct load load_begins(void) {
    struct load load = {.self = pm_self(), .device = PM_NO_DEVICE};
    if (load.self && pm_load(&pm_captures) == 0)
        load.device = pm_current_device(load.self);
    if (load.device == PM_NO_DEVICE || !look(&load))
        load.self = NULL;
    return load;
}

static uint64_t grown_by(const struct load *before) {
    struct load after = *before;
    if (!look(&after) || after.free_bytes > before->free_bytes)
        return 0;
    int64_t less = (int64_t)(before->free_bytes - after.free_bytes);
    int64_t ours = (int64_t)(after.used - before->used);
    return less > ours ? (uint64_t)(less - ours) : 0;
}

/* False: over the limit, and the module has to go again. */
static bool load_ends(const struct load *load, const void *module, uint64_t context) {
    if (!load->self)
        return true;
    struct pm_claim claim;
    uint64_t bytes = grown_by(load);
    if (!pm_claim_begin(&claim, load->device, PM_MEMORY_MODULE, bytes))
        return false;
    struct pm_holding holding = {pm_key(module), bytes, context, load->device, PM_MEMORY_MODULE, 1, 0};
    if (!pm_pointers_put(load->self->pointers, PM_HOLD_MODULE, &holding))
        pm_claim_undo(&claim, CUDA_SUCCESS);
    return true;
}

#define LOAD(name, out_type, unload, context, params, ...)                                                             \
    PM_EXPORT CUresult name params {                                                                                   \
        PM_MISSING(name);                                                                                              \
        struct load load = load_begins();                                                                              \
        CUresult result = ((CUresult(*) params)pm_real[PM_HOOK_##name])(__VA_ARGS__);                                  \
        if (result != CUDA_SUCCESS || !out || load_ends(&load, *out, context))                                         \
            return result;                                                                                             \
        if (pm_real[PM_HOOK_##unload])                                                                                 \
            PM_REAL(unload)(*out);                                                                                     \
        *out = NULL;                                                                                                   \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
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
        while (self && pm_pointers_take_any(self->pointers, PM_HOLD_GLOBAL, pm_key(module), &global))                  \
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
    uint64_t grown = holding.device == load->device ? grown_by(load) : 0, now = holding.bytes + grown;
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
    return result;
}
