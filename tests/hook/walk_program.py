"""Every call that takes or gives back memory, one at a time: reads a name, prepares, waits for a line, calls, says what came back, waits
for a line (`other`: makes the second device current), undoes. Each is a generator that hands out the call and is told its result."""

import json
import sys
import tempfile
from collections.abc import Callable, Generator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cuda_calls import (
    DEFERRED,
    FLOAT,
    MIB,
    AllocationProp,
    AllocNode,
    Array2D,
    Array3D,
    Cuda,
    Location,
    MapInfo,
    NodeParams,
    OldArray2D,
    OldArray3D,
    PoolProps,
)

Walk = Generator[Callable[[], int], int, None]
WALKS: dict[str, Callable[[], Walk]] = {}
cuda = Cuda()
IMAGE = b"poolmeter-sim-module 1\nkernel spin parameter\nglobal table 4194304\n"
FLAT, DEEP = Array2D(512, 512, FLOAT, 1), Array3D(512, 512, 2, FLOAT, 1, 0)
ON_DEVICE = AllocationProp(1, 1, Location(1, 0))
POOL = PoolProps(type=1, handle_types=1, location=Location(1, 0))


def walk(name: str) -> Callable[[Callable[[], Walk]], Callable[[], Walk]]:
    def register(function: Callable[[], Walk]) -> Callable[[], Walk]:
        WALKS[name] = function
        return function

    return register


def done(result: int) -> None:
    assert result == 0, result


def taking(name: str, call: Callable[[Any], int], free: Callable[[Any], int], out: Callable[[], Any]) -> None:
    """A call that gives memory in `out`, which `free` gives back."""

    def steps() -> Walk:
        at = out()
        if (yield lambda: call(at)) == 0:
            done(free(at))

    WALKS[name] = steps


def giving(name: str, take: Callable[[Any], int], call: Callable[[Any], int], out: Callable[[], Any]) -> None:
    """A call that gives back what `take` gave."""

    def steps() -> Walk:
        at = out()
        done(take(at))
        if (yield lambda: call(at)) != 0:
            done(call(at))

    WALKS[name] = steps


def pair(take_name: str, take: Callable[[Any], int], give_name: str, give: Callable[[Any], int], out: Callable[[], Any] = c_uint64) -> None:
    taking(take_name, take, give, out)
    giving(give_name, take, give, out)


def size(bytes_: int) -> c_size_t:
    return c_size_t(bytes_)


pair("MemAlloc_v2", lambda at: cuda.MemAlloc_v2(byref(at), size(MIB)), "MemFree_v2", lambda at: cuda.MemFree_v2(at))
pair("MemAllocAsync", lambda at: cuda.MemAllocAsync(byref(at), size(MIB), None), "MemFreeAsync", lambda at: cuda.MemFreeAsync(at, None))
pair(
    "MemAllocAsync_ptsz",
    lambda at: cuda.MemAllocAsync_ptsz(byref(at), size(MIB), None),
    "MemFreeAsync_ptsz",
    lambda at: cuda.MemFreeAsync_ptsz(at, None),
)
taking("MemAllocManaged", lambda at: cuda.MemAllocManaged(byref(at), size(MIB), 1), lambda at: cuda.MemFree_v2(at), c_uint64)
taking(
    "MemAllocPitch_v2",
    lambda at: cuda.MemAllocPitch_v2(byref(at), byref(c_size_t()), size(1000), size(100), 4),
    lambda at: cuda.MemFree_v2(at),
    c_uint64,
)
pair(
    "MemCreate",
    lambda at: cuda.MemCreate(byref(at), size(2 * MIB), byref(ON_DEVICE), c_uint64(0)),
    "MemRelease",
    lambda at: cuda.MemRelease(at),
)
pair("ArrayCreate_v2", lambda at: cuda.ArrayCreate_v2(byref(at), byref(FLAT)), "ArrayDestroy", lambda at: cuda.ArrayDestroy(at), c_void_p)
taking("Array3DCreate_v2", lambda at: cuda.Array3DCreate_v2(byref(at), byref(DEEP)), lambda at: cuda.ArrayDestroy(at), c_void_p)
taking(
    "ArrayCreate",
    lambda at: cuda.ArrayCreate(byref(at), byref(OldArray2D(512, 512, FLOAT, 1))),
    lambda at: cuda.ArrayDestroy(at),
    c_void_p,
)
taking(
    "Array3DCreate",
    lambda at: cuda.Array3DCreate(byref(at), byref(OldArray3D(512, 512, 2, FLOAT, 1, 0))),
    lambda at: cuda.ArrayDestroy(at),
    c_void_p,
)
pair(
    "MipmappedArrayCreate",
    lambda at: cuda.MipmappedArrayCreate(byref(at), byref(DEEP), 3),
    "MipmappedArrayDestroy",
    lambda at: cuda.MipmappedArrayDestroy(at),
    c_void_p,
)
pair("ModuleLoadData", lambda at: cuda.ModuleLoadData(byref(at), IMAGE), "ModuleUnload", lambda at: cuda.ModuleUnload(at), c_void_p)
taking(
    "ModuleLoadDataEx",
    lambda at: cuda.ModuleLoadDataEx(byref(at), IMAGE, 0, None, None),
    lambda at: cuda.ModuleUnload(at),
    c_void_p,
)
taking("ModuleLoadFatBinary", lambda at: cuda.ModuleLoadFatBinary(byref(at), IMAGE), lambda at: cuda.ModuleUnload(at), c_void_p)


