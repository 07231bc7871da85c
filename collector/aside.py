"""Setting a damaged segment aside: the rest of the store goes on, and what is gone is written down by node and time, never silently."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.audit import examine, find_segment, live_segments
from poolmeter.collector.catalog import open_catalog
from poolmeter.collector.rollup import read_segments
from poolmeter.collector.segments import Lost, Segment, day_of, day_start_us, sync_folder
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.state import State
from poolmeter.collector.store import Store
from poolmeter.collector.tables import ROLLUPS, SegmentKind, literal
from poolmeter.errors import Refused
from poolmeter.model.units import DAY_US
from poolmeter.model.usage import RecordKind

if TYPE_CHECKING:
    import duckdb

DAMAGED = "damaged"
_SEQUENCED = tuple(SegmentKind(kind.value) for kind in RecordKind)
_log = logging.getLogger("poolmeter.collector")


def set_aside(root: Path, names: Sequence[str], now_us: int) -> list[Lost]:
    """Publish a state without these damaged segments and move their files to `damaged/`; what is lost with them.

    Raises Unavailable (a collector owns the store, no such segment), Refused when a segment is whole.
    """
    segments = [find_segment(root, name) for name in names]
    problems = []
    for segment in segments:
        problem = examine(root, segment)
        if problem is None:
            raise Refused(f"segment {segment.file} of store {root} is whole, expected a damaged one")
        problems.append(problem)
    # Others may be torn too: each is set aside by its own word, and none of them must keep the store from opening for this.
    out: list[Lost] = []
    with Store(root, damaged=_live(root)) as store:
        for segment, problem in zip(segments, problems, strict=True):
            lost = losses(store.root, store.state, segment, now_us, problem.sentence)
            store.lose(segment, lost)
            _move(root, segment)
            _log.warning("set aside: %s", problem.sentence)
            out += lost
    return out


def _live(root: Path) -> list[str]:
    with open_catalog(root) as connection:
        return [segment.file for segment in live_segments(connection)]


def _move(root: Path, segment: Segment) -> None:
    folder = root / DAMAGED
    folder.mkdir(exist_ok=True)
    source = root / segment.file
    try:
        os.rename(source, folder / f"{segment.kind.value}-{segment.day}-{source.name}")
    except FileNotFoundError:
        return  # it is missing: that was the damage
    sync_folder(folder)
    sync_folder(source.parent)


def losses(root: Path, state: State, segment: Segment, now_us: int, reason: str) -> list[Lost]:
    """What goes with a segment, by node.

    A torn file cannot say whose rows it held. They are the sequences that the catalog knows as stored, that no live segment has, and
    whose neighbours lie at times of the segment. Rows that went for another reason (process rows past their time, quarantine in bulk) make
    that too many: then the numbers are "at most" (`exact` is false). A rollup whose minutes are live loses nothing, and neither do newest
    snapshots: the next pulls bring newer ones.
    """

    def lost(node: str | None, rows: int, exact: bool) -> Lost:
        return Lost(
            segment.kind.value, segment.day, segment.file, node, rows, exact, segment.min_minute_us, segment.max_minute_us, now_us, reason
        )

    if segment.kind is SegmentKind.NOW or (
        segment.kind in ROLLUPS
        and any(found.kind is ROLLUPS[segment.kind].source and found.day == segment.day for found in state.segments.values())
    ):
        return []
    if segment.kind not in _SEQUENCED:
        return [lost(None, segment.rows, True)]
    holes = _holes(root, state, segment)
    total = sum(holes.values())
    if total < segment.rows:  # not all holes can be seen: known ranges were joined
        return [lost(None, segment.rows, True)]
    return [lost(node, min(count, segment.rows), total == segment.rows) for node, count in sorted(holes.items())]


def _holes(root: Path, state: State, segment: Segment) -> dict[str, int]:
    """By node, how many sequences that are known as stored have no live row, where the rows beside them lie at times of the segment."""
    import duckdb

    start = day_start_us(segment.day)
    days = {day_of(start - DAY_US), segment.day, day_of(start + DAY_US)}
    near, far = [], []
    for found in state.segments.values():
        if found.file == segment.file or found.kind not in (*_SEQUENCED, SegmentKind.QUARANTINE):
            continue
        if found.day in days or found.kind is SegmentKind.QUARANTINE:
            near += [found] if examine(root, found) is None else []
        else:
            far += [found] if (root / found.file).exists() else []
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(f"SET file_search_path = {literal(str(root.absolute()))}")
        _fill_points(connection, near, far)
        gaps = connection.execute(
            "SELECT * FROM (SELECT node, epoch, sequence + 1 AS first, lead(sequence) OVER spool - 1 AS last, minute_us,"
            " lead(minute_us) OVER spool AS next_us FROM points WINDOW spool AS (PARTITION BY node, epoch ORDER BY sequence))"
            " WHERE last >= first AND coalesce(minute_us <= ?, true) AND coalesce(next_us >= ?, true)",
            [segment.max_minute_us, segment.min_minute_us],
        ).fetchall()
        ends = connection.execute(
            "SELECT node, epoch, min(sequence), arg_min(minute_us, sequence), max(sequence), arg_max(minute_us, sequence) FROM points GROUP BY ALL"
        ).fetchall()
    holes = [((node, epoch), first, last) for node, epoch, first, last, _, _ in gaps]
    seen = {(node, epoch): rest for node, epoch, *rest in ends}
    for key, ranges in state.sequences.items():
        if not ranges.ranges:
            continue
        first, last = ranges.ranges[0][0], ranges.ranges[-1][1]
        if key not in seen:
            holes.append((key, first, last))
            continue
        low, low_us, high, high_us = seen[key]
        holes += [(key, first, low - 1)] if low_us is None or low_us >= segment.min_minute_us else []
        holes += [(key, high + 1, last)] if high_us is None or high_us <= segment.max_minute_us else []
    out: dict[str, int] = {}
    for key, first, last in holes:
        if count := _known_between(state.sequences.get(key, Ranges()), first, last):
            out[key[0]] = out.get(key[0], 0) + count
    return out


def _fill_points(connection: "duckdb.DuckDBPyConnection", near: Sequence[Segment], far: Sequence[Segment]) -> None:
    """A table `points` of live sequences and their minutes: all of `near`, and the outermost of each day of `far`."""
    connection.execute("CREATE TABLE points (node VARCHAR, epoch VARCHAR, sequence BIGINT, minute_us BIGINT)")
    columns = "node, epoch, sequence, minute_us"
    for segment in near:
        connection.execute(f"INSERT INTO points SELECT {columns} FROM {read_segments([segment])} WHERE sequence IS NOT NULL")
    for day in sorted({found.day for found in far}):
        own = read_segments([found for found in far if found.day == day])
        for pick in ("min", "max"):
            connection.execute(
                f"INSERT INTO points SELECT node, epoch, {pick}(sequence), arg_{pick}(minute_us, sequence) FROM {own} GROUP BY ALL"
            )


def _known_between(ranges: Ranges, first: int, last: int) -> int:
    return sum(max(0, min(last, high) - max(first, low) + 1) for low, high in ranges.ranges)
