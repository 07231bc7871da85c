"""Clocks as an argument: quantity from monotonic time, placement from wall time.

Everything that needs the time takes a `Clock`; tests pass `ManualClock`. All times are integers.
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """What the components read the time from."""

    def wall_us(self) -> int:
        """Microseconds since the Unix epoch, UTC; may step."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds of a clock that never steps back (and counts suspend: CLOCK_BOOTTIME where there is one)."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@dataclass
class ManualClock:
    """A clock that moves only when told to."""

    wall: int
    monotonic: int = 0

    def wall_us(self) -> int:
        return self.wall

    def monotonic_us(self) -> int:
        return self.monotonic

    def advance(self, us: int) -> None:
        """Move both clocks forward by `us` microseconds."""
        self.wall += us
        self.monotonic += us
