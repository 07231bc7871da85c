"""Programs of the driver API that take memory or copy in every other way: `paths_program.py NAME [ARGUMENT...]`, one JSON object out."""

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cuda_calls import (
    ARRAY,
    DEFERRED,
    DEVICE,
    FLOAT,
    HOST,
    MIB,
    SPARSE,
    UINT8,
    AllocationProp,
    AllocNode,
    Array2D,
    Array3D,
    BatchOp,
    Copy2D,
    Copy3D,
    Cuda,
    LaunchParams,
    Location,
    MapInfo,
    NodeParams,
    OldArray2D,
    OldArray3D,
    PoolProps,
)

cuda = Cuda()


def arrays() -> dict[str, int]:
    """A limit of 64 MiB; arrays of 16."""
    cuda.start()
    said = {}
    flat, deep = Array2D(2048, 2048, FLOAT, 1), Array3D(1024, 512, 8, FLOAT, 1, 0)
    array, second, mip, big = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    said["flat"] = cuda.ArrayCreate_v2(byref(array), byref(flat))
    said["after_flat"] = cuda.used()
    said["deep"] = cuda.Array3DCreate_v2(byref(second), byref(deep))
    said["after_deep"] = cuda.used()
    said["mip"] = cuda.MipmappedArrayCreate(byref(mip), byref(Array3D(2048, 2048, 0, FLOAT, 1, 0)), 3)
    said["after_mip"] = cuda.used()
    said["too_big"] = cuda.Array3DCreate_v2(byref(big), byref(Array3D(4096, 4096, 0, FLOAT, 1, 0)))
    said["too_big_mip"] = cuda.MipmappedArrayCreate(byref(big), byref(Array3D(2048, 2048, 0, FLOAT, 1, 0)), 3)
    said["later"] = cuda.Array3DCreate_v2(byref(big), byref(Array3D(4096, 4096, 0, FLOAT, 1, DEFERRED)))
    said["later_destroy"] = cuda.ArrayDestroy(big)
    said["sparse"] = cuda.Array3DCreate_v2(byref(big), byref(Array3D(4096, 4096, 0, FLOAT, 1, SPARSE)))
    said["sparse_destroy"] = cuda.ArrayDestroy(big)
    said["null"] = cuda.ArrayCreate_v2(None, byref(flat))
    said["null_shape"] = cuda.Array3DCreate_v2(byref(big), None)
    said["bad_format"] = cuda.ArrayCreate_v2(byref(big), byref(Array2D(16, 16, 77, 1)))
    level = c_void_p()
    assert cuda.MipmappedArrayGetLevel(byref(level), mip, 1) == 0
    said["level_destroy"] = cuda.ArrayDestroy(level)
    cuda.CtxSetCurrent(None)
    said["no_context"] = cuda.ArrayCreate_v2(byref(big), byref(flat))
    said["destroy_without_context"] = cuda.ArrayDestroy(array)
    cuda.start()
    said["destroy_deep"] = cuda.ArrayDestroy(second)
    said["destroy_mip"] = cuda.MipmappedArrayDestroy(mip)
    said["after"] = cuda.used()
    said["old_flat"] = cuda.ArrayCreate(byref(array), byref(OldArray2D(2048, 2048, FLOAT, 1)))
    said["old_deep"] = cuda.Array3DCreate(byref(second), byref(OldArray3D(1024, 512, 8, FLOAT, 1, 0)))
    said["after_old"] = cuda.used()
    context = c_void_p()
    cuda.CtxCreate_v2(byref(context), 0, 0)
    said["in_own_context"] = cuda.ArrayCreate_v2(byref(array), byref(flat))
    said["after_own"] = cuda.used()
    cuda.CtxDestroy_v2(context)
    cuda.start()
    said["after_context"] = cuda.used()
    return said


