"""NVML's accounting of processes, where it is on; it is never switched on here, for that is a setting of the card.

Drivers from 610 on keep a true sum of utilisation (AccountingStats_v2: hundredths of a per cent summed over samples, and their number); their
mean over the time that the process had a context is device time. Older ones tell whole per cents, and the time only once the process has
ended: good for a last word. Off on a card in MIG mode.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from poolmeter.vendors.nvml import Nvml, number, wide
from poolmeter.vendors.proc import age_us_of
from poolmeter.vendors.reading import ProcessReading


@dataclass
class Accounting:
    """What accounting said of the processes of one card; a number that it gave never falls."""

    nvml: Nvml
    _lacks_v2: bool = False
    _said: dict[tuple[int, int], int] = field(default_factory=dict)
    # When a context was first seen (monotonic) and how old it was then, by (pid, when it began): the clock may be set.
    _seen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, handle: Any, on: bool | None, readings: Iterable[ProcessReading]) -> tuple[ProcessReading, ...]:
        """The readings with `accounted_us_total` where accounting is on and says something of the process."""
        found, said = [], {}
        for reading in readings:
            key = (reading.pid, reading.start_ticks or 0)
            used = self._used(handle, reading) if on and reading.start_ticks is not None else None
            used = max((value for value in (used, self._said.get(key)) if value is not None), default=None) if on else None
            if used is not None:
                said[key] = used
            found.append(reading if used is None else replace(reading, accounted_us_total=used))
        self._said = said
        there = {pid for pid, _ in said}
        self._seen = {key: value for key, value in self._seen.items() if key[0] in there}
        return tuple(found)

    def _used(self, handle: Any, reading: ProcessReading) -> int | None:
        nvml = self.nvml.binding
        if not self._lacks_v2:
            try:
                stats = self.nvml.call("nvmlDeviceGetAccountingStats_v2", handle, reading.pid)
            except nvml.NVMLError as fault:
                self._lacks_v2 = self.nvml.code(fault) in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_SUPPORTED)
                if not self._lacks_v2:
                    return None
            else:
                return None if _another(stats, reading) else summed_us(stats, self._age_us(reading, wide(stats.startTime)))
        stats = self.nvml.ask("nvmlDeviceGetAccountingStats", handle, reading.pid)
        if stats is None or _another(stats, reading) or stats.isRunning:
            return None
        percent, ms = number(stats.gpuUtilization), wide(stats.time)
        return None if percent is None or not ms else min(100, percent) * ms * 10

    def _age_us(self, reading: ProcessReading, began_us: int | None) -> int | None:
        """How old a context of the process is that began at a wall time: by a clock that may have been set since, so not older than the process."""
        if began_us is None:
            return None
        at_us, key = time.monotonic_ns() // 1000, (reading.pid, began_us)
        if key not in self._seen:
            age_us = max(0, time.time_ns() // 1000 - began_us)
            oldest_us = age_us_of(reading.start_ticks) if reading.start_ticks is not None else None
            self._seen[key] = (at_us, age_us if oldest_us is None else min(age_us, oldest_us))
        first_us, age_us = self._seen[key]
        return age_us + at_us - first_us


def _another(stats: Any, reading: ProcessReading) -> bool:
    """Whether they are of a process that had this pid before: it has ended, and ours is on the card."""
    return reading.listed and not stats.isRunning


def summed_us(stats: Any, age_us: int | None) -> int | None:
    """Device time of the sums of AccountingStats_v2: their mean over the time since the context began (`time`, in ms, once it has ended).

    None: the driver has not told them.
    """
    samples, total, ms = number(stats.sampleCount), wide(stats.sumGpuUtil), wide(stats.time)
    if not samples or total is None or ms is None or (ms == 0 and age_us is None):
        return None
    span_us = ms * 1000 or age_us or 0
    return min(total, samples * 10_000) * span_us // (samples * 10_000)


__all__ = ["Accounting", "summed_us"]
