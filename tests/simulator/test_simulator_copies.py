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


ARRAYS = """
cu.open()
class Shape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]
class Box(ctypes.Structure):
    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (("X", c_size_t), ("Y", c_size_t), ("Type", c_int), ("Host", c_void_p), ("Device", c_uint64), ("Array", c_void_p), ("Pitch", c_size_t))
    ] + [("width", c_size_t), ("height", c_size_t)]
def array(width, height):
    made = c_void_p(); cu("cuArrayCreate_v2", byref(made), byref(Shape(width, height, 0x20, 1)))
    return made
HOST, DEVICE, ARRAY = 1, 2, 3
"""


def test_an_array_gives_back_what_was_copied_in(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """Rows of 1,000 floats, padded in the array; a corner of 5 x 3 is read from row 10, byte 400 on."""
    machine = make_machine("h200x4", clock="virtual")
    answer = run_program(
        machine,
        ARRAYS
        + """
a = array(1000, 20); data = (c_uint * 20000)(*range(20000)); out = (c_uint * 15)()
cu("cuMemcpy2D_v2", byref(Box(srcType=HOST, srcHost=ctypes.addressof(data), srcPitch=4000, dstType=ARRAY, dstArray=a, width=4000, height=20)))
corner = dict(srcType=ARRAY, srcArray=a, srcX=400, srcY=10, dstType=HOST, dstHost=ctypes.addressof(out), dstPitch=20, width=20, height=3)
cu("cuMemcpy2D_v2", byref(Box(**corner)))
outside = cu.status("cuMemcpy2D_v2", byref(Box(**(corner | dict(srcY=18)))))
beside = cu.status("cuMemcpy2D_v2", byref(Box(**(corner | dict(srcX=3984)))))
cu("cuArrayDestroy", a)
say(out=list(out), refused=[outside, beside])
""",
    )
    assert answer["out"] == [row * 1000 + column for row in (10, 11, 12) for column in range(100, 105)]
    assert answer["refused"] == [1, 1]
    (truth,) = machine.truth()
    assert (truth.h2d_bytes, truth.d2h_bytes) == (80_000, 60)
    assert truth.copy_ns == 80_000 * 1000 // 55_000 + 60 * 1000 // 55_000


def test_arrays_of_one_dimension(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine("h200x4", clock="virtual")
    answer = run_program(
        machine,
        ARRAYS
        + """
a, b, flat, s = array(64, 0), array(64, 0), array(64, 2), cu.stream()
p = cu.allocate(256); data = (c_uint * 64)(*range(64)); out = (c_uint * 4)()
cu("cuMemcpyHtoA_v2", a, c_size_t(0), data, c_size_t(256))
cu("cuMemcpyAtoA_v2", b, c_size_t(16), a, c_size_t(0), c_size_t(128))
cu("cuMemcpyAtoD_v2", p, b, c_size_t(16), c_size_t(128))
cu("cuMemcpyDtoA_v2", a, c_size_t(128), p, c_size_t(64))
cu("cuMemcpyAtoHAsync_v2", out, a, c_size_t(136), c_size_t(16), s)
cu("cuStreamSynchronize", s)
say(out=list(out), two=cu.status("cuMemcpyHtoA_v2", flat, c_size_t(0), data, c_size_t(256)),
    over=cu.status("cuMemcpyHtoA_v2", a, c_size_t(4), data, c_size_t(256)), nothing=cu.status("cuMemcpyAtoH_v2", out, None, c_size_t(0), c_size_t(4)))
""",
    )
    assert answer == {"out": [2, 3, 4, 5], "two": 1, "over": 1, "nothing": 1}
    (truth,) = machine.truth()
    assert (truth.h2d_bytes, truth.d2d_bytes, truth.d2h_bytes) == (256, 320, 16)
