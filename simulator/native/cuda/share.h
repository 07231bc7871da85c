/* What sharing memory between processes needs of physical memory and pools. */
#ifndef POOLMETER_SIM_CUDA_SHARE_H
#define POOLMETER_SIM_CUDA_SHARE_H

#include "state.h"

bool physical_about(CUmemGenericAllocationHandle handle, int *device, size_t *bytes);
CUresult physical_import(CUmemGenericAllocationHandle *out, int device, size_t bytes);
bool physical_mapped(CUmemGenericAllocationHandle handle, int by); /* under our lock; false: no such memory */
CUresult pool_import(CUmemoryPool *out, int device);
void export_drop(uint64_t id); /* under our lock; the allocation goes */

bool array_deferred(CUarray a);
void array_unmapped(CUarray a); /* it goes */

#endif
