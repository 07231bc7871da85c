"""How contexts share a card: turns, switches, preemption, and what a span between two events then contains."""

import pytest

from .conftest import MakeMachine, RunProgram, start_tenant

SWITCH_MS = 0.174

TWO_CONTEXTS = """
cu("cuInit", 0)
def context():
    made = c_void_p(); cu("cuCtxCreate_v2", byref(made), 0, 0)
    return made
def work(ctx, do):
    cu("cuCtxSetCurrent", ctx)
    s, a, b = cu.stream(), cu.event(), cu.event()
    cu("cuEventRecord", a, s); do(s); cu("cuEventRecord", b, s)
    return ctx, s, a, b
def span(work):
    ctx, s, a, b = work
    cu("cuCtxSetCurrent", ctx); cu("cuStreamSynchronize", s)
    return cu.elapsed_ms(a, b)
first, second = context(), context()
cu("cuCtxSetCurrent", first); f = cu.function()
cu("cuCtxSetCurrent", second); g = cu.function()
"""


@pytest.mark.parametrize("kernel_us", [20_000, 5_000, 1_000, 50])
def test_turns_are_as_long_whatever_the_kernels(make_machine: MakeMachine, kernel_us: int) -> None:
    machine = make_machine(clock="virtual", participants=2)
    tenants = [start_tenant(machine, kernel_us=kernel_us, seconds=2) for _ in range(2)]
    for tenant in tenants:
        _output, errors = tenant.communicate(timeout=60)
        assert tenant.returncode == 0, errors
    card = machine.device_truth(0)
    assert card.switched_ns == card.switches * machine.setting("switch_ns", 0)
    assert card.busy_ns / card.switches == pytest.approx(machine.setting("slice_ns", 0), rel=0.02)
    first, second = machine.truth()
    assert first.busy_ns == pytest.approx(second.busy_ns, rel=0.02)
    assert (first.busy_ns, second.busy_ns) == (first.kernels * kernel_us * 1000, second.kernels * kernel_us * 1000)


def test_a_dry_queue_gives_its_turn_up_at_once(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """The long kernel is stopped in its middle at the end of its turn; the short one's events are both in its own turn."""
    answer = run_program(
        make_machine(clock="virtual"),
        TWO_CONTEXTS
        + """
long = work(first, lambda s: cu.launch(f, 20_000_000, s))
short = work(second, lambda s: cu.launch(g, 500_000, s))
say(short=span(short), long=span(long))
""",
    )
    assert answer["short"] == pytest.approx(0.5, abs=1e-4)
    assert answer["long"] == pytest.approx(20 + 0.5 + 2 * SWITCH_MS, abs=1e-3)


def test_a_span_holds_the_neighbours_turns(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """5 ms need three turns, between which the neighbour has two; the neighbour's last turn is the rest of its kernel."""
    answer = run_program(
        make_machine(clock="virtual"),
        TWO_CONTEXTS
        + """
mine = work(first, lambda s: cu.launch(f, 5_000_000, s))
other = work(second, lambda s: cu.launch(g, 7_000_000, s))
say(mine=span(mine), other=span(other))
""",
    )
    assert answer["mine"] == pytest.approx(5 + 2 * (2 + 2 * SWITCH_MS), abs=1e-3)
    assert answer["other"] == pytest.approx(7 + 2 + 1 + 4 * SWITCH_MS, abs=1e-3)


def test_a_fill_takes_turns_and_a_copy_does_not(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine("h200x4", clock="virtual")
    answer = run_program(
        machine,
        TWO_CONTEXTS
        + """
fill, n = cu.allocate(9_600_000_000), c_size_t(9_600_000_000)
copied, m = cu.allocate(55_000_000), c_size_t(55_000_000)
buffer = ctypes.create_string_buffer(55_000_000)
kernel = work(first, lambda s: cu.launch(f, 20_000_000, s))
copy = work(second, lambda s: cu("cuMemcpyHtoDAsync_v2", copied, buffer, m, s))
copied = span(copy)
filled = span(work(second, lambda s: cu("cuMemsetD8Async", fill, 7, n, s)))
say(copy=copied, fill=filled, kernel=span(kernel))
""",
    )
    (truth,) = machine.truth()
    assert (truth.busy_ns, truth.fill_ns, truth.copy_ns) == (20_000_000, 4_000_000, 1_000_000)
    # The copy's events needed turns of their own (one before it, one after), its bytes did not.
    assert answer["kernel"] == pytest.approx(20 + 4 + 8 * SWITCH_MS, abs=1e-3)
    assert answer["fill"] == pytest.approx(4 + 2 + 2 * SWITCH_MS, abs=1e-3)
