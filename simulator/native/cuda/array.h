/* Arrays: memory of the card with a shape. */
#ifndef POOLMETER_SIM_ARRAY_H
#define POOLMETER_SIM_ARRAY_H

#include "state.h"

struct CUarray_st {
    uint32_t magic;
    int device;
    size_t bytes;
    size_t pitch;   /* of a row, padded */
    CUdeviceptr at; /* rows, then planes */
    struct CUctx_st *ctx;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    struct CUmipmappedArray_st *owner; /* a level of it: not the program's to destroy */
};

static inline bool array_valid(const struct CUarray_st *a) {
    return a != NULL && a->magic == MAGIC_ARRAY;
}
struct copy_side { /* one side of a pitched copy */
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t pitch, height, x, y, z;
};
CUresult copy_box(struct copy_side *from, struct copy_side *to, size_t width, size_t height, size_t depth,
                  CUstream handle, bool wait);
size_t array_element_bytes(const struct CUarray_st *a); /* of all its channels */
size_t array_row(const struct CUarray_st *a);           /* bytes of a row, without padding */

#endif
