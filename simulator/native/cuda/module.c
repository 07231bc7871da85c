/*
 * Modules and libraries. An image is text:
 *
 *     poolmeter-sim-module 1
 *     kernel NAME fixed NS [waves] [width PPM]
 *     kernel NAME parameter [waves] [width PPM]     the length in ns is the first kernel parameter, a uint64
 *     global NAME BYTES
 *     code BYTES                      of the card for its code, once loaded
 *
 * Code is loaded with the module where CUDA_MODULE_LOADING is EAGER, else when a function of it is first asked for.
 * `waves`: the length is that of one wave of blocks (one block per SM), so larger grids take longer. `width`: the part
 * of the card the kernel fills; without it, its blocks over the SMs, at most the whole card.
 */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool module_valid(const struct CUmod_st *mod) {
    return mod != NULL && mod->magic == MAGIC_MODULE;
}

static void module_free(struct CUmod_st *mod) {
    for (struct CUfunc_st *f = mod->functions, *next; f != NULL; f = next) {
        next = f->next;
        f->magic = 0;
        free(f);
    }
    if (mod->code_at != 0)
        memory_release(mod->code_at);
    for (struct module_global *g = mod->globals, *next; g != NULL; g = next) {
        next = g->next;
        if (g->at != 0)
            memory_release(g->at);
        free(g);
    }
    mod->magic = 0; /* stays allocated: a stale handle is refused, not followed */
}

static bool add_kernel(struct CUmod_st *mod, char *line) {
    struct CUfunc_st *f = calloc(1, sizeof *f);
    if (f == NULL)
        return false;
    f->magic = MAGIC_FUNCTION;
    f->module = mod;
    f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    f->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    f->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = 90;
    f->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90;
    f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
    f->next = mod->functions;
    mod->functions = f;
    mod->function_count++;
    char *save = NULL;
    const char *name = strtok_r(line, " \t\r", &save);
    const char *length = strtok_r(NULL, " \t\r", &save);
    if (name == NULL || length == NULL || strlen(name) >= sizeof f->name)
        return false;
    strcpy(f->name, name);
    if (strcmp(length, "fixed") == 0) {
        const char *ns = strtok_r(NULL, " \t\r", &save);
        if (ns == NULL)
            return false;
        f->length = LENGTH_FIXED;
        f->ns = strtoull(ns, NULL, 10);
    } else if (strcmp(length, "parameter") == 0) {
        f->length = LENGTH_PARAMETER;
    } else {
        return false;
    }
    for (const char *word; (word = strtok_r(NULL, " \t\r", &save)) != NULL;) {
        if (strcmp(word, "waves") == 0) {
            f->waves = true;
        } else if (strcmp(word, "width") == 0) {
            const char *ppm = strtok_r(NULL, " \t\r", &save);
            unsigned long value = ppm != NULL ? strtoul(ppm, NULL, 10) : 0;
            if (value == 0 || value > 1000000)
                return false;
            f->width_ppm = (uint32_t)value;
        } else {
            return false;
        }
    }
    return true;
}

static bool add_global(struct CUmod_st *mod, char *line) {
    char *save = NULL;
    const char *name = strtok_r(line, " \t\r", &save);
    const char *bytes = strtok_r(NULL, " \t\r", &save);
    struct module_global *g = calloc(1, sizeof *g);
    if (g == NULL)
        return false;
    g->next = mod->globals;
    mod->globals = g;
    if (name == NULL || bytes == NULL || strlen(name) >= sizeof g->name)
        return false;
    strcpy(g->name, name);
    g->bytes = strtoull(bytes, NULL, 10);
    return g->bytes > 0;
}

static bool eager(void) {
    const char *mode = getenv("CUDA_MODULE_LOADING");
    return mode != NULL && strcmp(mode, "EAGER") == 0;
}

static CUresult load_code(struct CUmod_st *mod, struct CUctx_st *ctx) {
    if (mod->code == 0 || mod->code_at != 0 || !context_valid(ctx))
        return CUDA_SUCCESS;
    return memory_allocate(&mod->code_at, mod->code, ctx->device, ctx, ALLOCATION_CODE, charge_of(mod->code));
}

