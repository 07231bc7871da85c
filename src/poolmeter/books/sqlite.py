"""Books in a file: SQLite in WAL mode on a local disk. Any number of processes may have them open."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

from poolmeter.books.backend import Purpose
from poolmeter.books.disk import refuse_network
from poolmeter.books.place import is_url
from poolmeter.errors import DataError, PoolmeterError, Unavailable

BUSY_MS = 5000


class Sqlite:
    """Books in the file at a path, whose folder is made."""

    def __init__(self, where: Path | str) -> None:
        self.path = Path(where)
        self.name = str(where)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"books {self.path} cannot be written: {error.strerror}") from None
        refuse_network(self.path)
        self._engine = _engine(self.path)

    @staticmethod
    def takes(where: Path | str) -> bool:
        return not is_url(where)

    @contextmanager
    def begin(self, purpose: Purpose) -> Iterator[Connection]:
        with self._engine.connect().execution_options(books=purpose) as connection, connection.begin():
            yield connection

    def passes(self, error: DBAPIError) -> bool:
        return False  # SQLite itself has waited for BUSY_MS

    def refusal(self, error: DBAPIError) -> PoolmeterError:
        text = str(error.orig)
        if "not a database" in text or "malformed" in text:
            return DataError(f"books {self.path} are no SQLite database: {text}")
        return Unavailable(f"books {self.path} cannot be used: {text}")

    def close(self) -> None:
        self._engine.dispose()


def _engine(path: Path) -> Engine:
    made = False

    def connect() -> sqlite3.Connection:
        nonlocal made
        if made and not path.exists():
            raise sqlite3.OperationalError("the file is not there any more")
        connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, check_same_thread=False)
        made = True
        return connection

    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        creator=connect,
        pool_size=4,
        max_overflow=12,
        pool_timeout=10,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, entry: ConnectionPoolEntry) -> None:
        # Transactions are begun below and nowhere else.
        connection.isolation_level = None
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = FULL")
        entry.info["file"] = _file(path)

    @event.listens_for(engine, "checkout")
    def check(_: object, entry: ConnectionPoolEntry, __: object) -> None:
        # What is written to a file that was moved away or replaced would be gone.
        if entry.info["file"] != _file(path):
            raise InvalidatePoolError

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred transaction that writes after it has read cannot wait for another writer, only fail: writers say so at once.
        reads = connection.get_execution_options().get("books") is Purpose.READ
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _write_ahead(connection: sqlite3.Connection) -> None:
    # The first change to WAL does not wait for another connection that makes the same change: busy_timeout is not asked there.
    deadline = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
