"""The CUDA driver API from Python by ctypes, as much of it as workloads need. Works over whatever libcuda.so.1 the loader finds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from poolmeter.errors import Unavailable

SPIN_IMAGE = b"poolmeter-sim-module 1\nkernel spin parameter\n"


class DriverError(Exception):
    """A driver call returned something else than CUDA_SUCCESS."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} returned {name} ({code}), CUDA_SUCCESS was expected")
        self.call = call
        self.code = code
        self.name = name


class Driver:
    """The loaded driver. Every call goes by symbol name; `driver("cuInit", 0)` raises DriverError unless it succeeds."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise Unavailable(f"no CUDA driver: {error}") from None
        if not hasattr(self.library, "poolmeter_sim_now_ns"):
            raise Unavailable(f"the CUDA driver {path} is a real one; this workload's kernels exist on the simulated card only")
        self.library.poolmeter_sim_now_ns.restype = ctypes.c_uint64
        self.library.poolmeter_sim_sleep_until_ns.argtypes = [ctypes.c_uint64]
        self.library.poolmeter_sim_sleep_until_ns.restype = None

    def status(self, call: str, *arguments: object) -> int:
        """The CUresult of a call. Handles and addresses are passed as they came (c_void_p, c_uint64) or as ctypes.byref."""
        return int(getattr(self.library, call)(*arguments))

    def __call__(self, call: str, *arguments: object) -> None:
        code = self.status(call, *arguments)
        if code != 0:
            raise DriverError(call, code, self.error_name(code))

    def error_name(self, code: int) -> str:
        """`CUDA_ERROR_OUT_OF_MEMORY` for 2."""
        text = ctypes.c_char_p()
        if self.library.cuGetErrorName(code, ctypes.byref(text)) != 0 or text.value is None:
            return f"CUresult {code}"
        return text.value.decode()

    def now_ns(self) -> int:
        """The clock the driver lives on."""
        return int(self.library.poolmeter_sim_now_ns())

    def sleep(self, ns: int) -> None:
        """Waits on the driver's clock."""
        self.library.poolmeter_sim_sleep_until_ns(self.now_ns() + ns)

    # --- the few calls every workload makes

    def open(self, device: int = 0) -> ctypes.c_void_p:
        """Initialises, makes the primary context of a visible card current, and returns it."""
        self("cuInit", 0)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        return context

    def function(self, image: bytes = SPIN_IMAGE, name: bytes = b"spin") -> ctypes.c_void_p:
        """A kernel of a module image."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), image)
        self("cuModuleGetFunction", ctypes.byref(function), module, name)
        return function

    def launch(
        self, function: ctypes.c_void_p, ns: int, stream: ctypes.c_void_p | int = 0, blocks: int = 1024, call: str = "cuLaunchKernel"
    ) -> None:
        """Launches a kernel of `ns` on a stream."""
        length = ctypes.c_uint64(ns)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(length), ctypes.c_void_p))
        self(call, function, blocks, 1, 1, 128, 1, 1, 0, _handle(stream), parameters, None)

    def stream(self, flags: int = 1) -> ctypes.c_void_p:
        """A new stream; flags 1: it takes no part in the legacy default stream's ordering."""
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), flags)
        return stream

    def event(self, flags: int = 0) -> ctypes.c_void_p:
        """A new event."""
        event = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(event), flags)
        return event

    def elapsed_ms(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """The time between two reached events."""
        span = ctypes.c_float()
        self("cuEventElapsedTime", ctypes.byref(span), start, end)
        return span.value

    def allocate(self, size: int) -> ctypes.c_uint64:
        """Device memory."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    @contextmanager
    def capture(self, stream: ctypes.c_void_p, mode: int = 0) -> Iterator[list[ctypes.c_void_p]]:
        """Captures what the body launches on the stream; afterwards the yielded list holds the executable graph."""
        made: list[ctypes.c_void_p] = []
        self("cuStreamBeginCapture_v2", stream, mode)
        yield made
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamEndCapture", stream, ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        made.append(executable)


def _handle(value: ctypes.c_void_p | int) -> ctypes.c_void_p:
    return value if isinstance(value, ctypes.c_void_p) else ctypes.c_void_p(value)


def copy_in(driver: Driver, address: ctypes.c_uint64, data: bytes, stream: ctypes.c_void_p) -> None:
    """Host bytes to the card, in stream order."""
    driver("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(len(data)), stream)


def copy_out(driver: Driver, address: ctypes.c_uint64, size: int) -> bytes:
    """The card's bytes, after the work before it."""
    buffer = ctypes.create_string_buffer(size)
    driver("cuMemcpyDtoH_v2", buffer, address, ctypes.c_size_t(size))
    return buffer.raw


def synchronise(driver: Driver, streams: Sequence[ctypes.c_void_p]) -> None:
    """Waits for each stream."""
    for stream in streams:
        driver("cuStreamSynchronize", stream)
