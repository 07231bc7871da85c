"""What a server does to its clients: it restarts, it hangs up, it says no; and nothing is lost, doubled, or told to those it is not for."""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from books_decisions import decision
from books_places import Places, Server, needs_postgres, server
from sqlalchemy import text

from poolmeter.books import database, postgres
from poolmeter.books.backend import Purpose
from poolmeter.books.database import Database, backend_of
from poolmeter.books.ledger import Writing
from poolmeter.books.place import PARAMETERS, check_url
from poolmeter.books.postgres import Postgres
from poolmeter.books.tokens import Role
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, Unavailable
from poolmeter.model.decision import DecisionState

pytestmark = needs_postgres


@pytest.fixture
def url(tmp_path: Path, postgres: Callable[[], Server]) -> str:
    """Where empty books are."""
    return str(Places(Postgres, tmp_path, postgres).ready())


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may stop."""
    with server() as found:
        yield found


class Interrupter:
    """Stands between a client and the server; hangs up at the next COMMIT: `before` the server hears it, or `after` it has answered."""

    def __init__(self, folder: Path, behind: Path) -> None:
        self.hang_up: str | None = None
        self.times = 0
        self._behind = str(behind / ".s.PGSQL.5432")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as behind:
            behind.connect(self._behind)
            while True:
                for side in select.select([client, behind], [], [])[0]:
                    body = side.recv(1 << 16)
                    if not body:
                        return
                    if side is client and b"COMMIT\0" in body and self.hang_up is not None:
                        how, self.hang_up = self.hang_up, None
                        self.times += 1
                        if how == "after":
                            behind.sendall(body)
                            assert b"COMMIT" in behind.recv(1 << 16)
                        return
                    (behind if side is client else client).sendall(body)


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_commit_without_an_answer_counts_once(url: str, postgres: Callable[[], Server], open_tmp_path: Path, how: str) -> None:
    folder = postgres().folder / f"{how}-{os.getpid()}"
    folder.mkdir()
    between = Interrupter(folder, postgres().folder)
    try:
        with Books(url.replace(str(postgres().folder), str(folder))) as books:
            writes: list[Callable[[], object]] = [
                lambda: books.add_decisions([decision(1), decision(2)])[1].decision.sequence,
                lambda: books.transition("d1", DecisionState.APPROVED, "ann").decision.state,
                lambda: books.record_outcome("d1", "n1", "applied", "done", 5),
                lambda: books.tokens.add("laptop", Role.ADMIN, "ann")[0].name,
            ]
            expected = [2, DecisionState.APPROVED, True, "laptop"]
            for index, (write, wanted) in enumerate(zip(writes, expected, strict=True), start=1):
                between.hang_up = how
                # Each of these would be refused, or say something else, if it were done twice.
                assert write() == wanted
                assert (between.times, between.hang_up) == (index, None)
            assert [change.number for change in books.changes()] == [1, 2, 3, 4, 5]
    finally:
        between.close()


def test_writers_go_on_over_restarts_of_the_server(own_server: Server) -> None:
    place = own_server.place()
    Books(place).close()
    stop = threading.Event()
    counts = [0, 0, 0]

    def write(writer: int) -> list[str]:
        acknowledged = []
        with Books(place) as books:
            while not stop.is_set():
                name = 1_000_000 * (writer + 1) + len(acknowledged)
                books.add_decisions([decision(name)])
                acknowledged.append(f"d{name}")
                counts[writer] = len(acknowledged)
        return acknowledged

    def wait_for_more() -> None:
        before = list(counts)
        while any(now < then + 5 for now, then in zip(counts, before, strict=True)):
            assert not any(future.done() for future in futures), [future.exception() for future in futures if future.done()]
            stop.wait(0.01)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(write, writer) for writer in range(3)]
        try:
            for how in (signal.SIGINT, signal.SIGQUIT, signal.SIGINT):
                wait_for_more()
                own_server.stop(how)
                own_server.start()
            wait_for_more()
        finally:
            stop.set()
    acknowledged = [name for future in futures for name in future.result()]
    with Books(place) as books:
        found = books.list()
        assert sorted(booked.decision.id for booked in found) == sorted(acknowledged)
        assert [booked.decision.sequence for booked in found] == list(range(1, len(acknowledged) + 1))
        assert [change.number for change in books.changes()] == list(range(1, len(acknowledged) + 1))


def test_a_server_that_stays_away_is_named(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = own_server.place()
    monkeypatch.setattr(database, "AGAIN_S", 0.3)
    with Books(place) as books:
        own_server.stop()
        for call in (books.list, lambda: books.add_decisions([decision(1)])):
            with pytest.raises(Unavailable, match=r"books postgresql://\S+ cannot be used: ") as caught:
                call()
            assert "\n" not in str(caught.value)
        # Only the first of them waited for it.
        monkeypatch.setattr(database, "AGAIN_S", 10_000.0)
        with pytest.raises(Unavailable, match="cannot be used"):
            books.list()
        with pytest.raises(Unavailable, match="cannot be used"):
            Books(place)
        own_server.start()
        books.add_decisions([decision(1)])
        assert [booked.decision.sequence for booked in books.list()] == [1]


def run_aside(url: str, statement: str) -> None:
    """A statement of somebody who does not write by our rules."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[call-overload]


