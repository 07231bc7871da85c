/* Modules of a context, and libraries: modules of no context. */
#include "module.h"

#include <string.h>

/* --- modules ------------------------------------------------------------------------------------------------------ */

CUresult CUDAAPI cuModuleLoad(CUmodule *out, const char *path) {
    ENTER(cuModuleLoad);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return image_load_file(path, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER(cuModuleLoadData);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return image_load(image, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options,
                                    void **values) {
    ENTER(cuModuleLoadDataEx);
    (void)options;
    (void)values;
    (void)count; /* nothing is compiled, so the compiler's options change nothing */
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return image_load(image, current_context(), out);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *out, const void *image) {
    ENTER(cuModuleLoadFatBinary);
    REQUIRE(context_valid(current_context()), CUDA_ERROR_INVALID_CONTEXT);
    return image_load(image, current_context(), out);
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
            return module_load_code(mod, mod->ctx != NULL ? mod->ctx : current_context());
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
    *mode = module_eager() ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

/* --- libraries ---------------------------------------------------------------------------------------------------- */

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
    return image_load(code, NULL, (struct CUmod_st **)out);
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
    return image_load_file(path, NULL, (struct CUmod_st **)out);
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
