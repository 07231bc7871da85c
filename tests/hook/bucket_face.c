/* What of the bucket is inline, for ctypes. */
#include "bucket.h"

__attribute__((visibility("default"))) void take(struct pm_bucket *bucket, int64_t ns) {
    pm_bucket_take(bucket, ns);
}