def test_a_writer_that_another_program_overtakes_begins_again(url: str, clock: ManualClock) -> None:
    with Books(url, clock) as books:
        books.add_decisions([decision(1)])
    found = Database(url, clock)
    seen = []

    def work(writing: Writing) -> None:
        seen.append(writing.connection.execute(text("SELECT memory_bytes FROM decisions")).scalar_one())
        if len(seen) == 1:
            run_aside(url, "UPDATE decisions SET memory_bytes = 7")
        writing.connection.execute(text("UPDATE decisions SET memory_bytes = memory_bytes + 1"))

    found.write(work)
    found.close()
    assert seen == [1 << 30, 7]
    with Books(url, clock) as books:
        assert books.get("d1").decision.memory_bytes == 8


def test_a_writer_that_stands_still_keeps_nobody_waiting(url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "IDLE_MS", 200)
    other = threading.Event()
    found = Database(url, clock)
    tries = []

    def stand(writing: Writing) -> None:
        tries.append(writing.transaction)
        if len(tries) == 1:
            started.set()
            other.wait(30)
        writing.connection.execute(text("SELECT 1"))

    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        standing = pool.submit(found.write, stand)
        started.wait(30)
        with Books(url, clock) as books:
            books.add_decisions([decision(1)])
        other.set()
        standing.result()
    found.close()
    assert len(tries) == 2 and tries[0] == tries[1]


def test_a_lock_that_is_held_too_long_is_named(url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "LOCK_MS", 100)
    with Books(url, clock) as books:
        token, text = books.tokens.add("mine", Role.ADMIN, "ann")
        backend = backend_of(url)
        with backend.begin(Purpose.WRITE):
            with pytest.raises(Unavailable, match="another writer has held them"):
                books.expire_due()
            # Readers feel nothing of it, nor those who have a token.
            assert books.list() == [] and books.tokens.find(text) == token
        backend.close()


def test_who_may_not_write_is_told_so(url: str, postgres: Callable[[], Server]) -> None:
    name = f"reader{os.getpid()}"
    owner = url.partition("//")[2].partition("@")[0]
    postgres().psql("postgres", f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {owner} TO {name}")
    postgres().psql("postgres", f"GRANT SELECT ON ALL TABLES IN SCHEMA {owner} TO {name}; ALTER ROLE {name} SET search_path = {owner}")
    with Books(url) as books:
        books.add_decisions([decision(1)])
    with Books(url.replace(f"//{owner}@", f"//{name}@")) as books:
        assert [booked.decision.id for booked in books.list()] == ["d1"]
        with pytest.raises(Unavailable, match="permission denied"):
            books.expire_due()


def test_a_password_is_read_from_a_file_and_never_told(
    postgres: Callable[[], Server], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2-of-the-books"
    postgres().psql("postgres", f"CREATE ROLE guarded LOGIN PASSWORD '{secret}'; CREATE SCHEMA AUTHORIZATION guarded")
    passwords = tmp_path / "passwords"
    passwords.write_text(f"*:*:*:guarded:{secret}\n")
    passwords.chmod(0o600)
    url = postgres().url("postgres", "guarded")
    with pytest.raises(Unavailable, match="no password supplied"):
        Books(url)
    with Books(f"{url}&passfile={passwords}") as books:
        books.add_decisions([decision(1)])
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    with Books(url) as books:
        assert len(books.list()) == 1
    passwords.write_text(f"*:*:*:guarded:wrong-{secret}\n")
    with pytest.raises(Unavailable, match="password authentication failed") as caught:
        Books(url)
    assert secret not in str(caught.value) and secret not in caplog.text


def test_without_the_driver_it_says_what_is_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(Unavailable, match="need the package psycopg, expected poolmeter to be installed with the extra 'postgres'"):
        Books(url)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("postgresql://ann:hunter2@db/books", "a URL with a password"),
        ("postgresql://ann:@db/books", "a URL with a password"),
        ("postgresql://ann:hun@ter2@db/books", "a URL with a password"),
        ("postgresql://db/books?user=ann&password=hunter2", "a URL with a password"),
        ("postgresql://db/books?sslpassword=hunter2", "a URL with a password"),
        ("postgresql://db/books?options=-csearch_path%3Dx", "a URL with 'options', expected parameters of"),
        ("postgresql://db/books?connect_timeout", "cannot be read"),
        ("postgresql://db/books#hunter2", "a fragment"),
        ("postgresql://d b/books", "expected a file or a URL"),
        ("mysql://ann:hunter2@db/books", "books are 'mysql', expected a file or a URL such as postgresql://user@host/name"),
        ("postgresql+psycopg://db/books", "expected a file or a URL"),
        ("postgresql://[::1/books", "cannot be read"),
    ],
)
def test_urls_that_are_refused(given: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        Books(given)
    assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


def test_urls_that_are_taken() -> None:
    for good in (
        "postgresql://db/books",
        "postgresql://ann@db1:5432,db2:5433/books?target_session_attrs=read-write",
        "postgresql:///books?host=/run",
    ):
        assert check_url(good) == good
    # Everything allowed is something that libpq knows; what it calls a password is not.
    import psycopg

    known = {option.keyword.decode(): option.dispchar for option in psycopg.pq.Conninfo.get_defaults()}
    assert known.keys() >= PARAMETERS
    assert not {name for name in PARAMETERS if known[name] == b"*"}
