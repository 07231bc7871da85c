/* Memory that is mapped into an array made for it: held as a mapping of addresses holds it. */
#include "share.h"

#include <stdlib.h>

struct array_mapping {
    CUarray array;
    CUmemGenericAllocationHandle physical;
    struct array_mapping *next;
};

static struct array_mapping *mappings; /* under our lock */

void array_unmapped(CUarray array) {
    cuda_lock();
    for (struct array_mapping **link = &mappings; *link != NULL;) {
        struct array_mapping *map = *link;
        if (map->array != array) {
            link = &map->next;
            continue;
        }
        *link = map->next;
        physical_mapped(map->physical, -1);
        free(map);
    }
    cuda_unlock();
}

/* Whole arrays that were made with deferred mapping; tiles of sparse ones are not simulated. */
CUresult CUDAAPI cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    ENTER(cuMemMapArrayAsync);
    struct CUstream_st *s;
    CUresult rc = stream_resolve(stream, &s);
    REQUIRE(rc == CUDA_SUCCESS, rc);
    REQUIRE(list != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        REQUIRE(list[i].resourceType == CU_RESOURCE_TYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
        CUarray array = list[i].resource.array;
        REQUIRE(array_deferred(array), CUDA_ERROR_INVALID_VALUE);
        array_unmapped(array);
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_UNMAP)
            continue;
        struct array_mapping *map = calloc(1, sizeof *map);
        REQUIRE(map != NULL, CUDA_ERROR_OUT_OF_MEMORY);
        cuda_lock();
        bool known = physical_mapped(list[i].memHandle.memHandle, 1);
        if (known) {
            *map = (struct array_mapping){array, list[i].memHandle.memHandle, mappings};
            mappings = map;
        }
        cuda_unlock();
        if (!known)
            free(map);
        REQUIRE(known, CUDA_ERROR_INVALID_VALUE);
    }
    return CUDA_SUCCESS;
}
