"""Where the native parts are, and the ctypes face of `libpoolmeter_pages.so`."""

import ctypes
import functools
import os
import sys
from pathlib import Path

from poolmeter.errors import Unavailable

HOOK_LIBRARY = "libpoolmeter_hook.so"
PAGES_LIBRARY = "libpoolmeter_pages.so"


def native_path(name: str) -> Path:
    """The built library `name`: in $POOLMETER_NATIVE, else in poolmeter/native of any folder that Python imports from.

    An editable install keeps what CMake built in site-packages, apart from the sources, hence the search along sys.path.
    Raises Unavailable when it is nowhere.
    """
    chosen = os.environ.get("POOLMETER_NATIVE")
    folders = (
        [Path(chosen)] if chosen else [Path(__file__).parents[1] / "native", *(Path(p) / "poolmeter" / "native" for p in sys.path if p)]
    )
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise Unavailable(f"native library {name} not found in {folders[0]}: build it (make install) or set POOLMETER_NATIVE to its folder")


@functools.cache
def pages_library() -> ctypes.CDLL:
    """`libpoolmeter_pages.so` with argument types set. Functions return 0 or a negative errno."""
    library = ctypes.CDLL(str(native_path(PAGES_LIBRARY)), use_errno=True)
    library.pm_pages_store_grant.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    library.pm_pages_store_grant.restype = ctypes.c_int
    library.pm_pages_reclaim.argtypes = (ctypes.c_int, ctypes.c_int)
    library.pm_pages_reclaim.restype = ctypes.c_int
    return library
