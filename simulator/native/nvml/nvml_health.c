/* Errors of a card's memory: ECC counts and remapped rows. */
#include "nvml_state.h"

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter,
                                                     unsigned long long *count);
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    ENTER_DEVICE(nvmlDeviceGetTotalEccErrors, device);
    REQUIRE(count != NULL && (type == 0 || type == 1) && (counter == 0 || counter == 1), NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->ecc, NVML_ERROR_NOT_SUPPORTED);
    *count = counter == 0 ? (type == 0 ? d->ecc_volatile_correctable : d->ecc_volatile_uncorrectable)
                          : (type == 0 ? d->ecc_aggregate_correctable : d->ecc_aggregate_uncorrectable);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, int *current, int *pending);
nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, int *current, int *pending) {
    ENTER_DEVICE(nvmlDeviceGetEccMode, device);
    REQUIRE(current != NULL && pending != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *current = *pending = (int)d->ecc;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                                   unsigned *pending, unsigned *failed);
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                       unsigned *pending, unsigned *failed) {
    ENTER_DEVICE(nvmlDeviceGetRemappedRows, device);
    REQUIRE(correctable != NULL && uncorrectable != NULL && pending != NULL && failed != NULL,
            NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(d->cc_major >= 8, NVML_ERROR_NOT_SUPPORTED);
    *correctable = d->remapped_correctable;
    *uncorrectable = d->remapped_uncorrectable;
    *pending = *failed = 0;
    return NVML_SUCCESS;
}
