"""The node's enforcement journal: append-only JSON lines, each on the disk before the change it tells of is acknowledged.

Readers (the exporter) may read while it is written: a line counts once it ends in a newline.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from poolmeter.errors import DataError, Unavailable
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import canonical_json, from_plain

COMPACTED = "compacted"  # kind of the marks that say what is no longer in the file
LONG_BYTES = 32 << 20


def parse_line(line: bytes, where: str) -> JournalEvent:
    """The event of one line. Raises DataError naming `where`."""
    try:
        return from_plain(JournalEvent, json.loads(line), where)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is {line[:60]!r} ({error}), expected a JSON object") from None


def read_events(path: Path) -> Iterator[JournalEvent]:
    """The events of a journal, oldest first, without a last line still being written. Raises DataError for a broken line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            yield parse_line(line, f"{path} line {number}")


class Journal:
    """Appends events; at most one writer (the enforcer that holds the run folder's lock)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._sequence = 0
        self._at_us = 0
        self._size = 0
        self._bound = LONG_BYTES

    def open(self, see: Callable[[JournalEvent], object] = lambda _: None) -> None:
        """Shows `see` every event so far, oldest first, one at a time: a journal may be far larger than what is still in force.

        A torn last line, which nobody was told of, is cut off. Raises DataError for a broken line before the last, and Unavailable
        when the file cannot be written or another enforcer has it.
        """
        try:
            self._claim()
            self._replay(see)
        except BlockingIOError:
            self.close()
            raise Unavailable(f"journal {self.path} has an enforcer already, expected none") from None
        except OSError as error:
            self.close()
            raise Unavailable(f"journal {self.path} cannot be opened: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        while True:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Unavailable(f"journal {self.path} is a device or a pipe, expected a regular file")
            # Another node's enforcer with the same data folder would declare this one's allocations gone.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(found, os.stat(self.path)):
                break
            os.close(self._descriptor)  # it was compacted between the two calls: this is the file that was
        self._fresh.unlink(missing_ok=True)  # of a compaction that was killed
        if new:
            sync_folder(self.path.parent)

    @property
    def _fresh(self) -> Path:
        return self.path.with_suffix(".new")

    def _replay(self, see: Callable[[JournalEvent], object]) -> None:
        assert self._descriptor is not None
        size, good = os.fstat(self._descriptor).st_size, 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.endswith(b"\n"):
                        raise DataError(f"{self.path} line {number} has no end")
                    event = parse_line(line, f"{self.path} line {number}")
                except DataError:
                    if good + len(line) < size:
                        raise
                    os.ftruncate(self._descriptor, good)
                    os.fsync(self._descriptor)
                    break
                good += len(line)
                self._size = good
                self._sequence, self._at_us = max(self._sequence, event.sequence), max(self._at_us, event.at_us)
                see(event)

    def append(
        self,
        kind: str,
        at_us: int,
        *,
        allocation_id: str | None = None,
        allocation: dict[str, object] | None = None,
        tenant: str | None = None,
        decision_id: str | None = None,
        outcome: str | None = None,
        reason: str | None = None,
        demand: dict[str, object] | None = None,
    ) -> JournalEvent:
        """The event, once it is on the disk. Its time is never before its predecessor's, so that order and time agree.

        Raises Unavailable when it could not be written; then nothing of it is left in the file.
        """
        if self._descriptor is None:
            raise Unavailable(f"journal {self.path} is not open, expected Journal.open first")
        event = JournalEvent(
            sequence=self._sequence + 1,
            at_us=max(at_us, self._at_us),
            kind=kind,
            allocation_id=allocation_id,
            allocation=allocation,
            tenant=tenant,
            decision_id=decision_id,
            outcome=outcome,
            reason=reason,
            demand=demand,
        )
        line = canonical_json(event).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(28, "the disk is full")
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise Unavailable(f"journal {self.path} cannot be written: {error.strerror}") from None
        self._sequence, self._at_us, self._size = event.sequence, event.at_us, before + len(line)
        return event

    @property
    def is_long(self) -> bool:
        """Whether it is time to compact."""
        return self._size > self._bound

    def rewrite(self, choose: Callable[[list[bytes]], list[bytes] | None]) -> None:
        """Replaces the file by the lines that `choose` makes of its lines, or keeps it where that is None. A kill leaves one or the other.

        Raises Unavailable when the new file cannot be written; the old one then goes on.
        """
        if self._descriptor is None:
            raise Unavailable(f"journal {self.path} is not open, expected Journal.open first")
        self._bound = max(LONG_BYTES, self._size + LONG_BYTES // 2)  # whatever comes of it, not again at once
        fresh: int | None = None
        try:
            with self.path.open("rb") as file:
                lines = choose(file.readlines())
            if lines is None:
                return
            self._fresh.unlink(missing_ok=True)
            fresh = os.open(self._fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            body = b"".join(lines)
            with open(fresh, "wb", closefd=False) as file:
                file.write(body)
            os.fsync(fresh)
            self._fresh.replace(self.path)
        except OSError as error:
            if fresh is not None:
                os.close(fresh)
            with contextlib.suppress(OSError):
                self._fresh.unlink(missing_ok=True)
            raise Unavailable(f"journal {self.path} cannot be compacted: {error.strerror}") from None
        os.close(self._descriptor)
        self._descriptor, self._size = fresh, len(body)
        self._bound = max(LONG_BYTES, 2 * self._size)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sync_folder(path: Path) -> None:
    """Returns once the folder's entries are on the disk: a file's own fsync does not keep its name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
