"""The five tenants of the simulated pool, named as teams are: vision trains, research holds memory and computes nothing, search asks for
more than its memory, speech runs 300 ms at a time, and one runs without the hook.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from poolmeter.pool import NodePlan, Pool


@dataclass(frozen=True)
class DemoTenant:
    """One tenant: on which node (by number), with which share (None: without the hook), running what, every how many seconds."""

    name: str
    node: int
    share: tuple[str, ...] | None
    work: tuple[str, ...]
    seconds: float | None = None  # None: as long as the pool runs
    repeat_s: float | None = None


TENANTS = (
    DemoTenant(
        "vision",
        0,
        ("--project", "detector", "--class", "training", "--device", "0", "--compute", "50", "--memory", "40G"),
        ("--kernel-us", "1000", "--allocate", "24G"),
    ),
    DemoTenant(
        "research",
        0,
        ("--project", "notes", "--class", "notebook", "--device", "1", "--compute", "25", "--memory", "64G"),
        ("--kernels", "0", "--allocate", "6G"),
    ),
    DemoTenant(
        "search",
        1,
        ("--project", "ranking", "--class", "inference", "--device", "0", "--compute", "50", "--memory", "8G"),
        ("--kernel-us", "500", "--gap-us", "2000", "--allocate", "16G"),
    ),
    DemoTenant(
        "speech",
        1,
        ("--project", "captions", "--class", "batch", "--device", "1", "--compute", "100", "--memory", "16G"),
        (
            "--kernel-us",
            "200",
        ),
        seconds=0.3,
        repeat_s=20.0,
    ),
    DemoTenant("unhooked", 1, None, ("--kernel-us", "1000", "--gap-us", "1000", "--device", "2"), seconds=None),
)


@dataclass
class RunningTenant:
    """A started tenant; its JSON line is in `out`, what it said beside it in `log`."""

    tenant: DemoTenant
    process: subprocess.Popen[bytes]
    out: Path
    started: float


@dataclass
class Tenants:
    """Starts the tenants of a pool, again where they repeat, and stops them."""

    pool: Pool
    seconds: float | None  # how long the lasting ones run; None: until stopped
    clock: Callable[[], float]
    running: list[RunningTenant] = field(default_factory=list)
    finished: list[RunningTenant] = field(default_factory=list)

    def start(self) -> None:
        """Start all of them once."""
        for tenant in TENANTS:
            self._start(tenant)

    def watch(self) -> None:
        """Note who has ended, and start repeating ones again when it is time. Call often."""
        for item in list(self.running):
            if item.process.poll() is not None:
                self.running.remove(item)
                self.finished.append(item)
        if self.seconds is None:
            for tenant in TENANTS:
                latest = [item for item in self.finished + self.running if item.tenant is tenant]
                due = tenant.repeat_s is not None and latest and self.clock() - max(item.started for item in latest) >= tenant.repeat_s
                if due and not any(item in self.running for item in latest):
                    self.finished = [item for item in self.finished if item.tenant is not tenant]
                    self._start(tenant)

    def stop(self) -> None:
        """End those that still run, as an operator would: SIGTERM to `poolmeter run`, which passes it on and releases."""
        for item in self.running:
            item.process.terminate()
        for item in self.running:
            try:
                item.process.wait(10)
            except subprocess.TimeoutExpired:
                item.process.kill()
                item.process.wait()
        self.finished += self.running
        self.running = []

    def _start(self, tenant: DemoTenant) -> None:
        node = self.pool.nodes[tenant.node]
        seconds = tenant.seconds if tenant.seconds is not None else self.seconds
        work = [
            sys.executable,
            "-m",
            "poolmeter.cli",
            "simulate",
            "tenant",
            *tenant.work,
            "--seconds",
            str(seconds if seconds is not None else 0),
        ]
        words = work if tenant.share is None else [*run_words(tenant, node, self.pool.data), "--", *work]
        number = sum(item.tenant is tenant for item in self.finished + self.running)
        out = self.pool.data / "logs" / f"tenant-{tenant.name}-{number}.json"
        with out.open("wb") as stdout, out.with_suffix(".log").open("wb") as stderr:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment(self.pool.environment(node)),
                start_new_session=True,
            )
        self.running.append(RunningTenant(tenant, process, out, self.clock()))


def run_words(tenant: DemoTenant, node: NodePlan, data: Path) -> list[str]:
    """The `poolmeter run` of a tenant, up to its program."""
    share = tenant.share or ()
    return [sys.executable, "-m", "poolmeter.cli", "run", "--data", str(data), "--node", node.name, "--tenant", tenant.name, *share]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a tenant: nothing of an outer allocation."""
    return {key: value for key, value in {**os.environ, **base}.items() if key != "POOLMETER_ALLOCATION_DIR"}