def load_library(at: c_void_p) -> int:
    result: int = cuda.LibraryLoadData(byref(at), IMAGE + b"code 2097152\n", None, None, 0, None, None, 0)
    return result


pair("LibraryLoadData", load_library, "LibraryUnload", lambda at: cuda.LibraryUnload(at), c_void_p)


@walk("LibraryLoadFromFile")
def library_file() -> Walk:
    library = c_void_p()
    with tempfile.NamedTemporaryFile() as file:
        file.write(IMAGE + b"code 2097152\n")
        file.flush()
        name = file.name.encode()
        result = yield lambda: cuda.LibraryLoadFromFile(byref(library), name, None, None, 0, None, None, 0)
        if result == 0:
            done(cuda.LibraryUnload(library))


@walk("ModuleLoad")
def module_file() -> Walk:
    module = c_void_p()
    with tempfile.NamedTemporaryFile() as file:
        file.write(IMAGE)
        file.flush()
        name = file.name.encode()
        if (yield lambda: cuda.ModuleLoad(byref(module), name)) == 0:
            done(cuda.ModuleUnload(module))


@walk("ModuleGetGlobal_v2")
def module_global() -> Walk:
    module = c_void_p()
    done(cuda.ModuleLoadData(byref(module), IMAGE))
    yield lambda: cuda.ModuleGetGlobal_v2(byref(c_uint64()), byref(c_size_t()), module, b"table")
    done(cuda.ModuleUnload(module))


@walk("LibraryGetGlobal")
def library_global() -> Walk:
    library = c_void_p()
    done(load_library(library))
    yield lambda: cuda.LibraryGetGlobal(byref(c_uint64()), byref(c_size_t()), library, b"table")
    done(cuda.LibraryUnload(library))


def from_pool(name: str, call: Callable[[Any, c_void_p], int], free: Callable[[Any], int]) -> None:
    def steps() -> Walk:
        pool, at = c_void_p(), c_uint64()
        done(cuda.MemPoolCreate(byref(pool), byref(POOL)))
        if (yield lambda: call(at, pool)) == 0:
            done(free(at))
        done(cuda.MemPoolDestroy(pool))

    WALKS[name] = steps


for variant in ("", "_ptsz"):
    from_pool(
        f"MemAllocFromPoolAsync{variant}",
        lambda at, pool, variant=variant: getattr(cuda, f"MemAllocFromPoolAsync{variant}")(byref(at), size(MIB), pool, None),  # type: ignore[misc]
        lambda at, variant=variant: getattr(cuda, f"MemFreeAsync{variant}")(at, None),  # type: ignore[misc]
    )
pair(
    "MemPoolCreate",
    lambda pool: cuda.MemPoolCreate(byref(pool), byref(POOL)),
    "MemPoolDestroy",
    lambda pool: cuda.MemPoolDestroy(pool),
    c_void_p,
)


def physical() -> c_uint64:
    handle = c_uint64()
    done(cuda.MemCreate(byref(handle), size(2 * MIB), byref(ON_DEVICE), c_uint64(0)))
    return handle


@walk("MemMap")
def mapping() -> Walk:
    at, handle = c_uint64(), physical()
    done(cuda.MemAddressReserve(byref(at), size(2 * MIB), size(0), c_uint64(0), c_uint64(0)))
    result = yield lambda: cuda.MemMap(at, size(2 * MIB), size(0), handle, c_uint64(0))
    done(cuda.MemRelease(handle))
    if result == 0:
        done(cuda.MemUnmap(at, size(2 * MIB)))
    done(cuda.MemAddressFree(at, size(2 * MIB)))


