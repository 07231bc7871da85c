"""Checking a store: every live segment against what the catalog says of it, and every sequence against all the others.

Reads alone, so it may run beside the collector that owns the store; a segment that is merged away meanwhile is left out.
"""

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from poolmeter.collector.catalog import CURRENT, TornCatalog, open_catalog
from poolmeter.collector.rollup import read_segments, view_lists
from poolmeter.collector.segments import FOLDER, Segment, day_of
from poolmeter.collector.tables import VIEWS, SegmentKind, arrow_schema, literal, time_column
from poolmeter.errors import DataError, Unavailable
from poolmeter.model.usage import RecordKind

if TYPE_CHECKING:
    import duckdb

SET_ASIDE = "poolmeter store check --set-aside FILE takes it out and counts its rows as lost; a backup may still have it"
PART_ROWS = 4_000_000  # so many sequences are compared at a time, which bounds the memory
_CHUNK = 1 << 20
_SEQUENCED = tuple(SegmentKind(kind.value) for kind in RecordKind)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the store: `file` is relative to the root, `rows` those concerned (None: not known)."""

    problem: str
    file: str
    found: str
    expected: str
    advice: str
    rows: int | None = None

    @property
    def sentence(self) -> str:
        """What is wrong, as one sentence."""
        return f"{self.file} of the store is damaged ({self.problem}): {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Audit:
    """What a check found; `replaced` segments were merged away while it ran."""

    generation: int | None
    segments: int = 0
    rows: int = 0
    bytes: int = 0
    checksummed: int = 0
    replaced: int = 0
    leftovers: int = 0
    leftover_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


def live_segments(connection: "duckdb.DuckDBPyConnection") -> list[Segment]:
    """The segments that an open catalog names."""
    rows = connection.sql("SELECT * FROM segments ORDER BY day, kind, file").to_arrow_table().to_pylist()
    return [Segment(**{**row, "kind": SegmentKind(row["kind"])}) for row in rows]


def digest_of(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file, as hexadecimal. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def open_file(path: Path) -> BinaryIO:
    """A file to read. Raises OSError, also for what is none: nobody waits for the other end of a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def examine(root: Path, segment: Segment, whole: bool = True) -> Problem | None:
    """What is wrong with one segment's file; None: it is what the catalog says. Not `whole`: as far as size and footer tell."""

    def wrong(problem: str, found: object, expected: object) -> Problem:
        return Problem(problem, segment.file, str(found), str(expected), SET_ASIDE, segment.rows)

    try:
        size, digest = digest_of(root / segment.file) if whole else ((root / segment.file).stat().st_size, segment.sha256)
    except FileNotFoundError:
        return wrong("missing", "no such file", f"{segment.bytes} bytes")
    except OSError as error:
        return wrong("unreadable", error.strerror or error, f"{segment.bytes} bytes")
    if size != segment.bytes:
        return wrong("size", f"{size} bytes", f"{segment.bytes} bytes")
    if segment.sha256 is not None and digest != segment.sha256:
        return wrong("checksum", f"SHA-256 {digest}", segment.sha256)
    return _examine_rows(root, segment, wrong, whole)


def _examine_rows(root: Path, segment: Segment, wrong: Callable[[str, object, object], Problem], whole: bool) -> Problem | None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    name = time_column(segment.kind)
    low: int | None = None
    high: int | None = None
    try:
        with pq.ParquetFile(root / segment.file) as file:
            schema = file.schema_arrow
            missing = [column for column in arrow_schema(segment.kind).names if column not in schema.names]
            if missing:
                return wrong("columns", f"no column {missing[0]}", f"the columns of a {segment.kind.value} segment")
            if file.metadata.num_rows != segment.rows:
                return wrong("rows", f"{file.metadata.num_rows} rows", f"{segment.rows} rows")
            if not whole:
                return None
            # Without a checksum only reading every value tells that they can be read.
            columns = None if segment.sha256 is None else [name]
            for part in file.iter_batches(columns=columns):
                bounds = pc.min_max(part.column(name)).as_py()
                low = bounds["min"] if low is None else min(low, bounds["min"])
                high = bounds["max"] if high is None else max(high, bounds["max"])
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        return wrong("unreadable", (str(error).splitlines() or [repr(error)])[0][:160], "a Parquet file")
    if (low, high) != (segment.min_minute_us, segment.max_minute_us):
        return wrong("times", f"{name} from {low} to {high}", f"{segment.min_minute_us} to {segment.max_minute_us}")
    # Quarantine lies under the day it was published on (it may have been received just before midnight), newest snapshots under none.
    if (
        segment.kind not in (SegmentKind.QUARANTINE, SegmentKind.NOW)
        and low is not None
        and high is not None
        and {day_of(low), day_of(high)} != {segment.day}
    ):
        return wrong("day", f"rows of {day_of(low)} to {day_of(high)}", f"rows of {segment.day}")
    return None


