"""Native parts for the hook's tests, built once per run with the system's compiler from this tree; a simulated node to work on."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, tenant_program

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "enforcer" / "native" / "hook"
ACCOUNTING = (
    "account",
    "board",
    "bucket",
    "charges",
    "clock",
    "estimates",
    "guard",
    "lanes",
    "limiter",
    "marks",
    "memory",
    "neighbours",
    "pages",
    "pointers",
    "process",
    "samples",
    "settler",
    "slots",
    "tracker",
    "union",
)
PATHS_PROGRAM = Path(__file__).parent / "paths_program.py"
DEVICE = "GPU-00000000-0000-0000-0000-000000000001"
PRELUDE = "import ctypes, json, os, signal, sys, time\nfrom poolmeter.simulator.driver import Driver, DriverError\n"


def cuda_include() -> Path:
    """The folder of the cuda.h that the project is built with, or $POOLMETER_CUDA_INCLUDE; skips where there is none."""
    package = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" / "include" for place in (package.submodule_search_locations or [])] if package else []
    named = os.environ.get("POOLMETER_CUDA_INCLUDE")
    for folder in [*([Path(named)] if named else []), *places, Path("/usr/local/cuda-13.0/include"), Path("/usr/local/cuda/include")]:
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("cuda.h is not on this machine: it comes with the build requirements")


def build(target: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compiles `sources` with the accounting library into `target`."""
    accounting = [str(HOOK / f"{name}.c") for name in ACCOUNTING]
    command = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}", *flags]
    subprocess.run([*command, *map(str, sources), *accounting, "-o", str(target), "-lpthread"], check=True)
    return target


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libpoolmeter_pages.so and the test programs."""
    folder = tmp_path_factory.mktemp("native")
    here = Path(__file__).parent
    build(folder / "worker", here / "worker.c")
    sources = [str(HOOK / f"{name}.c") for name in ("library", "memory", "pages", "slots")]
    command = ["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}"]
    subprocess.run([*command, *sources, "-o", str(folder / "libpoolmeter_pages.so")], check=True)
    return folder


@pytest.fixture
def long_run() -> int:
    """How many times the usual counts: 1, or 20 with POOLMETER_LONG=1."""
    return 20 if os.environ.get("POOLMETER_LONG") == "1" else 1


@dataclass
class Bench:
    """A simulated node with one allocation on it, and the programs of paths_program.py under the hook."""

    machine: Machine
    folder: Path

    @property
    def uuid(self) -> str:
        return self.machine.uuid(0)

    @property
    def hook(self) -> str:
        return str(native_path("libpoolmeter_hook.so"))

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return self.program(sys.executable, "-S", str(PATHS_PROGRAM), *arguments, **extra)

    def program(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        environment = self.machine.environment() | {
            "LD_PRELOAD": self.hook,
            "POOLMETER_ALLOCATION_DIR": str(self.folder),
        }
        return subprocess.Popen(words, env=environment | extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str, **extra: str) -> dict[str, Any]:
        return finish(self.start(*arguments, **extra))

    def counters(self, device: int = 0) -> DeviceCounters:
        return read_meter(self.folder / "meter").total(self.machine.uuid(device))

    def truth_ns(self) -> int:
        self.machine.advance()
        return sum(truth.busy_ns for truth in self.machine.truth())


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "not implemented" not in errors
    answer: dict[str, Any] = json.loads(output)
    return answer


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(
        memory: int | None = None,
        compute_ppm: int | None = None,
        charge_copies: bool = False,
        machine: str = "single",
        participants: int | None = None,
        clock: Literal["virtual", "real"] = "virtual",
    ) -> Bench:
        (tmp_path / "devices").mkdir()
        folder = tmp_path / "allocations" / "a"
        folder.mkdir(parents=True)
        here = Machine.create(machine, tmp_path / "machine", clock=clock, participants=participants)
        uuids = [here.uuid(device) for device in range(here.devices)]
        devices = tuple(DeviceGrant(uuid, compute_ppm=compute_ppm, memory_bytes=memory) for uuid in uuids)
        write_grant(folder / "grant", Grant("a", devices, charge_copies=charge_copies))
        create_meter(folder / "meter", uuids)
        return Bench(here, folder)

    return make


@dataclass
class Pair:
    """A machine of two cards, and the allocations on it."""

    machine: Machine
    root: Path

    @property
    def uuids(self) -> tuple[str, str]:
        return self.machine.uuid(0), self.machine.uuid(1)

    def allocation(self, name: str, *devices: DeviceGrant) -> Path:
        folder = self.root / "allocations" / name
        folder.mkdir(parents=True)
        write_grant(folder / "grant", Grant(name, devices))
        create_meter(folder / "meter", [device.uuid for device in devices])
        return folder

    def start(self, folder: Path, *words: str, **extra: str) -> "subprocess.Popen[str]":
        hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
        environment = self.machine.environment() | hook | extra
        return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def python(self, folder: Path, source: str, *words: str, **extra: str) -> "subprocess.Popen[str]":
        return self.start(folder, sys.executable, "-c", PRELUDE + source, *words, **extra)

    def answer(self, folder: Path, source: str, *words: str, **extra: str) -> dict[str, int]:
        process = self.python(folder, source, *words, **extra)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        told: dict[str, int] = json.loads(output.splitlines()[-1])
        return told

    def tenant(self, folder: Path, plan: TenantPlan, **extra: str) -> "subprocess.Popen[str]":
        return self.start(folder, str(tenant_program(plan.resolve)), *plan.words(), **extra)

    def share(self, process: "subprocess.Popen[str]") -> dict[int, float]:
        """Percent of each card's time that the ended tenant had."""
        report = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
        assert process.returncode == 0 and report["cuda_error"] is None
        self.machine.advance()
        mine = [truth for truth in self.machine.truth() if truth.pid == report["pid"] and truth.busy_ns]
        return {truth.device: 100 * truth.busy_ns / 1e9 / report["wall_seconds"] for truth in mine}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    machines: list[Machine] = []

    def make(clock: str = "virtual", participants: int | None = None) -> Pair:
        machines.append(Machine.create("t4x2", tmp_path / f"machine-{len(machines)}", clock=clock, participants=participants))
        (tmp_path / "devices").mkdir(exist_ok=True)
        return Pair(machines[-1], tmp_path)

    yield make
    for machine in machines:
        machine.close()


def first_line(process: "subprocess.Popen[str]") -> dict[str, int]:
    assert process.stdout is not None
    told: dict[str, int] = json.loads(process.stdout.readline())
    return told
