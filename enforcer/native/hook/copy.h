/* A copy on its way: counted by direction when the driver took it, a break in what is measured, charged where the grant
 * says so. */
#ifndef PM_COPY_H
#define PM_COPY_H

#include "claim.h"

enum pm_direction { PM_TO_DEVICE, PM_TO_HOST, PM_ON_DEVICE, PM_BETWEEN_DEVICES, PM_ON_HOST };

struct pm_copy {
    struct pm_context *context; /* NULL: not counted */
    CUstream stream;
    uint64_t bytes[PM_ON_HOST];
    uint64_t copies;
    bool charged;
    struct pm_ticket ticket;
};

/* `waits`: such a copy is never captured. */
void pm_copy_begin(struct pm_copy *copy, CUstream stream, bool waits);
/* So much goes that way; once or more before pm_copy_go. */
void pm_copy_add(struct pm_copy *copy, enum pm_direction way, uint64_t bytes);
/* Right before the driver's call; waits for the limit where copies are charged. */
void pm_copy_go(struct pm_copy *copy);
void pm_copy_end(struct pm_copy *copy, CUresult result, bool waited);

/* By what the addresses are; worked out before the call: afterwards another thread may have freed the memory. */
enum pm_direction pm_direction_of(CUdeviceptr to, CUdeviceptr from);
/* By the kinds of memory that a descriptor names. */
enum pm_direction pm_direction_between(CUmemorytype to, CUdeviceptr to_at, CUmemorytype from, CUdeviceptr from_at);
/* Of an array, all channels; 1 when the driver does not say. */
uint64_t pm_array_element_bytes(CUarray array);

#endif