def _nothing(done: int, total: int) -> None:
    pass


def torn_heads(root: Path, segments: Sequence[Segment], damaged: Collection[str]) -> dict[str, str]:
    """Segments that keep a catalog from being written: what is wrong, by file. Only those are read that a view would have to begin with."""
    found: dict[str, str] = {}
    newest = [segment for segment in segments if segment.kind is SegmentKind.NOW]
    for lists in ([newest], *(view_lists(kind, segments) for kind, _, _ in VIEWS.values())):
        for part in lists:
            for segment in part:
                if segment.file in damaged or segment.file in found:
                    continue
                problem = examine(root, segment, whole=False)
                if problem is None:
                    break
                found[segment.file] = problem.sentence
    return found


def audit(root: Path, show: Callable[[int, int], None] = _nothing) -> Audit:
    """Check the whole store; `show` is told bytes read and bytes in all.

    Raises Unavailable (no store), DataError (another version). A torn catalog is a finding, and the only one: nothing else says what belongs to the store.
    """
    try:
        opened = open_catalog(root)
    except TornCatalog as error:
        advice = "poolmeter store restore puts a backup in its place"
        return Audit(None, problems=[Problem("catalog", CURRENT, str(error), "a catalog that can be opened", advice)])
    with opened as connection:
        segments = live_segments(connection)
        generation = connection.execute("SELECT generation FROM meta").fetchall()[0][0]
        ranges = connection.sql("SELECT node, epoch, first_sequence, last_sequence FROM sequences").to_arrow_table()
    total, done = sum(segment.bytes for segment in segments), 0
    problems: list[Problem] = []
    for segment in segments:
        problem = examine(root, segment)
        if problem is not None:
            problems.append(problem)
        done += segment.bytes
        show(done, total)
    named = _named_now(root)
    replaced = {segment.file for segment in segments if segment.file not in named and not (root / segment.file).exists()}
    problems = [problem for problem in problems if problem.file not in replaced]
    bad = {problem.file for problem in problems} | replaced
    whole = [segment for segment in segments if segment.file not in bad]
    if not replaced:
        problems += _sequences(root, whole, ranges)
    leftovers = list(_leftovers(root, named | {segment.file for segment in segments}))
    return Audit(
        generation,
        len(segments) - len(replaced),
        sum(segment.rows for segment in whole),
        sum(segment.bytes for segment in whole),
        sum(segment.sha256 is not None for segment in whole),
        len(replaced),
        len(leftovers),
        sum(leftovers),
        problems,
    )


def _named_now(root: Path) -> set[str]:
    with open_catalog(root) as connection:
        return {segment.file for segment in live_segments(connection)}


def _leftovers(root: Path, named: set[str]) -> Iterator[int]:
    """Sizes of segment files that no catalog names: of merges within their grace, or of a collector that was killed."""
    for path in (root / FOLDER).glob("*/*/*"):
        if str(path.relative_to(root)) not in named:
            try:
                yield path.stat().st_size
            except FileNotFoundError:
                continue


