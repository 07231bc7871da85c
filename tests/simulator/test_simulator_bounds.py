"""Lengths and offsets so large that a sum of them wraps: refused, neither followed nor taken for a small one."""

import pytest

from .conftest import MakeMachine, RunProgram

INVALID_VALUE, OUT_OF_MEMORY = 1, 2

SETUP = """
cu.open()
TOP, MIB, HOST, DEVICE, ARRAY = 1 << 64, 1 << 20, 1, 2, 3
def structure(*names):
    kinds = {"Type": c_int, "format": c_int, "channels": c_uint, "value": c_uint, "element": c_uint, "flags": c_uint}
    return type("S", (ctypes.Structure,), {"_fields_": [(n, kinds.get(n, kinds.get(n[3:], c_size_t))) for n in names]})
sides = lambda *names: [side + name for side in ("src", "dst") for name in names]
Box = structure(*sides("X", "Y", "Type", "Host", "Device", "Array", "Pitch"), "width", "height")
Solid = structure(*sides("X", "Y", "Z", "LOD", "Type", "Host", "Device", "Array", "Context", "Pitch", "Height"), "width", "height", "depth")
Shape = structure("width", "height", "depth", "format", "channels", "flags")
Fill = structure("at", "pitch", "value", "element", "width", "height")
def array(width, height, depth):
    made = c_void_p(); cu("cuArray3DCreate_v2", byref(made), byref(Shape(width, height, depth, 0x20, 1, 0)))
    return made
n = c_size_t
p, host = cu.allocate(MIB), ctypes.create_string_buffer(MIB)
inside = c_uint64(p.value + 16)
line, flat, solid = array(64, 0, 0), array(64, 4, 0), array(64, 4, 4)
to_host = dict(dstType=HOST, dstHost=ctypes.addressof(host), dstPitch=4096, width=16, height=2)
out = c_uint64()
def launched(call, params):
    graph, node, made = c_void_p(), c_void_p(), c_void_p()
    cu("cuGraphCreate", byref(graph), 0)
    code = cu.status(call, byref(node), graph, None, n(0), byref(params), None)
    if code == 0:
        cu("cuGraphInstantiateWithFlags", byref(made), graph, c_uint64(0))
        code = cu.status("cuGraphLaunch", made, None)
    return code
"""

CALLS = {
    "array out": "cu.status('cuMemcpyAtoH_v2', host, line, n(TOP - MIB), n(MIB))",
    "array in": "cu.status('cuMemcpyHtoA_v2', line, n(TOP - MIB), host, n(MIB))",
    "array row": "cu.status('cuMemcpy2D_v2', byref(Box(srcType=ARRAY, srcArray=flat.value, srcY=TOP - 1, **to_host)))",
    "array plane": "cu.status('cuMemcpy3D_v2', byref(Solid(srcType=ARRAY, srcArray=solid.value, srcZ=TOP - 1, depth=2, dstHeight=2, **to_host)))",
    "box column": "cu.status('cuMemcpy2D_v2', byref(Box(srcType=DEVICE, srcDevice=p.value, srcX=TOP - MIB, srcPitch=512, **to_host)))",
    "box row": "cu.status('cuMemcpy2D_v2', byref(Box(srcType=DEVICE, srcDevice=p.value, srcY=1 << 55, srcPitch=512, **to_host)))",
    "box plane": "cu.status('cuMemcpy3D_v2', byref(Solid(srcType=DEVICE, srcDevice=p.value, srcZ=1 << 40, srcHeight=1 << 15, srcPitch=512, depth=1, dstHeight=2, **to_host)))",
    "box pitch": "cu.status('cuMemcpy2D_v2', byref(Box(srcType=DEVICE, srcDevice=p.value, srcPitch=TOP - MIB, **to_host)))",
    "box of many elements": "cu.status('cuMemcpy3DBatchAsync_v2', n(1), byref((c_uint64 * 16)(1, p.value, 0, 0, 0, 2, flat.value, 1 << 62, 0, 0, 4, 1, 1)), c_uint64(0), None)",
    "copy out": "cu.status('cuMemcpyDtoH_v2', host, inside, n(TOP - 16))",
    "copy in": "cu.status('cuMemcpyHtoD_v2', inside, host, n(TOP - 16))",
    "copy of the host's": "cu.status('cuMemcpy', c_uint64(ctypes.addressof(host)), c_uint64(ctypes.addressof(host)), n(TOP - 16))",
    "advice": "cu.status('cuMemPrefetchAsync_v2', inside, n(TOP - 16), c_uint64(1), 0, None)",
    "bytes": "cu.status('cuMemsetD8_v2', inside, 1, n(TOP - 16))",
    "words": "cu.status('cuMemsetD32_v2', p, 1, n(1 << 62))",
    "rows": "cu.status('cuMemsetD2D8_v2', p, n(1 << 63), 1, n(16), n(3))",
    "copy node": "launched('cuGraphAddMemcpyNode', Solid(srcType=DEVICE, srcDevice=p.value, **to_host | dict(width=1 << 32, height=1 << 32, depth=1)))",
    "copy node's column": "launched('cuGraphAddMemcpyNode', Solid(srcType=DEVICE, srcDevice=p.value, srcX=TOP - MIB, **to_host | dict(height=1, depth=1)))",
    "fill node's words": "launched('cuGraphAddMemsetNode', Fill(p.value, 0, 1, 4, 1 << 62, 1))",
    "fill node's rows": "launched('cuGraphAddMemsetNode', Fill(p.value, 1 << 63, 1, 1, 16, 3))",
    "fill node of nothing": "launched('cuGraphAddMemsetNode', Fill(4096, 0, 1, 1, 16, 1))",
    "registered": "cu.status('cuMemHostRegister_v2', host, n(TOP - 1), 0)",
    "mapped": """[cu("cuMemAddressReserve", byref(out), n(4 * MIB), n(0), c_uint64(0), c_uint64(0)),
        cu("cuMemCreate", byref(physical := c_uint64()), n(TOP - 2 * MIB), byref((c_uint64 * 4)(1, 2)), c_uint64(0)),
        cu.status("cuMemMap", c_uint64(out.value + 2 * MIB), n(TOP - 2 * MIB), n(0), physical, c_uint64(0))][-1]""",
    "unmapped": "cu.status('cuMemUnmap', c_uint64(2 * MIB), n(TOP - 2 * MIB))",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_wraps_is_refused(make_machine: MakeMachine, run_program: RunProgram, name: str) -> None:
    answer = run_program(make_machine(clock="virtual"), SETUP + f"say(code={CALLS[name]}, still=cu.status('cuCtxSynchronize'))")
    assert answer == {"code": INVALID_VALUE, "still": 0}


def test_what_wraps_takes_no_memory_and_leaves_no_trace(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine(clock="virtual")
    answer = run_program(
        machine,
        SETUP
        + """
pool, high, blocks = c_void_p(), c_uint64(), c_int(7)
codes = [cu.status("cuMemAllocPitch_v2", byref(out), byref(n()), n(width), n(height), 4) for width, height in ((1 << 32, (1 << 32) + 1), (TOP - 1, 1))]
codes.append(cu.status("cuMemAllocAsync", byref(out), n(TOP - 512), None))
cu("cuDeviceGetDefaultMemPool", byref(pool), 0); cu("cuMemPoolGetAttribute", pool, 8, byref(high))
cu("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), cu.function(), 32, n(TOP - 1024))
say(codes=codes, high=high.value, blocks=blocks.value)
""",
    )
    assert answer == {"codes": [OUT_OF_MEMORY] * 3, "high": 0, "blocks": 0}
