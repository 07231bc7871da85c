"""Bands of a price set: which clock times of which days they cover, and where they meet.

A date is a holiday when the plan lists it, else its day of the week, never both: that is the whole precedence. Clock times that pass
midnight belong to the day on which they begin. Everything is told by the local clock of each minute, so an hour that a clock change
repeats is in its band both times, and one that it skips is in none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun", "holidays")
HOLIDAY = DAYS.index("holidays")
DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Band:
    """Prices of some clock times. `days` are indexes of `DAYS`; `hours` are [start, end) in minutes of the day.

    An `end` past `DAY_MINUTES` lies in the next day. A model that `device_hour` does not cover pays the set's price times `factor`;
    without a factor it has no price. `line` is where the band stands in its file, where that is known.
    """

    name: str
    days: frozenset[int]
    hours: tuple[tuple[int, int], ...]
    device_hour: tuple[tuple[str, Decimal], ...] = ()
    factor: Decimal | None = None
    line: int | None = None

    def covered(self, day: int, before: int) -> Iterator[tuple[int, int]]:
        """The minutes of a day that the band covers, as [start, end); `day` and `before` are the kinds (`DAYS`) of it and of the day before."""
        for start, end in self.hours:
            if day in self.days:
                yield start, min(end, DAY_MINUTES)
            if end > DAY_MINUTES and before in self.days:
                yield 0, end - DAY_MINUTES


def kind_of_day(day: int, holidays: frozenset[int]) -> int:
    """What a date is, as an index of `DAYS`; `day` and `holidays` are days since 1970-01-01, which was a Thursday."""
    return HOLIDAY if day in holidays else (day + 3) % 7


def cuts(bands: tuple[Band, ...], day: int, holidays: frozenset[int]) -> list[tuple[int, int, int | None]]:
    """A day from its first minute to its last as [start, end) and the number of the band there; None: the set's own prices."""
    kinds = kind_of_day(day, holidays), kind_of_day(day - 1, holidays)
    edges = {0, DAY_MINUTES}
    spans = [(start, end, number) for number, band in enumerate(bands) for start, end in band.covered(*kinds)]
    edges |= {edge for start, end, _ in spans for edge in (start, end)}
    ordered = sorted(edges)
    found: list[tuple[int, int, int | None]] = []
    for start, end in pairwise(ordered):
        number = next((number for low, high, number in spans if low <= start < high), None)
        if found and found[-1][2] == number:
            found[-1] = (found[-1][0], end, number)
        else:
            found.append((start, end, number))
    return found


def meetings(bands: tuple[Band, ...], day: int, holidays: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """Where two bands cover the same minute of a day: that minute, and the numbers of both."""
    kinds = kind_of_day(day, holidays), kind_of_day(day - 1, holidays)
    spans = sorted((start, end, number) for number, band in enumerate(bands) for start, end in band.covered(*kinds))
    for index, (_, end, number) in enumerate(spans):
        for start, _, other in spans[index + 1 :]:
            if start < end and other != number:
                yield start, min(number, other), max(number, other)
