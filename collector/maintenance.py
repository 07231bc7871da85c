"""Upkeep of a store: what is over forgotten, small segments merged, closed days rolled up into hours and days.

Each step replaces some live segments by others in one publication; a step whose ground changed meanwhile is dropped and tried again later.
What is read is checked against its checksum first: a damaged segment must not pass its damage on under a new one.
"""

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from poolmeter.collector.audit import examine
from poolmeter.collector.retention import Retention, expired
from poolmeter.collector.rollup import read_segments, rollup_select
from poolmeter.collector.segments import Segment, day_start_us, write_segment
from poolmeter.collector.state import State
from poolmeter.collector.store import Store
from poolmeter.collector.tables import MEASURES, ROLLUPS, SegmentKind, literal, quoted, segment_fields
from poolmeter.errors import DataError
from poolmeter.model.units import DAY_US, HOUR_US

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("poolmeter.collector")
FAN_IN = 16  # so many segments of one level make one of the next
LEVELS = 3
MERGED_ROWS = 5_000_000  # at most, which bounds the memory of a merge
CLOSED_AFTER_US = HOUR_US  # late rows of a day mostly come within the hour
_ORDER = ("node", "device_uuid", "allocation_id", "pid", "minute_us", "received_us", "sequence")


def maintain(store: Store, now_us: int, keep: Retention, at_once: bool = False) -> int:
    """Do what is due; how many steps were taken. Raises Unavailable when the store cannot be written.

    `at_once` merges what would else wait for more segments or for the end of the day.
    """
    steps = int(_retire(store, now_us, keep))
    while merge := next_merge(store.state, now_us, at_once, store.damaged):
        try:
            if not _merge(store, merge):
                break
        except DataError as error:  # its segment is known as damaged now, and is left out from here on
            _log.error("maintenance: %s", error)
            continue
        steps += 1
    for kind, day in due_rollups(store.state, now_us, store.damaged):
        try:
            steps += int(_roll(store, kind, day))
        except DataError as error:
            _log.error("maintenance: %s", error)
    store.sweep()
    if steps:
        _log.info("maintenance of %s: %d steps, %d live segments", store.root, steps, len(store.state.segments))
    return steps


def _groups(state: State) -> dict[tuple[SegmentKind, str], list[Segment]]:
    groups: dict[tuple[SegmentKind, str], list[Segment]] = {}
    for segment in state.segments.values():
        groups.setdefault((segment.kind, segment.day), []).append(segment)
    return groups


def next_merge(state: State, now_us: int, at_once: bool = False, damaged: Collection[str] = ()) -> list[Segment] | None:
    """Segments of one kind and day that should become one: many of a level, or all the small ones of a closed day; None: none."""
    for (kind, day), found in sorted(_groups(state).items()):
        if kind in ROLLUPS or kind is SegmentKind.NOW:
            continue
        segments = [segment for segment in found if segment.file not in damaged]
        closed = at_once or day_start_us(day) + DAY_US + CLOSED_AFTER_US <= now_us
        for level in range(LEVELS):
            own = [segment for segment in segments if segment.level == level]
            if len(own) >= FAN_IN and len(chosen := _bounded(own)) > 1:
                return chosen
        if closed:
            small = _bounded([segment for segment in segments if segment.rows < MERGED_ROWS // 2])
            if len(small) > 1:
                return small
    return None


def _bounded(segments: Sequence[Segment]) -> list[Segment]:
    chosen: list[Segment] = []
    rows = 0
    for segment in sorted(segments, key=lambda segment: (segment.rows, segment.file)):
        if chosen and rows + segment.rows > MERGED_ROWS:
            break
        chosen.append(segment)
        rows += segment.rows
    return chosen


def _merge(store: Store, old: Sequence[Segment]) -> bool:
    kind, day = old[0].kind, old[0].day

    def write() -> list[Segment]:
        names = [field.name for field in segment_fields(kind)]
        order = ", ".join(quoted(name) for name in _ORDER if name in names)
        columns = ", ".join(map(quoted, names))
        _verify(store, old)
        table = _ask(store, f"SELECT {columns} FROM {read_segments(old)} ORDER BY {order}")
        expected = sum(segment.rows for segment in old)
        if table.num_rows != expected:
            raise RuntimeError(f"merge of {kind.value} {day} read {table.num_rows} rows, expected {expected}")
        level = min(max(segment.level for segment in old) + 1, LEVELS)
        return [write_segment(store.root, kind, day, table, level)]

    return store.swap(old, write, lambda state: [segment.file in state.segments for segment in old])


def _verify(store: Store, segments: Sequence[Segment]) -> None:
    """Raises DataError when one is damaged, which the store then knows."""
    found = [problem for segment in segments if (problem := examine(store.root, segment)) is not None]
    store.damaged |= {problem.file: problem.sentence for problem in found}
    if found:
        raise DataError(found[0].sentence)


def due_rollups(state: State, now_us: int, damaged: Collection[str] = ()) -> list[tuple[SegmentKind, str]]:
    """(kind of rollup, day) of closed days that have rows and no such rollup stored; a day with a damaged segment waits."""
    days = set(_groups(state))
    torn = {(segment.kind, segment.day) for segment in state.segments.values() if segment.file in damaged}
    return [
        (kind, day)
        for kind, rollup in ROLLUPS.items()
        for found, day in sorted(days - torn)
        if found is rollup.source and (kind, day) not in days and day_start_us(day) + DAY_US + CLOSED_AFTER_US <= now_us
    ]


def _roll(store: Store, kind: SegmentKind, day: str) -> bool:
    source = ROLLUPS[kind].source

    def basis(state: State) -> frozenset[str]:
        return frozenset(segment.file for segment in state.segments.values() if segment.kind is source and segment.day == day)

    def write() -> list[Segment]:
        segments = [segment for segment in store.state.segments.values() if segment.kind is source and segment.day == day]
        _verify(store, segments)
        order = ", ".join(map(quoted, (*MEASURES[source].keys, ROLLUPS[kind].start)))
        table = _ask(store, f"SELECT * FROM ({rollup_select(kind, read_segments(segments))}) ORDER BY {order}")
        return [write_segment(store.root, kind, day, table)]

    return store.swap((), write, basis)


def _retire(store: Store, now_us: int, keep: Retention) -> bool:
    """Drop what is over; False when there is nothing, or when a late row has just dropped a rollup that told of it."""
    chosen = store.state
    old = expired(chosen, now_us, keep)
    gone = {segment.file for segment in old}
    return bool(old) and store.swap(old, list, lambda state: gone <= {found.file for found in expired(state, now_us, keep)}, chosen)


def _ask(store: Store, sql: str) -> "pa.Table":
    import duckdb

    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(f"SET file_search_path = {literal(str(store.root.absolute()))}")
        return connection.sql(sql).to_arrow_table()
