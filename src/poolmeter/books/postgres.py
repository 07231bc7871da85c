"""Books in a PostgreSQL database, for several collectors or where a server is kept anyway. Needs psycopg (extra `postgres`).

Writers are serializable and go one at a time, by a lock that readers do not feel. So there is nothing to try again but what the server
or the way to it interrupts; and once a writer has the lock it sees whether an earlier try of its own, whose end it was not told, counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError, OperationalError

from poolmeter.books.backend import Purpose
from poolmeter.books.models import REVISION_TABLE
from poolmeter.books.place import SCHEME, check_url, is_url
from poolmeter.errors import PoolmeterError, Unavailable

if TYPE_CHECKING:
    import psycopg

CONNECT_S = 5
LOCK_MS = 5000
UPGRADE_MS = 60_000
# A writer that stands still inside its transaction would keep all others waiting.
IDLE_MS = 15_000
UPGRADE_LOCK = 0x706F6F6C  # any number that all versions share
# Classes and codes after which the same transaction may succeed (PostgreSQL manual, appendix A): connection exceptions, serialization
# failure, deadlock, a server that stops or starts, a session that was ended.
PASSING = ("08", "40001", "40P01", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "53300")
BUSY = "55P03"


class Postgres:
    """Books in the database at a URL."""

    def __init__(self, where: Path | str) -> None:
        self.name = check_url(str(where))
        self._engine = _engine(self.name)

    @staticmethod
    def takes(where: Path | str) -> bool:
        return is_url(where)

    @contextmanager
    def begin(self, purpose: Purpose) -> Iterator[Connection]:
        # An upgrade waits for its lock in a SELECT, and must see what the one before it has committed: no snapshot from before.
        level = {Purpose.READ: "REPEATABLE READ", Purpose.WRITE: "SERIALIZABLE", Purpose.UPGRADE: "READ COMMITTED"}[purpose]
        with self._engine.connect().execution_options(isolation_level=level) as connection, connection.begin():
            # SET and LOCK TABLE take no snapshot, so that a writer's is from after the wait for its lock (manual, 13.3.1 on LOCK TABLE).
            if purpose is Purpose.WRITE:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {LOCK_MS}")
                connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS}")
                connection.exec_driver_sql(f"LOCK TABLE {REVISION_TABLE} IN EXCLUSIVE MODE")
            elif purpose is Purpose.UPGRADE:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {UPGRADE_MS}")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})")
                if connection.exec_driver_sql(f"SELECT to_regclass('{REVISION_TABLE}')").scalar() is not None:
                    # Writers of the older program first: they would meet the tables in another order.
                    connection.exec_driver_sql(f"LOCK TABLE {REVISION_TABLE} IN EXCLUSIVE MODE")
            yield connection

    def passes(self, error: DBAPIError) -> bool:
        code = _code(error)
        if code is None:
            # The client's own word: the connection is gone, or could not be made.
            return error.connection_invalidated or isinstance(error, OperationalError)
        return code.startswith(PASSING)

    def refusal(self, error: DBAPIError) -> PoolmeterError:
        if _code(error) == BUSY:
            return Unavailable(f"books {self.name} cannot be used: another writer has held them for over {LOCK_MS // 1000} s")
        return Unavailable(f"books {self.name} cannot be used: {' '.join(str(error.orig).split())}")

    def close(self) -> None:
        self._engine.dispose()


def _code(error: DBAPIError) -> str | None:
    code = getattr(error.orig, "sqlstate", None)
    return code if isinstance(code, str) else None


def _engine(url: str) -> Engine:
    try:
        import psycopg
    except ImportError:
        raise Unavailable(f"books {url} need the package psycopg, expected poolmeter to be installed with the extra 'postgres'") from None

    def connect() -> "psycopg.Connection[tuple[object, ...]]":
        # Without prepared statements a pooler between us and the server may give each transaction another session.
        return psycopg.connect(
            url, connect_timeout=CONNECT_S, prepare_threshold=None, client_encoding="UTF8", fallback_application_name="poolmeter",
            keepalives_idle=15, keepalives_interval=5, keepalives_count=3, tcp_user_timeout=30_000,
        )  # fmt: skip

    return create_engine(SCHEME.replace(":", "+psycopg:"), creator=connect, pool_size=4, max_overflow=12, pool_timeout=10)