def tiles() -> dict[str, int]:
    """Physical memory that only an array holds on to."""
    cuda.start()
    array, handle = c_void_p(), c_uint64()
    prop = AllocationProp(1, 0, Location(1, 0))
    assert cuda.Array3DCreate_v2(byref(array), byref(Array3D(512, 512, 0, FLOAT, 1, DEFERRED))) == 0
    assert cuda.MemCreate(byref(handle), c_size_t(2 * MIB), byref(prop), c_uint64(0)) == 0
    info = MapInfo(resource_type=0, resource=array, operation=1, handle_type=0, handle=handle.value, devices=1)
    said = {"map": cuda.MemMapArrayAsync(byref(info), 1, None)}
    assert cuda.MemRelease(handle) == 0
    said["mapped_only"] = cuda.used()
    info.operation = 2
    said["unmap"] = cuda.MemMapArrayAsync(byref(info), 1, None)
    said["unmapped"] = cuda.used()
    assert cuda.MemCreate(byref(handle), c_size_t(2 * MIB), byref(prop), c_uint64(0)) == 0
    info.operation, info.handle = 1, handle.value
    assert cuda.MemMapArrayAsync(byref(info), 1, None) == 0
    assert cuda.MemRelease(handle) == 0
    said["destroy"] = cuda.ArrayDestroy(array)
    said["destroyed"] = cuda.used()
    return said


def alloc_graph(sizes: list[int], by: str = "node") -> c_void_p:
    """An executable graph that allocates these and frees none."""
    graph, node, executable = c_void_p(), c_void_p(), c_void_p()
    assert cuda.GraphCreate(byref(graph), 0) == 0
    for size in sizes:
        pool = PoolProps(type=1, location=Location(1, 0))
        if by == "node":
            params = AllocNode(pool=pool, bytes=size)
            assert cuda.GraphAddMemAllocNode(byref(node), graph, None, c_size_t(0), byref(params)) == 0
        else:
            general = NodeParams(type=10, alloc=AllocNode(pool=pool, bytes=size))
            add = cuda.GraphAddNode_v2 if by == "any" else cuda.GraphAddNode
            args = (None, None, c_size_t(0)) if by == "any" else (None, c_size_t(0))
            assert add(byref(node), graph, *args, byref(general)) == 0
    assert cuda.GraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)) == 0
    assert cuda.GraphDestroy(graph) == 0
    return executable


def graphs() -> dict[str, int]:
    """A limit of 64 MiB."""
    cuda.start()
    said = {}
    small, any_node, old_node = alloc_graph([8 * MIB, 4 * MIB]), alloc_graph([2 * MIB], "any"), alloc_graph([2 * MIB], "old")
    large, half = alloc_graph([60 * MIB, 10 * MIB]), alloc_graph([40 * MIB])
    said["instantiated"] = cuda.used()
    said["launch"] = cuda.GraphLaunch(small, None)
    said["launched"] = cuda.used()
    said["again"] = cuda.GraphLaunch(small, None)
    said["launched_again"] = cuda.used()
    said["upload"] = cuda.GraphUpload(any_node, None)
    said["uploaded"] = cuda.used()
    said["old"] = cuda.GraphLaunch(old_node, None)
    said["old_launched"] = cuda.used()
    said["large"] = cuda.GraphLaunch(large, None)
    said["large_upload"] = cuda.GraphUpload(large, None)
    said["after_large"] = cuda.used()
    said["synchronize"] = cuda.CtxSynchronize()
    said["destroy"] = cuda.GraphExecDestroy(small)
    said["destroyed"] = cuda.used()
    said["trim"] = cuda.DeviceGraphMemTrim(0)
    said["trimmed"] = cuda.used()
    said["half"] = cuda.GraphLaunch(half, None)
    said["half_launched"] = cuda.used()
    for executable in (any_node, old_node, large, half):
        assert cuda.GraphExecDestroy(executable) == 0
    assert cuda.DeviceGraphMemTrim(0) == 0
    said["end"] = cuda.used()
    stream, graph, executable, at = c_void_p(), c_void_p(), c_void_p(), c_uint64()
    assert cuda.StreamCreate(byref(stream), 1) == 0
    assert cuda.StreamBeginCapture_v2(stream, 0) == 0
    assert cuda.MemAllocAsync(byref(at), c_size_t(6 * MIB), stream) == 0
    assert cuda.MemFreeAsync(at, stream) == 0
    assert cuda.StreamEndCapture(stream, byref(graph)) == 0
    assert cuda.GraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)) == 0
    said["captured"] = cuda.used()
    said["captured_launch"] = cuda.GraphLaunch(executable, stream)
    said["captured_launched"] = cuda.used()
    assert cuda.StreamSynchronize(stream) == 0
    assert cuda.DevicePrimaryCtxReset_v2(0) == 0
    cuda.start()
    said["after_reset"] = cuda.used()
    return said


