"""What takes memory or copies besides the plain calls, under the hook on the simulated driver."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter
from poolmeter.simulator.machine import Machine

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "paths_program.py"


@dataclass
class Bench:
    """A simulated node with one allocation on it."""

    machine: Machine
    folder: Path

    @property
    def uuid(self) -> str:
        return self.machine.uuid(0)

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        environment = self.machine.environment() | {
            "LD_PRELOAD": str(native_path("libpoolmeter_hook.so")),
            "POOLMETER_ALLOCATION_DIR": str(self.folder),
        }
        command = [sys.executable, "-S", str(PROGRAM), *arguments]
        return subprocess.Popen(command, env=environment | extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

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
    ) -> Bench:
        (tmp_path / "devices").mkdir()
        folder = tmp_path / "allocations" / "a"
        folder.mkdir(parents=True)
        here = Machine.create(machine, tmp_path / "machine", clock="virtual", participants=participants)
        uuids = [here.uuid(device) for device in range(here.devices)]
        devices = tuple(DeviceGrant(uuid, compute_ppm=compute_ppm, memory_bytes=memory) for uuid in uuids)
        write_grant(folder / "grant", Grant("a", devices, charge_copies=charge_copies))
        create_meter(folder / "meter", uuids)
        return Bench(here, folder)

    return make
