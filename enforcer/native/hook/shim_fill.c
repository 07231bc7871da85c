/* Fills, and other work of no kernel: what is measured around it breaks off there. */
#include "claim.h"

/* One that waits: for the host in general, though not always for the device. */
#define SYNC(name, params, ...)                                                                                        \
    PM_TAINTING(name, (CUstream)PM_LEGACY, params, __VA_ARGS__)                                                        \
    PM_TAINTING(name##_ptds, (CUstream)PM_PER_THREAD, params, __VA_ARGS__)

PM_TAINTING_STREAM(cuMemsetD8Async, (CUdeviceptr at, unsigned char value, size_t n, CUstream stream), at, value, n,
                   stream)
PM_TAINTING_STREAM(cuMemsetD16Async, (CUdeviceptr at, unsigned short value, size_t n, CUstream stream), at, value, n,
                   stream)
PM_TAINTING_STREAM(cuMemsetD32Async, (CUdeviceptr at, unsigned value, size_t n, CUstream stream), at, value, n, stream)
PM_TAINTING_STREAM(cuMemsetD2D8Async,
                   (CUdeviceptr at, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream),
                   at, pitch, value, width, height, stream)
PM_TAINTING_STREAM(cuMemsetD2D16Async,
                   (CUdeviceptr at, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream),
                   at, pitch, value, width, height, stream)
PM_TAINTING_STREAM(cuMemsetD2D32Async,
                   (CUdeviceptr at, size_t pitch, unsigned value, size_t width, size_t height, CUstream stream), at,
                   pitch, value, width, height, stream)
SYNC(cuMemsetD8_v2, (CUdeviceptr at, unsigned char value, size_t n), at, value, n)
SYNC(cuMemsetD16_v2, (CUdeviceptr at, unsigned short value, size_t n), at, value, n)
SYNC(cuMemsetD32_v2, (CUdeviceptr at, unsigned value, size_t n), at, value, n)
SYNC(cuMemsetD2D8_v2, (CUdeviceptr at, size_t pitch, unsigned char value, size_t width, size_t height), at, pitch,
     value, width, height)
SYNC(cuMemsetD2D16_v2, (CUdeviceptr at, size_t pitch, unsigned short value, size_t width, size_t height), at, pitch,
     value, width, height)
SYNC(cuMemsetD2D32_v2, (CUdeviceptr at, size_t pitch, unsigned value, size_t width, size_t height), at, pitch, value,
     width, height)

#undef cuMemsetD8
#undef cuMemsetD16
#undef cuMemsetD32
#undef cuMemsetD2D8
#undef cuMemsetD2D16
#undef cuMemsetD2D32
/* As CUDA 2 had them, with 32-bit addresses and lengths. */
#define OLD(name, params, ...) PM_TAINTING(name, (CUstream)PM_LEGACY, params, __VA_ARGS__)
OLD(cuMemsetD8, (uint32_t at, unsigned char value, unsigned n), at, value, n)
OLD(cuMemsetD16, (uint32_t at, unsigned short value, unsigned n), at, value, n)
OLD(cuMemsetD32, (uint32_t at, unsigned value, unsigned n), at, value, n)
OLD(cuMemsetD2D8, (uint32_t at, unsigned pitch, unsigned char value, unsigned width, unsigned height), at, pitch, value,
    width, height)
OLD(cuMemsetD2D16, (uint32_t at, unsigned pitch, unsigned short value, unsigned width, unsigned height), at, pitch,
    value, width, height)
OLD(cuMemsetD2D32, (uint32_t at, unsigned pitch, unsigned value, unsigned width, unsigned height), at, pitch, value,
    width, height)

PM_TAINTING_STREAM(cuMemBatchDecompressAsync,
                   (CUmemDecompressParams * list, size_t count, unsigned flags, size_t *failed, CUstream stream), list,
                   count, flags, failed, stream)
/* Newer than the header that this is built with: copies over a fabric, of memory that other hosts hold. */
PM_TAINTING_STREAM(cuFabricCpyBatchAsync, (size_t count, void *list, unsigned long long flags, CUstream stream), count,
                   list, flags, stream)
