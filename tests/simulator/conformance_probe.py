# ruff: noqa: SIM905, ARG005 - lists of names as words, and lambdas of one shape
"""Asks a CUDA driver and NVML many small questions and prints the answers as JSON: `{"group": {"question": answer}}`.

The same program runs on a real card (its answers are kept in goldens/) and on the simulator. It needs nothing but Python and, for NVML,
nvidia-ml-py. Every group is a process of its own, so that a question that crashes a driver costs that group only.
"""

import ctypes
import json
import os
import subprocess
import sys
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 length)
{
    .reg .pred %p; .reg .b64 %n; .reg .b64 %start; .reg .b64 %now; .reg .b64 %past;
    ld.param.u64 %n, [length];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.s64 %past, %now, %start;
    setp.lt.u64 %p, %past, %n;
    @%p bra again;
    ret;
}
"""
TEXT = b"poolmeter-sim-module 1\nkernel spin parameter\n"


class Cuda:
    """libcuda by ctypes, with the few things every group needs."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.simulated = hasattr(self.lib, "poolmeter_sim_now_ns")
        self.found: dict[str, Any] = {}
        self.keep: list[Any] = []

    def __call__(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.lib, name)(*arguments))

    def must(self, name: str, *arguments: Any) -> None:
        code = self(name, *arguments)
        if code != 0:
            raise SystemExit(f"{name} returned {code}")

    def ask(self, question: str, name: str, *arguments: Any) -> int:
        code = self(name, *arguments)
        self.found[question] = code
        return code

    def context(self) -> c_void_p:
        self.must("cuInit", 0)
        context = c_void_p()
        self.must("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.must("cuCtxSetCurrent", context)
        return context

    def kernel(self) -> c_void_p:
        module, function = c_void_p(), c_void_p()
        self.must("cuModuleLoadData", byref(module), TEXT if self.simulated else PTX)
        self.must("cuModuleGetFunction", byref(function), module, b"spin")
        return function

    def params(self, ns: int) -> Any:
        length = c_uint64(ns)
        array = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p))
        self.keep.append((length, array))
        return array

    def launch(self, function: c_void_p, ns: int, stream: Any) -> int:
        return self("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, self.params(ns), None)

    def stream(self, flags: int = 1) -> c_void_p:
        stream = c_void_p()
        self.must("cuStreamCreate", byref(stream), flags)
        return stream

    def event(self, flags: int = 0) -> c_void_p:
        event = c_void_p()
        self.must("cuEventCreate", byref(event), flags)
        return event


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Prop(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c_void_p), ("flags", c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


def group_before_init(cu: Cuda) -> None:
    n, p = c_int(), c_void_p()
    cu.ask("count", "cuDeviceGetCount", byref(n))
    cu.ask("current", "cuCtxGetCurrent", byref(p))
    cu.ask("alloc", "cuMemAlloc_v2", byref(c_uint64()), c_size_t(100))
    cu.ask("version", "cuDriverGetVersion", byref(n))
    cu.ask("bad flags", "cuInit", 1)
    text = c_char_p()
    cu.ask("error name", "cuGetErrorName", 2, byref(text))
    cu.ask("error name of nothing", "cuGetErrorName", 77777, byref(text))


def group_symbols(cu: Cuda) -> None:
    cu.must("cuInit", 0)
    names = (
        "cuMemAlloc cuMemAlloc_v2 cuLaunchKernel cuLaunchKernel_ptsz cuStreamBeginCapture cuStreamBeginCapture_v2 cuStreamBeginCapture_ptsz "
        "cuStreamBeginCapture_v2_ptsz cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuMemcpyHtoD cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds "
        "cuGetProcAddress cuGetProcAddress_v2 cuGraphInstantiate cuGraphInstantiate_v2 cuEventElapsedTime cuEventElapsedTime_v2 cuGraphLaunch "
        "cuGraphLaunch_ptsz cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v3 cuStreamGetCaptureInfo_v2_ptsz cuMemFree_v2 "
        "cuMemPrefetchAsync cuMemPrefetchAsync_v2 cuDeviceGetUuid cuDeviceGetUuid_v2 cuGraphExecUpdate cuGraphExecUpdate_v2 cuCtxGetDevice "
        "cuCtxGetDevice_v2 cuMemGetDefaultMemPool cuCtxDestroy cuCtxDestroy_v2 cuLaunchKernelEx cuLaunchKernelEx_ptsz cuGraphInstantiateWithFlags"
    ).split()
    address = {}
    for name in names:
        if hasattr(cu.lib, name):
            address[ctypes.cast(getattr(cu.lib, name), c_void_p).value] = name
    for base in sorted({name.split("_")[0] for name in names}):
        for version in (2000, 3020, 4000, 7000, 10000, 11000, 11030, 11060, 12000, 12080, 13000):
            for flags in (0, 1, 2):
                at, status = c_void_p(), c_int(-1)
                code = cu("cuGetProcAddress_v2", base.encode(), byref(at), version, c_uint64(flags), byref(status))
                cu.found[f"{base} {version} {flags}"] = [code, status.value, address.get(at.value, "elsewhere") if at.value else None]
    at, status = c_void_p(), c_int(-1)
    cu.found["unknown"] = [cu("cuGetProcAddress_v2", b"cuNone", byref(at), 13000, c_uint64(0), byref(status)), status.value]
    cu.found["unknown, no status"] = cu("cuGetProcAddress_v2", b"cuNone", byref(at), 13000, c_uint64(0), None)
    cu.found["too old, no status"] = cu("cuGetProcAddress_v2", b"cuLaunchKernelEx", byref(at), 11000, c_uint64(0), None)
    cu.found["first version unknown"] = cu("cuGetProcAddress", b"cuNone", byref(at), 13000, c_uint64(0))
    cu.found["bad flags"] = cu("cuGetProcAddress_v2", b"cuInit", byref(at), 13000, c_uint64(8), byref(status))
    cu.found["suffixed name"] = [
        cu("cuGetProcAddress_v2", b"cuMemAlloc_v2", byref(at), 13000, c_uint64(0), byref(status)),
        status.value,
        bool(at.value),
    ]


def group_contexts(cu: Cuda) -> None:
    cu.must("cuInit", 0)
    p, q, n, flags, active = c_void_p(), c_void_p(), c_int(), c_uint(), c_int()
    a, b = c_size_t(), c_size_t()
    cu.ask("pop of nothing", "cuCtxPopCurrent_v2", byref(p))
    cu.ask("device of nothing", "cuCtxGetDevice", byref(n))
    cu.ask("memory info of nothing", "cuMemGetInfo_v2", byref(a), byref(b))
    cu.ask("synchronise nothing", "cuCtxSynchronize")
    cu.ask("stream of nothing", "cuStreamCreate", byref(p), 0)
    cu.ask("default stream of nothing", "cuStreamSynchronize", c_void_p())
    cu.ask("bad device", "cuDevicePrimaryCtxRetain", byref(p), 99)
    cu.ask("release unretained", "cuDevicePrimaryCtxRelease_v2", 0)
    cu.ask("state", "cuDevicePrimaryCtxGetState", 0, byref(flags), byref(active))
    cu.found["active before"] = active.value
    cu.must("cuDevicePrimaryCtxRetain", byref(p), 0)
    cu.must("cuDevicePrimaryCtxRetain", byref(q), 0)
    cu.found["same"] = p.value == q.value
    cu.must("cuDevicePrimaryCtxGetState", 0, byref(flags), byref(active))
    cu.found["active after"] = active.value
    cu.ask("destroy primary", "cuCtxDestroy_v2", p)
    cu.must("cuCtxPushCurrent_v2", p)
    cu.must("cuCtxGetCurrent", byref(q))
    cu.found["current"] = p.value == q.value
    cu.must("cuCtxPopCurrent_v2", byref(q))
    cu.must("cuCtxSetCurrent", p)
    function, stream = cu.kernel(), cu.stream()
    cu.must("cuCtxSetCurrent", None)
    cu.found["launch on a stream with no current context"] = cu.launch(function, 1000, stream)
    cu.found["launch on the default stream with no current context"] = cu.launch(function, 1000, None)
    cu.ask("synchronise a stream with no current context", "cuStreamSynchronize", stream)
    cu.must("cuCtxSetCurrent", p)
    cu.must("cuDevicePrimaryCtxRelease_v2", 0)
    cu.ask("still usable after one release", "cuMemGetInfo_v2", byref(a), byref(b))
    own = c_void_p()
    cu.ask("create", "cuCtxCreate_v2", byref(own), 0, 0)
    cu.must("cuCtxGetCurrent", byref(q))
    cu.found["created is current"] = own.value == q.value
    cu.ask("destroy", "cuCtxDestroy_v2", own)
    cu.must("cuCtxGetCurrent", byref(q))
    cu.found["current after destroy"] = "primary" if q.value == p.value else "none" if not q.value else "other"


def group_events(cu: Cuda) -> None:
    cu.context()
    f, s = cu.kernel(), cu.stream()
    start, end, untimed, never, p = cu.event(), cu.event(), cu.event(2), cu.event(), c_void_p()
    span = c_float()
    cu.ask("bad flags", "cuEventCreate", byref(p), 0x100)
    cu.ask("interprocess with timing", "cuEventCreate", byref(p), 4)
    cu.ask("query unrecorded", "cuEventQuery", never)
    cu.ask("synchronise unrecorded", "cuEventSynchronize", never)
    cu.ask("wait for unrecorded", "cuStreamWaitEvent", s, never, 0)
    cu.ask("elapsed of unrecorded", "cuEventElapsedTime", byref(span), never, never)
    cu.must("cuEventRecord", start, s)
    cu.launch(f, 30_000_000, s)
    cu.must("cuEventRecord", end, s)
    cu.must("cuEventRecord", untimed, s)
    cu.ask("query pending", "cuEventQuery", end)
    cu.ask("stream query pending", "cuStreamQuery", s)
    cu.ask("elapsed of pending", "cuEventElapsedTime", byref(span), start, end)
    cu.ask("synchronise", "cuEventSynchronize", end)
    cu.ask("query reached", "cuEventQuery", end)
    cu.ask("elapsed", "cuEventElapsedTime", byref(span), start, end)
    cu.found["elapsed is the kernel's length"] = 29.9 < span.value < 31
    cu.ask("elapsed backwards", "cuEventElapsedTime", byref(span), end, start)
    cu.ask("elapsed of untimed", "cuEventElapsedTime", byref(span), start, untimed)
    cu.ask("elapsed, second version, of unrecorded", "cuEventElapsedTime_v2", byref(span), start, never)
    cu.ask("record nothing", "cuEventRecord", None, s)
    cu.ask("destroy nothing", "cuEventDestroy_v2", None)
    cu.ask("destroy the default stream", "cuStreamDestroy_v2", None)
    cu.launch(f, 20_000_000, s)
    cu.must("cuEventRecord", end, s)
    cu.ask("destroy pending event", "cuEventDestroy_v2", end)
    cu.ask("destroy busy stream", "cuStreamDestroy_v2", s)


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


def group_launches(cu: Cuda) -> None:
    cu.context()
    f, s = cu.kernel(), cu.stream()

    def launch(question: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int = 0, params: Any = True) -> None:
        cu.ask(question, "cuLaunchKernel", f, *grid, *block, shared, s, cu.params(1000) if params is True else params, None)

    launch("usual", (1, 1, 1), (32, 1, 1))
    launch("no grid", (0, 1, 1), (32, 1, 1))
    launch("no block", (1, 1, 1), (0, 1, 1))
    launch("block too large", (1, 1, 1), (2048, 1, 1))
    launch("block too deep", (1, 1, 1), (1, 1, 65))
    launch("grid too high", (1, 65536, 1), (1, 1, 1))
    launch("too much shared memory", (1, 1, 1), (32, 1, 1), 400_000)
    launch("no parameters", (1, 1, 1), (32, 1, 1), 0, None)
    cu.ask("bad stream flags", "cuStreamCreate", byref(c_void_p()), 0x80)
    cu.ask("cooperative", "cuLaunchCooperativeKernel", f, 1, 1, 1, 32, 1, 1, 0, s, cu.params(1000))
    cu.ask("cooperative, too many", "cuLaunchCooperativeKernel", f, 1_000_000, 1, 1, 1024, 1, 1, 0, s, cu.params(1000))
    cu.ask("unknown function", "cuModuleGetFunction", byref(c_void_p()), c_void_p(), b"x")
    module = c_void_p()
    cu.must("cuModuleLoadData", byref(module), TEXT if cu.simulated else PTX)
    cu.ask("unknown name", "cuModuleGetFunction", byref(c_void_p()), module, b"nothing")
    at, size = c_uint64(), c_size_t()
    cu.ask("unknown global", "cuModuleGetGlobal_v2", byref(at), byref(size), module, b"nothing")
    cu.ask("missing file", "cuModuleLoad", byref(module), b"/nonexistent/module")
    cu.must("cuCtxSynchronize")


def group_graphs(cu: Cuda) -> None:
    cu.context()
    f, s = cu.kernel(), cu.stream()

    class Params(ctypes.Structure):
        _fields_ = [("func", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("params", c_void_p), ("extra", c_void_p),
                    ("kern", c_void_p), ("ctx", c_void_p)]  # fmt: skip

    def params(ns: int, block: int = 1) -> Params:
        array = cu.params(ns)
        return Params(f, (c_uint * 3)(1, 1, 1), (c_uint * 3)(block, 1, 1), 0, ctypes.cast(array, c_void_p))

    g, a, b, c, e = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
    cu.ask("bad flags", "cuGraphCreate", byref(g), 1)
    cu.must("cuGraphCreate", byref(g), 0)
    cu.ask("add", "cuGraphAddKernelNode_v2", byref(a), g, None, c_size_t(0), byref(params(1000)))
    cu.ask("add after", "cuGraphAddKernelNode_v2", byref(b), g, byref(a), c_size_t(1), byref(params(2000)))
    cu.ask("add bad block", "cuGraphAddKernelNode_v2", byref(c), g, None, c_size_t(0), byref(params(2000, 4096)))
    n = c_size_t()
    cu.must("cuGraphGetNodes", g, None, byref(n))
    cu.found["nodes"] = n.value
    nodes, room = (c_void_p * 4)(), c_size_t(4)
    cu.must("cuGraphGetNodes", g, nodes, byref(room))
    cu.found["nodes given, room for four"] = [room.value, [bool(node) for node in nodes]]
    roots = c_size_t()
    cu.must("cuGraphGetRootNodes", g, None, byref(roots))
    cu.found["roots"] = roots.value
    kind = c_int()
    cu.must("cuGraphNodeGetType", a, byref(kind))
    cu.found["type"] = kind.value
    cu.ask("cycle", "cuGraphAddDependencies_v2", g, byref(b), byref(a), None, c_size_t(1))
    cu.ask("instantiate", "cuGraphInstantiateWithFlags", byref(e), g, c_uint64(0))
    g2, e2 = c_void_p(), c_void_p()
    cu.must("cuGraphCreate", byref(g2), 0)
    cu.must("cuGraphAddKernelNode_v2", byref(a), g2, None, c_size_t(0), byref(params(1000)))
    cu.must("cuGraphAddKernelNode_v2", byref(b), g2, byref(a), c_size_t(1), byref(params(2000)))
    cu.ask("instantiate a chain", "cuGraphInstantiateWithFlags", byref(e2), g2, c_uint64(0))
    cu.ask("upload", "cuGraphUpload", e2, s)
    cu.ask("launch", "cuGraphLaunch", e2, s)
    cu.ask("set parameters", "cuGraphExecKernelNodeSetParams_v2", e2, a, byref(params(5000)))
    info = (c_uint64 * 4)()
    cu.ask("update with itself", "cuGraphExecUpdate_v2", e2, g2, info)
    cu.must("cuGraphAddEmptyNode", byref(c), g2, byref(b), c_size_t(1))
    cu.ask("update with more", "cuGraphExecUpdate_v2", e2, g2, info)
    cu.found["update result"] = ctypes.c_uint32.from_buffer(info).value
    cu.ask("launch nothing", "cuGraphLaunch", None, s)
    cu.must("cuStreamSynchronize", s)
    cu.ask("destroy executable", "cuGraphExecDestroy", e2)
    cu.ask("destroy graph", "cuGraphDestroy", g2)
    cu.ask("destroy nothing", "cuGraphDestroy", None)


def group_memory(cu: Cuda) -> None:
    context = cu.context()
    p, q, a, b = c_uint64(), c_uint64(), c_size_t(), c_size_t()
    mib = 1 << 20

    def used() -> int:
        cu.must("cuMemGetInfo_v2", byref(a), byref(b))
        return b.value - a.value

    cu.ask("nothing", "cuMemAlloc_v2", byref(p), c_size_t(0))
    cu.ask("far too much", "cuMemAlloc_v2", byref(p), c_size_t(1 << 45))
    cu.ask("free nothing", "cuMemFree_v2", c_uint64(0))
    cu.ask("free a stranger", "cuMemFree_v2", c_uint64(0x123400))
    base = used()
    cu.must("cuMemAlloc_v2", byref(p), c_size_t(64 * mib))
    cu.found["64 MiB take"] = (used() - base) // mib
    cu.ask("free inside", "cuMemFree_v2", c_uint64(p.value + 256))
    cu.ask("free", "cuMemFree_v2", p)
    cu.ask("free again", "cuMemFree_v2", p)
    cu.found["all is back"] = (used() - base) // mib
    cu.must("cuMemAlloc_v2", byref(p), c_size_t(64 * mib + 1))
    cu.found["64 MiB and a byte take"] = (used() - base) // mib
    cu.must("cuMemFree_v2", p)
    size = c_size_t()
    cu.must("cuMemAlloc_v2", byref(p), c_size_t(1000))
    cu.must("cuMemGetAddressRange_v2", byref(q), byref(size), p)
    cu.found["range of 1000 bytes"] = size.value
    cu.found["aligned to"] = min(p.value & -p.value, 512)
    host = ctypes.create_string_buffer(2000)
    cu.ask("copy beyond the end", "cuMemcpyHtoD_v2", p, host, c_size_t(1 << 22))
    cu.ask("copy of nothing", "cuMemcpyHtoD_v2", p, host, c_size_t(0))
    cu.ask("copy to a stranger", "cuMemcpyHtoD_v2", c_uint64(0x1000), host, c_size_t(16))
    value, kind = c_uint64(), c_uint()
    cu.ask("attribute of a stranger", "cuPointerGetAttribute", byref(kind), 2, c_uint64(ctypes.addressof(host)))
    cu.ask("memory type", "cuPointerGetAttribute", byref(kind), 2, p)
    cu.found["memory type value"] = kind.value
    stream = cu.stream()
    pool, reserved = c_void_p(), c_uint64()
    cu.must("cuDeviceGetDefaultMemPool", byref(pool), 0)
    cu.ask("async nothing", "cuMemAllocAsync", byref(q), c_size_t(0), stream)
    cu.must("cuMemAllocAsync", byref(q), c_size_t(10 * mib), stream)
    cu.must("cuMemPoolGetAttribute", pool, 7, byref(reserved))
    cu.found["pool uses, for 10 MiB"] = reserved.value // mib
    cu.must("cuMemPoolGetAttribute", pool, 5, byref(reserved))
    cu.found["pool keeps, for 10 MiB"] = reserved.value // mib
    cu.must("cuMemFreeAsync", q, stream)
    cu.must("cuStreamSynchronize", stream)
    cu.must("cuMemPoolGetAttribute", pool, 5, byref(reserved))
    cu.found["pool keeps after a synchronisation"] = reserved.value // mib
    cu.ask("async free of nothing", "cuMemFreeAsync", c_uint64(0), stream)
    cu.must("cuMemAlloc_v2", byref(q), c_size_t(mib))
    cu.ask("async free of plain memory", "cuMemFreeAsync", q, stream)
    cu.must("cuMemAllocAsync", byref(q), c_size_t(mib), stream)
    cu.ask("plain free of async memory", "cuMemFree_v2", q)
    h, va = c_uint64(), c_uint64()
    granularity = c_size_t()
    device = Prop(1, 0, Location(1, 0))
    cu.must("cuMemGetAllocationGranularity", byref(granularity), byref(device), 0)
    cu.found["granularity"] = granularity.value
    cu.ask("create, bad size", "cuMemCreate", byref(h), c_size_t(1000), byref(device), c_uint64(0))
    cu.ask("create, bad card", "cuMemCreate", byref(h), c_size_t(2 * mib), byref(Prop(1, 0, Location(1, 99))), c_uint64(0))
    cu.ask("create, no type", "cuMemCreate", byref(h), c_size_t(2 * mib), byref(Prop(0, 0, Location(1, 0))), c_uint64(0))
    cu.ask("create, no location", "cuMemCreate", byref(h), c_size_t(2 * mib), byref(Prop(1, 0, Location(0, 0))), c_uint64(0))
    cu.ask("create, too much", "cuMemCreate", byref(h), c_size_t(1 << 45), byref(device), c_uint64(0))
    cu.must("cuCtxSetCurrent", None)
    cu.ask("create with no context", "cuMemCreate", byref(h), c_size_t(2 * mib), byref(device), c_uint64(0))
    cu.must("cuCtxSetCurrent", context)
    cu.ask("reserve, bad size", "cuMemAddressReserve", byref(va), c_size_t(1000), c_size_t(0), c_uint64(0), c_uint64(0))
    cu.ask("reserve", "cuMemAddressReserve", byref(va), c_size_t(8 * mib), c_size_t(0), c_uint64(0), c_uint64(0))
    cu.ask("map", "cuMemMap", va, c_size_t(2 * mib), c_size_t(0), h, c_uint64(0))
    cu.ask("map there again", "cuMemMap", va, c_size_t(2 * mib), c_size_t(0), h, c_uint64(0))
    cu.ask("map an offset", "cuMemMap", c_uint64(va.value + 2 * mib), c_size_t(2 * mib), c_size_t(2 * mib), h, c_uint64(0))
    cu.ask("map too much", "cuMemMap", c_uint64(va.value + 4 * mib), c_size_t(4 * mib), c_size_t(0), h, c_uint64(0))
    cu.ask("use before access", "cuMemcpyHtoD_v2", va, host, c_size_t(16))
    cu.ask("access", "cuMemSetAccess", va, c_size_t(2 * mib), byref(Access(Location(1, 0), 3)), c_size_t(1))
    cu.ask("access to more than is mapped", "cuMemSetAccess", va, c_size_t(8 * mib), byref(Access(Location(1, 0), 3)), c_size_t(1))
    cu.ask("use", "cuMemcpyHtoD_v2", va, host, c_size_t(16))
    cu.ask("free the range while mapped", "cuMemAddressFree", va, c_size_t(8 * mib))
    kept = c_uint64()
    cu.ask("retain", "cuMemRetainAllocationHandle", byref(kept), c_void_p(va.value))
    cu.ask("release", "cuMemRelease", h)
    cu.ask("release the retained", "cuMemRelease", kept)
    cu.ask("unmap part of nothing", "cuMemUnmap", c_uint64(va.value + 4 * mib), c_size_t(2 * mib))
    cu.ask("unmap", "cuMemUnmap", va, c_size_t(2 * mib))
    cu.ask("free the range", "cuMemAddressFree", va, c_size_t(8 * mib))
    cu.ask("free the range again", "cuMemAddressFree", va, c_size_t(8 * mib))
    hp = c_void_p()
    cu.ask("host nothing", "cuMemAllocHost_v2", byref(hp), c_size_t(0))
    cu.must("cuMemAllocHost_v2", byref(hp), c_size_t(4096))
    cu.ask("free host as device", "cuMemFree_v2", c_uint64(hp.value or 0))
    cu.ask("free host", "cuMemFreeHost", hp)
    cu.ask("unregister a stranger", "cuMemHostUnregister", host)
    cu.ask("managed, no flags", "cuMemAllocManaged", byref(p), c_size_t(4096), 0)
    cu.ask("managed", "cuMemAllocManaged", byref(p), c_size_t(4096), 1)
    cu.keep.append(value)


def group_fork(cu: Cuda) -> None:
    cu.context()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        n = c_int()
        answers = [
            cu("cuInit", 0),
            cu("cuDeviceGetCount", byref(n)),
            cu("cuCtxSynchronize"),
            cu("cuMemAlloc_v2", byref(c_uint64()), c_size_t(4096)),
        ]
        os.write(write, json.dumps(answers).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    cu.found["child"] = json.loads(os.read(read, 4096) or b'"died"')
    cu.ask("parent goes on", "cuCtxSynchronize")


def group_nvml(cu: Cuda) -> None:
    import pynvml as n

    found = cu.found

    def kind(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, kind(value[0]) if value else None]
        return type(value).__name__

    def ask(name: str, *arguments: Any, question: str | None = None) -> None:
        try:
            found[question or name] = kind(getattr(n, name)(*arguments))
        except n.NVMLError as error:
            found[question or name] = f"{type(error).__name__} {error.value}"

    ask("nvmlDeviceGetCount", question="before init")
    n.nvmlInit()
    h = n.nvmlDeviceGetHandleByIndex(0)
    for name in (
        "nvmlDeviceGetUUID nvmlDeviceGetName nvmlDeviceGetIndex nvmlDeviceGetMinorNumber nvmlDeviceGetSerial nvmlDeviceGetPciInfo "
        "nvmlDeviceGetMemoryInfo nvmlDeviceGetUtilizationRates nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization "
        "nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetCurrentClocksEventReasons "
        "nvmlDeviceGetRemappedRows nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetGraphicsRunningProcesses "
        "nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingBufferSize nvmlDeviceGetMigMode "
        "nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetDeviceHandleFromMigDeviceHandle "
        "nvmlDeviceGetAttributes nvmlGpmQueryDeviceSupport nvmlDeviceGetSupportedEventTypes nvmlDeviceGetPersistenceMode "
        "nvmlDeviceGetComputeMode nvmlDeviceGetVirtualizationMode nvmlDeviceGetAccountingPids nvmlDeviceGetFanSpeed "
        "nvmlDeviceGetPowerManagementLimit nvmlDeviceGetEccMode nvmlDeviceGetCudaComputeCapability nvmlDeviceGetArchitecture "
        "nvmlDeviceGetPerformanceState nvmlDeviceGetBrand nvmlDeviceIsMigDeviceHandle"
    ).split():
        ask(name, h)
    found["running processes of an idle card"] = found.pop("nvmlDeviceGetComputeRunningProcesses")
    ask("nvmlDeviceGetMemoryInfo", h, n.nvmlMemory_v2, question="memory, second version")
    ask("nvmlDeviceGetHandleByIndex", 99)
    ask("nvmlDeviceGetHandleByUUID", "GPU-00000000-0000-0000-0000-000000000000", question="handle by unknown uuid")
    ask("nvmlDeviceGetHandleByUUID", "nonsense", question="handle by nonsense")
    ask("nvmlDeviceGetTemperature", h, 0)
    ask("nvmlDeviceGetTemperature", h, 9, question="temperature of no sensor")
    for domain in range(5):
        ask("nvmlDeviceGetClockInfo", h, domain, question=f"clock {domain}")
    for counter in range(3):
        ask("nvmlDeviceGetPcieThroughput", h, counter, question=f"pcie {counter}")
    for error in (0, 1):
        for counter in (0, 1):
            ask("nvmlDeviceGetTotalEccErrors", h, error, counter, question=f"ecc {error} {counter}")
    for sampling in range(10):
        ask("nvmlDeviceGetSamples", h, sampling, 0, question=f"samples {sampling}")
    ask("nvmlDeviceGetMigDeviceHandleByIndex", h, 0)
    ask("nvmlDeviceGetAccountingStats", h, os.getpid())
    ask("nvmlDeviceGetAccountingStats_v2", h, os.getpid())
    future = 2**63
    ask("nvmlDeviceGetProcessUtilization", h, future, question="process utilisation of the future")
    ask("nvmlDeviceGetProcessesUtilizationInfo", h, future, question="processes utilisation of the future")
    fields = [*range(74, 84), 94, 142, 143, 144, 145, *range(185, 193), 197, 198, 230, 269, 270, 271]
    for value in n.nvmlDeviceGetFieldValues(h, fields):
        found[f"field {value.fieldId}"] = [value.nvmlReturn, value.valueType if value.nvmlReturn == 0 else None]
    events = n.nvmlEventSetCreate()
    try:
        n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, events)
        n.nvmlEventSetWait_v2(events, 10)
    except n.NVMLError as error:
        found["wait for an event"] = f"{type(error).__name__} {error.value}"
    first, second = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
    n.nvmlGpmSampleGet(h, first)
    import time

    time.sleep(0.2)
    n.nvmlGpmSampleGet(h, second)
    ids = [1, 2, 3, 5, 10, 20, 21]
    request = n.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics, request.sample1, request.sample2 = 1, len(ids), first, second
    for index, number in enumerate(ids):
        request.metrics[index].metricId = number
    n.nvmlGpmMetricsGet(request)
    for index, number in enumerate(ids):
        metric = request.metrics[index]
        found[f"gpm {number}"] = [metric.nvmlReturn, (metric.metricInfo.unit or b"").decode() if metric.nvmlReturn == 0 else None]
    # Raw size protocols.
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    count = c_uint(0)
    found["raw running, idle, no room"] = [lib.nvmlDeviceGetComputeRunningProcesses_v3(h, byref(count), None), count.value]
    found["raw running, no count"] = lib.nvmlDeviceGetComputeRunningProcesses_v3(h, None, None)
    count = c_uint(0)
    found["raw utilisation, future, no room"] = [
        lib.nvmlDeviceGetProcessUtilization(h, None, byref(count), c_ulonglong(future)),
        count.value,
    ]
    found["raw uuid, no room"] = lib.nvmlDeviceGetUUID(h, ctypes.create_string_buffer(4), 4)
    found["raw name, nowhere"] = lib.nvmlDeviceGetName(h, None, 96)
    found["raw no device"] = lib.nvmlDeviceGetName(None, ctypes.create_string_buffer(96), 96)
    # With a process on the card.
    before = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    cu.context()
    mine = [p for p in n.nvmlDeviceGetComputeRunningProcesses(h) if p.pid == os.getpid()]
    found["this process is listed"] = len(mine)
    if mine:
        found["its memory is a number"] = isinstance(mine[0].usedGpuMemory, int)
        found["its instance"] = [mine[0].gpuInstanceId, mine[0].computeInstanceId]
    after = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    found["its context takes memory"] = after.used > before.used
    found["total = reserved + used + free"] = after.total == after.reserved + after.used + after.free
    old = n.nvmlDeviceGetMemoryInfo(h)
    found["first version: total = used + free"] = old.total == old.used + old.free
    count = c_uint(0)
    found["raw running, no room"] = [lib.nvmlDeviceGetComputeRunningProcesses_v3(h, byref(count), None), count.value > 0]
    f, s = cu.kernel(), cu.stream()
    for _ in range(25):
        cu.launch(f, 20_000_000, s)
    cu.must("cuStreamSynchronize", s)
    samples = [u for u in n.nvmlDeviceGetProcessUtilization(h, 0) if u.pid == os.getpid()]
    found["process utilisation lists it once"] = len(samples)
    found["its percentage is above 10"] = bool(samples) and samples[0].smUtil > 10
    count = c_uint(0)
    found["raw utilisation, no room"] = [lib.nvmlDeviceGetProcessUtilization(h, None, byref(count), c_ulonglong(0)), count.value > 0]
    ask("nvmlDeviceGetProcessesUtilizationInfo", h, 0)
    n.nvmlShutdown()
    ask("nvmlDeviceGetCount", question="after shutdown")


GROUPS = {name.removeprefix("group_"): value for name, value in list(globals().items()) if name.startswith("group_")}


def main() -> None:
    if len(sys.argv) > 1:
        cu = Cuda()
        try:
            GROUPS[sys.argv[1]](cu)
        finally:
            print(json.dumps(cu.found))
        return
    answers: dict[str, Any] = {}
    for name in GROUPS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answers[name] = json.loads(lines[-1]) if lines else {}
        if done.returncode != 0:
            answers[name]["ended with"] = done.returncode
            sys.stderr.write(f"{name}: {done.stderr[-2000:]}\n")
    print(json.dumps(answers, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
