/* Functions and kernels. A CUkernel is the function itself, so either handle launches. */
#include "module.h"

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
    /* a kernel is asked its own way */
    REQUIRE(kernel_valid((CUkernel)f) && f->module->ctx != NULL, CUDA_ERROR_INVALID_HANDLE);
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
