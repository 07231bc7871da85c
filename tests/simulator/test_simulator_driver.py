"""The simulated libcuda as a program meets it: resolution, contexts, streams, events, graphs, memory."""

import subprocess

import pytest

from .conftest import MakeMachine, RunProgram, start_tenant


def test_symbol_resolution_by_version_and_flag(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(),
        """
def ask(name, version, flags=0):
    at, status = c_void_p(), c_int(-1)
    code = cu.library.cuGetProcAddress_v2(name, byref(at), version, c_uint64(flags), byref(status))
    named = next((n for n in CANDIDATES if at.value and ctypes.cast(getattr(cu.library, n), c_void_p).value == at.value), None)
    return [code, status.value, named]
CANDIDATES = ["cuMemAlloc", "cuMemAlloc_v2", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuStreamBeginCapture", "cuStreamBeginCapture_v2",
              "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4", "cuMemcpyHtoD_v2_ptds", "cuGetProcAddress", "cuGetProcAddress_v2",
              "cuGraphInstantiate", "cuGraphInstantiate_v2", "cuEventElapsedTime", "cuEventElapsedTime_v2", "cuCtxGetDevice", "cuCtxGetDevice_v2"]
say(old=ask(b"cuMemAlloc", 2000), new=ask(b"cuMemAlloc", 13000), launch=ask(b"cuLaunchKernel", 12000), own=ask(b"cuLaunchKernel", 12000, 2),
    legacy=ask(b"cuLaunchKernel", 12000, 1), own_copy=ask(b"cuMemcpyHtoD", 12000, 2), own_alloc=ask(b"cuMemAlloc", 12000, 2),
    too_old=ask(b"cuLaunchKernelEx", 11000), unknown=ask(b"cuNoSuchCall", 13000), bad_flags=ask(b"cuInit", 13000, 8),
    context=[ask(b"cuCtxCreate", v)[2] for v in (3020, 11040, 12050)], self=ask(b"cuGetProcAddress", 12000),
    graph=[ask(b"cuGraphInstantiate", v)[2] for v in (10000, 11000)], elapsed=[ask(b"cuEventElapsedTime", v)[2] for v in (12000, 12080)],
    device=[ask(b"cuCtxGetDevice", v)[2] for v in (12000, 13000)],
    without_status=cu.library.cuGetProcAddress_v2(b"cuNoSuchCall", byref(c_void_p()), 13000, c_uint64(0), None),
    first_version=cu.library.cuGetProcAddress(b"cuNoSuchCall", byref(c_void_p()), 13000, c_uint64(0)))
""",
    )
    assert answer["old"] == [0, 0, "cuMemAlloc"]
    assert answer["new"] == [0, 0, "cuMemAlloc_v2"]
    assert answer["launch"] == answer["legacy"] == [0, 0, "cuLaunchKernel"]
    assert answer["own"] == [0, 0, "cuLaunchKernel_ptsz"]
    assert answer["own_copy"] == [0, 0, "cuMemcpyHtoD_v2_ptds"]
    assert answer["own_alloc"] == [0, 0, "cuMemAlloc_v2"]
    assert answer["too_old"] == [0, 2, None]
    assert answer["unknown"] == [0, 1, None]
    assert answer["bad_flags"][0] == 1
    assert answer["context"] == ["cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4"]
    assert answer["self"][2] == "cuGetProcAddress_v2"
    assert answer["graph"] == ["cuGraphInstantiate", "cuGraphInstantiate_v2"]
    assert answer["elapsed"] == ["cuEventElapsedTime", "cuEventElapsedTime_v2"]
    assert answer["device"] == ["cuCtxGetDevice", "cuCtxGetDevice_v2"]
    assert answer["without_status"] == 0
    assert answer["first_version"] == 500


