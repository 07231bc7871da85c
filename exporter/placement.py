"""Where a moment is placed: quantity from monotonic time, placement from wall time, and no minute twice."""

from dataclasses import dataclass
from pathlib import Path

from poolmeter.clock import Clock

STEP_US = 500_000  # wall and monotonic time may differ by this much before the wall clock counts as set


@dataclass(frozen=True)
class Moment:
    """Now. What happened since the cursor lies in [cursor, watched_us); when the clock was set forward, counting goes on at `at_us` later than that."""

    watched_us: int
    at_us: int
    monotonic_us: int


def place(clock: Clock, cursor_us: int, monotonic_us: int) -> Moment:
    """The moment after `cursor_us`, which was at `monotonic_us` of the same boot.

    Clock set forward: time watched stays what the monotonic clock says, and counting jumps. Clock set back: counting goes on ahead of
    the wall clock, because going back would count minutes twice.
    """
    now = clock.monotonic_us()
    expected = cursor_us + max(0, now - monotonic_us)
    wall = clock.wall_us()
    return Moment(expected, wall if wall - expected > STEP_US else expected, now)


def place_after_boot(clock: Clock, cursor_us: int) -> Moment:
    """The moment after a cursor of an earlier boot: only the wall clock bridges it."""
    at = max(cursor_us, clock.wall_us())
    return Moment(at, at, clock.monotonic_us())


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """What the monotonic clock counts from; empty where the kernel does not say."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
