"""libcuda by ctypes, as every group of questions uses it."""

import ctypes
from ctypes import byref, c_int, c_ubyte, c_uint64, c_void_p
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
