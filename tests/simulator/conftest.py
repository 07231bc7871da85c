"""Machines and programs for the simulator's tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, tenant_program

LONG = os.environ.get("POOLMETER_LONG") == "1"

MakeMachine = Callable[..., Machine]
RunProgram = Callable[..., Any]


@pytest.fixture
def make_machine(tmp_path: Path) -> Iterator[MakeMachine]:
    """Makes machines in tmp_path and closes them at the end."""
    made: list[Machine] = []

    def make(description: Any = "single", **options: Any) -> Machine:
        machine = Machine.create(description, tmp_path / f"machine-{len(made)}", **options)
        made.append(machine)
        return machine

    yield make
    for machine in made:
        machine.close()


PRELUDE = """
import ctypes, json, os, sys, time
from ctypes import byref, c_void_p, c_uint64, c_size_t, c_int, c_uint
from poolmeter.simulator.driver import Driver, DriverError
cu = Driver()
def say(**values):
    print(json.dumps(values), flush=True)
"""


@pytest.fixture
def run_program() -> RunProgram:
    """Runs Python source on a machine, with `cu` a Driver and `say` to answer; gives back what it said last."""

    def run(machine: Machine, source: str, *, status: int = 0, errors: list[str] | None = None, **variables: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + source], env=machine.environment() | variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        if errors is not None:
            errors.extend(done.stderr.splitlines())
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else None

    return run


def start_tenant(machine: Machine, **options: Any) -> subprocess.Popen[str]:
    """Starts the tenant program; its report comes on stdout."""
    plan = TenantPlan(**options)
    words = [str(tenant_program(plan.resolve)), "--die-with-parent", *plan.words()]
    return subprocess.Popen(words, env=machine.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
