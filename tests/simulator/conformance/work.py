"""What a program gives a card to do and to hold: launches, graphs, memory."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from driver import PTX, TEXT, Access, Cuda, Location, Prop


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
