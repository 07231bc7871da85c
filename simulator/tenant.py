"""A workload on a simulated card: runs the tenant program and says what it used, by the simulator's own truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from poolmeter.errors import Unavailable
from poolmeter.native import native_path
from poolmeter.simulator.machine import MACHINE_VARIABLE, Machine, ProcessTruth

SCHEMA = "poolmeter.tenant/1"


@dataclass(frozen=True)
class TenantPlan:
    """What the tenant does. Lengths in microseconds, memory in bytes."""

    kernel_us: int = 1000
    seconds: float = 1.0  # 0: until SIGTERM
    kernels: int | None = None  # a fixed number; 0: none, it only holds its memory
    graph: int = 0  # kernels per graph launch; 0: plain launches
    allocate: int = 0
    processes: int = 1
    streams: int = 1
    gap_us: int = 0  # idle between launches
    sync_every: int = 0
    device: int = 0
    blocks: int = 0  # 0: one for each SM
    resolve: str = "gpa"

    def words(self) -> list[str]:
        """The arguments of the tenant program."""
        words = [
            "--kernel-us",
            str(self.kernel_us),
            "--seconds",
            str(self.seconds),
            "--allocate",
            str(self.allocate),
            "--graph",
            str(self.graph),
        ]
        words += ["--processes", str(self.processes), "--streams", str(self.streams), "--gap-us", str(self.gap_us)]
        words += ["--sync-every", str(self.sync_every), "--device", str(self.device), "--blocks", str(self.blocks)]
        if self.kernels is not None:
            words += ["--kernels", str(self.kernels)]
        if self.resolve != "link":
            words += ["--resolve", self.resolve]
        return words


def tenant_program(resolve: str) -> Path:
    """The tenant program that finds its driver functions in this way."""
    return native_path("bin/poolmeter-sim-tenant-linked" if resolve == "link" else "bin/poolmeter-sim-tenant")


def run_tenant(plan: TenantPlan, machine_file: str | Path | None = None) -> dict[str, Any]:
    """Runs the tenant on a machine (the environment's when none is given) and returns its report (schema poolmeter.tenant/1).

    A SIGTERM to this process ends the tenant in order. Raises Unavailable when there is no machine, or the program cannot work.
    """
    file = machine_file or os.environ.get(MACHINE_VARIABLE)
    if not file:
        raise Unavailable(f"no simulated machine: the variable {MACHINE_VARIABLE} is not set, a machine file was expected")
    with Machine.open(file) as machine:
        words = [str(tenant_program(plan.resolve)), "--die-with-parent", *plan.words()]
        lines, status = _run(words, machine.environment())
        reports = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
        if status not in (0, 3) or not reports:
            raise Unavailable(f"the tenant program ended with status {status} and {len(reports)} reports, expected {plan.processes}")
        machine.advance()
        return summary(reports, machine.truth())


def _run(words: list[str], env: dict[str, str]) -> tuple[str, int]:
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        output, _ = process.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return output, process.returncode


def summary(reports: list[dict[str, Any]], truth: tuple[ProcessTruth, ...]) -> dict[str, Any]:
    """One report for all processes of a tenant: device time and kernels from the truth, the rest from what they said."""
    pids = {int(report["pid"]) for report in reports}
    # A pid may have been another's before: the newest record of each pid and card is ours.
    newest: dict[tuple[int, int], ProcessTruth] = {}
    for record in truth:
        key = (record.pid, record.device)
        if record.pid in pids and (key not in newest or record.attached_ns >= newest[key].attached_ns):
            newest[key] = record
    busy_ns = sum(record.busy_ns for record in newest.values())
    wall = max(float(report["wall_seconds"]) for report in reports)
    errors = [str(report["cuda_error"]) for report in reports if report["cuda_error"] is not None]
    return {
        "schema": SCHEMA,
        "kernels": sum(record.kernels for record in newest.values()),
        "device_seconds": busy_ns / 1e9,
        "wall_seconds": wall,
        "share": busy_ns / 1e9 / wall if wall > 0 else None,
        "allocated_bytes": sum(int(report["allocated_bytes"]) for report in reports),
        "cuda_error": errors[0] if errors else None,
        "processes": len(reports),
        "pids": sorted(pids),
    }
