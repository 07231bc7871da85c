"""Books in a file: SQLite in WAL mode on a local disk. Any number of processes may have them open."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

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
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=NullPool,
        connect_args={"timeout": BUSY_MS / 1000, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        # Transactions are begun below and nowhere else.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred transaction that writes after it has read cannot wait for another writer, only fail: writers say so at once.
        reads = connection.get_execution_options().get("books") is Purpose.READ
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


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
