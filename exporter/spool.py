"""The spool: usage records not yet acknowledged by every registered consumer, with the state they were computed from.

SQLite in WAL mode. Records and the state that says what they already contain are one transaction, so that a kill at any moment neither
loses nor repeats anything; closing a minute is fsynced (synchronous=FULL), the checkpoints in between are not (they survive the
process, not the machine). The epoch is made with the file; sequences start at 1 and never return.

One writer, the agent (a lock beside the file says so); reads and acknowledgements may come from other threads.
"""

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from poolmeter.errors import BadInput, DataError, Refused, Unavailable
from poolmeter.model.units import DAY_US
from poolmeter.model.usage import EventRecord, RecordKind, UsageRecord, kind_of
from poolmeter.model.wire import record_from

SCHEMA = "poolmeter.spool/1"
_LOG = logging.getLogger("poolmeter.exporter")
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, minute_us INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX records_by_minute ON records (minute_us);
CREATE TABLE consumers (name TEXT PRIMARY KEY, sequence INTEGER NOT NULL, at_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), body TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Batch:
    """Records in sequence order; `last` is the sequence to acknowledge and to ask after, `more` says whether others follow."""

    records: tuple[UsageRecord, ...]
    last: int
    more: bool


class Spool:
    """An open spool. `moved_aside` names the corrupted file that this one replaces, None as a rule."""

    def __init__(self, path: Path, node: str, consumers: Sequence[str]) -> None:
        """Open or create. Raises DataError for a spool of another version, Unavailable when it is in use or not permitted."""
        self.path = path
        self.node = node
        self.moved_aside: Path | None = None
        self._mutex = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = _guard(path)
        except OSError as error:
            raise Unavailable(f"spool {path} cannot be opened: {error.strerror}, expected a writable folder") from None
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
                os.close(self._guard)
                raise Unavailable(f"spool {path} cannot be opened: {error}") from None
            _LOG.error("spool %s is corrupted (%s): moved aside, a new epoch begins", path, error)
            self.moved_aside = _move_aside(path)
            self._db = self._open()
        except BaseException:
            os.close(self._guard)
            raise
        self.epoch = str(self._db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0])
        self._last = int(self._db.execute("SELECT value FROM meta WHERE key = 'sequence'").fetchone()[0])
        self._register(consumers)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                db.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.strip().split(";\n"):
                    db.execute(statement)
                rows = [("schema", SCHEMA), ("epoch", str(uuid.uuid4())), ("sequence", "0")]
                db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
                db.execute("COMMIT")
            if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check found damage")
            names = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() if "meta" in names else None
            if found is None or found[0] != SCHEMA:
                raise DataError(f"spool {self.path} has schema {found[0] if found else 'unknown'}, expected {SCHEMA}")
            return db
        except BaseException:
            db.close()
            raise

    def _register(self, consumers: Sequence[str]) -> None:
        # A consumer that is no longer configured must not hold records for ever.
        self.consumers = tuple(dict.fromkeys(consumers))
        with self._transaction():
            marks = ",".join("?" * len(self.consumers))
            self._db.execute(f"DELETE FROM consumers WHERE name NOT IN ({marks})", self.consumers)
            self._db.executemany("INSERT OR IGNORE INTO consumers VALUES (?, 0, 0)", [(name,) for name in self.consumers])

    @contextlib.contextmanager
    def _transaction(self, durable: bool = True) -> Iterator[None]:
        with self._mutex:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @property
    def last_sequence(self) -> int:
        """The sequence of the newest record ever appended; 0 when there was none."""
        return self._last

    def load_state(self) -> dict[str, object] | None:
        """The state saved by the last commit; None in a new spool."""
        with self._mutex:
            row = self._db.execute("SELECT body FROM state WHERE id = 1").fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def commit(self, records: Sequence[UsageRecord], state: str, durable: bool = True) -> None:
        """Append records and replace the state, both or neither. The records' sequences must continue the spool's."""
        expected = range(self._last + 1, self._last + 1 + len(records))
        if [record.sequence for record in records] != list(expected):
            raise ValueError(f"records do not continue the spool at sequence {self._last + 1}")
        rows = [(record.sequence, kind_of(record).value, record.minute_us, encode(record)) for record in records]
        with self._transaction(durable or bool(rows)):
            if rows:
                self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'sequence'", (str(expected[-1]),))
            self._db.execute("INSERT OR REPLACE INTO state VALUES (1, ?)", (state,))
        if rows:
            self._last = expected[-1]

    def read(self, after_epoch: str | None, after_sequence: int, limit: int = 50_000) -> Batch:
        """Records after a position. A position of another epoch is a reader that missed a new spool: it gets this one from its start."""
        start = after_sequence if after_epoch in (None, self.epoch) else 0
        with self._mutex:
            rows = self._db.execute(
                "SELECT kind, body FROM records WHERE sequence > ? ORDER BY sequence LIMIT ?", (start, limit + 1)
            ).fetchall()
        records = tuple(decode(kind, body) for kind, body in rows[:limit])
        return Batch(records, records[-1].sequence if records else start, len(rows) > limit)

    def acknowledge(self, consumer: str, epoch: str, sequence: int) -> int:
        """Note what a consumer has stored, free what all have, and return the consumer's position.

        Raises BadInput for a consumer that is not registered; Refused for another epoch or a sequence ahead of the spool. An older
        position than noted changes nothing.
        """
        if consumer not in self.consumers:
            raise BadInput(f"consumer is {consumer!r}, expected one of {', '.join(self.consumers) or 'none'}")
        if epoch != self.epoch:
            raise Refused(f"epoch is {epoch!r}, expected {self.epoch}")
        if not 0 <= sequence <= self._last:
            raise Refused(f"sequence is {sequence}, expected at most {self._last}, the last one of the spool")
        with self._transaction():
            self._db.execute(
                "UPDATE consumers SET sequence = max(sequence, ?), at_us = ? WHERE name = ?", (sequence, time.time_ns() // 1000, consumer)
            )
            self._db.execute("DELETE FROM records WHERE sequence <= (SELECT min(sequence) FROM consumers)")
            return int(self._db.execute("SELECT sequence FROM consumers WHERE name = ?", (consumer,)).fetchone()[0])

    def acknowledged(self) -> int:
        """What every registered consumer has stored; with no consumers nobody will ever ask, and everything counts as stored."""
        if not self.consumers:
            return self._last
        with self._mutex:
            return int(self._db.execute("SELECT min(sequence) FROM consumers").fetchone()[0])

    def expire(self, now_us: int, retention_days: int) -> tuple[int, int, int] | None:
        """Drop records older than the retention: (how many, first, last sequence), None when there were none to drop."""
        horizon = now_us - retention_days * DAY_US
        with self._mutex:
            found = self._db.execute(
                "SELECT count(*), min(sequence), max(sequence) FROM records WHERE minute_us < ?", (horizon,)
            ).fetchone()
        if not found[0]:
            return None
        with self._transaction():
            self._db.execute("DELETE FROM records WHERE minute_us < ?", (horizon,))
        return int(found[0]), int(found[1]), int(found[2])

    def held(self) -> int:
        """How many records wait to be acknowledged."""
        with self._mutex:
            return int(self._db.execute("SELECT count(*) FROM records").fetchone()[0])

    def after(self, sequence: int) -> int:
        """How many records come after a sequence."""
        with self._mutex:
            first = self._db.execute("SELECT min(sequence) FROM records").fetchone()[0]
        return max(0, self._last - max(sequence, first - 1)) if first is not None else 0

    def close(self) -> None:
        """Close the file; further calls fail."""
        with self._mutex:
            self._db.close()
            os.close(self._guard)


def encode(record: UsageRecord) -> str:
    """A record as JSON, without the fields that are None."""
    values = {name: value for name, value in vars(record).items() if value is not None}
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def decode(kind: str, body: str) -> UsageRecord:
    """A record as it was committed."""
    return record_from(RecordKind(kind), json.loads(body))


def event(
    node: str, epoch: str, sequence: int, at_us: int, name: str, reason: str, span_us: int = 0, details: dict[str, object] | None = None
) -> EventRecord:
    """An event of the exporter's own (gap, tampered)."""
    from poolmeter.model.plain import canonical_json
    from poolmeter.model.units import MINUTE_US

    known = {field.name for field in fields(EventRecord)}
    extra = {key: value for key, value in (details or {}).items() if key in known}
    detail = canonical_json({"kind": name, "at_us": at_us, "reason": reason, **(details or {})})
    return EventRecord(
        node=node,
        epoch=epoch,
        sequence=sequence,
        minute_us=at_us - at_us % MINUTE_US,
        start_us=at_us,
        span_us=span_us,
        event=name,
        at_us=at_us,
        reason=reason,
        detail=detail,
        **extra,  # type: ignore[arg-type]
    )


def _guard(path: Path) -> int:
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Unavailable(f"spool {path} is in use by another exporter, expected to be its only writer") from None
    return descriptor


def _move_aside(path: Path, now: Callable[[], float] = time.time) -> Path:
    target = path.with_name(f"{path.name}.corrupted-{int(now())}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + suffix), target.with_name(target.name + suffix))
    return target
