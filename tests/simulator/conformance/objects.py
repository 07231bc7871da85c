# ruff: noqa: SIM905 - lists of names as words
"""The driver and its objects: initialisation, symbols, contexts, events, fork."""

import ctypes
import json
import os
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from driver import Cuda


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
    cu.launch(f, 20_000_000, s)  # something ahead, so that a host that is late does not lie between the two events
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