@walk("MemUnmap")
def unmapping() -> Walk:
    at, handle = c_uint64(), physical()
    done(cuda.MemAddressReserve(byref(at), size(2 * MIB), size(0), c_uint64(0), c_uint64(0)))
    done(cuda.MemMap(at, size(2 * MIB), size(0), handle, c_uint64(0)))
    done(cuda.MemRelease(handle))
    if (yield lambda: cuda.MemUnmap(at, size(2 * MIB))) != 0:
        done(cuda.MemUnmap(at, size(2 * MIB)))
    done(cuda.MemAddressFree(at, size(2 * MIB)))


@walk("MemRetainAllocationHandle")
def retaining() -> Walk:
    at, handle, again = c_uint64(), physical(), c_uint64()
    done(cuda.MemAddressReserve(byref(at), size(2 * MIB), size(0), c_uint64(0), c_uint64(0)))
    done(cuda.MemMap(at, size(2 * MIB), size(0), handle, c_uint64(0)))
    result = yield lambda: cuda.MemRetainAllocationHandle(byref(again), c_void_p(at.value))
    if result == 0:
        done(cuda.MemRelease(again))
    done(cuda.MemUnmap(at, size(2 * MIB)))
    done(cuda.MemRelease(handle))
    done(cuda.MemAddressFree(at, size(2 * MIB)))


def mapping_arrays(variant: str) -> None:
    def steps() -> Walk:
        array, handle = c_void_p(), physical()
        done(cuda.Array3DCreate_v2(byref(array), byref(Array3D(512, 512, 0, FLOAT, 1, DEFERRED))))
        info = MapInfo(resource_type=0, resource=array, operation=1, handle=handle.value, devices=1)
        yield lambda: getattr(cuda, f"MemMapArrayAsync{variant}")(byref(info), 1, None)
        done(cuda.MemRelease(handle))
        done(cuda.ArrayDestroy(array))

    WALKS[f"MemMapArrayAsync{variant}"] = steps


mapping_arrays("")
mapping_arrays("_ptsz")


def graph_of(bytes_: int) -> c_void_p:
    graph = c_void_p()
    done(cuda.GraphCreate(byref(graph), 0))
    done(cuda.GraphAddMemAllocNode(byref(c_void_p()), graph, None, size(0), byref(AllocNode(pool=POOL, bytes=bytes_))))
    return graph


def executable_of(bytes_: int) -> c_void_p:
    executable = c_void_p()
    done(cuda.GraphInstantiateWithFlags(byref(executable), graph_of(bytes_), c_uint64(0)))
    return executable


def no_more(executable: c_void_p) -> None:
    done(cuda.GraphExecDestroy(executable))
    done(cuda.DeviceGraphMemTrim(0))


def on_executable(name: str) -> None:
    def steps() -> Walk:
        executable = executable_of(4 * MIB)
        yield lambda: getattr(cuda, name)(executable, None)
        no_more(executable)

    WALKS[name] = steps


for call_name in ("GraphLaunch", "GraphLaunch_ptsz", "GraphUpload", "GraphUpload_ptsz"):
    on_executable(call_name)


def instantiating(name: str, call: Callable[[c_void_p, c_void_p], int]) -> None:
    def steps() -> Walk:
        executable, graph = c_void_p(), graph_of(4 * MIB)
        if (yield lambda: call(executable, graph)) == 0:
            done(cuda.GraphLaunch(executable, None))
            no_more(executable)
        done(cuda.GraphDestroy(graph))

    WALKS[name] = steps


UPLOAD = (c_uint64 * 4)(2, 0, 0, 0)
instantiating("GraphInstantiate", lambda out, graph: cuda.GraphInstantiate(byref(out), graph, None, None, size(0)))
instantiating("GraphInstantiate_v2", lambda out, graph: cuda.GraphInstantiate_v2(byref(out), graph, None, None, size(0)))
instantiating("GraphInstantiateWithFlags", lambda out, graph: cuda.GraphInstantiateWithFlags(byref(out), graph, c_uint64(0)))
for call_name in ("GraphInstantiateWithParams", "GraphInstantiateWithParams_ptsz"):
    instantiating(call_name, lambda out, graph, name=call_name: getattr(cuda, name)(byref(out), graph, byref(UPLOAD)))  # type: ignore[misc]


