"""How much of what broke a rule is kept: a hostile exporter must not fill the disk with it. What is not kept is counted all the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolmeter.collector.segments import Segment
from poolmeter.collector.tables import SegmentKind

ROWS_A_NODE = 10_000  # in a UTC day, each with its text
BYTES_A_NODE = 16 << 20
BYTES_IN_ALL = 256 << 20
NOT_KEPT = (
    f"not kept: rows of this node that broke a rule are more than the {ROWS_A_NODE} or {BYTES_A_NODE >> 20} MiB that are kept of a day"
)


@dataclass(frozen=True)
class Kept:
    """What is kept of a node and day: rows, and bytes of their text."""

    rows: int = 0
    bytes: int = 0


def bounded(rows: Sequence[Mapping[str, Any]], kept: Mapping[str, Kept]) -> tuple[list[Mapping[str, Any]], dict[str, Kept]]:
    """Rows of the quarantine as they may be stored, and what is kept then, by node; `kept` is what the day has already.

    Beyond the limits a node's rows of one epoch are one row without a text, which says how many they are.
    """
    out: list[Mapping[str, Any]] = []
    now, total = dict(kept), sum(one.bytes for one in kept.values())
    dropped: dict[tuple[str, str | None], dict[str, Any]] = {}
    for row in rows:
        node, size = row["node"], _size(row)
        mine = now.get(node, Kept())
        if mine.rows < ROWS_A_NODE and mine.bytes + size <= BYTES_A_NODE and total + size <= BYTES_IN_ALL:
            out.append(row)
            now[node], total = Kept(mine.rows + 1, mine.bytes + size), total + size
            continue
        key = (node, row["epoch"])
        if key not in dropped:
            dropped[key] = {**row, "sequence": None, "minute_us": None, "reason": NOT_KEPT, "rows": 0, "record": None}
        dropped[key]["rows"] += row["rows"]
    return [*out, *dropped.values()], now


def kept_of(root: Path, segments: Sequence[Segment], day: str) -> dict[str, Kept]:
    """What the live segments keep of a UTC day, by node. A damaged segment counts for nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, Kept] = {}
    for segment in segments:
        if segment.kind is not SegmentKind.QUARANTINE or segment.day != day:
            continue
        try:
            table = pq.read_table(root / segment.file, columns=["node", "reason", "record"])
        except (OSError, pa.ArrowException):
            continue
        for row in table.to_pylist():
            if row["reason"] != NOT_KEPT:
                mine = found.get(row["node"], Kept())
                found[row["node"]] = Kept(mine.rows + 1, mine.bytes + _size(row))
    return found


def _size(row: Mapping[str, Any]) -> int:
    return len((row["record"] or "").encode()) + len(row["reason"].encode())
