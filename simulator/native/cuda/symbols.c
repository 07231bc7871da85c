/* cuGetProcAddress: the variant of a symbol that a CUDA version and a stream flag choose. */
#include "symbols.h"
#include "state.h"

#include <string.h>

static CUresult find_symbol(const char *symbol, void **pfn, int version, cuuint64_t flags,
                            CUdriverProcAddressQueryResult *status) {
    REQUIRE(symbol != NULL && pfn != NULL, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(
        (flags & ~(cuuint64_t)(CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)) == 0,
        CUDA_ERROR_INVALID_VALUE);
    *pfn = NULL;
    const struct sim_symbol *best = NULL, *best_own = NULL;
    bool known = false, has_own = false;
    size_t low = 0, high = sim_symbol_count; /* the table is sorted by name */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(sim_symbols[middle].base, symbol) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < sim_symbol_count && strcmp(sim_symbols[low].base, symbol) == 0; low++) {
        const struct sim_symbol *s = &sim_symbols[low];
        known = true;
        has_own |= s->per_thread != 0;
        if (s->version > version)
            continue;
        if (s->per_thread) {
            if (best_own == NULL || s->version > best_own->version)
                best_own = s;
        } else if (best == NULL || s->version > best->version) {
            best = s;
        }
    }
    /* Asked for per-thread variants, the driver gives nothing else for a name that has any. */
    bool own = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 && has_own;
    const struct sim_symbol *chosen = own ? best_own : best;
    if (status != NULL)
        *status = chosen != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known        ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    REQUIRE(chosen != NULL, CUDA_ERROR_NOT_FOUND);
    *pfn = chosen->address;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags) {
    ENTER_EARLY(cuGetProcAddress);
    return find_symbol(symbol, pfn, version, flags, NULL);
}

CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *status) {
    ENTER_EARLY(cuGetProcAddress_v2);
    /* What is not found is told by the status and the null pointer alone; seen on a 580 driver, with and without a
     * status. */
    CUresult rc = find_symbol(symbol, pfn, version, flags, status);
    return rc == CUDA_ERROR_NOT_FOUND ? CUDA_SUCCESS : rc;
}
