"""How much time a utilisation sample stands for, and what becomes of samples when the clock is set.

NVML gives samples the wall clock's time. One covers the time since the one before it, but only as far as samples reach: after an outage, or
a clock that was set forward, it says nothing of the hole before it. A clock that was set back leaves samples ahead of it in the driver's
buffer, which are counted already.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Generic, TypeVar

T = TypeVar("T")
LONGEST_US = 1_000_000  # NVML's documentation: a sample is of 1/6 s to 1 s
PERIODS = 3
STEP_US = 500_000  # wall and monotonic time part by this much before the clock counts as set


@dataclass
class Cover:
    """The card's sample period, learnt from the distances between its samples."""

    _gaps: deque[int] = field(default_factory=lambda: deque(maxlen=31))

    @property
    def period_us(self) -> int:
        """The usual distance; the longest there is as long as nothing is known."""
        return min(LONGEST_US, median_low(self._gaps)) if self._gaps else LONGEST_US

    @property
    def reach_us(self) -> int:
        """The longest distance that is still one sample's: a few periods."""
        return max(LONGEST_US, PERIODS * self.period_us)

    def learn(self, times: Iterable[int]) -> None:
        """Take the distances of samples that are not counted."""
        self._gaps.extend(after - before for before, after in pairwise(sorted(times)) if after > before)

    def of(self, gap_us: int) -> int:
        """What a sample covers of the time (above 0) since the one before it: all of it, but beyond a few periods one period."""
        covered = gap_us if gap_us <= self.reach_us else self.period_us
        self._gaps.append(gap_us)
        return covered


@dataclass
class Allowance:
    """Samples together cover no more than the time that passed: they may run ahead of it by `slack_us`, once and not at each look."""

    _left_us: int | None = None

    def passed(self, us: int, slack_us: int) -> None:
        """Time went by."""
        self._left_us = min(slack_us, self._left_us if self._left_us is not None else slack_us) + us

    def take(self, us: int) -> int:
        """As much of this as there is."""
        taken = min(us, self._left_us or 0)
        self._left_us = (self._left_us or 0) - taken
        return taken


@dataclass
class Steps:
    """Tells when the wall clock was set back."""

    _ahead_us: int | None = None

    def back_us(self, wall_us: int, monotonic_us: int) -> int:
        """How far it was set back since the last call; 0: it was not."""
        ahead, self._ahead_us = self._ahead_us, wall_us - monotonic_us
        return max(0, ahead - self._ahead_us) if ahead is not None and ahead - self._ahead_us > STEP_US else 0


@dataclass
class Ahead(Generic[T]):
    """Samples that lay ahead of the clock when it was set back (or at the first look): counted already, or of nobody. They are passed over
    whenever they come again; a new one counts, also from a driver whose clock does not follow."""

    due: bool = True
    _passed: frozenset[T] = frozenset()

    def sift(self, samples: list[tuple[int, T]], wall_us: int) -> list[T]:
        """Those of (time, sample) that count."""
        if self.due and samples:
            self._passed = frozenset(sample for at, sample in samples if at > wall_us + LONGEST_US)
            self.due = False
        return [sample for _, sample in samples if sample not in self._passed] if self._passed else [sample for _, sample in samples]
