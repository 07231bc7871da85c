"""The driver through ctypes, for programs that tests run under the hook: constants, structures, and a context to work in.

`Cuda.name(...)` calls `cuName...` and returns its CUresult; nothing is checked, as refusals are what is tested.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_float, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

MIB = 1 << 20
HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4
UINT8, FLOAT = 1, 32
SPARSE, DEFERRED = 0x40, 0x80
OUT_OF_MEMORY = 2
MODULE = b"poolmeter-sim-module 1\nkernel spin parameter\nkernel ncclDevKernel_AllReduce parameter\n"


class Array3D(Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class Array2D(Structure):
    """CUDA_ARRAY_DESCRIPTOR."""

    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]


class OldArray3D(Structure):
    """CUDA_ARRAY3D_DESCRIPTOR_v1."""

    _fields_ = [("width", c_uint), ("height", c_uint), ("depth", c_uint), ("format", c_int), ("channels", c_uint), ("flags", c_uint)]


class OldArray2D(Structure):
    """CUDA_ARRAY_DESCRIPTOR_v1."""

    _fields_ = [("width", c_uint), ("height", c_uint), ("format", c_int), ("channels", c_uint)]


class Location(Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_char * 8),
    ]


class PoolProps(Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("max_size", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", c_char * 54),
    ]


class AllocNode(Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = [
        ("pool", PoolProps),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("at", c_uint64),
    ]


class NodeParams(Structure):
    """CUgraphNodeParams, with a memory allocation in it."""

    _fields_ = [("type", c_int), ("reserved", c_int * 3), ("alloc", AllocNode), ("rest", c_char * (256 - 16 - ctypes.sizeof(AllocNode)))]


class Copy2D(Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        ("from_x", c_size_t),
        ("from_y", c_size_t),
        ("from_type", c_int),
        ("from_host", c_void_p),
        ("from_device", c_uint64),
        ("from_array", c_void_p),
        ("from_pitch", c_size_t),
        ("to_x", c_size_t),
        ("to_y", c_size_t),
        ("to_type", c_int),
        ("to_host", c_void_p),
        ("to_device", c_uint64),
        ("to_array", c_void_p),
        ("to_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


class Copy3D(Structure):
    """CUDA_MEMCPY3D, and CUDA_MEMCPY3D_PEER whose reserved words are contexts."""

    _fields_ = [
        ("from_x", c_size_t),
        ("from_y", c_size_t),
        ("from_z", c_size_t),
        ("from_lod", c_size_t),
        ("from_type", c_int),
        ("from_host", c_void_p),
        ("from_device", c_uint64),
        ("from_array", c_void_p),
        ("from_context", c_void_p),
        ("from_pitch", c_size_t),
        ("from_height", c_size_t),
        ("to_x", c_size_t),
        ("to_y", c_size_t),
        ("to_z", c_size_t),
        ("to_lod", c_size_t),
        ("to_type", c_int),
        ("to_host", c_void_p),
        ("to_device", c_uint64),
        ("to_array", c_void_p),
        ("to_context", c_void_p),
        ("to_pitch", c_size_t),
        ("to_height", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    ]


class LaunchParams(Structure):
    """CUDA_LAUNCH_PARAMS."""

    _fields_ = [
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("params", POINTER(c_void_p)),
    ]


class Operand(Structure):
    """CUmemcpy3DOperand of a pointer."""

    _fields_ = [("type", c_int), ("at", c_uint64), ("row", c_size_t), ("layer", c_size_t), ("hint", Location)]


class BatchOp(Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = [("source", Operand), ("target", Operand), ("extent", c_size_t * 3), ("order", c_int), ("flags", c_uint)]


class MapInfo(Structure):
    """CUarrayMapInfo of a whole array."""

    _fields_ = [
        ("resource_type", c_int),
        ("resource", c_void_p),
        ("subresource_type", c_int),
        ("fill", c_int),
        ("subresource", c_uint * 8),
        ("operation", c_int),
        ("handle_type", c_int),
        ("handle", c_ulonglong),
        ("offset", c_ulonglong),
        ("devices", c_uint),
        ("flags", c_uint),
        ("reserved", c_uint * 2),
    ]


class IpcHandle(Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class ExternalHandle(Structure):
    """CUDA_EXTERNAL_MEMORY_HANDLE_DESC of a descriptor."""

    _fields_ = [
        ("type", c_int),
        ("fill", c_int),
        ("fd", c_int),
        ("pad", c_char * 12),
        ("size", c_uint64),
        ("flags", c_uint),
        ("rest", c_uint * 16),
    ]


class ExternalBuffer(Structure):
    """CUDA_EXTERNAL_MEMORY_BUFFER_DESC."""

    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("flags", c_uint), ("rest", c_uint * 16)]


class Cuda:
    """The driver, found as programs find it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, f"cu{name[0].upper()}{name[1:]}")

    def start(self, device: int = 0) -> c_void_p:
        """Makes the device's primary context current."""
        context = c_void_p()
        assert self.Init(0) == 0
        assert self.DevicePrimaryCtxRetain(byref(context), device) == 0
        assert self.CtxSetCurrent(context) == 0
        return context

    def used(self) -> int:
        """Bytes of the limit that are taken, as the hook shows them."""
        free, total = c_size_t(), c_size_t()
        assert self.MemGetInfo_v2(byref(free), byref(total)) == 0
        return total.value - free.value

    def module(self, image: bytes = MODULE) -> c_void_p:
        module = c_void_p()
        assert self.ModuleLoadData(byref(module), image) == 0
        return module

    def function(self, module: c_void_p, name: bytes = b"spin") -> c_void_p:
        function = c_void_p()
        assert self.ModuleGetFunction(byref(function), module, name) == 0
        return function

    def launch(self, function: c_void_p, ns: int, stream: c_void_p | None = None) -> int:
        length = c_uint64(ns)
        params = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p))
        result: int = self.LaunchKernel(function, 64, 1, 1, 128, 1, 1, 0, stream, params, None)
        return result

    def elapsed_ms(self, start: c_void_p, end: c_void_p) -> float:
        ms = c_float()
        assert self.EventElapsedTime(byref(ms), start, end) == 0
        return ms.value
