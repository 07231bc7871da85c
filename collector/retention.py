"""How long each tier of the store is kept, and which segments are over: pure, from the state and the clock.

Minutes go only when their hours and days are stored; hours go only after their minutes, or they would be rolled up again. Days stay.
"""

from dataclasses import dataclass

from poolmeter.collector.segments import Segment, day_start_us
from poolmeter.collector.state import State
from poolmeter.collector.tables import MEASURES, ROLLUPS, SegmentKind, rollups_of
from poolmeter.model.units import DAY_US


@dataclass(frozen=True)
class Retention:
    """Days that rows are kept beyond their own day; rows of a day (`slice_days`, `device_days`) are kept for ever."""

    process_days: int = 1
    minute_days: int = 400
    hour_days: int = 731
    quarantine_days: int = 30

    def days_of(self, kind: SegmentKind) -> int | None:
        """Days that segments of `kind` are kept; None: for ever."""
        if kind is SegmentKind.NOW:  # each publication of newer ones replaces them
            return None
        if kind is SegmentKind.PROCESS:
            return self.process_days
        if kind is SegmentKind.QUARANTINE:
            return self.quarantine_days
        if kind not in ROLLUPS:
            return self.minute_days
        return None if ROLLUPS[kind].period_us == DAY_US else self.hour_days


def expired(state: State, now_us: int, keep: Retention) -> list[Segment]:
    """Live segments whose time is over and whose rows are told by coarser ones, where there are such."""
    stored = {(segment.kind, segment.day) for segment in state.segments.values()}
    out = []
    for segment in state.segments.values():
        days = keep.days_of(segment.kind)
        if days is None or day_start_us(segment.day) + (1 + days) * DAY_US > now_us:
            continue
        if segment.kind in ROLLUPS and (ROLLUPS[segment.kind].source, segment.day) in stored:
            continue
        if all((kind, segment.day) in stored for kind in rollups_of(segment.kind)):
            out.append(segment)
    return out


def closed_days(state: State) -> frozenset[tuple[SegmentKind, int]]:
    """(kind, number of the day) whose minutes are gone while something rolled up of them is kept."""
    minutes = {(segment.kind, segment.day) for segment in state.segments.values() if segment.kind in MEASURES}
    rolled = {(ROLLUPS[segment.kind].source, segment.day) for segment in state.segments.values() if segment.kind in ROLLUPS}
    return frozenset((kind, day_start_us(day) // DAY_US) for kind, day in rolled - minutes)