static CUresult load(const void *image, struct CUctx_st *ctx, struct CUmod_st **out) {
    static const char mark[] = "poolmeter-sim-module 1";
    REQUIRE(image != NULL && out != NULL, CUDA_ERROR_INVALID_VALUE);
    if (strncmp(image, mark, sizeof mark - 1) != 0) {
        fprintf(stderr,
                "poolmeter simulator: a module image that does not begin with \"%s\" cannot be loaded: the simulated "
                "card runs no device code\n",
                mark);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    char *text = strdup(image);
    struct CUmod_st *mod = calloc(1, sizeof *mod);
    if (text == NULL || mod == NULL) {
        free(text);
        free(mod);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    mod->magic = MAGIC_MODULE;
    mod->ctx = ctx;
    char *save = NULL;
    bool ok = true;
    strtok_r(text, "\n", &save);
    for (char *line; ok && (line = strtok_r(NULL, "\n", &save)) != NULL;) {
        line += strspn(line, " \t\r");
        if (*line == 0 || *line == '#')
            continue;
        if (strncmp(line, "kernel ", 7) == 0)
            ok = add_kernel(mod, line + 7);
        else if (strncmp(line, "global ", 7) == 0)
            ok = add_global(mod, line + 7);
        else if (strncmp(line, "code ", 5) == 0)
            ok = (mod->code = strtoull(line + 5, NULL, 10)) > 0;
        else
            ok = false;
        if (!ok)
            fprintf(stderr, "poolmeter simulator: a module image has a line that is no kernel and no global: %s\n",
                    line);
    }
    free(text);
    CUresult rc = ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
    for (struct module_global *g = mod->globals; rc == CUDA_SUCCESS && ctx != NULL && g != NULL; g = g->next)
        rc = memory_allocate(&g->at, g->bytes, ctx->device, ctx, ALLOCATION_GLOBAL, charge_of(g->bytes));
    if (rc == CUDA_SUCCESS && eager())
        rc = load_code(mod, ctx != NULL ? ctx : current_context());
    if (rc != CUDA_SUCCESS) {
        module_free(mod);
        return rc;
    }
    cuda_lock();
    struct CUmod_st **list = ctx != NULL ? &ctx->modules : &cuda.libraries;
    mod->next = *list;
    *list = mod;
    cuda_unlock();
    *out = mod;
    return CUDA_SUCCESS;
}

static CUresult load_file(const char *path, struct CUctx_st *ctx, struct CUmod_st **out) {
    REQUIRE(path != NULL && out != NULL, CUDA_ERROR_INVALID_VALUE);
    FILE *file = fopen(path, "rb");
    REQUIRE(file != NULL, CUDA_ERROR_FILE_NOT_FOUND);
    char *text = calloc(1, (1 << 20) + 1);
    size_t n = text != NULL ? fread(text, 1, 1 << 20, file) : 0;
    fclose(file);
    if (text == NULL || n == 0) {
        free(text);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    CUresult rc = load(text, ctx, out);
    free(text);
    return rc;
}

CUresult CUDAAPI cuModuleLoad(CUmodule *out, const char *path) {
    ENTER(cuModuleLoad);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return load_file(path, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER(cuModuleLoadData);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return load(image, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options,
                                    void **values) {
    ENTER(cuModuleLoadDataEx);
    (void)options;
    (void)values;
    (void)count; /* nothing is compiled, so the compiler's options change nothing */
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return load(image, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *out, const void *image) {
    ENTER(cuModuleLoadFatBinary);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return load(image, current_context(), out);
}

static void unlink_module(struct CUmod_st **list, struct CUmod_st *mod) {
    while (*list != NULL && *list != mod)
        list = &(*list)->next;
    if (*list != NULL)
        *list = mod->next;
}

CUresult CUDAAPI cuModuleUnload(CUmodule mod) {
    ENTER(cuModuleUnload);
    REQUIRE(module_valid(mod) && mod->ctx != NULL, CUDA_ERROR_INVALID_HANDLE);
    cuda_lock();
    unlink_module(&mod->ctx->modules, mod);
    cuda_unlock();
    module_free(mod);
    return CUDA_SUCCESS;
}

static CUresult find_function(struct CUmod_st *mod, const char *name, struct CUfunc_st **out) {
    REQUIRE(out != NULL && name != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid(mod), CUDA_ERROR_INVALID_HANDLE);
    for (struct CUfunc_st *f = mod->functions; f != NULL; f = f->next)
        if (strcmp(f->name, name) == 0) {
            *out = f;
            return load_code(mod, mod->ctx != NULL ? mod->ctx : current_context());
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *out, CUmodule mod, const char *name) {
    ENTER(cuModuleGetFunction);
    return find_function(mod, name, out);
}

CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int *count, CUmodule mod) {
    ENTER(cuModuleGetFunctionCount);
    REQUIRE(count != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid(mod), CUDA_ERROR_INVALID_HANDLE);
    *count = mod->function_count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *out, unsigned int count, CUmodule mod) {
    ENTER(cuModuleEnumerateFunctions);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid(mod), CUDA_ERROR_INVALID_HANDLE);
    unsigned n = 0;
    for (struct CUfunc_st *f = mod->functions; f != NULL && n < count; f = f->next)
        out[n++] = f;
    return CUDA_SUCCESS;
}

static CUresult find_global(const struct CUmod_st *mod, const char *name, struct module_global **out) {
    REQUIRE(name != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid(mod), CUDA_ERROR_INVALID_HANDLE);
    for (struct module_global *g = mod->globals; g != NULL; g = g->next)
        if (strcmp(g->name, name) == 0) {
            *out = g;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *bytes, CUmodule mod, const char *name) {
    ENTER(cuModuleGetGlobal_v2);
    struct module_global *g;
    CUresult rc = find_global(mod, name, &g);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (at != NULL)
        *at = g->at;
    if (bytes != NULL)
        *bytes = g->bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    ENTER(cuModuleGetLoadingMode);
    REQUIRE(mode != NULL, CUDA_ERROR_INVALID_VALUE);
    *mode = eager() ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

/* --- libraries: modules of no context. A CUkernel is the function itself, so either handle launches. -----------------
 */

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values,
                                   unsigned int jit_count, CUlibraryOption *options, void **values,
                                   unsigned int count) {
    ENTER(cuLibraryLoadData);
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    return load(code, NULL, (struct CUmod_st **)out);
}

CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values,
                                       unsigned int jit_count, CUlibraryOption *options, void **values,
                                       unsigned int count) {
    ENTER(cuLibraryLoadFromFile);
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    return load_file(path, NULL, (struct CUmod_st **)out);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    ENTER(cuLibraryUnload);
    struct CUmod_st *mod = (struct CUmod_st *)library;
    REQUIRE(module_valid(mod) && mod->ctx == NULL, CUDA_ERROR_INVALID_HANDLE);
    cuda_lock();
    unlink_module(&cuda.libraries, mod);
    cuda_unlock();
    module_free(mod);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) {
    ENTER(cuLibraryGetKernel);
    return find_function((struct CUmod_st *)library, name, (struct CUfunc_st **)out);
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned int *count, CUlibrary library) {
    ENTER(cuLibraryGetKernelCount);
    REQUIRE(count != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid((struct CUmod_st *)library), CUDA_ERROR_INVALID_HANDLE);
    *count = ((struct CUmod_st *)library)->function_count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned int count, CUlibrary library) {
    ENTER(cuLibraryEnumerateKernels);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid((struct CUmod_st *)library), CUDA_ERROR_INVALID_HANDLE);
    unsigned n = 0;
    for (struct CUfunc_st *f = ((struct CUmod_st *)library)->functions; f != NULL && n < count; f = f->next)
        out[n++] = (CUkernel)f;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule *out, CUlibrary library) {
    ENTER(cuLibraryGetModule);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(module_valid((struct CUmod_st *)library), CUDA_ERROR_INVALID_HANDLE);
    *out = (CUmodule)library;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *at, size_t *bytes, CUlibrary library, const char *name) {
    ENTER(cuLibraryGetGlobal);
    struct module_global *g;
    CUresult rc = find_global((struct CUmod_st *)library, name, &g);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    struct CUctx_st *ctx = current_context();
    REQUIRE(context_valid(ctx), CUDA_ERROR_INVALID_CONTEXT);
    if (g->at == 0)
        rc = memory_allocate(&g->at, g->bytes, ctx->device, ctx, ALLOCATION_GLOBAL, charge_of(g->bytes));
    REQUIRE(rc == CUDA_SUCCESS, rc);
    if (at != NULL)
        *at = g->at;
    if (bytes != NULL)
        *bytes = g->bytes;
    return CUDA_SUCCESS;
}

static bool kernel_valid(CUkernel k) {
    return k != NULL && ((struct CUfunc_st *)k)->magic == MAGIC_FUNCTION;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    ENTER(cuKernelGetFunction);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetLibrary(CUlibrary *out, CUkernel kernel) {
    ENTER(cuKernelGetLibrary);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    *out = (CUlibrary)((struct CUfunc_st *)kernel)->module;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel kernel) {
    ENTER(cuKernelGetName);
    REQUIRE(name != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    *name = ((struct CUfunc_st *)kernel)->name;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction f) {
    ENTER(cuFuncGetName);
    REQUIRE(name != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid((CUkernel)f) && f->module->ctx != NULL,
            CUDA_ERROR_INVALID_HANDLE); /* a kernel is asked its own way */
    *name = f->name;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetModule(CUmodule *out, CUfunction f) {
    ENTER(cuFuncGetModule);
    REQUIRE(out != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    *out = f->module;
    return CUDA_SUCCESS;
}

/* The one parameter a kernel has: the length, when it is taken from there. */
static CUresult parameter_info(const struct CUfunc_st *f, size_t index, size_t *offset, size_t *size) {
    REQUIRE(offset != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(f->length == LENGTH_PARAMETER && index == 0, CUDA_ERROR_INVALID_VALUE);
    *offset = 0;
    if (size != NULL)
        *size = sizeof(uint64_t);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction f, size_t index, size_t *offset, size_t *size) {
    ENTER(cuFuncGetParamInfo);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return parameter_info(f, index, offset, size);
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    ENTER(cuKernelGetParamInfo);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    return parameter_info((struct CUfunc_st *)kernel, index, offset, size);
}

static CUresult get_attribute(int *value, CUfunction_attribute attribute, const struct CUfunc_st *f) {
    REQUIRE(value != NULL && (int)attribute >= 0 && attribute < CU_FUNC_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    *value = f->attributes[attribute];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
    ENTER(cuFuncGetAttribute);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return get_attribute(value, attribute, f);
}

CUresult CUDAAPI cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice dev) {
    ENTER_DEVICE(cuKernelGetAttribute, dev);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    return get_attribute(value, attribute, (struct CUfunc_st *)kernel);
}

static CUresult set_attribute(struct CUfunc_st *f, CUfunction_attribute attribute, int value) {
    REQUIRE((int)attribute >= CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && attribute < CU_FUNC_ATTRIBUTE_MAX,
            CUDA_ERROR_INVALID_VALUE);
    f->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
    ENTER(cuFuncSetAttribute);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return set_attribute(f, attribute, value);
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice dev) {
    ENTER_DEVICE(cuKernelSetAttribute, dev);
    REQUIRE(kernel_valid(kernel), CUDA_ERROR_INVALID_HANDLE);
    return set_attribute((struct CUfunc_st *)kernel, attribute, value);
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) {
    ENTER(cuFuncSetCacheConfig);
    (void)config;
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction f, CUsharedconfig config) {
    ENTER(cuFuncSetSharedMemConfig);
    (void)config;
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction f) {
    ENTER(cuFuncIsLoaded);
    REQUIRE(state != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncLoad(CUfunction f) {
    ENTER(cuFuncLoad);
    REQUIRE(kernel_valid((CUkernel)f), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}