def _sequences(root: Path, segments: Sequence[Segment], ranges: object) -> list[Problem]:
    """Records stored twice, and records that the catalog does not know as stored (they would be stored again)."""
    import duckdb

    out: list[Problem] = []
    days: dict[str, list[Segment]] = {}
    for segment in segments:
        if segment.kind in _SEQUENCED:
            days.setdefault(segment.day, []).append(segment)
    with tempfile.TemporaryDirectory() as spill, duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(f"SET file_search_path = {literal(str(root.absolute()))}")
        connection.execute(f"SET temp_directory = {literal(spill)}")
        connection.register("ranges", ranges)
        connection.execute("CREATE TABLE extents (day VARCHAR, node VARCHAR, epoch VARCHAR, low BIGINT, high BIGINT)")
        try:
            for day, own in sorted(days.items()):
                parts = 1 + sum(segment.rows for segment in own) // PART_ROWS
                for part in range(parts):
                    chosen = f"SELECT node, epoch, sequence FROM {read_segments(own)} WHERE hash(node, epoch) % {parts} = {part}"
                    connection.execute(f"CREATE OR REPLACE TABLE part AS {chosen}")
                    out += _within(connection, day)
            out += _between(connection, days)
        except duckdb.IOException as error:
            # Merged away while we read: the next check tells.
            if not _changed(root, segments):
                raise DataError(f"store {root} cannot be read: {str(error).splitlines()[0]:.200}") from None
    return out


def _changed(root: Path, segments: Iterable[Segment]) -> bool:
    return any(not (root / segment.file).exists() for segment in segments)


def _within(connection: "duckdb.DuckDBPyConnection", day: str) -> list[Problem]:
    where = f"segments of {day}"
    twice = connection.execute(
        "SELECT node, epoch, min(sequence), count(*) FROM (SELECT node, epoch, sequence FROM part GROUP BY ALL HAVING count(*) > 1) GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    unknown = connection.execute(
        "SELECT p.node, p.epoch, min(p.sequence), count(*) FROM part p ASOF LEFT JOIN ranges r"
        " ON p.node = r.node AND p.epoch = r.epoch AND p.sequence >= r.first_sequence"
        " WHERE r.last_sequence IS NULL OR r.last_sequence < p.sequence GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    connection.execute(f"INSERT INTO extents SELECT {literal(day)}, node, epoch, min(sequence), max(sequence) FROM part GROUP BY ALL")
    return [_twice(where, *row) for row in twice] + [
        Problem(
            "unknown sequence",
            where,
            f"{count} rows from sequence {first} of node {node}, epoch {epoch}",
            "only sequences that the catalog knows",
            "restore a backup: they would be stored again if they were sent again",
            count,
        )
        for node, epoch, first, count in unknown
    ]


def _between(connection: "duckdb.DuckDBPyConnection", days: dict[str, list[Segment]]) -> list[Problem]:
    """Sequences that two days have: only spools whose extents on the two days overlap are read again."""
    pairs = connection.execute(
        "SELECT a.day, b.day, a.node, a.epoch, greatest(a.low, b.low), least(a.high, b.high) FROM extents a JOIN extents b"
        " ON a.node = b.node AND a.epoch = b.epoch AND a.day < b.day AND a.low <= b.high AND b.low <= a.high ORDER BY ALL"
    ).fetchall()
    out = []
    for first_day, second_day, node, epoch, low, high in pairs:
        wanted = f"WHERE node = ? AND epoch = ? AND sequence BETWEEN {low} AND {high}"
        sides = [f"SELECT sequence FROM {read_segments(days[day])} {wanted}" for day in (first_day, second_day)]
        first, count = connection.execute(
            f"SELECT min(sequence), count(*) FROM ({sides[0]} INTERSECT {sides[1]})", [node, epoch, node, epoch]
        ).fetchall()[0]
        if count:
            out.append(_twice(f"segments of {first_day} and {second_day}", node, epoch, first, count))
    return out


def _twice(where: str, node: str, epoch: str, first: int, count: int) -> Problem:
    found = f"{count} sequences of node {node}, epoch {epoch} twice, the first {first}"
    return Problem("stored twice", where, found, "each sequence once", "restore a backup: a bill over these rows counts them twice", count)


def find_segment(root: Path, name: str) -> Segment:
    """The live segment that an operator means: a path, a path under the root, or a file's name. Raises Unavailable, DataError."""
    with open_catalog(root) as connection:
        segments = live_segments(connection)
    for segment in segments:
        if name == segment.file or (
            Path(name).name == Path(segment.file).name and (root / segment.file).absolute() == Path(name).absolute()
        ):
            return segment
    found = [segment for segment in segments if Path(segment.file).name == name]
    if len(found) != 1:
        raise Unavailable(f"segment {name!r:.200} is not live in store {root}, expected a file that poolmeter store check names")
    return found[0]