def test_calls_before_initialisation(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(),
        """
n = c_int()
say(count=cu.status("cuDeviceGetCount", byref(n)), version=cu.status("cuDriverGetVersion", byref(n)), number=n.value, bad=cu.status("cuInit", 1))
""",
    )
    assert answer == {"count": 3, "version": 0, "number": 13000, "bad": 1}


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("1,9,0", [1]), ("3,3", []), ("", []), ("{uuid2},{short1}", [2, 1])]
)
def test_visible_devices(make_machine: MakeMachine, run_program: RunProgram, visible: str | None, expected: list[int]) -> None:
    machine = make_machine("h200x4")
    uuids = [machine.uuid(device) for device in range(4)]
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(uuid2=uuids[2], short1=uuids[1][:12])}
    answer = run_program(
        machine,
        """
import uuid
code = cu.status("cuInit", 0)
n = c_int()
found = []
if code == 0:
    cu("cuDeviceGetCount", byref(n))
    for i in range(n.value):
        raw = (ctypes.c_ubyte * 16)()
        cu("cuDeviceGetUuid_v2", raw, i)
        found.append("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
say(code=code, found=found)
""",
        **variables,
    )
    assert answer["code"] == (0 if expected else 100)
    assert answer["found"] == [uuids[device] for device in expected]


