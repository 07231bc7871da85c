"""Upkeep of a store: small segments merged, closed days rolled up, process rows forgotten after their time.

Each step replaces some live segments by others in one publication; a step whose ground changed meanwhile is dropped and tried again later.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poolmeter.collector.rollup import day_select, read_segments
from poolmeter.collector.segments import Segment, day_start_us, write_segment
from poolmeter.collector.state import State
from poolmeter.collector.store import Store
from poolmeter.collector.tables import DAY_SOURCES, SegmentKind, literal, quoted, segment_fields
from poolmeter.model.units import DAY_US, HOUR_US

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("poolmeter.collector")
QUARANTINE_DAYS = 30
FAN_IN = 16  # so many segments of one level make one of the next
LEVELS = 3
MERGED_ROWS = 5_000_000  # at most, which bounds the memory of a merge
CLOSED_AFTER_US = HOUR_US  # late rows of a day mostly come within the hour
TIME_COLUMN = {SegmentKind.QUARANTINE: "received_us", SegmentKind.SLICE_DAY: "first_minute_us", SegmentKind.DEVICE_DAY: "first_minute_us"}
_ORDER = ("node", "device_uuid", "allocation_id", "pid", "minute_us", "received_us", "sequence")


def maintain(store: Store, now_us: int, process_days: int) -> int:
    """Do what is due; how many steps were taken. Raises Unavailable when the store cannot be written."""
    steps = int(_retire(store, now_us, process_days))
    while merge := next_merge(store.state, now_us):
        if not _merge(store, merge):
            break
        steps += 1
    for kind, day in due_rollups(store.state, now_us):
        steps += int(_roll(store, kind, day))
    store.sweep()
    if steps:
        _log.info("maintenance of %s: %d steps, %d live segments", store.root, steps, len(store.state.segments))
    return steps


def _groups(state: State) -> dict[tuple[SegmentKind, str], list[Segment]]:
    groups: dict[tuple[SegmentKind, str], list[Segment]] = {}
    for segment in state.segments.values():
        groups.setdefault((segment.kind, segment.day), []).append(segment)
    return groups


def next_merge(state: State, now_us: int) -> list[Segment] | None:
    """Segments of one kind and day that should become one: many of a level, or all the small ones of a closed day; None: none."""
    for (kind, day), segments in sorted(_groups(state).items()):
        if kind in DAY_SOURCES:
            continue
        closed = day_start_us(day) + DAY_US + CLOSED_AFTER_US <= now_us
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
        table = _ask(store, f"SELECT {columns} FROM {read_segments(old)} ORDER BY {order}")
        expected = sum(segment.rows for segment in old)
        if table.num_rows != expected:
            raise RuntimeError(f"merge of {kind.value} {day} read {table.num_rows} rows, expected {expected}")
        level = min(max(segment.level for segment in old) + 1, LEVELS)
        return [write_segment(store.root, kind, day, table, TIME_COLUMN.get(kind, "minute_us"), level)]

    return store.swap(old, write, lambda state: [segment.file in state.segments for segment in old])


def due_rollups(state: State, now_us: int) -> list[tuple[SegmentKind, str]]:
    """(day kind, day) of closed days that have rows and no stored rollup."""
    days = set(_groups(state))
    out = []
    for kind, source in DAY_SOURCES.items():
        for found, day in sorted(days):
            if found is source and (kind, day) not in days and day_start_us(day) + DAY_US + CLOSED_AFTER_US <= now_us:
                out.append((kind, day))
    return out


def _roll(store: Store, kind: SegmentKind, day: str) -> bool:
    source = DAY_SOURCES[kind]

    def basis(state: State) -> frozenset[str]:
        return frozenset(segment.file for segment in state.segments.values() if segment.kind is source and segment.day == day)

    def write() -> list[Segment]:
        segments = [segment for segment in store.state.segments.values() if segment.kind is source and segment.day == day]
        order = ", ".join(quoted(field.name) for field in segment_fields(kind)[:14])
        table = _ask(store, f"SELECT * FROM ({day_select(kind, read_segments(segments))}) ORDER BY {order}")
        return [write_segment(store.root, kind, day, table, TIME_COLUMN[kind])]

    return store.swap((), write, basis)


def _retire(store: Store, now_us: int, process_days: int) -> bool:
    """Drop process days that are over by more than `process_days`, and old quarantine: a node gone wrong must not fill the disk."""
    kept = {SegmentKind.PROCESS: process_days, SegmentKind.QUARANTINE: QUARANTINE_DAYS}
    old = [
        segment
        for segment in store.state.segments.values()
        if segment.kind in kept and day_start_us(segment.day) + (1 + kept[segment.kind]) * DAY_US <= now_us
    ]
    return bool(old) and store.swap(old, list, lambda _: None)


def _ask(store: Store, sql: str) -> "pa.Table":
    import duckdb

    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(f"SET file_search_path = {literal(str(store.root.absolute()))}")
        return connection.sql(sql).to_arrow_table()
