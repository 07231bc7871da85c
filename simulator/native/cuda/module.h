/* What the files about modules share: images, modules and libraries, functions. */
#ifndef POOLMETER_SIM_MODULE_H
#define POOLMETER_SIM_MODULE_H

#include "state.h"

static inline bool module_valid(const struct CUmod_st *mod) {
    return mod != NULL && mod->magic == MAGIC_MODULE;
}
static inline bool kernel_valid(CUkernel k) {
    return k != NULL && ((struct CUfunc_st *)k)->magic == MAGIC_FUNCTION;
}

/* Reads an image into a module of `ctx`, or, with NULL, into a library. */
CUresult image_load(const void *image, struct CUctx_st *ctx, struct CUmod_st **out);
CUresult image_load_file(const char *path, struct CUctx_st *ctx, struct CUmod_st **out);
bool module_eager(void);
/* Its code comes to the card, unless it is there. */
CUresult module_load_code(struct CUmod_st *mod, struct CUctx_st *ctx);
void module_free(struct CUmod_st *mod);

#endif
