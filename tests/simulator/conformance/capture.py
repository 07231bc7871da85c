# ruff: noqa: ARG005 - lambdas of one shape
"""Stream capture: what it allows, what it spoils, and what other threads may do beside it."""

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from driver import PTX, TEXT, Cuda


def group_capture(cu: Cuda) -> None:
    context = cu.context()
    f, p, g, status = cu.kernel(), c_uint64(), c_void_p(), c_int()
    done = cu.event()
    other = cu.stream()
    cu.must("cuEventRecord", done, other)
    cu.must("cuEventSynchronize", done)
    buffer = ctypes.create_string_buffer(64)
    cu.must("cuMemAlloc_v2", byref(p), c_size_t(4096))
    spare = []
    for _ in range(6):
        q = c_uint64()
        cu.must("cuMemAlloc_v2", byref(q), c_size_t(4096))
        spare.append(q)
    total, q, a, b, m = c_int(), c_uint64(), c_size_t(), c_size_t(), c_void_p()
    image = TEXT if cu.simulated else PTX
    probes = {
        "nothing": None,
        "synchronise it": lambda s: cu("cuStreamSynchronize", s),
        "query it": lambda s: cu("cuStreamQuery", s),
        "synchronise another": lambda s: cu("cuStreamSynchronize", other),
        "query another": lambda s: cu("cuStreamQuery", other),
        "query another's event": lambda s: cu("cuEventQuery", done),
        "synchronise another's event": lambda s: cu("cuEventSynchronize", done),
        "record on another": lambda s: cu("cuEventRecord", done, other),
        "launch on another": lambda s: cu.launch(f, 1000, other),
        "launch on legacy": lambda s: cu.launch(f, 1000, c_void_p(1)),
        "allocate": lambda s: cu("cuMemAlloc_v2", byref(q), c_size_t(4096)),
        "free": lambda s: cu("cuMemFree_v2", spare.pop()),
        "memory info": lambda s: cu("cuMemGetInfo_v2", byref(a), byref(b)),
        "synchronise context": lambda s: cu("cuCtxSynchronize"),
        "copy": lambda s: cu("cuMemcpyHtoD_v2", p, buffer, c_size_t(64)),
        "copy on it": lambda s: cu("cuMemcpyHtoDAsync_v2", p, buffer, c_size_t(64), s),
        "memset": lambda s: cu("cuMemsetD8_v2", p, 0, c_size_t(64)),
        "memset on it": lambda s: cu("cuMemsetD8Async", p, 0, c_size_t(64), s),
        "allocate on it": lambda s: cu("cuMemAllocAsync", byref(q), c_size_t(4096), s),
        "allocate on another": lambda s: cu("cuMemAllocAsync", byref(q), c_size_t(4096), other),
        "load a module": lambda s: cu("cuModuleLoadData", byref(m), image),
        "create an event": lambda s: cu("cuEventCreate", byref(m), 0),
        "create a stream": lambda s: cu("cuStreamCreate", byref(m), 1),
        "device attribute": lambda s: cu("cuDeviceGetAttribute", byref(total), 16, 0),
        "begin again": lambda s: cu("cuStreamBeginCapture_v2", s, 0),
        "elapsed": lambda s: cu("cuEventElapsedTime", byref(c_float()), done, done),
        "destroy it": lambda s: cu("cuStreamDestroy_v2", s),
    }
    for mode in (0, 1, 2):
        for blocking in (0, 1):
            for name, probe in probes.items():
                if name == "destroy it" and mode != 0:
                    continue
                s = cu.stream(0 if blocking else 1)
                cu.must("cuStreamBeginCapture_v2", s, mode)
                cu.launch(f, 1000, s)
                code = probe(s) if probe is not None else 0
                if name == "destroy it":
                    cu.found[f"{mode}{blocking} {name}"] = code
                    if code == 0:
                        continue
                after = cu("cuStreamIsCapturing", s, byref(status))
                cu.found[f"{mode}{blocking} {name}"] = [code, after, status.value, cu("cuStreamEndCapture", s, byref(g))]
                cu.must("cuStreamDestroy_v2", s)
                cu("cuEventRecord", done, other)
                cu("cuEventSynchronize", done)
    s, t = cu.stream(), cu.stream()
    fork = cu.event(2)
    cu.ask("end without begin", "cuStreamEndCapture", s, byref(g))
    cu.ask("begin on legacy", "cuStreamBeginCapture_v2", c_void_p(1), 0)
    cu.ask("begin on the default stream", "cuStreamBeginCapture_v2", None, 0)
    cu.must("cuStreamBeginCapture_v2", s, 0)
    cu.launch(f, 1000, s)
    cu.must("cuEventRecord", fork, s)
    cu.ask("query captured event", "cuEventQuery", fork)
    cu.ask("synchronise captured event", "cuEventSynchronize", fork)
    cu("cuStreamEndCapture", s, byref(g))
    fork = cu.event(2)
    cu.must("cuStreamBeginCapture_v2", s, 2)
    cu.launch(f, 1000, s)
    cu.must("cuEventRecord", fork, s)
    cu.ask("query captured event, relaxed", "cuEventQuery", fork)
    cu.ask("other stream joins", "cuStreamWaitEvent", t, fork, 0)
    cu.must("cuStreamIsCapturing", t, byref(status))
    cu.found["joined"] = status.value
    cu.launch(f, 1000, t)
    cu.ask("end on the joined stream", "cuStreamEndCapture", t, byref(g))
    cu.ask("end unjoined", "cuStreamEndCapture", s, byref(g))
    cu.must("cuStreamIsCapturing", t, byref(status))
    cu.found["joined stream afterwards"] = status.value
    cu.must("cuEventRecord", done, t)
    cu.must("cuStreamBeginCapture_v2", s, 0)
    cu.ask("wait for an event from outside", "cuStreamWaitEvent", s, done, 0)
    cu.found["end after it"] = cu("cuStreamEndCapture", s, byref(g))
    cu.must("cuStreamBeginCapture_v2", s, 0)
    cu.must("cuEventRecord", fork, s)
    cu.must("cuStreamEndCapture", s, byref(g))
    cu.ask("wait for a captured event after its end", "cuStreamWaitEvent", t, fork, 0)
    cu.keep.append(context)


