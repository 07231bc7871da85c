"""Segments: immutable zstd Parquet files, one kind and one UTC day each, durable before anything names them.

`segments/KIND/day=YYYY-MM-DD/NAME.parquet` under the root; written under a temporary name, synced, renamed, and the folder synced.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.collector.tables import SegmentKind, arrow_schema, time_column
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
    """A live segment; `file` is relative to the root; `level` counts how often its rows were merged; `sha256` is of the file's bytes."""

    kind: SegmentKind
    day: str
    file: str
    rows: int
    bytes: int
    min_minute_us: int
    max_minute_us: int
    level: int = 0
    sha256: str | None = None


@dataclass(frozen=True)
class Lost:
    """Rows of a damaged segment that was set aside: `rows` of `node` (None: of which node cannot be told), at most so many unless `exact`."""

    kind: str
    day: str
    file: str
    node: str | None
    rows: int
    exact: bool
    min_minute_us: int
    max_minute_us: int
    at_us: int
    reason: str


def day_of(minute_us: int) -> str:
    """The UTC day of a moment, YYYY-MM-DD."""
    return datetime.fromtimestamp(minute_us // MICROSECONDS, UTC).strftime("%Y-%m-%d")


def day_start_us(day: str) -> int:
    """Epoch microseconds of a UTC day's start."""
    return int(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * MICROSECONDS


def write_segment(root: Path, kind: SegmentKind, day: str, table: "pa.Table", level: int = 0) -> Segment:
    """Write one segment, synced; the folder is synced by the caller (`sync_folders`). Nothing is left behind on an error (OSError)."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    folder = root / FOLDER / kind.value / f"day={day}"
    folder.mkdir(parents=True, exist_ok=True)
    stem = secrets.token_hex(8)
    temporary = folder / f"{TEMPORARY}{stem}"
    final = folder / f"{stem}.parquet"
    typed = (
        table.select(arrow_schema(kind).names)
        .cast(arrow_schema(kind))
        .replace_schema_metadata(arrow_schema(kind).metadata)
        .combine_chunks()
    )
    sink = pa.BufferOutputStream()
    pq.write_table(typed, sink, compression="zstd", row_group_size=ROW_GROUP.get(kind, 122_880), **_encodings(typed.schema))
    body = sink.getvalue()
    try:
        with temporary.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    bounds = pc.min_max(typed.column(time_column(kind))).as_py()
    digest = hashlib.sha256(body).hexdigest()
    return Segment(kind, day, str(final.relative_to(root)), typed.num_rows, body.size, bounds["min"], bounds["max"], level, digest)


def _encodings(schema: "pa.Schema") -> dict[str, Any]:
    """How columns are packed: text by dictionary, whole numbers by their differences, a third smaller and twice as fast to write as by default."""
    import pyarrow as pa

    whole = [column.name for column in schema if column.type == pa.int64()]
    return {
        "use_dictionary": [column.name for column in schema if column.type == pa.utf8()],
        "column_encoding": dict.fromkeys(whole, "DELTA_BINARY_PACKED"),
    }


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(root: Path, segments: Sequence[Segment], known: set[Path]) -> None:
    """Make the names of segments durable, and those of the folders they may have been the first in.

    `known` holds folders whose own names this process has made durable, and takes new ones in; a folder that is removed must leave it.
    """
    folders = {(root / segment.file).parent for segment in segments}
    fresh = folders - known
    for folder in folders | {folder.parent for folder in fresh} | ({root / FOLDER, root} if fresh else set()):
        sync_folder(folder)
    known |= fresh


def kinds_of(wide: "pa.Table") -> list[RecordKind]:
    """The kinds that a wide table has rows of."""
    import pyarrow.compute as pc

    found = set(pc.unique(wide.column("kind")).to_pylist())
    return [kind for kind in RecordKind if kind.value in found]


def split_days(kind: SegmentKind, wide: "pa.Table") -> dict[str, "pa.Table"]:
    """The rows of one kind of a wide table, by UTC day, in the kind's own columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    mine = pc.equal(wide.column("kind"), RecordKind(kind.value).value)
    # The columns first: a table of many nodes' answers has many pieces, and each column of each piece is filtered on its own.
    rows = wide.select(arrow_schema(kind).names)
    if not pc.all(mine).as_py():
        rows = rows.filter(mine)
    if rows.num_rows == 0:
        return {}
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