def modules() -> dict[str, int]:
    """A limit of 64 MiB."""
    cuda.start()
    said = {}
    code, module, big = b"poolmeter-sim-module 1\nkernel spin parameter\ncode 4194304\n", c_void_p(), c_void_p()
    said["load"] = cuda.ModuleLoadData(byref(module), code)
    said["loaded"] = cuda.used()
    said["unload"] = cuda.ModuleUnload(module)
    said["unloaded"] = cuda.used()
    said["unload_twice"] = cuda.ModuleUnload(module)
    image = b"poolmeter-sim-module 1\nglobal table 8388608\n"
    said["globals"] = cuda.ModuleLoadDataEx(byref(module), image, 0, None, None)
    said["globals_loaded"] = cuda.used()
    at, size = c_uint64(), c_size_t()
    said["get_global"] = cuda.ModuleGetGlobal_v2(byref(at), byref(size), module, b"table")
    said["get_global_null"] = cuda.ModuleGetGlobal_v2(None, None, module, b"table")
    said["get_global_unknown"] = cuda.ModuleGetGlobal_v2(byref(at), byref(size), module, b"none")
    said["after_get"] = cuda.used()
    said["too_big"] = cuda.ModuleLoadData(byref(big), b"poolmeter-sim-module 1\nglobal table 67108864\n")
    said["too_big_handle"] = int(big.value or 0)
    said["after_too_big"] = cuda.used()
    said["null"] = cuda.ModuleLoadData(None, image)
    library = c_void_p()
    text = b"poolmeter-sim-module 1\nkernel spin parameter\nglobal late 2097152\ncode 4194304\n"
    said["library"] = cuda.LibraryLoadData(byref(library), text, None, None, 0, None, None, 0)
    said["library_loaded"] = cuda.used()
    said["library_global"] = cuda.LibraryGetGlobal(byref(at), byref(size), library, b"late")
    said["library_global_known"] = cuda.used()
    said["library_unload"] = cuda.LibraryUnload(library)
    said["library_unloaded"] = cuda.used()
    said["end_unload"] = cuda.ModuleUnload(module)
    said["end"] = cuda.used()
    return said


def limits() -> dict[str, int]:
    """A limit of 1 GiB; the context begins with a 7 MiB buffer, an 8 MiB heap, stacks of 1 KiB."""
    cuda.start()
    said = {"start": cuda.used()}
    said["heap"] = cuda.CtxSetLimit(2, c_size_t(24 * MIB))
    said["heap_set"] = cuda.used()
    said["heap_less"] = cuda.CtxSetLimit(2, c_size_t(10 * MIB))
    said["heap_less_set"] = cuda.used()
    said["heap_least"] = cuda.CtxSetLimit(2, c_size_t(MIB))
    said["heap_least_set"] = cuda.used()
    said["printf"] = cuda.CtxSetLimit(1, c_size_t(8 * MIB))
    said["printf_set"] = cuda.used()
    said["stack"] = cuda.CtxSetLimit(0, c_size_t(2048))
    said["stack_set"] = cuda.used()
    said["too_much"] = cuda.CtxSetLimit(2, c_size_t(2048 * MIB))
    said["after_too_much"] = cuda.used()
    said["unknown"] = cuda.CtxSetLimit(99, c_size_t(1))
    said["pending"] = cuda.CtxSetLimit(4, c_size_t(4096))
    said["after_others"] = cuda.used()
    cuda.CtxSetCurrent(None)
    said["no_context"] = cuda.CtxSetLimit(2, c_size_t(24 * MIB))
    cuda.DevicePrimaryCtxReset_v2(0)
    cuda.start()
    said["after_reset"] = cuda.used()
    return said


