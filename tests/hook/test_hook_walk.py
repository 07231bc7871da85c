"""Every interposed call that takes or gives back memory: refused by the driver, undone on another device, asked for nothing."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import HOOK, Bench

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "walk_program.py"
FAMILIES = ("memory", "arrays", "modules and libraries", "graphs and their memory", "other processes' memory")
# What the simulated driver cannot be asked, or what takes no memory.
NOT_WALKED = {
    "cuMemGetInfo_v2": "a question",
    "cuDeviceTotalMem_v2": "a question",
    "cuGraphAddNode_v3": "newer than the simulated driver",
    "cuModuleGetGlobal": "32-bit addresses, which the simulated driver does not have",
    "cuLibraryGetManaged": "the simulated driver has no managed globals",
}


class Walker:
    """The program, and what the page says between its steps."""

    def __init__(self, here: Bench) -> None:
        self.here = here
        environment = here.machine.environment() | {
            "LD_PRELOAD": here.hook,
            "POOLMETER_ALLOCATION_DIR": str(here.folder),
            "CUDA_MODULE_LOADING": "EAGER",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(PROGRAM)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.names: list[str] = json.loads(self.read())

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended: {self.process.wait()}"
        return line

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def walk(self, name: str, code: int = 0, other: bool = False) -> tuple[int, int, int]:
        """The call's result, and what the account holds before and after it."""
        self.write(name)
        assert self.read() == "ready\n"
        before = self.held
        rule = self.here.machine.script(f"cu{name}", code=code) if code else None
        self.write("")
        result = int(self.read())
        after = self.held
        if rule:
            assert self.here.machine.hits(rule) > 0, name
            self.here.machine.unscript(rule)
        self.write("other" if other else "same")
        assert self.read() == "undone\n"
        return result, before, after

    @property
    def held(self) -> int:
        return self.here.counters(0).memory_bytes

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=30) == 0
        self.process.stdout.close()


@pytest.fixture
def walker(bench: Callable[..., Bench]) -> Iterator[Walker]:
    walker = Walker(bench(memory=512 * MIB, machine="t4x2"))
    yield walker
    walker.close()
    assert walker.here.counters(0).memory_bytes == walker.here.counters(1).memory_bytes == 0
    assert walker.here.counters(0).internal_faults == 0


def hooks() -> set[str]:
    text = (HOOK / "hooks.h").read_text().split("#define PM_NEEDS")[0]
    parts = re.split(r"/\* (.+?) \*/", text)
    return {
        name
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
        if title in FAMILIES
        for name in re.findall(r"X\((cu\w+)\)", body)
    }


def test_every_memory_call_is_walked(walker: Walker) -> None:
    walked = {f"cu{name}" for name in walker.names}
    assert hooks() - walked == set(NOT_WALKED)
    assert walked - hooks() == {"cuCtxSetLimit", "cuGraphLaunch", "cuGraphLaunch_ptsz", "cuGraphExecDestroy"}


def test_each_takes_and_gives_back_exactly(walker: Walker) -> None:
    for name in walker.names:
        result, before, after = walker.walk(name)
        assert result == 0, name
        if re.search(r"(Free|Release|Destroy|Unload|Trim|Unmap)", name) and name not in (
            "MemPoolDestroy",
            "MemRelease",
            "GraphExecDestroy",
        ):
            assert after < before, name
        elif re.search(r"Alloc|Load|GraphLaunch|Upload|SetLimit|ArrayCreate|Array3DCreate|MemCreate|WithParams", name) and not re.search(
            r"Node|Retain", name
        ):
            assert after > before, name
        assert walker.held == 0, name


@pytest.mark.parametrize("code", [999, 2])
def test_a_driver_that_refuses_changes_no_account(walker: Walker, code: int) -> None:
    for name in walker.names:
        denied = walker.here.counters(0).denied_card
        result, before, after = walker.walk(name, code)
        assert (result, after) == (code, before), name
        takes = re.search(r"(MemAlloc|MemCreate|ArrayCreate|Array3DCreate|GraphLaunch|GraphUpload|WithParams)", name)
        took = code == 2 and takes and not re.search(r"Node|^ModuleLoad", name)
        assert walker.here.counters(0).denied_card - denied == bool(took), name
        assert walker.held == 0, name


def test_what_is_given_back_on_another_current_device_leaves_the_one_that_owns_it(walker: Walker) -> None:
    for name in walker.names:
        if name in ("CtxSetLimit", "MemAllocAsync_ptsz", "MemFreeAsync_ptsz", "MemAllocFromPoolAsync_ptsz", "LibraryGetGlobal"):
            continue  # of the context, or of the thread's own stream there
        result, _, _ = walker.walk(name, other=True)
        assert result == 0, name
        assert walker.held == 0 and walker.here.counters(1).memory_bytes == 0, name


def test_asked_for_nothing_or_without_a_context_they_answer_as_the_driver_does(walker: Walker) -> None:
    walker.write("nothing")
    said: dict[str, int] = json.loads(walker.read())
    assert len(said) > 90 and {name: result for name, result in said.items() if result == 0} == {}
    assert said["alloc without context"] == said["array without context"] == said["limit without context"] == 201
    assert walker.held == 0
