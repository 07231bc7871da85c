"""The writing side of a store: one owner, one published state at a time.

What a publication stores (rows, which sequences they were, snapshots, node states) becomes visible in one step, the replacement of
`CURRENT`, after everything it names is durable. Killed at any point, the store is the state that `CURRENT` names; files that state does
not name are leftovers. An error leaves the state as it was and is raised as Unavailable, so that nothing is acknowledged.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from poolmeter.clock import SystemClock
from poolmeter.collector.audit import examine, live_segments, torn_heads
from poolmeter.collector.catalog import current_name, generation_of, open_catalog
from poolmeter.collector.intake import Batch as Batch
from poolmeter.collector.intake import new_rows
from poolmeter.collector.now import NOW_TABLES, Newest, now_rows, now_tables_of, write_now
from poolmeter.collector.publication import CatalogWriter, name_current
from poolmeter.collector.quarantine import Kept, bounded, kept_of
from poolmeter.collector.retention import closed_days
from poolmeter.collector.segments import (
    FOLDER,
    TEMPORARY,
    Lost,
    Segment,
    day_of,
    kinds_of,
    split_days,
    sync_folder,
    sync_folders,
    write_segment,
)
from poolmeter.collector.state import NodeRow, State, catalog_tables, forget_epochs, last_sequence, state_from, with_devices
from poolmeter.collector.tables import ROLLUPS, TABLES, SegmentKind, arrow_schema
from poolmeter.errors import BadInput, DataError, PoolmeterError, Unavailable
from poolmeter.model.usage import RecordKind

LOCK = "LOCK"
GRACE_S = 300.0
# An opened catalog stays readable after it is deleted, so only the moment between reading CURRENT and opening it counts; at a publication a
# second the old ones would else fill a gigabyte.
CATALOG_GRACE_S = 10.0
FULL_BYTES = 1 << 20  # a catalog needs about a quarter of that
# So many rows of newest snapshots are written with every publication; more of them apart, as often as their writing is worth.
NOW_INLINE = 2000
_log = logging.getLogger("poolmeter.collector")


@dataclass(frozen=True)
class Published:
    """What a publication did: rows stored per kind, rows dropped as already known, rows quarantined."""

    generation: int
    rows: dict[RecordKind, int]
    known: int
    quarantined: int


class Store:
    """The one writer of a root; a context manager. Every method may be called from any thread.

    `on_step` is called between the steps of a publication (`segment`, `synced`, `catalog`, `current`): tests crash there. `trouble` says
    why the last publication failed; `damaged` which segments were found damaged since the start, and how: they are merged no more.
    """

    def __init__(
        self, root: Path, *, grace_s: float = GRACE_S, on_step: Callable[[str], None] | None = None, damaged: Collection[str] = ()
    ) -> None:
        """Lock and load. Raises Unavailable (another owner, no permission), DataError (version, damage), BadInput (a comma).

        `damaged` names segments that may be torn or missing: who opens the store so is about to set them aside.
        """
        if "," in str(root.absolute()):
            raise BadInput(f"store {root} has a comma in its path, expected none: DuckDB's search path is split there")
        self.root = root
        self.trouble: str | None = None
        self.damaged: dict[str, str] = {}
        self._grace_s = grace_s
        self._on_step = on_step or (lambda _: None)
        self._mutex = threading.Lock()
        self._folders: set[Path] = set()
        self._doomed: list[tuple[float, Path]] = []
        self._kept: tuple[str | None, dict[str, Kept]] = (None, {})  # of the quarantine, by day
        self._writer = CatalogWriter(root)
        self._lock = own(root)
        try:
            self._state = self._load(frozenset(damaged))
            self._now_written = self._state.now
            self._clear_leftovers()
            if self._state.generation == 0:
                self._found()
        except BaseException:
            os.close(self._lock)
            raise

    def _found(self) -> None:
        import duckdb

        try:
            self._commit(replace(self._state, published_us=SystemClock().wall_us()))
        except (OSError, duckdb.Error) as error:  # a full disk, a quota
            raise Unavailable(f"store {self.root} cannot be written: {str(error).splitlines()[0]:.200}") from None

    @property
    def state(self) -> State:
        """The published state; never changes under the caller."""
        return self._state

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the root, once a publication under way in another thread is done: a cancelled task does not end its thread."""
        with self._mutex:
            self._writer.close()
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def publish(
        self,
        batches: Sequence[Batch] = (),
        snapshots: Sequence[Newest] = (),
        nodes: Sequence[NodeRow] = (),
        now_us: int | None = None,
        forget: Collection[str] = (),
    ) -> Published:
        """Store what is new in `batches`, the newest snapshots and node states, durably, all or nothing. Raises Unavailable.

        `forget` names the URLs of exporters that are configured no more.
        """
        with self._mutex:
            written: list[Segment] = []
            now = SystemClock().wall_us() if now_us is None else now_us
            try:
                return self._publish(batches, snapshots, nodes, now, written, frozenset(forget))
            except Exception as error:
                self._forget(written)
                failure = self._unwritable(error)
                self.trouble = str(failure)
                raise failure from error

    def swap(
        self, old: Sequence[Segment], new: Callable[[], list[Segment]], basis: Callable[[State], object], since: State | None = None
    ) -> bool:
        """Replace live segments by others that hold the same rows (or by none: retention); False when `basis` changed meanwhile.

        `new` writes them without the store being held, so that pulls go on; `since` is the state that the step was chosen by (the one at the
        call). Raises Unavailable.
        """
        before = basis(since or self._state)
        written: list[Segment] = []
        try:
            written = new()
            with self._mutex:
                live = self._state.segments
                if basis(self._state) != before or any(segment.file not in live for segment in old):
                    self._forget(written)
                    return False
                sync_folders(self.root, written, self._folders)
                gone = {segment.file for segment in old}
                kept = {file: segment for file, segment in live.items() if file not in gone}
                self._commit(replace(self._state, segments=kept | {segment.file: segment for segment in written}))
                return True
        except Exception as error:
            self._forget(written)
            raise self._unwritable(error) from error

    def lose(self, segment: Segment, lost: Sequence[Lost]) -> None:
        """Publish a state without a damaged segment, in which `lost` says what is gone. Raises Unavailable."""
        with self._mutex:
            segments = {file: found for file, found in self._state.segments.items() if file != segment.file}
            try:
                self._commit(replace(self._state, segments=segments, lost=(*self._state.lost, *lost)))
            except Exception as error:
                raise self._unwritable(error) from error

    @property
    def now_waits(self) -> bool:
        """Whether readers of the store do not see the newest snapshots yet (`refresh_now`)."""
        return self._state.now is not self._now_written

    def refresh_now(self) -> None:
        """Let readers see the newest snapshots; publications go on meanwhile. Raises Unavailable."""
        written: list[Segment] = []
        try:
            newest = self._state.now
            written = write_now(self.root, newest)
            with self._mutex:
                sync_folders(self.root, written, self._folders)
                self._commit(replace(self._state, segments=_with_now(self._state.segments, written)))
                self._now_written = newest
        except Exception as error:
            self._forget(written)
            raise self._unwritable(error) from error

    def sweep(self) -> None:
        """Delete what no reader can be using any more."""
        with self._mutex:
            now = time.monotonic()
            due = [path for deadline, path in self._doomed if deadline <= now]
            self._doomed = [(deadline, path) for deadline, path in self._doomed if deadline > now]
            for path in due:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # only an empty day goes
                    self._folders.discard(path.parent)

    def _publish(
        self,
        batches: Sequence[Batch],
        snapshots: Sequence[Newest],
        nodes: Sequence[NodeRow],
        now_us: int,
        written: list[Segment],
        forget: frozenset[str],
    ) -> Published:
        import pyarrow as pa

        state = self._state
        sequences = dict(state.sequences)
        new = new_rows(batches, sequences, closed_days(state))
        if len(sequences) > len(state.sequences):
            forget_epochs(sequences, {(batch.node, batch.epoch) for batch in batches})
        wide, today = new.rows, day_of(now_us)
        if new.quarantine and self._kept[0] != today:
            self._kept = (today, kept_of(self.root, tuple(state.segments.values()), today))
        bad, kept = bounded(new.quarantine, self._kept[1])
        counts: dict[RecordKind, int] = {}
        for kind in kinds_of(wide) if wide is not None else ():
            segment_kind = SegmentKind(kind.value)
            for day, part in split_days(segment_kind, wide).items():
                written.append(write_segment(self.root, segment_kind, day, part))
                counts[kind] = counts.get(kind, 0) + part.num_rows
                self._on_step("segment")
        if bad:
            table = pa.Table.from_pylist(bad, schema=arrow_schema(SegmentKind.QUARANTINE))
            written.append(write_segment(self.root, SegmentKind.QUARANTINE, today, table))
            self._on_step("segment")
        rows = {url: row for url, row in state.nodes.items() if url not in forget}
        rows |= {row.url: replace(row, last_sequence=last_sequence(sequences, row)) for row in nodes}
        now = state.now
        if forget or any(row.state == "gone" for row in nodes):
            # A snapshot of a node that nobody asks any more is an old number.
            named = {row.node for row in rows.values() if row.state != "gone"}
            if not named >= now.keys():
                now = {node: tables for node, tables in now.items() if node in named}
        if snapshots:
            now = now | {newest.node: newest.tables for newest in snapshots}
        now_written = now is not self._now_written and now_rows(now) <= NOW_INLINE
        if now_written:
            written += write_now(self.root, now)
        sync_folders(self.root, written, self._folders)
        self._on_step("synced")
        touched = {(segment.kind, segment.day) for segment in written}
        # A stored rollup of a day that gets late rows is no longer true: its view aggregates live until the day is rolled up again.
        segments = {
            file: segment
            for file, segment in state.segments.items()
            if segment.kind not in ROLLUPS or (ROLLUPS[segment.kind].source, segment.day) not in touched
        } | {segment.file: segment for segment in written}
        if now_written:
            segments = _with_now(segments, [segment for segment in written if segment.kind is SegmentKind.NOW])
        self._commit(
            replace(
                state,
                published_us=now_us,
                segments=segments,
                sequences=sequences,
                nodes=rows,
                devices=with_devices(state.devices, wide, snapshots, state.now),
                now=now,
            )
        )
        if now_written:
            self._now_written = now
        if bad:
            self._kept = (today, kept)
        self.trouble = None
        return Published(self._state.generation, counts, new.known, sum(int(row["rows"]) for row in bad))

    def _commit(self, wanted: State) -> None:
        """Make a state the published one (its segments are durable already), and doom what it no longer names."""
        if self._lock < 0:  # another owner may have the root by now, and its generations
            raise Unavailable(f"store {self.root} is closed, expected an open one")
        before = self._state
        wanted = replace(wanted, generation=before.generation + 1)
        self._write_catalog(wanted)
        self._on_step("catalog")

        def replaced() -> None:
            self._state = wanted

        name_current(self.root, wanted.generation, replaced)
        for file in [file for file in list(self.damaged) if file not in wanted.segments]:
            self.damaged.pop(file, None)
        self._on_step("current")
        now = time.monotonic()
        self._doomed += [(now + self._grace_s, self.root / file) for file in before.segments if file not in wanted.segments]
        if before.generation:
            self._doomed.append((now + min(self._grace_s, CATALOG_GRACE_S), self.root / f"catalog-{before.generation}.duckdb"))

    def _write_catalog(self, wanted: State) -> None:
        import duckdb

        segments, tables = tuple(wanted.segments.values()), catalog_tables(wanted)
        try:
            self._writer.write(wanted.generation, segments, tables, self.damaged)
        except duckdb.Error:
            torn = torn_heads(self.root, segments, self.damaged)
            if not torn:
                raise
            for sentence in torn.values():
                _log.error("%s", sentence)
            self.damaged |= torn
            self._writer.write(wanted.generation, segments, tables, self.damaged)

    def _forget(self, written: Sequence[Segment]) -> None:
        """Remove segments of a publication that failed, unless it had already become the published state."""
        for segment in written:
            if segment.file not in self._state.segments:
                with contextlib.suppress(OSError):
                    (self.root / segment.file).unlink(missing_ok=True)

    def _unwritable(self, error: Exception) -> PoolmeterError:
        if isinstance(error, PoolmeterError):
            return error
        if isinstance(error, OSError) and error.strerror:
            text = error.strerror
        else:
            # DuckDB's first line names its own step, not the disk.
            text = "No space left on device" if _full(self.root) else (str(error).splitlines() or [repr(error)])[0].strip()
        return Unavailable(f"store {self.root} cannot be written: {text:.200}")

    def _load(self, damaged: frozenset[str]) -> State:
        if current_name(self.root) is None:
            return State()
        with open_catalog(self.root) as connection:
            tables = {name: connection.sql(f"SELECT * FROM {name}").to_arrow_table() for name in TABLES if name not in NOW_TABLES}
            newest = [segment for segment in live_segments(connection) if segment.kind is SegmentKind.NOW]
            broken = [problem for segment in newest if (problem := examine(self.root, segment)) is not None]
            tables |= now_tables_of(None if broken else connection)
        state = state_from(tables)
        if broken:  # no bill rests on them, and the next pulls bring newer ones
            _log.warning("newest snapshots are asked for again: %s", broken[0].sentence)
            state = replace(state, segments=_with_now(state.segments, []))
        torn = []
        for segment in state.segments.values():
            found = _size(self.root / segment.file)
            if found != segment.bytes and segment.file not in damaged:
                said = "is missing" if found is None else f"has {found} bytes"
                torn.append(f"segment {segment.file} of store {self.root} {said}, expected {segment.bytes} bytes")
        if torn:
            more = f" (and {len(torn) - 1} more)" if len(torn) > 1 else ""
            raise DataError(f"{torn[0]}{more}; poolmeter store check names all that are damaged, and its --set-aside goes on without them")
        return state

    def _clear_leftovers(self) -> None:
        """Files that `CURRENT` does not name: half-written ones go at once, whole ones after the grace (a reader may hold them)."""
        named = {self.root / file for file in self._state.segments}
        deadline = time.monotonic() + self._grace_s
        for path in [*self.root.glob("*"), *(self.root / FOLDER).glob("*/*/*")]:
            if path.name.startswith(TEMPORARY):
                path.unlink(missing_ok=True)
            elif path.suffix == ".parquet" and path not in named:
                self._doomed.append((deadline, path))
            elif generation_of(path.name) > self._state.generation:
                # Written and never named: its number is about to be used again.
                path.unlink(missing_ok=True)
            elif 0 <= generation_of(path.name) < self._state.generation:
                self._doomed.append((deadline, path))


def _with_now(segments: dict[str, Segment], written: Sequence[Segment]) -> dict[str, Segment]:
    """Live segments with the newest snapshots in `written` in place of those before."""
    kept = {file: segment for file, segment in segments.items() if segment.kind is not SegmentKind.NOW}
    return kept | {segment.file: segment for segment in written}


def own(root: Path) -> int:
    """The lock of a root, as an open file; the root is made where it is not there. Raises Unavailable: another owner, a closed disk."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unavailable(f"store {root} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Unavailable(f"store {root} is owned by another collector, expected one collector per store ({root / LOCK})") from None
    sync_folder(root)
    return handle


def _full(root: Path) -> bool:
    try:
        return shutil.disk_usage(root).free < FULL_BYTES
    except OSError:
        return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
