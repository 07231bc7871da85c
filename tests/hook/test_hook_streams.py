"""Many streams: more than the hook has lanes, spans over the same seconds, and launches that the driver refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from .conftest import Bench, finish

PROGRAM = """
import sys
from ctypes import byref, c_void_p

sys.path.insert(0, sys.argv[1])
from cuda_calls import Cuda

cuda = Cuda()
context = cuda.start()
first, other = cuda.function(cuda.module()), cuda.function(cuda.module())
streams = [c_void_p() for _ in range(int(sys.argv[2]))]
for stream in streams:
    assert cuda.StreamCreate(byref(stream), 1) == 0
if sys.argv[3] == "beyond":
    for stream in streams[:64]:
        assert cuda.launch(first, 1000, stream) == 0
    assert cuda.CtxSynchronize() == 0
    streams = streams[64:]
if sys.argv[3] == "refused":
    assert cuda.CtxSetCurrent(None) == 0
    assert {cuda.launch(first, 1_000_000) for _ in range(100)} == {201}
    assert cuda.CtxSetCurrent(context) == 0
if sys.argv[3] == "turns":
    event = c_void_p()
    assert cuda.EventCreate(byref(event), 2) == 0
for n in range(int(sys.argv[4])):
    assert cuda.launch(other, 1_000_000, streams[n % len(streams)]) == 0
    if sys.argv[3] == "turns":
        assert cuda.EventRecord(event, streams[n % len(streams)]) == 0
        assert cuda.StreamWaitEvent(streams[(n + 1) % len(streams)], event, 0) == 0
assert cuda.CtxSynchronize() == 0
print("{}")
"""


def run(bench: Bench, streams: int, how: str, launches: int) -> None:
    words = [sys.executable, "-S", "-c", PROGRAM, str(Path(__file__).parent), str(streams), how, str(launches)]
    assert finish(bench.program(*words)) == json.loads("{}")


@pytest.mark.parametrize("streams, launches", [(2, 200), (2, 1000), (32, 1000), (60, 1000)])
def test_streams_that_wait_for_each_other_are_charged_the_device_time_once(
    bench: Callable[..., Bench], streams: int, launches: int
) -> None:
    here = bench()
    run(here, streams, "plain", launches)
    assert here.counters().busy_ns == pytest.approx(here.truth_ns(), rel=0.01)


def test_what_was_unknown_when_launched_is_charged_as_known_since(bench: Callable[..., Bench]) -> None:
    here = bench()
    run(here, 2, "turns", 600)
    assert here.counters().busy_ns == pytest.approx(here.truth_ns(), rel=0.02)


def test_a_stream_beyond_the_lanes_is_measured_like_any_other(bench: Callable[..., Bench]) -> None:
    here = bench()
    run(here, 80, "beyond", 200)
    assert here.counters().busy_ns == pytest.approx(here.truth_ns(), rel=0.01)


def test_launches_that_the_driver_refuses_do_not_end_measuring(bench: Callable[..., Bench]) -> None:
    here = bench()
    run(here, 1, "refused", 50)
    counters = here.counters()
    assert counters.internal_faults == 0
    assert counters.busy_ns == pytest.approx(here.truth_ns(), rel=0.01)


CONTEXTS = """
import sys
from ctypes import byref, c_void_p

sys.path.insert(0, sys.argv[1])
from cuda_calls import Cuda

cuda = Cuda()
contexts = [cuda.start(), c_void_p()]
assert cuda.CtxCreate_v2(byref(contexts[1]), 0, 0) == 0
functions = []
for context in contexts:
    assert cuda.CtxSetCurrent(context) == 0
    functions.append(cuda.function(cuda.module()))
for _ in range(int(sys.argv[2])):
    for context, function in zip(contexts, functions):
        assert cuda.CtxSetCurrent(context) == 0
        assert cuda.launch(function, int(sys.argv[3]) * 1000) == 0
for context in contexts:
    assert cuda.CtxSetCurrent(context) == 0
    assert cuda.CtxSynchronize() == 0
print("{}")
"""


@pytest.mark.parametrize("launches, us, clock", [(400, 1000, "virtual"), (40, 10_000, "real")])
def test_two_contexts_of_a_process_that_take_turns(
    bench: Callable[..., Bench], launches: int, us: int, clock: Literal["virtual", "real"]
) -> None:
    """Both are busy all the time, so each one's spans hold the other's turns. Long ones are looked at as they end, which takes a clock that runs."""
    here = bench(clock=clock)
    words = [sys.executable, "-S", "-c", CONTEXTS, str(Path(__file__).parent), str(launches), str(us)]
    assert finish(here.program(*words)) == json.loads("{}")
    assert here.counters().busy_ns == pytest.approx(here.truth_ns(), rel=0.05 if us == 1000 else 0.15)