def test_unimplemented_calls_are_loud_and_counted(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    errors: list[str] = []
    answer = run_program(machine, "cu.open()\nsay(code=cu.status('cuCheckpointProcessLock', 1, None))", errors=errors)
    assert answer["code"] == 801
    assert any("cuCheckpointProcessLock is not implemented" in line for line in errors)
    count = machine.calls()["cuCheckpointProcessLock"]
    assert count.count == 1 and not count.implemented
    assert machine.calls()["cuInit"].implemented


def test_real_images_are_refused_loudly(make_machine: MakeMachine, run_program: RunProgram) -> None:
    errors: list[str] = []
    answer = run_program(
        make_machine(),
        "cu.open()\nm = c_void_p()\nsay(code=cu.status('cuModuleLoadData', byref(m), b'.version 8.0\\n.target sm_90'))",
        errors=errors,
    )
    assert answer["code"] == 200
    assert any("poolmeter-sim-module 1" in line for line in errors)


def test_events_measure_the_kernel(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        """
cu.open()
f, s = cu.function(), cu.stream()
a, b, untimed, never = cu.event(), cu.event(), cu.event(2), cu.event()
cu("cuEventRecord", a, s); cu.launch(f, 7_000_000, s); cu("cuEventRecord", b, s); cu("cuEventRecord", untimed, s)
early = cu.status("cuEventQuery", b)
span = ctypes.c_float()
pending = cu.status("cuEventElapsedTime", byref(span), a, b)
cu("cuEventSynchronize", b)
say(early=early, pending=pending, late=cu.status("cuEventQuery", b), ms=cu.elapsed_ms(a, b), back=cu.elapsed_ms(b, a),
    untimed=cu.status("cuEventElapsedTime", byref(span), a, untimed), never=cu.status("cuEventElapsedTime", byref(span), a, never),
    unrecorded=cu.status("cuEventQuery", never))
""",
    )
    assert answer["early"] == 600 and answer["pending"] == 600 and answer["late"] == 0
    assert answer["ms"] == pytest.approx(7.0) and answer["back"] == pytest.approx(-7.0)
    assert answer["untimed"] == 400 and answer["never"] == 400 and answer["unrecorded"] == 0


def test_streams_wait_for_events_across_cards(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine("t4x2", clock="virtual"),
        """
first = cu.open(0)
f, s = cu.function(), cu.stream()
e = cu.event()
start = cu.now_ns()
cu.launch(f, 5_000_000, s); cu("cuEventRecord", e, s)
second = cu.open(1)
g, t = cu.function(), cu.stream()
cu("cuStreamWaitEvent", t, e, 0); cu.launch(g, 3_000_000, t)
cu("cuStreamSynchronize", t)
say(ns=cu.now_ns() - start)
""",
    )
    assert answer["ns"] == 8_000_000


def test_legacy_stream_orders_blocking_streams_only(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        """
cu.open()
f, blocking, free = cu.function(), cu.stream(0), cu.stream(1)
def end(stream):
    cu("cuStreamSynchronize", stream); return cu.now_ns() - start
start = cu.now_ns()
cu.launch(f, 4_000_000, blocking, 1); cu.launch(f, 4_000_000, 0, 1); cu.launch(f, 4_000_000, blocking, 1); cu.launch(f, 1_000_000, free, 1)
ends = [end(free), end(blocking)]
start = cu.now_ns()
cu.launch(f, 2_000_000, blocking, 1); cu.launch(f, 2_000_000, 1, 1)
legacy = end(c_void_p(1))
start = cu.now_ns()
cu.launch(f, 2_000_000, blocking, 1); cu.launch(f, 2_000_000, 2, 1)
say(ends=ends, legacy=legacy, own=end(c_void_p(2)))
""",
    )
    assert answer["ends"] == [1_000_000, 12_000_000]
    assert answer["legacy"] == 4_000_000
    assert answer["own"] == 2_000_000


def test_per_thread_entry_points_use_their_own_stream(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine(clock="virtual")
    answer = run_program(
        machine,
        """
cu.open()
f, blocking = cu.function(), cu.stream(0)
start = cu.now_ns()
cu.launch(f, 2_000_000, blocking, 1); cu.launch(f, 2_000_000, 0, 1, "cuLaunchKernel_ptsz")
cu("cuStreamSynchronize_ptsz", c_void_p())
say(ns=cu.now_ns() - start)
""",
    )
    assert answer["ns"] == 2_000_000
    calls = machine.calls()
    assert calls["cuLaunchKernel_ptsz"].count == 1 and calls["cuLaunchKernel"].count == 1


def test_capture_becomes_a_graph_with_fork_and_join(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine(clock="virtual")
    answer = run_program(
        machine,
        """
cu.open()
f, s, side = cu.function(), cu.stream(), cu.stream()
fork, join = cu.event(2), cu.event(2)
status = c_int()
with cu.capture(s) as made:
    cu.launch(f, 1_000_000, s, 1)
    cu("cuEventRecord", fork, s); cu("cuStreamWaitEvent", side, fork, 0)
    cu.launch(f, 2_000_000, side, 1); cu.launch(f, 3_000_000, s, 1)
    cu("cuEventRecord", join, side); cu("cuStreamWaitEvent", s, join, 0)
    cu("cuStreamIsCapturing", side, byref(status)); joined = status.value
    cu.launch(f, 1_000_000, s, 1)
    nothing_yet = cu.now_ns()
start = cu.now_ns()
cu("cuGraphLaunch", made[0], s); cu("cuGraphLaunch", made[0], s)
cu("cuStreamSynchronize", s)
say(joined=joined, ns=cu.now_ns() - start)
""",
    )
    assert answer == {"joined": 1, "ns": 10_000_000}
    (truth,) = machine.truth()
    assert (truth.graph_launches, truth.kernels, truth.launches, truth.busy_ns) == (2, 8, 0, 10_000_000)


def test_what_capture_forbids(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        """
cu.open()
f, s, blocking, other = cu.function(), cu.stream(), cu.stream(0), cu.stream()
e = cu.event(); cu("cuEventRecord", e, other); cu("cuEventSynchronize", e)
p, g = c_uint64(), c_void_p()
found = {}
def begin(stream, mode):
    cu("cuStreamBeginCapture_v2", stream, mode)
def end(stream):
    return cu.status("cuStreamEndCapture", stream, byref(g))
begin(s, 0); found["sync"] = cu.status("cuStreamSynchronize", s); found["sync_end"] = end(s)
begin(s, 0); found["alloc"] = cu.status("cuMemAlloc_v2", byref(p), c_size_t(4096)); found["alloc_end"] = end(s)
begin(s, 2); found["relaxed"] = cu.status("cuMemAlloc_v2", byref(p), c_size_t(4096)); found["relaxed_end"] = end(s)
begin(s, 0); found["query"] = cu.status("cuEventQuery", e); end(s)
begin(blocking, 0); cu.launch(f, 10, blocking, 1)
length = c_uint64(5); params = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p))
found["implicit"] = cu.status("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, c_void_p(1), params, None); found["implicit_end"] = end(blocking)
begin(s, 0); found["unmatched"] = end(other); found["last"] = end(s)
begin(s, 0); cu.launch(f, 10, s); ev = cu.event(2); cu("cuEventRecord", ev, s); cu("cuStreamWaitEvent", other, ev, 0); cu.launch(f, 10, other)
found["unjoined"] = end(s)
say(**found)
""",
    )
    assert answer["sync"] == 900 and answer["sync_end"] == 901
    assert answer["alloc"] == 900 and answer["alloc_end"] == 901
    assert answer["relaxed"] == 0 and answer["relaxed_end"] == 0
    assert answer["query"] == 900
    assert answer["implicit"] == 906 and answer["implicit_end"] == 901
    assert answer["unmatched"] == 401 and answer["last"] == 0
    assert answer["unjoined"] == 904


def test_graphs_built_by_hand_and_changed(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine(clock="virtual")
    answer = run_program(
        machine,
        """
cu.open()
f, s = cu.function(), cu.stream()
class P(ctypes.Structure):
    _fields_ = [("func", c_void_p), ("g", c_uint * 3), ("b", c_uint * 3), ("shared", c_uint), ("params", c_void_p), ("extra", c_void_p),
                ("kern", c_void_p), ("ctx", c_void_p)]
keep = []
def params(ns):
    length = c_uint64(ns); array = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p)); keep.append((length, array))
    return P(f, (c_uint * 3)(1, 1, 1), (c_uint * 3)(1, 1, 1), 0, ctypes.cast(array, c_void_p))
g, a, b, e = c_void_p(), c_void_p(), c_void_p(), c_void_p()
cu("cuGraphCreate", byref(g), 0)
cu("cuGraphAddKernelNode_v2", byref(a), g, None, c_size_t(0), byref(params(1_000_000)))
cu("cuGraphAddKernelNode_v2", byref(b), g, byref(a), c_size_t(1), byref(params(2_000_000)))
n = c_size_t(); cu("cuGraphGetNodes", g, None, byref(n))
back = P(); cu("cuGraphKernelNodeGetParams_v2", b, byref(back))
read = c_uint64.from_address(c_void_p.from_address(back.params).value).value
cu("cuGraphInstantiateWithFlags", byref(e), g, c_uint64(0))
def run():
    start = cu.now_ns(); cu("cuGraphLaunch", e, s); cu("cuStreamSynchronize", s); return cu.now_ns() - start
spans = [run()]
cu("cuGraphExecKernelNodeSetParams_v2", e, b, byref(params(5_000_000))); spans.append(run())
cu("cuGraphNodeSetEnabled", e, a, 0); spans.append(run())
cu("cuGraphKernelNodeSetParams_v2", a, byref(params(10_000_000)))
info = (c_uint64 * 4)()
cu("cuGraphExecUpdate_v2", e, g, info); spans.append(run())
c = c_void_p(); cu("cuGraphAddEmptyNode", byref(c), g, byref(b), c_size_t(1))
say(nodes=n.value, read=read, spans=spans, changed=cu.status("cuGraphExecUpdate_v2", e, g, info))
""",
    )
    assert answer["nodes"] == 2 and answer["read"] == 2_000_000
    assert answer["spans"] == [3_000_000, 6_000_000, 5_000_000, 12_000_000]
    assert answer["changed"] == 910


def test_launch_spellings_and_refusals(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine(clock="virtual")
    answer = run_program(
        machine,
        """
cu.open()
f, s = cu.function(), cu.stream()
length = c_uint64(1_000_000); params = (c_void_p * 1)(ctypes.cast(byref(length), c_void_p))
class Config(ctypes.Structure):
    _fields_ = [("g", c_uint * 3), ("b", c_uint * 3), ("shared", c_uint), ("stream", c_void_p), ("attrs", c_void_p), ("n", c_uint)]
config = Config((c_uint * 3)(1, 1, 1), (c_uint * 3)(1, 1, 1), 0, s, None, 0)
cu("cuLaunchKernelEx", byref(config), f, params, None)
cu("cuLaunchCooperativeKernel", f, 1, 1, 1, 1, 1, 1, 0, s, params)
cu("cuFuncSetBlockShape", f, 32, 1, 1); cu("cuParamSetv", f, 0, byref(length), 8); cu("cuParamSetSize", f, 8)
cu("cuLaunchGridAsync", f, 2, 1, s); cu("cuLaunchGrid", f, 2, 1); cu("cuLaunch", f)
size = c_size_t(8)
extra = (c_void_p * 5)(1, ctypes.cast(byref(length), c_void_p), 2, ctypes.cast(byref(size), c_void_p), 0)
cu("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, s, None, extra)
library, kernel, got = c_void_p(), c_void_p(), c_void_p()
cu("cuLibraryLoadData", byref(library), b"poolmeter-sim-module 1\\nkernel fixed fixed 500000\\n", None, None, 0, None, None, 0)
cu("cuLibraryGetKernel", byref(kernel), library, b"fixed")
cu("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, s, None, None)
cu("cuKernelGetFunction", byref(got), kernel)
cu("cuCtxSynchronize")
say(too_wide=cu.status("cuLaunchKernel", f, 1, 1, 1, 2048, 1, 1, 0, s, params, None), no_grid=cu.status("cuLaunchKernel", f, 0, 1, 1, 1, 1, 1, 0, s, params, None),
    no_params=cu.status("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, s, None, None), no_function=cu.status("cuLaunchKernel", None, 1, 1, 1, 1, 1, 1, 0, s, params, None),
    too_many=cu.status("cuLaunchCooperativeKernel", f, 100000, 1, 1, 1024, 1, 1, 0, s, params))
""",
    )
    assert answer == {"too_wide": 1, "no_grid": 1, "no_params": 1, "no_function": 400, "too_many": 720}
    (truth,) = machine.truth()
    assert truth.kernels == 7


def test_memory_kinds_are_counted_once_and_returned(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    answer = run_program(
        machine,
        """
cu.open()
MIB = 1 << 20
def free():
    a, b = c_size_t(), c_size_t(); cu("cuMemGetInfo_v2", byref(a), byref(b)); return a.value
base = free()
found = {}
def took(name): found[name] = (base - free()) // MIB
p, q, pitch = c_uint64(), c_uint64(), c_size_t()
cu("cuMemAlloc_v2", byref(p), c_size_t(10 * MIB)); took("alloc"); cu("cuMemFree_v2", p)
cu("cuMemAllocPitch_v2", byref(p), byref(pitch), c_size_t(1000), c_size_t(4096), 4); took("pitch"); cu("cuMemFree_v2", p)
cu("cuMemAllocManaged", byref(p), c_size_t(10 * MIB), 1); took("managed"); cu("cuMemFree_v2", p)
s = cu.stream()
cu("cuMemAllocAsync", byref(p), c_size_t(10 * MIB), s); took("async"); cu("cuMemFreeAsync", p, s); took("cached"); cu("cuStreamSynchronize", s); took("synced")
class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]
class Prop(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c_void_p), ("flags", ctypes.c_ubyte * 8)]
class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]
prop = Prop(1, 0, Location(1, 0)); h, va = c_uint64(), c_uint64()
cu("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(prop), c_uint64(0)); took("create")
cu("cuMemAddressReserve", byref(va), c_size_t(64 * MIB), c_size_t(0), c_uint64(0), c_uint64(0))
cu("cuMemMap", va, c_size_t(8 * MIB), c_size_t(0), h, c_uint64(0)); took("mapped")
closed = cu.status("cuMemsetD8_v2", va, 7, c_size_t(16))
cu("cuMemSetAccess", va, c_size_t(8 * MIB), byref(Access(Location(1, 0), 3)), c_size_t(1))
cu("cuMemsetD8_v2", va, 7, c_size_t(16)); back = ctypes.create_string_buffer(16); cu("cuMemcpyDtoH_v2", back, va, c_size_t(16))
cu("cuMemRelease", h); took("released_mapped"); cu("cuMemUnmap", va, c_size_t(8 * MIB)); took("unmapped"); cu("cuMemAddressFree", va, c_size_t(64 * MIB))
class Shape(ctypes.Structure):
    _fields_ = [("w", c_size_t), ("h", c_size_t), ("format", c_int), ("channels", c_uint)]
array = c_void_p(); cu("cuArrayCreate_v2", byref(array), byref(Shape(1024, 1024, 0x20, 4))); took("array"); cu("cuArrayDestroy", array)
m = c_void_p(); cu("cuModuleLoadData", byref(m), b"poolmeter-sim-module 1\\nglobal table 4194304\\n"); took("global"); cu("cuModuleUnload", m)
host_prop = Prop(1, 0, Location(2, 0)); cu("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(host_prop), c_uint64(0)); took("host"); cu("cuMemRelease", h)
found["bad_device"] = cu.status("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(Prop(1, 0, Location(1, 9))), c_uint64(0))
took("end")
say(closed=closed, back=list(back.raw), **found)
""",
    )
    assert answer.pop("back") == [7] * 16
    assert answer == {
        "alloc": 10, "pitch": 4, "managed": 10, "async": 32, "cached": 32, "synced": 0, "create": 8, "mapped": 8, "closed": 1, "released_mapped": 8,
        "unmapped": 0, "array": 16, "global": 4, "host": 0, "bad_device": 101, "end": 0,
    }  # fmt: skip
    (truth,) = machine.truth()
    assert truth.memory == 0 and truth.memory_peak == 32 << 20


def test_eighty_gigabytes_take_no_memory_of_the_host(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine("h200x4"),
        """
import resource
cu.open()
p = cu.allocate(80 << 30)
cu("cuMemsetD8_v2", p, 1, c_size_t(80 << 30)); cu("cuCtxSynchronize")
back = ctypes.create_string_buffer(4); cu("cuMemcpyDtoH_v2", back, p, c_size_t(4))
say(kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, back=list(back.raw), over=cu.status("cuMemAlloc_v2", byref(c_uint64()), c_size_t(70 << 30)))
""",
    )
    assert answer["kib"] < 1_000_000
    assert answer["back"] == [1, 1, 1, 1]
    assert answer["over"] == 2


def test_host_functions_run_in_stream_order(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(),
        """
cu.open()
f, s = cu.function(), cu.stream()
seen = []
HOST = ctypes.CFUNCTYPE(None, c_void_p)
note = HOST(lambda data: seen.append((data, cu.now_ns())))
start = cu.now_ns()
cu.launch(f, 20_000_000, s); cu("cuLaunchHostFunc", s, note, c_void_p(1)); cu.launch(f, 1000, s); cu("cuLaunchHostFunc", s, note, c_void_p(2))
cu("cuStreamSynchronize", s)
say(order=[d for d, _ in seen], after=seen[0][1] - start)
""",
    )
    assert answer["order"] == [1, 2]
    assert answer["after"] >= 20_000_000


def test_a_virtual_clock_stands_while_a_host_function_runs(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        """
cu.open()
f, s = cu.function(), cu.stream()
HOST = ctypes.CFUNCTYPE(None, c_void_p)
slow = HOST(lambda data: time.sleep(0.05))
start = cu.now_ns()
for _ in range(3):
    cu.launch(f, 5_000_000, s); cu("cuLaunchHostFunc", s, slow, None); cu.launch(f, 3_000_000, s)
cu("cuStreamSynchronize", s)
say(ns=cu.now_ns() - start)
""",
    )
    assert answer["ns"] == 24_000_000


def test_a_forked_child_may_not_use_the_parents_driver(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    answer = run_program(
        machine,
        """
cu.open()
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(w, json.dumps([cu.status("cuInit", 0), cu.status("cuCtxSynchronize")]).encode()); os._exit(0)
os.waitpid(pid, 0)
f = cu.function(); cu.launch(f, 1000); cu("cuCtxSynchronize")
say(child=json.loads(os.read(r, 100)))
""",
    )
    assert answer["child"] == [3, 3]
    assert len(machine.truth()) == 1


def test_threads_share_a_context(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    run_program(
        machine,
        """
import threading
context = cu.open()
f = cu.function()
def work():
    cu("cuCtxSetCurrent", context)
    s = cu.stream()
    for _ in range(200):
        cu.launch(f, 10_000, s)
    cu("cuStreamSynchronize", s); cu("cuStreamDestroy_v2", s)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
say(done=True)
""",
    )
    (truth,) = machine.truth()
    assert truth.kernels == 800 and truth.busy_ns == pytest.approx(8_000_000, rel=1e-3)


def test_the_hook_side_of_the_clock_is_exported(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(make_machine(clock="virtual"), "cu.open()\na = cu.now_ns()\ncu.sleep(3_600_000_000_000)\nsay(ns=cu.now_ns() - a)")
    assert answer["ns"] == 3_600_000_000_000


def test_no_machine_is_no_device(run_program: RunProgram, make_machine: MakeMachine) -> None:
    errors: list[str] = []
    answer = run_program(make_machine(), "say(code=cu.status('cuInit', 0))", errors=errors, POOLMETER_SIM_MACHINE="")
    assert answer["code"] == 100
    assert any("POOLMETER_SIM_MACHINE is not set" in line for line in errors)


def test_tenant_says_what_a_missing_driver_is(make_machine: MakeMachine) -> None:
    machine = make_machine()
    environment = {key: value for key, value in machine.environment().items() if key != "LD_LIBRARY_PATH"}
    from poolmeter.simulator.tenant import tenant_program

    done = subprocess.run([str(tenant_program("dlsym")), "--resolve", "dlsym"], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3
    assert "no CUDA driver" in done.stderr


def test_reports_of_a_tenant_on_a_missing_card(make_machine: MakeMachine) -> None:
    tenant = start_tenant(make_machine(), device=7)
    output, errors = tenant.communicate(timeout=20)
    assert tenant.returncode == 3
    assert "CUDA_ERROR_INVALID_DEVICE" in errors and "CUDA_ERROR_INVALID_DEVICE" in output
