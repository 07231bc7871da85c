"""Use of a card and of its processes, integrated from NVML's samples.

Process utilisation names only processes active in the last period and answers NOT_FOUND for "nothing new"; its size call may return
SUCCESS with 0, which the binding raises as a bare error. Under MPS it names only the server, with the sum of its clients: that sum is
divided among the clients the card lists, by their active thread percentages where those are known, and marked.

No sample is stretched over time that nobody sampled: what no sample covers is counted for nobody and told as not measured, and while
nothing is told the busy time is not known. Lengths are monotonic time, for the clock may be set.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poolmeter.vendors.mps import is_server
from poolmeter.vendors.nvidia_samples import LONGEST_US, PERIODS, Ahead, Allowance, Cover, Steps
from poolmeter.vendors.nvml import Nvml, number, text
from poolmeter.vendors.proc import command_of, start_ticks_of
from poolmeter.vendors.reading import ProcessReading

FORGET_AFTER_US = 120_000_000  # an ended process stays this long, so that whoever reads seldom still sees its last use
FULL_PPM = 1_000_000
ASK_US = 5_000_000
RATE_US = PERIODS * LONGEST_US  # a rate is of the driver's last period: it covers no more time than this
FARTHEST_US = 3 * ASK_US  # a process's mean covers no more time than this
_UNTOLD = -1  # a sample whose value the driver says is not available: it sorts, as None does not


@dataclass
class _Busy:
    """Integrated use of one process."""

    start_ticks: int | None
    command: str | None
    total_us: int = 0
    seen_us: int = 0  # monotonic
    divided: bool = False


@dataclass
class Listed:
    """What the lists say of one process."""

    memory: int | None = None
    mps: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass
class Use:
    """Integration of one card, kept from reading to reading."""

    nvml: Nvml
    proc: Path
    busy_us: int | None = None
    unmeasured_us: int = 0  # time that no sample covered
    known: bool = True  # whether anything was told of late
    told_us: int | None = None  # monotonic, when the card last told anything of its utilisation
    rates_us: int | None = None  # monotonic, when a utilisation rate was last told, with no sample since
    rated_us: int = 0  # what came before this was integrated from rates
    sample_us: int | None = None  # newest utilisation sample taken
    cover: Cover = field(default_factory=Cover)
    allowance: Allowance = field(default_factory=Allowance)
    windows: Allowance = field(default_factory=Allowance)  # of processes
    steps: Steps = field(default_factory=Steps)
    ahead: Ahead[tuple[int, int]] = field(default_factory=Ahead)
    ahead_uses: Ahead[tuple[int, int]] = field(default_factory=Ahead)
    asked_us: int = -ASK_US  # monotonic
    answered_us: int | None = None  # monotonic, when the use of processes was last told
    process_sample_us: int | None = None
    process_samples: bool = False  # whether the card tells the use of processes
    processes: dict[int, _Busy] = field(default_factory=dict)
    threads_ppm: Mapping[int, int] = field(default_factory=dict)  # active thread percentages of MPS clients

    def device(self, handle: Any, utilization_ppm: int | None, errors: list[str]) -> None:
        """Adds to `busy_us`: from the sample buffer, each sample over the time since the one before it; else the rate over the interval."""
        nvml = self.nvml.binding
        wall_us, at_us = time.time_ns() // 1000, time.monotonic_ns() // 1000
        back_us = self.steps.back_us(wall_us, at_us)
        if back_us:
            self._set_back(back_us)
        self.told_us = at_us if self.told_us is None else self.told_us
        try:
            _, samples = self.nvml.call("nvmlDeviceGetSamples", handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self.sample_us or 0)
        except nvml.NVMLError as fault:
            if self.nvml.code(fault) == nvml.NVML_ERROR_NOT_FOUND:
                self.busy_us, self.rates_us = self.busy_us or 0, None
                self._silent(utilization_ppm, wall_us, at_us)  # nothing new in the buffer; the next sample covers the time
                return
            errors.append(f"nvmlDeviceGetSamples: {fault}")
            self._rate(utilization_ppm, wall_us, at_us)
            return
        self.rates_us = None
        told = [(int(sample.timeStamp), _percent(sample.sampleValue.uiVal)) for sample in samples]
        fresh = sorted(sample for sample in self.ahead.sift([(at, (at, value)) for at, value in told], wall_us))
        fresh = [(at, value) for at, value in fresh if at > (self.sample_us or 0)]
        if not fresh or any(value != _UNTOLD for _, value in fresh):
            self.busy_us = self.busy_us or 0
        if not fresh and (self.sample_us is not None or not told):
            self._silent(utilization_ppm, wall_us, at_us)
            return
        passed_us, self.told_us, self.known = at_us - self.told_us, at_us, True
        if self.sample_us is None:
            # What lies in the buffer at the first look was used before anybody watched.
            self.sample_us = fresh[-1][0] if fresh else wall_us
            self.cover.learn(at for at, _ in fresh)
            return
        self.allowance.passed(passed_us, self.cover.reach_us)
        for at, value in fresh:
            since = max(self.sample_us, self.rated_us)
            if at > since:
                covered = self.allowance.take(self.cover.of(at - since))
                if value == _UNTOLD:
                    self.unmeasured_us += covered
                else:
                    self.busy_us = (self.busy_us or 0) + value * covered // 100
                # A hole that is longer than the time that passed is a clock that was set.
                self.unmeasured_us += max(0, min(at - since, passed_us) - covered)
            self.sample_us = at

    def _rate(self, utilization_ppm: int | None, wall_us: int, at_us: int) -> None:
        """Count by a rate, where samples cannot be read."""
        if utilization_ppm is None:
            self.rates_us = None  # the time until it is told again is nobody's
            self._silent(None, wall_us, at_us)
            return
        gap_us = at_us - self.rates_us if self.rates_us is not None else 0
        if gap_us > 0:
            self.busy_us = (self.busy_us or 0) + utilization_ppm * min(gap_us, RATE_US) // 1_000_000
            self.rated_us = wall_us
        elif self.busy_us is None:
            self.busy_us = 0
        self.unmeasured_us += max(0, gap_us - RATE_US)
        self.known = True
        self.rates_us = self.told_us = at_us

    def _silent(self, utilization_ppm: int | None, wall_us: int, at_us: int) -> None:
        """No sample came: one that comes soon covers the time, one that comes late does not. A card may sample only while it works: the rate
        says so where it is 0."""
        self.known = self.told_us is None or at_us - self.told_us <= PERIODS * LONGEST_US
        if not self.known and utilization_ppm == 0:
            self.known, self.told_us, self.rated_us = True, at_us, wall_us

    def _set_back(self, back_us: int) -> None:
        """The clock was set back: what was counted goes back with it, and what lies ahead of it is counted already."""
        self.sample_us = None if self.sample_us is None else max(0, self.sample_us - back_us)
        self.process_sample_us = None if self.process_sample_us is None else max(0, self.process_sample_us - back_us)
        self.rated_us = max(0, self.rated_us - back_us)
        self.ahead.due = self.ahead_uses.due = True

    def lists(self, handle: Any, errors: list[str]) -> tuple[dict[int, Listed], bool]:
        """Processes with a context, once each (the compute, MPS and graphics lists overlap); and whether these are all.

        Not all where the compute list could not be read; a card that has none is known by the others.
        """
        nvml = self.nvml.binding
        found: dict[int, Listed] = {}
        known, failed = False, False
        for kind in ("Compute", "MPSCompute", "Graphics"):
            name = f"nvmlDeviceGet{kind}RunningProcesses_v3"
            try:
                rows = self.nvml.call(name, handle)
                known = True
            except nvml.NVMLError as fault:
                errors.append(f"{name}: {fault}")
                lacks = self.nvml.code(fault) in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
                failed = failed or (kind == "Compute" and not lacks)
                continue
            for row in rows:
                mine = found.setdefault(int(row.pid), Listed())
                mine.memory = max((value for value in (mine.memory, number(row.usedGpuMemory)) if value is not None), default=None)
                mine.gpu_instance = number(getattr(row, "gpuInstanceId", None))
                mine.compute_instance = number(getattr(row, "computeInstanceId", None))
                if kind == "MPSCompute":
                    mine.mps = "client"
        at_us = time.monotonic_ns() // 1000
        for pid, mine in found.items():
            busy = self._process(pid, at_us)
            command = busy.command if busy else None
            if command is None and mine.mps is None:
                name = self.nvml.ask("nvmlSystemGetProcessName", pid)
                command = None if name is None else text(name)
            if is_server(command):
                mine.mps = "server"
        return found, known and not failed

    def integrate(self, handle: Any, listed: Mapping[int, Listed], hooked: frozenset[tuple[int, int]] | None, errors: list[str]) -> None:
        """Adds each process's samples to its total; together they never exceed the time since the last look.

        Where all who are or were on the card of late are `hooked`, nobody is known to need them, and they cost more than most (2.8 ms on an
        H200): they are then asked every few seconds, for one who comes and goes between two turns. None: who is on the card is not known.

        One entry of a process is its mean over all sample periods since the last look, whenever in them it was active; of several
        entries each is the mean since the one before. The newest sample of the device says how far those periods reach; they reach no farther
        back than the time that passed, which a clock that was set does not tell, and than a driver is known to keep samples.
        """
        nvml = self.nvml.binding
        wall_us, at_us = time.time_ns() // 1000, time.monotonic_ns() // 1000
        # By its start as well: a pid may have got another process since the hook's own was seen.
        there = {(pid, busy.start_ticks) for pid, busy in self.processes.items()}
        there |= {(pid, None) for pid in listed if pid not in self.processes}
        if there and hooked is not None and hooked.issuperset(there) and 0 <= at_us - self.asked_us < ASK_US:
            return
        self.asked_us = at_us
        last = self.process_sample_us
        samples: list[Any] = []
        for attempt in range(3):
            try:
                samples = self.nvml.call("nvmlDeviceGetProcessUtilization", handle, last or 0)
                break
            except nvml.NVMLError as fault:
                code = self.nvml.code(fault)
                if code == nvml.NVML_ERROR_INSUFFICIENT_SIZE and attempt < 2:
                    continue  # a process started between the size call and the second call
                if code not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
                    errors.append(f"nvmlDeviceGetProcessUtilization: {fault}")
                    if self.answered_us is not None and at_us - self.answered_us > FARTHEST_US:
                        self.process_samples = False  # no longer known
                    return
                break
        self.process_samples = True
        passed_us = at_us - self.answered_us if self.answered_us is not None else 0
        self.answered_us = at_us
        # The driver has been seen to return a hundred zero entries and absurd values: only what is newer and non-zero counts.
        told = [(int(s.timeStamp), int(s.pid), _percent(s.smUtil)) for s in samples if int(s.timeStamp) > (last or 0)]
        counting = frozenset(self.ahead_uses.sift([(at, (at, pid)) for at, pid, _ in told], wall_us))
        # Of a mean that is not told the time is nobody's; and none is of later than what the card itself was sampled to.
        latest = max(self.sample_us, last or 0) + LONGEST_US if self.sample_us is not None else None
        fresh = sorted((at if latest is None else min(at, latest), pid, max(0, value)) for at, pid, value in told if (at, pid) in counting)
        newest = max([at for at, _, _ in fresh] + [at for at in (self.sample_us, last) if at is not None], default=None)
        self.process_sample_us = newest
        self.windows.passed(passed_us, self.cover.reach_us)
        if last is None or newest is None:
            return  # what lies in the buffer at the first look was used before anybody watched
        first = newest - self.windows.take(min(FARTHEST_US, newest - last))
        entries: dict[int, list[tuple[int, int]]] = {}
        for at, pid, value in fresh:
            entries.setdefault(pid, []).append((at, value))
        used: dict[int, int] = {}
        for pid, mine in entries.items():
            ends = [at for at, _ in mine[:-1]] + [newest if len(mine) == 1 else mine[-1][0]]
            ends = [max(first, end) for end in ends]
            starts = [first, *ends[:-1]]
            used[pid] = sum(value * (end - start) // 100 for (_, value), start, end in zip(mine, starts, ends, strict=True))
        total, window = sum(used.values()), newest - first
        if total > window:
            used = {pid: amount * window // total for pid, amount in used.items()}
        clients = {pid: self.threads_ppm.get(pid, FULL_PPM) for pid, item in listed.items() if item.mps == "client"}
        for pid, amount in used.items():
            known = self.processes.get(pid)
            server = (pid in listed and listed[pid].mps == "server") or is_server(known.command if known else None)
            for owner, part in (divide(amount, clients) if server and clients else {pid: amount}).items():
                busy = self._process(owner, at_us)
                if busy is not None:
                    busy.total_us += part
                    busy.divided = busy.divided or owner != pid

    def _process(self, pid: int, at_us: int) -> _Busy | None:
        """What is kept of the process that has `pid` now; None for a pid that nobody ever saw (samples outlive their process)."""
        busy, start = self.processes.get(pid), start_ticks_of(pid, self.proc)
        if start is not None and (busy is None or busy.start_ticks != start):
            busy = _Busy(start, command_of(pid, self.proc))
            self.processes[pid] = busy
        if busy is not None:
            busy.seen_us = at_us
        return busy

    def readings(self, listed: Mapping[int, Listed]) -> tuple[ProcessReading, ...]:
        """Everybody who is on the card, or was on it a moment ago."""
        at_us = time.monotonic_ns() // 1000
        for pid in [pid for pid, busy in self.processes.items() if at_us - busy.seen_us > FORGET_AFTER_US]:
            del self.processes[pid]
        found = []
        for pid in sorted(listed.keys() | self.processes.keys()):
            busy, item = self.processes.get(pid), listed.get(pid, Listed())
            found.append(
                ProcessReading(
                    pid=pid,
                    start_ticks=busy.start_ticks if busy else None,
                    command=busy.command if busy else None,
                    memory_bytes=item.memory,
                    busy_us_total=busy.total_us if busy and self.process_samples else None,
                    listed=pid in listed,
                    divided=busy.divided if busy else False,
                    mps=item.mps,
                    active_thread_ppm=self.threads_ppm.get(pid),
                    gpu_instance_id=item.gpu_instance,
                    compute_instance_id=item.compute_instance,
                )
            )
        return tuple(found)


def _percent(value: Any) -> int:
    found = number(value)
    return _UNTOLD if found is None else min(100, found)


def divide(amount: int, weights: Mapping[int, int]) -> dict[int, int]:
    """An amount in whole parts by weight (all 0: alike); the parts add up to it, and who comes first by number gets what is left."""
    total = sum(weights.values())
    shares = weights if total > 0 else dict.fromkeys(weights, 1)
    total = total or len(shares)
    parts = {key: amount * weight // total for key, weight in sorted(shares.items())}
    left = amount - sum(parts.values())
    for key in list(parts)[:left]:
        parts[key] += 1
    return parts
