/*
 * Module images: the text that stands for compiled code, read into kernels and globals.
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
#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void module_free(struct CUmod_st *mod) {
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

bool module_eager(void) {
    const char *mode = getenv("CUDA_MODULE_LOADING");
    return mode != NULL && strcmp(mode, "EAGER") == 0;
}

CUresult module_load_code(struct CUmod_st *mod, struct CUctx_st *ctx) {
    if (mod->code == 0 || mod->code_at != 0 || !context_valid(ctx))
        return CUDA_SUCCESS;
    return memory_allocate(&mod->code_at, mod->code, ctx->device, ctx, ALLOCATION_CODE, charge_of(mod->code));
}

CUresult image_load(const void *image, struct CUctx_st *ctx, struct CUmod_st **out) {
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
    if (rc == CUDA_SUCCESS && module_eager())
        rc = module_load_code(mod, ctx != NULL ? ctx : current_context());
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

CUresult image_load_file(const char *path, struct CUctx_st *ctx, struct CUmod_st **out) {
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
    CUresult rc = image_load(text, ctx, out);
    free(text);
    return rc;
}