def group_capture_beside(cu: Cuda) -> None:
    """What another thread may do while this one captures."""
    import threading

    context = cu.context()
    f, g, p, q, status = cu.kernel(), c_void_p(), c_uint64(), c_uint64(), c_int()
    other, done, fresh = cu.stream(), cu.event(), c_void_p()
    cu.must("cuEventRecord", done, other)
    cu.must("cuEventSynchronize", done)
    probes = {
        "synchronise": lambda: cu("cuStreamSynchronize", other),
        "query": lambda: cu("cuStreamQuery", other),
        "query event": lambda: cu("cuEventQuery", done),
        "synchronise event": lambda: cu("cuEventSynchronize", done),
        "elapsed": lambda: cu("cuEventElapsedTime", byref(c_float()), done, done),
        "record": lambda: cu("cuEventRecord", done, other),
        "launch": lambda: cu.launch(f, 1000, other),
        "allocate": lambda: cu("cuMemAlloc_v2", byref(p), c_size_t(4096)),
        "allocate async": lambda: cu("cuMemAllocAsync", byref(q), c_size_t(4096), other),
        "create event": lambda: cu("cuEventCreate", byref(fresh), 0),
        "synchronise context": lambda: cu("cuCtxSynchronize"),
    }
    for mode in (0, 1, 2):
        for mine in (0, 1, 2):
            for name, probe in probes.items():
                s = cu.stream()
                cu.must("cuStreamBeginCapture_v2", s, mode)
                cu.launch(f, 1000, s)
                codes = []

                def beside(probe: Any = probe, codes: Any = codes, mine: int = mine) -> None:
                    cu.must("cuCtxSetCurrent", context)
                    own = c_int(mine)
                    cu.must("cuThreadExchangeStreamCaptureMode", byref(own))
                    codes.append(probe())

                thread = threading.Thread(target=beside)
                thread.start()
                thread.join()
                after = cu("cuStreamIsCapturing", s, byref(status))
                cu.found[f"{mode}{mine} {name}"] = [*codes, after, status.value, cu("cuStreamEndCapture", s, byref(g))]
                cu.must("cuStreamDestroy_v2", s)
                cu("cuEventRecord", done, other)
                cu("cuEventSynchronize", done)
