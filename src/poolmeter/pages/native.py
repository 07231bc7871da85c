"""The ctypes face of `libpoolmeter_pages.so`."""

import ctypes
import functools

from poolmeter.native import native_path

HOOK_LIBRARY = "libpoolmeter_hook.so"
PAGES_LIBRARY = "libpoolmeter_pages.so"


@functools.cache
def pages_library() -> ctypes.CDLL:
    """`libpoolmeter_pages.so` with argument types set. Functions return 0 (or a count) or a negative errno."""
    library = ctypes.CDLL(str(native_path(PAGES_LIBRARY)), use_errno=True)
    library.pm_pages_store_grant.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.pm_pages_store_grant.restype = ctypes.c_int
    library.pm_pages_reclaim.argtypes = (ctypes.c_int, ctypes.c_int)
    library.pm_pages_reclaim.restype = ctypes.c_int
    return library