def copies() -> dict[str, int]:
    """One of every shape."""
    context = cuda.start()
    host = (c_char * MIB)()
    near = ctypes.addressof(host)
    a, b, array, line, said = c_uint64(), c_uint64(), c_void_p(), c_void_p(), {}
    assert cuda.MemAlloc_v2(byref(a), c_size_t(MIB)) == cuda.MemAlloc_v2(byref(b), c_size_t(MIB)) == 0
    assert cuda.ArrayCreate_v2(byref(array), byref(Array2D(100, 50, FLOAT, 1))) == 0
    assert cuda.ArrayCreate_v2(byref(line), byref(Array2D(1000, 0, UINT8, 1))) == 0
    stream = c_void_p()
    assert cuda.StreamCreate(byref(stream), 1) == 0
    to_device = Copy2D(from_type=HOST, from_host=near, from_pitch=64, to_type=DEVICE, to_device=a.value, to_pitch=512, width=10, height=3)
    to_array = Copy2D(from_type=HOST, from_host=near, from_pitch=400, to_type=ARRAY, to_array=array, width=400, height=50)
    said["2d"] = cuda.Memcpy2D_v2(byref(to_device))
    said["2d_unaligned"] = cuda.Memcpy2DUnaligned_v2(byref(to_device))
    said["2d_async"] = cuda.Memcpy2DAsync_v2(byref(to_device), stream)
    said["2d_array"] = cuda.Memcpy2D_v2(byref(to_array))
    said["2d_null"] = cuda.Memcpy2D_v2(None)
    box = Copy3D(
        from_type=DEVICE,
        from_device=a.value,
        from_pitch=512,
        from_height=4,
        to_type=HOST,
        to_host=near,
        to_pitch=100,
        to_height=4,
        width=7,
        height=4,
        depth=5,
    )
    said["3d"] = cuda.Memcpy3D_v2(byref(box))
    said["3d_async"] = cuda.Memcpy3DAsync_v2(byref(box), stream)
    box.to_type, box.to_device, box.to_pitch, box.from_context, box.to_context = DEVICE, b.value, 512, context, context
    said["3d_peer"] = cuda.Memcpy3DPeer(byref(box))
    said["3d_peer_async"] = cuda.Memcpy3DPeerAsync(byref(box), stream)
    said["d_to_a"] = cuda.MemcpyDtoA_v2(line, c_size_t(0), a, c_size_t(11))
    said["a_to_d"] = cuda.MemcpyAtoD_v2(a, line, c_size_t(0), c_size_t(13))
    said["h_to_a"] = cuda.MemcpyHtoA_v2(line, c_size_t(0), host, c_size_t(17))
    said["a_to_h"] = cuda.MemcpyAtoH_v2(host, line, c_size_t(0), c_size_t(19))
    said["a_to_a"] = cuda.MemcpyAtoA_v2(line, c_size_t(0), line, c_size_t(500), c_size_t(23))
    said["h_to_a_async"] = cuda.MemcpyHtoAAsync_v2(line, c_size_t(0), host, c_size_t(29), stream)
    said["a_to_h_async"] = cuda.MemcpyAtoHAsync_v2(host, line, c_size_t(0), c_size_t(31), stream)
    to, source, sizes = (c_uint64 * 2)(a.value, near), (c_uint64 * 2)(b.value, a.value), (c_size_t * 2)(1000, 2000)
    attributes, index = (c_char * 64)(), (c_size_t * 1)(0)
    tail = (attributes, index, c_size_t(1))
    said["batch"] = cuda.MemcpyBatchAsync_v2(to, source, sizes, c_size_t(2), *tail, stream)
    said["batch_old"] = cuda.MemcpyBatchAsync(to, source, sizes, c_size_t(2), *tail, None, stream)
    op = BatchOp()
    op.source.type = op.target.type = 1
    op.source.at, op.target.at = a.value, b.value
    op.extent[0], op.extent[1], op.extent[2] = 30, 20, 10
    said["batch_3d"] = cuda.Memcpy3DBatchAsync_v2(c_size_t(1), byref(op), c_uint64(0), stream)
    said["refused"] = cuda.Memcpy2D_v2(byref(Copy2D(from_type=HOST, to_type=99, width=10, height=3)))
    said["synchronize"] = cuda.CtxSynchronize()
    for name in ("D8", "D16", "D32"):
        said[f"set_{name}"] = getattr(cuda, f"Memset{name}_v2")(a, 0, c_size_t(16))
        said[f"set_2{name}"] = getattr(cuda, f"MemsetD2{name}_v2")(a, c_size_t(512), 0, c_size_t(16), c_size_t(2))
        said[f"set_2{name}_async"] = getattr(cuda, f"MemsetD2{name}Async")(a, c_size_t(512), 0, c_size_t(16), c_size_t(2), stream)
    said["end"] = cuda.CtxSynchronize()
    return said


