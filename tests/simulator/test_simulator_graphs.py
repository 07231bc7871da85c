"""Graphs of the simulated libcuda, and the launches they are made of."""

from .conftest import MakeMachine, RunProgram


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


NODES = """
cu.open()
class Node(ctypes.Structure):
    _fields_ = [("type", c_int), ("reserved", c_int * 3), ("words", c_uint64 * 28), ("last", c_uint64)]
MEMSET, HOST, GRAPH, WAIT, RECORD = 2, 3, 4, 6, 7
def node(kind, *words):
    return byref(Node(kind, (c_int * 3)(), (c_uint64 * 28)(*words)))
def graph():
    made = c_void_p(); cu("cuGraphCreate", byref(made), 0)
    return made
none = c_size_t(0)
"""


def test_a_child_graph_belongs_to_its_parent_however_it_came_there(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """The program may not destroy it, and the parent destroys it once."""
    answer = run_program(
        make_machine(clock="virtual"),
        NODES
        + """
s, found = cu.stream(), {}
def child_of(parent):
    made, count = c_void_p(), c_size_t(1)
    cu("cuGraphGetNodes", parent, byref(made), byref(count))
    child = c_void_p(); cu("cuGraphChildGraphNodeGetGraph", made, byref(child))
    return child
def destroyed(name, parent):
    found[name] = [cu.status("cuGraphDestroy", child_of(parent)), cu.status("cuGraphDestroy", parent)]
inner, made = graph(), c_void_p()
cu("cuGraphAddEmptyNode", byref(made), inner, None, none)
parent = graph(); cu("cuGraphAddChildGraphNode", byref(made), parent, None, none, inner)
clone = c_void_p(); cu("cuGraphClone", byref(clone), parent)
destroyed("single", parent); destroyed("clone", clone)
parent = graph(); cu("cuGraphAddNode", byref(made), parent, None, none, node(GRAPH, inner.value)); destroyed("any", parent)
parent = graph(); cu("cuGraphAddNode_v2", byref(made), parent, None, None, none, node(GRAPH, inner.value)); destroyed("any_v2", parent)
e = c_void_p(); cu("cuGraphInstantiateWithFlags", byref(e), inner, c_uint64(0))
cu("cuStreamBeginCapture_v2", s, 0); cu("cuGraphLaunch", e, s); captured = c_void_p(); cu("cuStreamEndCapture", s, byref(captured))
destroyed("captured", captured)
# Each launch of an executable in a capture copies its graph: the next child is a child's child.
parent = graph(); cu("cuGraphAddChildGraphNode", byref(made), parent, None, none, inner)
cu("cuGraphInstantiateWithFlags", byref(e), parent, c_uint64(0))
cu("cuStreamBeginCapture_v2", s, 0); cu("cuGraphLaunch", e, s); cu("cuStreamEndCapture", s, byref(captured))
found["deep"] = cu.status("cuGraphDestroy", child_of(child_of(captured)))
destroyed("nested", captured)
cu("cuGraphDestroy", inner)
say(**found)
""",
    )
    assert answer.pop("deep") == 1
    assert answer == {name: [1, 0] for name in ("single", "clone", "any", "any_v2", "captured", "nested")}


def test_a_node_of_any_kind_is_refused_what_the_single_calls_refuse(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        NODES
        + """
p, g, made, found = cu.allocate(4096), graph(), c_void_p(), {}
def same(name, single, kind, *words):
    found[name] = [single, *(cu.status(call, byref(made), g, None, *more, none, node(kind, *words)) for call, more in (("cuGraphAddNode", ()), ("cuGraphAddNode_v2", (None,))))]
class Set(ctypes.Structure):
    _fields_ = [("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element", c_uint), ("width", c_size_t), ("height", c_size_t)]
for element in (0, 3, 8, 2**32 - 1):
    single = cu.status("cuGraphAddMemsetNode", byref(made), g, None, none, byref(Set(p.value, 0, 7, element, 16, 1)), None)
    same(f"memset {element}", single, MEMSET, p.value, 0, 7 | element << 32, 16, 1)
same("host", cu.status("cuGraphAddHostNode", byref(made), g, None, none, byref((c_uint64 * 2)())), HOST, 0, 0)
same("record", cu.status("cuGraphAddEventRecordNode", byref(made), g, None, none, None), RECORD, 0)
same("wait", cu.status("cuGraphAddEventWaitNode", byref(made), g, None, none, None), WAIT, 0)
same("child", cu.status("cuGraphAddChildGraphNode", byref(made), g, None, none, None), GRAPH, 0)
count = c_size_t(); cu("cuGraphGetNodes", g, None, byref(count))
event = cu.event()
taken = [cu.status("cuGraphAddNode", byref(made), g, None, none, node(*words)) for words in ((MEMSET, p.value, 0, 7 | 4 << 32, 16, 1), (RECORD, event.value), (WAIT, event.value))]
e, s, back = c_void_p(), cu.stream(), (c_uint * 16)()
cu("cuGraphInstantiateWithFlags", byref(e), g, c_uint64(0)); cu("cuGraphLaunch", e, s); cu("cuStreamSynchronize", s)
cu("cuMemcpyDtoH_v2", back, p, c_size_t(64))
say(found=found, nodes=count.value, taken=taken, back=list(back))
""",
    )
    assert set(answer["found"]) == {"memset 0", "memset 3", "memset 8", f"memset {2**32 - 1}", "host", "record", "wait", "child"}
    for name, (single, any_kind, any_kind_v2) in answer["found"].items():
        assert single == any_kind == any_kind_v2 != 0, name
    assert answer["nodes"] == 0 and answer["taken"] == [0, 0, 0] and answer["back"] == [7] * 16
