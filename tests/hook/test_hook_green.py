"""Contexts on a part of the processors: what is allocated in one is the primary context's, and stays with it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Bench

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "green_program.py"


def run(here: Bench, name: str) -> tuple[list[int], int]:
    """What the program says, and what it has of the card at its end."""
    environment = here.machine.environment() | {
        "LD_PRELOAD": here.hook,
        "POOLMETER_ALLOCATION_DIR": str(here.folder),
        "CUDA_MODULE_LOADING": "EAGER",
    }
    with subprocess.Popen(
        [sys.executable, "-S", str(PROGRAM), name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        truth = sum(truth.memory for truth in here.machine.truth())
        counted = here.counters()
        process.stdin.close()
    assert process.returncode == 0 and line
    said: list[int] = json.loads(line)["said"]
    assert counted.memory_bytes == said[-1]
    assert (here.counters().memory_bytes, counted.internal_faults) == (0, 0)
    return said, truth


def test_one_after_the_other_they_do_not_pass_the_limit(bench: Callable[..., Bench]) -> None:
    said, truth = run(bench(memory=10 * MIB), "again")
    assert said == [0, 4 * MIB, 0, 8 * MIB, 2, 8 * MIB, 2, 8 * MIB, 4 * MIB]
    assert truth == 4 * MIB


def test_memory_of_every_kind_stays_with_the_primary_context(bench: Callable[..., Bench]) -> None:
    said, _ = run(bench(memory=256 * MIB), "every")
    heap = 8 * MIB  # beyond what it began with
    assert said[0] >= 4 * MIB + 4 * MIB + 4 * MIB + heap
    assert said[1] == said[0]


@pytest.mark.parametrize(("name", "expected"), [("released", [0, 4 * MIB, 0]), ("reset", [0, 2 * MIB])])
def test_it_goes_with_the_primary_context(bench: Callable[..., Bench], name: str, expected: list[int]) -> None:
    said, truth = run(bench(memory=64 * MIB), name)
    assert said == expected and truth == expected[-1]


def test_another_contexts_memory_goes_with_that(bench: Callable[..., Bench]) -> None:
    said, truth = run(bench(memory=64 * MIB), "plain")
    assert said == [12 * MIB, 0, 4 * MIB] and truth == 4 * MIB


def test_one_that_could_not_be_destroyed_lives_on(bench: Callable[..., Bench]) -> None:
    here = bench(memory=64 * MIB)
    here.machine.script("cuGreenCtxDestroy", code=999)
    said, truth = run(here, "plain")
    assert said == [12 * MIB, 999, 4 * MIB] and truth == 4 * MIB
