"""Streams and events of the simulated libcuda: what waits for what, host functions, threads."""

import pytest

from .conftest import MakeMachine, RunProgram


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
