"""Transactions on the books, whichever back end holds them: every one of them whole, on the revision this program knows, once."""

import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError as UnfitValue
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoneFree

from poolmeter.books.backend import Backend, Purpose
from poolmeter.books.ledger import Writing, is_in_log
from poolmeter.books.migrate import bring_up, check_revision, found_revision
from poolmeter.books.models import REVISION
from poolmeter.books.postgres import Postgres
from poolmeter.books.sqlite import Sqlite
from poolmeter.clock import Clock
from poolmeter.errors import BadInput, Unavailable

BACKENDS: tuple[type[Backend], ...] = (Sqlite, Postgres)
# How long a transaction is tried again while a server restarts.
AGAIN_S = 10.0
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0

T = TypeVar("T")


def backend_of(where: Path | str) -> Backend:
    """The back end for a place. Raises BadInput (network file system, a URL that is none), Unavailable."""
    return next(backend for backend in BACKENDS if backend.takes(where))(where)


class Database:
    """The books at a place. Empty ones get their tables; older ones are brought up when `upgrade` is true, refused otherwise.

    Raises BadInput for books of another revision or other tables, DataError for no database, Unavailable.
    """

    def __init__(self, where: Path | str, clock: Clock, upgrade: bool = False) -> None:
        self._clock = clock
        self._backend = backend_of(where)
        self._away = False  # whether it stayed away for all of AGAIN_S the last time
        self.name = self._backend.name
        try:
            found = self._run(Purpose.READ, lambda connection, _: found_revision(connection, self.name), again_s=0)
            if found is None or (upgrade and found != REVISION):
                self._run(Purpose.UPGRADE, lambda connection, _: bring_up(connection, self.name), again_s=0)
            else:
                check_revision(found, self.name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        self._backend.close()

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` finds in one state of the books; it may be called again."""

        def checked(connection: Connection, _: str) -> T:
            check_revision(found_revision(connection, self.name, quick=True), self.name)
            return work(connection)

        return self._run(Purpose.READ, checked)

    def write(self, work: Callable[[Writing], T]) -> T:
        """What `work` returns once all it wrote is durable; nothing of it is when it raises. It may be called again, and counts once.

        Only an Unavailable after a server was lost at the commit, and stayed away, leaves open which of the two it is.
        """

        def checked(connection: Connection, transaction: str) -> T:
            # Another program may have brought the books further since they were opened.
            check_revision(found_revision(connection, self.name, quick=True), self.name)
            return work(Writing(connection, transaction, self._clock.wall_us()))

        return self._run(Purpose.WRITE, checked)

    def _run(self, purpose: Purpose, work: Callable[[Connection, str], T], again_s: float | None = None) -> T:
        # Who knows that it is away does not keep everybody waiting to find that out again.
        again_s = (0 if self._away else AGAIN_S) if again_s is None else again_s
        transaction, deadline, wait_s = uuid.uuid4().hex, time.monotonic() + again_s, FIRST_WAIT_S
        results: list[T] = []  # what a try returned whose commit was asked for
        while True:
            try:
                with self._backend.begin(purpose) as connection:
                    # A commit without an answer may have happened; under the writer's lock that is settled.
                    if results and purpose is Purpose.WRITE and is_in_log(connection, transaction):
                        return results[-1]
                    results.append(work(connection, transaction))
                self._away = False
                return results[-1]
            except UnfitValue as error:
                raise BadInput(f"books cannot hold what they were given: {' '.join(str(error.orig).split())}") from None
            except DBAPIError as error:
                passes = self._backend.passes(error)
                if not passes or time.monotonic() >= deadline:
                    self._away = passes
                    raise self._backend.refusal(error) from None
            except NoneFree:
                raise Unavailable(f"books {self.name} cannot be used: all connections are in use") from None
            time.sleep(random.uniform(wait_s / 2, wait_s))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