@walk("GraphExecDestroy")
def destroying_executable() -> Walk:
    executable = executable_of(4 * MIB)
    done(cuda.GraphLaunch(executable, None))
    if (yield lambda: cuda.GraphExecDestroy(executable)) != 0:
        done(cuda.GraphExecDestroy(executable))
    done(cuda.DeviceGraphMemTrim(0))


@walk("DeviceGraphMemTrim")
def trimming() -> Walk:
    executable = executable_of(4 * MIB)
    done(cuda.GraphLaunch(executable, None))
    done(cuda.GraphExecDestroy(executable))
    if (yield lambda: cuda.DeviceGraphMemTrim(0)) != 0:
        done(cuda.DeviceGraphMemTrim(0))


def adding_node(name: str, call: Callable[[c_void_p], int]) -> None:
    def steps() -> Walk:
        graph = c_void_p()
        done(cuda.GraphCreate(byref(graph), 0))
        yield lambda: call(graph)
        done(cuda.GraphDestroy(graph))

    WALKS[name] = steps


GENERAL = NodeParams(type=10, alloc=AllocNode(pool=POOL, bytes=MIB))
NODE = c_void_p()
adding_node(
    "GraphAddMemAllocNode",
    lambda graph: cuda.GraphAddMemAllocNode(byref(NODE), graph, None, size(0), byref(AllocNode(pool=POOL, bytes=MIB))),
)
adding_node("GraphAddNode", lambda graph: cuda.GraphAddNode(byref(NODE), graph, None, size(0), byref(GENERAL)))
adding_node("GraphAddNode_v2", lambda graph: cuda.GraphAddNode_v2(byref(NODE), graph, None, None, size(0), byref(GENERAL)))


@walk("CtxSetLimit")
def setting_limit() -> Walk:
    yield lambda: cuda.CtxSetLimit(2, size(16 * MIB))
    done(cuda.CtxSetLimit(2, size(8 * MIB)))


@walk("MemImportFromShareableHandle")
def importing() -> Walk:
    handle, descriptor, again = physical(), c_int(), c_uint64()
    done(cuda.MemExportToShareableHandle(byref(descriptor), handle, 1, c_uint64(0)))
    if (yield lambda: cuda.MemImportFromShareableHandle(byref(again), c_void_p(descriptor.value), 1)) == 0:
        done(cuda.MemRelease(again))
    done(cuda.MemRelease(handle))


@walk("MemPoolImportFromShareableHandle")
def importing_pool() -> Walk:
    pool, descriptor, again = c_void_p(), c_int(), c_void_p()
    done(cuda.MemPoolCreate(byref(pool), byref(POOL)))
    done(cuda.MemPoolExportToShareableHandle(byref(descriptor), pool, 1, c_uint64(0)))
    result = yield lambda: cuda.MemPoolImportFromShareableHandle(byref(again), c_void_p(descriptor.value), 1, c_uint64(0))
    if result == 0:
        done(cuda.MemPoolDestroy(again))
    done(cuda.MemPoolDestroy(pool))


