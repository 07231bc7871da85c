"""Segments: immutable zstd Parquet files, one kind and one UTC day each, durable before anything names them.

`segments/KIND/day=YYYY-MM-DD/NAME.parquet` under the root; written under a temporary name, synced, renamed, and the folder synced.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.tables import SegmentKind, arrow_schema
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import DAY_US, MICROSECONDS
from poolmeter.model.usage import RecordKind, UsageRecord

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "segments"
TEMPORARY = ".tmp-"
ROW_GROUP = {SegmentKind.NOW: 16_384}  # a question about one part of the snapshots passes over the others


@dataclass(frozen=True)
class Segment:
    """A live segment; `file` is relative to the root; `level` counts how often its rows were merged."""

    kind: SegmentKind
    day: str
    file: str
    rows: int
    bytes: int
    min_minute_us: int
    max_minute_us: int
    level: int = 0


def day_of(minute_us: int) -> str:
    """The UTC day of a moment, YYYY-MM-DD."""
    return datetime.fromtimestamp(minute_us // MICROSECONDS, UTC).strftime("%Y-%m-%d")


def day_start_us(day: str) -> int:
    """Epoch microseconds of a UTC day's start."""
    return int(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * MICROSECONDS


def write_segment(root: Path, kind: SegmentKind, day: str, table: "pa.Table", time_column: str, level: int = 0) -> Segment:
    """Write one segment, synced; the folder is synced by the caller (`sync_folders`). Nothing is left behind on an error (OSError)."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    folder = root / FOLDER / kind.value / f"day={day}"
    folder.mkdir(parents=True, exist_ok=True)
    stem = secrets.token_hex(8)
    temporary = folder / f"{TEMPORARY}{stem}"
    final = folder / f"{stem}.parquet"
    typed = table.select(arrow_schema(kind).names).cast(arrow_schema(kind)).replace_schema_metadata(arrow_schema(kind).metadata)
    try:
        with temporary.open("wb") as file:
            pq.write_table(typed, file, compression="zstd", row_group_size=ROW_GROUP.get(kind, 122_880))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.rename(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    bounds = pc.min_max(typed.column(time_column)).as_py()
    return Segment(kind, day, str(final.relative_to(root)), typed.num_rows, size, bounds["min"], bounds["max"], level)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(root: Path, segments: Sequence[Segment]) -> None:
    """Make the names of segments durable, and those of the folders they may have been the first in."""
    folders = {(root / segment.file).parent for segment in segments}
    for folder in folders | {folder.parent for folder in folders} | ({root / FOLDER, root} if folders else set()):
        sync_folder(folder)


def split_days(kind: SegmentKind, wide: "pa.Table") -> dict[str, "pa.Table"]:
    """The rows of one kind of a wide table, by UTC day, in the kind's own columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    record_kind = RecordKind(kind.value)
    rows = wide.filter(pc.equal(wide.column("kind"), record_kind.value))
    if rows.num_rows == 0:
        return {}
    rows = rows.select(arrow_schema(kind).names)
    days = rows.column("minute_us").to_numpy() // DAY_US
    found = np.unique(days)
    if len(found) == 1:
        return {day_of(int(found[0]) * DAY_US): rows}
    return {day_of(int(day) * DAY_US): rows.filter(pa.array(days == day)) for day in found}


def publish_records(root: Path, records: Sequence[UsageRecord], snapshots: Sequence[Snapshot] = (), now_us: int | None = None) -> None:
    """Store model records and snapshots by the collector's own write path (check, segment, catalog), and close the store again.

    For tests and imports; records may be of several nodes and epochs, in any order of sequence. `now_us` is the clock the future rule
    goes by (the system's, or the newest record's minute when that is later, so that made-up times do not depend on the day). Rows that break a rule land in `quarantine`, as they do from the wire. Raises Unavailable when a collector
    owns the root.
    """
    from poolmeter import arrow
    from poolmeter.clock import SystemClock
    from poolmeter.collector.check import Expected, check_usage
    from poolmeter.collector.now import newest
    from poolmeter.collector.state import NodeRow
    from poolmeter.collector.store import Batch, Store

    now = max([SystemClock().wall_us(), *(record.minute_us for record in records)]) if now_us is None else now_us
    spools: dict[tuple[str, str], list[UsageRecord]] = {}
    for record in records:
        spools.setdefault((record.node, record.epoch), []).append(record)
    batches = []
    for (node, epoch), found in spools.items():
        found.sort(key=lambda record: record.sequence)
        expected = Expected(node, epoch, found[-1].sequence, now)
        batches.append(Batch(node, epoch, check_usage(arrow.to_table(found), expected), now))
    last = {snapshot.node: snapshot for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.taken_us)}
    epochs = {batch.node: batch.epoch for batch in batches} | {node: snapshot.epoch for node, snapshot in last.items()}
    nodes = []
    for node, epoch in epochs.items():
        snapshot = last.get(node)
        pool, simulated = (snapshot.pool, snapshot.simulated) if snapshot else (None, None)
        nodes.append(NodeRow(f"records:{node}", node, epoch, now, "up", None, pool, simulated))
    with Store(root) as store:
        store.publish(batches, [newest(snapshot) for snapshot in last.values()], nodes, now)