def collective(kind: str, count: str) -> dict[str, int]:
    """Launches a collective's kernel by the handle of a module's function, or of a library's kernel."""
    cuda.start()
    if kind == "kernel":
        library, handle = c_void_p(), c_void_p()
        image = b"poolmeter-sim-module 1\nkernel ncclDevKernel_AllReduce parameter\n"
        assert cuda.LibraryLoadData(byref(library), image, None, None, 0, None, None, 0) == 0
        assert cuda.LibraryGetKernel(byref(handle), library, b"ncclDevKernel_AllReduce") == 0
    else:
        handle = cuda.function(cuda.module(), b"ncclDevKernel_AllReduce" if kind == "function" else b"spin")
    for _ in range(int(count)):
        assert cuda.launch(handle, 1_000_000) == 0
    assert cuda.CtxSynchronize() == 0
    return {}


def several(count: str) -> dict[str, int]:
    """Cooperative launches of several devices at once (all on the devices there are)."""
    devices = c_int()
    assert cuda.Init(0) == 0 and cuda.DeviceGetCount(byref(devices)) == 0
    parts: list[LaunchParams] = []
    length = c_uint64(1_000_000)
    words = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p))
    for device in range(devices.value):
        cuda.start(device)
        stream = c_void_p()
        assert cuda.StreamCreate(byref(stream), 1) == 0
        function = cuda.function(cuda.module())
        parts.append(LaunchParams(function, (c_uint * 3)(8, 1, 1), (c_uint * 3)(128, 1, 1), 0, stream, words))
    batch = (LaunchParams * len(parts))(*parts)
    for _ in range(int(count)):
        assert cuda.LaunchCooperativeKernelMultiDevice(batch, len(parts), 0) == 0
    for device in range(devices.value):
        cuda.start(device)
        assert cuda.CtxSynchronize() == 0
    return {"devices": devices.value}