def nothing_given() -> dict[str, int]:
    """Every call with NULL where it would answer; then with no context current."""
    nowhere: dict[str, Callable[[], int]] = {
        "MemAlloc_v2": lambda: cuda.MemAlloc_v2(None, size(16)),
        "MemAllocManaged": lambda: cuda.MemAllocManaged(None, size(16), 1),
        "MemAllocPitch_v2": lambda: cuda.MemAllocPitch_v2(None, None, size(16), size(16), 4),
        "MemAllocAsync": lambda: cuda.MemAllocAsync(None, size(16), None),
        "MemAllocFromPoolAsync": lambda: cuda.MemAllocFromPoolAsync(None, size(16), None, None),
        "MemPoolCreate": lambda: cuda.MemPoolCreate(None, None),
        "MemCreate": lambda: cuda.MemCreate(None, size(2 * MIB), None, c_uint64(0)),
        "MemRetainAllocationHandle": lambda: cuda.MemRetainAllocationHandle(None, None),
        "MemImportFromShareableHandle": lambda: cuda.MemImportFromShareableHandle(None, None, 1),
        "MemPoolImportFromShareableHandle": lambda: cuda.MemPoolImportFromShareableHandle(None, None, 1, c_uint64(0)),
        "MemMapArrayAsync": lambda: cuda.MemMapArrayAsync(None, 1, None),
        "ArrayCreate_v2": lambda: cuda.ArrayCreate_v2(None, byref(FLAT)),
        "Array3DCreate_v2": lambda: cuda.Array3DCreate_v2(None, None),
        "ArrayCreate": lambda: cuda.ArrayCreate(None, None),
        "Array3DCreate": lambda: cuda.Array3DCreate(None, None),
        "MipmappedArrayCreate": lambda: cuda.MipmappedArrayCreate(None, byref(DEEP), 1),
        "ArrayDestroy": lambda: cuda.ArrayDestroy(None),
        "MipmappedArrayDestroy": lambda: cuda.MipmappedArrayDestroy(None),
        "ModuleLoad": lambda: cuda.ModuleLoad(None, None),
        "ModuleLoadData": lambda: cuda.ModuleLoadData(None, None),
        "ModuleLoadDataEx": lambda: cuda.ModuleLoadDataEx(None, None, 0, None, None),
        "ModuleLoadFatBinary": lambda: cuda.ModuleLoadFatBinary(None, None),
        "ModuleUnload": lambda: cuda.ModuleUnload(None),
        "ModuleGetGlobal_v2": lambda: cuda.ModuleGetGlobal_v2(None, None, None, None),
        "LibraryLoadData": lambda: cuda.LibraryLoadData(None, None, None, None, 0, None, None, 0),
        "LibraryLoadFromFile": lambda: cuda.LibraryLoadFromFile(None, None, None, None, 0, None, None, 0),
        "LibraryUnload": lambda: cuda.LibraryUnload(None),
        "LibraryGetGlobal": lambda: cuda.LibraryGetGlobal(None, None, None, None),
        "GraphInstantiate": lambda: cuda.GraphInstantiate(None, None, None, None, size(0)),
        "GraphInstantiateWithFlags": lambda: cuda.GraphInstantiateWithFlags(None, None, c_uint64(0)),
        "GraphInstantiateWithParams": lambda: cuda.GraphInstantiateWithParams(None, None, None),
        "GraphLaunch": lambda: cuda.GraphLaunch(None, None),
        "GraphUpload": lambda: cuda.GraphUpload(None, None),
        "GraphExecDestroy": lambda: cuda.GraphExecDestroy(None),
        "GraphAddMemAllocNode": lambda: cuda.GraphAddMemAllocNode(None, None, None, size(0), None),
        "GraphAddNode_v2": lambda: cuda.GraphAddNode_v2(None, None, None, None, size(0), None),
        "GreenCtxCreate": lambda: cuda.GreenCtxCreate(None, None, 0, 0),
        "GreenCtxDestroy": lambda: cuda.GreenCtxDestroy(None),
        "LaunchCooperativeKernelMultiDevice": lambda: cuda.LaunchCooperativeKernelMultiDevice(None, 1, 0),
        "Memcpy2D_v2": lambda: cuda.Memcpy2D_v2(None),
        "Memcpy3D_v2": lambda: cuda.Memcpy3D_v2(None),
        "Memcpy3DPeer": lambda: cuda.Memcpy3DPeer(None),
        "MemcpyBatchAsync_v2": lambda: cuda.MemcpyBatchAsync_v2(None, None, None, size(1), None, None, size(0), None),
        "Memcpy3DBatchAsync_v2": lambda: cuda.Memcpy3DBatchAsync_v2(size(1), None, c_uint64(0), None),
    }
    said = {name: call() for name, call in nowhere.items()}
    cuda.CtxSetCurrent(None)
    said |= {f"{name} without context": call() for name, call in nowhere.items()}
    at = c_uint64()
    said["alloc without context"] = cuda.MemAlloc_v2(byref(at), size(16))
    said["array without context"] = cuda.ArrayCreate_v2(byref(c_void_p()), byref(FLAT))
    said["module without context"] = cuda.ModuleLoadData(byref(c_void_p()), IMAGE)
    said["limit without context"] = cuda.CtxSetLimit(2, size(MIB))
    cuda.start()
    return said


def main() -> None:
    devices = c_int()
    done(cuda.Init(0))
    done(cuda.DeviceGetCount(byref(devices)))
    cuda.start()
    print(json.dumps(sorted(WALKS)), flush=True)
    while line := sys.stdin.readline():
        if line == "nothing\n":
            print(json.dumps(nothing_given()), flush=True)
            continue
        steps = WALKS[line.strip()]()
        call = next(steps)
        print("ready", flush=True)
        sys.stdin.readline()
        result = call()
        print(c_uint(result).value, flush=True)
        if sys.stdin.readline() == "other\n":
            cuda.start(1)
        try:
            steps.send(result)
        except StopIteration:
            cuda.start(0)
            print("undone", flush=True)


if __name__ == "__main__":
    main()
