"""Copies and fills: how long they take, on which engine, and that the truth keeps them apart from kernels."""

import pytest

from .conftest import MakeMachine, RunProgram

# On a card that copies 55 GB/s in and out and 2,400 GB/s within.
PROGRAM = """
cu.open(); f = cu.function(); s, t = cu.stream(), cu.stream()
big, small = cu.allocate(2_400_000_000), cu.allocate(55_000_000)
buffer = ctypes.create_string_buffer(55_000_000)
n = c_size_t(55_000_000)
start = cu.now_ns()
"""


def _after(make_machine: MakeMachine, run_program: RunProgram, source: str) -> tuple[int, int, int, int]:
    """The process's busy, fill and copy time and what the program took, in us."""
    machine = make_machine("h200x4", clock="virtual")
    answer = run_program(machine, PROGRAM + source + "\ncu('cuCtxSynchronize')\nsay(took=cu.now_ns() - start)\n")
    (truth,) = machine.truth()
    card = machine.device_truth(0)
    assert (card.busy_ns, card.fill_ns, card.copy_ns) == (truth.busy_ns, truth.fill_ns, truth.copy_ns)
    return truth.busy_ns // 1000, truth.fill_ns // 1000, truth.copy_ns // 1000, answer["took"] // 1000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("cu('cuMemcpyHtoDAsync_v2', small, buffer, n, s)", (0, 0, 1000, 1000)),
        ("cu('cuMemcpyDtoHAsync_v2', buffer, small, n, s)", (0, 0, 1000, 1000)),
        ("cu('cuMemcpyDtoDAsync_v2', big, c_uint64(big.value + 1_200_000_000), c_size_t(1_200_000_000), s)", (0, 0, 500, 500)),
        ("cu('cuMemsetD8Async', big, 1, c_size_t(2_400_000_000), s)", (0, 1000, 0, 1000)),
        ("cu('cuMemsetD32Async', big, 1, c_size_t(600_000_000), s)", (0, 1000, 0, 1000)),
        ("cu('cuMemsetD2D8Async', big, c_size_t(4096), 1, c_size_t(2000), c_size_t(120_000), s)", (0, 100, 0, 100)),
    ],
    ids=["in", "out", "within", "bytes", "words", "rows"],
)
def test_each_takes_its_time_on_its_engine(
    make_machine: MakeMachine, run_program: RunProgram, source: str, expected: tuple[int, int, int, int]
) -> None:
    assert _after(make_machine, run_program, source) == expected


def test_copies_at_once_are_counted_once_and_run_beside_kernels(make_machine: MakeMachine, run_program: RunProgram) -> None:
    source = """
cu.launch(f, 3_000_000, 0)
cu("cuMemcpyHtoDAsync_v2", small, buffer, n, s)
cu("cuMemcpyDtoHAsync_v2", buffer, small, n, t)
"""
    assert _after(make_machine, run_program, source) == (3000, 0, 1000, 3000)


def test_a_fill_beside_a_kernel_slows_it(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """Both fill the card: 1 ms and 3 ms take 4 ms together, in all of which the kernel runs."""
    source = "cu.launch(f, 3_000_000, s)\ncu('cuMemsetD8Async', big, 1, c_size_t(2_400_000_000), t)"
    assert _after(make_machine, run_program, source) == (4000, 0, 0, 4000)


def test_a_fill_before_a_kernel_is_not_its_time(make_machine: MakeMachine, run_program: RunProgram) -> None:
    source = "cu('cuMemsetD8Async', big, 1, c_size_t(2_400_000_000), s)\ncu.launch(f, 3_000_000, s)"
    assert _after(make_machine, run_program, source) == (3000, 1000, 0, 4000)


def test_a_captured_fill_takes_the_same_time(make_machine: MakeMachine, run_program: RunProgram) -> None:
    source = """
with cu.capture(s) as made:
    cu("cuMemsetD8Async", big, 1, c_size_t(2_400_000_000), s)
    cu("cuMemcpyDtoDAsync_v2", big, c_uint64(big.value + 1_200_000_000), c_size_t(1_200_000_000), s)
start = cu.now_ns()
for _ in range(2):
    cu("cuGraphLaunch", made[0], s)
"""
    assert _after(make_machine, run_program, source) == (0, 2000, 1000, 3000)


def test_a_program_that_ends_in_a_copy_leaves_none_in_flight(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine("h200x4")
    run_program(machine, PROGRAM + "for _ in range(50): cu('cuMemcpyHtoDAsync_v2', small, buffer, n, s)\nos._exit(0)")
    before = machine.advance()
    (first,) = machine.truth()
    while machine.advance() < before + 20_000_000:
        pass
    (second,) = machine.truth()
    assert first.copy_ns == second.copy_ns == machine.device_truth(0).copy_ns
    assert 0 < first.copy_ns < 50_000_000