def green(count: str) -> dict[str, int]:
    """Launches in a context on half of the processors."""
    cuda.start()
    whole, part, groups = (c_char * 256)(), (c_char * 256)(), c_uint(1)
    description, context, current, stream = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    said = {"resource": cuda.DeviceGetDevResource(0, byref(whole), 1)}
    processors = c_uint.from_buffer(whole, 96).value
    said["split"] = cuda.DevSmResourceSplitByCount(byref(part), byref(groups), byref(whole), None, 0, processors // 2)
    said["describe"] = cuda.DevResourceGenerateDesc(byref(description), byref(part), 1)
    said["create"] = cuda.GreenCtxCreate(byref(context), description, 0, 1)
    said["context"] = cuda.CtxFromGreenCtx(byref(current), context)
    said["stream"] = cuda.GreenCtxStreamCreate(byref(stream), context, 1, 0)
    assert cuda.CtxSetCurrent(current) == 0
    at = c_uint64()
    said["alloc"] = cuda.MemAlloc_v2(byref(at), c_size_t(4 * MIB))
    function = cuda.function(cuda.module())
    for _ in range(int(count)):
        assert cuda.launch(function, 1_000_000, stream) == 0
    said["synchronize"] = cuda.CtxSynchronize()
    said["destroy"] = cuda.GreenCtxDestroy(context)
    cuda.start()
    said["after"] = cuda.used()
    return said


def copy_loop(count: str, size: str) -> dict[str, int]:
    """Copies to the device, each waited for."""
    cuda.start()
    at, host = c_uint64(), (c_char * int(size))()
    assert cuda.MemAlloc_v2(byref(at), c_size_t(int(size))) == 0
    for _ in range(int(count)):
        assert cuda.MemcpyHtoD_v2(at, host, c_size_t(int(size))) == 0
    return {}


def streams(count: str, each: str, ns: str) -> dict[str, int]:
    """Launches in many streams, then waits for the context."""
    cuda.start()
    function = cuda.function(cuda.module())
    for _ in range(int(count)):
        stream = c_void_p()
        assert cuda.StreamCreate(byref(stream), 1) == 0
        for _ in range(int(each)):
            assert cuda.launch(function, int(ns), stream) == 0
    assert cuda.CtxSynchronize() == 0
    print("{}", flush=True)
    os._exit(0)  # nothing is settled on the way out


def together(count: str) -> dict[str, int]:
    """Threads that take and give back memory of every kind at once, and copy; nothing may be left."""
    context = cuda.start()
    failures: list[str] = []

    def work(number: int) -> None:
        cuda.CtxSetCurrent(context)
        host = (c_char * 4096)()
        for _ in range(int(count)):
            array, mip, module, at, handle = c_void_p(), c_void_p(), c_void_p(), c_uint64(), c_uint64()
            prop = AllocationProp(1, 0, Location(1, 0))
            results = [
                cuda.ArrayCreate_v2(byref(array), byref(Array2D(256 + number, 256, FLOAT, 1))),
                cuda.MipmappedArrayCreate(byref(mip), byref(Array3D(256, 256, 0, FLOAT, 1, 0)), 2),
                cuda.ModuleLoadData(byref(module), b"poolmeter-sim-module 1\nkernel spin parameter\n"),
                cuda.MemAllocAsync(byref(at), c_size_t(65536), None),
                cuda.MemCreate(byref(handle), c_size_t(2 * MIB), byref(prop), c_uint64(0)),
                cuda.MemcpyHtoD_v2(at, host, c_size_t(4096)),
            ]
            executable = alloc_graph([MIB * (number + 1)])
            results += [
                cuda.GraphLaunch(executable, None),
                cuda.CtxSynchronize(),
                cuda.GraphExecDestroy(executable),
                cuda.MemRelease(handle),
                cuda.MemFreeAsync(at, None),
                cuda.ModuleUnload(module),
                cuda.MipmappedArrayDestroy(mip),
                cuda.ArrayDestroy(array),
            ]
            if any(results):
                failures.append(str(results))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [], failures
    assert cuda.DeviceGraphMemTrim(0) == 0
    return {"left": cuda.used()}


PROGRAMS: dict[str, Callable[..., dict[str, int]]] = {
    program.__name__: program
    for program in (
        arrays,
        tiles,
        graphs,
        modules,
        limits,
        copies,
        collective,
        several,
        green,
        copy_loop,
        streams,
        together,
    )
}


def main(arguments: list[str]) -> None:
    said: dict[str, Any] = PROGRAMS[arguments[0]](*arguments[1:])
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
