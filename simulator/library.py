"""libpoolmeter_sim.so by ctypes: the calls by which Python reads and changes a machine file."""

import ctypes

from poolmeter.errors import Unavailable
from poolmeter.native import native_path
from poolmeter.simulator import partition


class Truth(ctypes.Structure):
    """A process's record as the library gives it; see ProcessTruth."""

    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("live", ctypes.c_uint32),
        ("killed", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in ("start_time", "attached_ns", "ended_ns", "busy_ns", "fill_ns", "copy_ns", "kernels", "launches", "graph_launches")
        ),
        *((name, ctypes.c_uint64) for name in ("h2d_bytes", "d2h_bytes", "d2d_bytes", "set_bytes")),
        *((name, ctypes.c_uint64) for name in ("memory", "memory_peak", "overhead", "refused")),
        ("name", ctypes.c_char * 32),
    ]


def load_library() -> ctypes.CDLL:
    """The library with the signatures of its calls. Raises Unavailable when it is not built, or of another version."""
    library = ctypes.CDLL(str(native_path("libpoolmeter_sim.so")))
    u32, u64, text, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
    signatures: dict[str, tuple[object, list[object]]] = {
        "psim_create": (pointer, [text, text, ctypes.c_size_t]),
        "psim_open": (pointer, [text, text, ctypes.c_size_t]),
        "psim_close": (None, [pointer]),
        "psim_set": (ctypes.c_int, [pointer, ctypes.c_int, text, u64]),
        "psim_set_text": (ctypes.c_int, [pointer, ctypes.c_int, text, text]),
        "psim_get": (ctypes.c_int, [pointer, ctypes.c_int, text, ctypes.POINTER(u64)]),
        "psim_get_text": (ctypes.c_int, [pointer, ctypes.c_int, text, text, ctypes.c_size_t]),
        "psim_ready": (None, [pointer]),
        "psim_now": (u64, [pointer]),
        "psim_advance": (u64, [pointer, u64]),
        "psim_truth": (ctypes.c_size_t, [pointer, ctypes.POINTER(Truth), ctypes.c_size_t]),
        "psim_truth_size": (ctypes.c_size_t, []),
        "psim_device_truth": (ctypes.c_int, [pointer, u32, pointer]),
        "psim_script": (ctypes.c_int, [pointer, text, ctypes.c_int, u32, u64, u64, ctypes.c_int, u64]),
        "psim_unscript": (ctypes.c_int, [pointer, ctypes.c_int]),
        "psim_rule": (ctypes.c_int, [pointer, ctypes.c_int, ctypes.POINTER(u64), ctypes.POINTER(u64)]),
        "psim_call": (ctypes.c_int, [pointer, ctypes.c_uint, ctypes.POINTER(text), ctypes.POINTER(u64), ctypes.POINTER(ctypes.c_int)]),
        "psim_xid": (None, [pointer, u32, u64]),
        **partition.signatures(),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if library.psim_truth_size() != ctypes.sizeof(Truth):
        raise Unavailable(
            f"libpoolmeter_sim.so keeps truth in {library.psim_truth_size()} bytes, this poolmeter expects {ctypes.sizeof(Truth)}"
        )
    return library
