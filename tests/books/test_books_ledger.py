"""The log of the books: everything that changed is in it, nothing leaves it, and a killed writer leaves all or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from books_crash import crash_at
from books_decisions import NOW, decision
from books_places import Places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from poolmeter.books.backend import Purpose
from poolmeter.books.database import backend_of
from poolmeter.books.ledger import UNLOGGED
from poolmeter.books.postgres import Postgres
from poolmeter.books.sqlite import Sqlite
from poolmeter.books.tokens import Role
from poolmeter.books.writer import Books, NotInBooks
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import DecisionState

TABLES = ("decisions", "tokens")


def rows(place: Path | str, table: str) -> dict[str, dict[str, object]]:
    """A table as it lies there, by key, without what the log leaves out."""
    backend = backend_of(place)
    with backend.begin(Purpose.READ) as connection:
        found = connection.execute(text(f"SELECT * FROM {table}")).mappings().all()
    backend.close()
    return {row["id"]: {name: value for name, value in row.items() if name not in UNLOGGED} for row in found}


def content(place: Path | str) -> tuple[dict[str, dict[str, object]], ...]:
    """All that the tables hold and the log says, for comparing."""
    with Books(place) as books:
        log = {str(change.number): {**vars(change), "transaction_id": None} for change in books.changes()}
    return (*(rows(place, table) for table in TABLES), log)


def check_log(place: Path | str) -> None:
    """The log alone gives the tables: each entry begins where the one before it ended, and the last ones are the rows."""
    with Books(place) as books:
        changes = books.changes()
    assert [change.number for change in changes] == list(range(1, len(changes) + 1))
    built: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for change in changes:
        assert change.before == built[change.subject].get(change.key)
        assert change.after != change.before
        built[change.subject][change.key] = change.after
    assert built == {table: rows(place, table) for table in TABLES}


STEP = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from(["n1", "n2"])),
    st.tuples(st.just("move"), st.integers(0, 3), st.sampled_from(DecisionState)),
    st.tuples(st.just("outcome"), st.integers(0, 3), st.sampled_from(["applied", "refused", "expired"])),
    st.tuples(st.just("wait"), st.integers(1, 3 * 3_600_000_000), st.none()),
    st.tuples(st.just("token"), st.integers(0, 2), st.sampled_from(Role)),
    st.tuples(st.just("revoke"), st.integers(0, 3), st.none()),
)


def take(books: Books, clock: ManualClock, step: tuple[Any, Any, Any]) -> None:
    """One thing that people and daemons do; what is refused is refused."""
    verb, one, other = step
    try:
        if verb == "add":
            books.add_decisions([decision(number, other) for number in one], by="ann")
        elif verb == "move":
            books.transition(f"d{one}", other, "bob", "because")
        elif verb == "outcome":
            books.record_outcome(f"d{one}", "n1", other, "said so", clock.wall_us())
        elif verb == "wait":
            clock.advance(one)
            books.expire_due()
        elif verb == "token":
            books.tokens.add(f"t{one}", other, "ann", tenant="vision" if other is Role.TENANT else None)
        else:
            books.tokens.revoke((["none"] + [token.id for token in books.tokens.list()])[one], "bob")
    except (Refused, BadInput, IndexError):
        pass


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(STEP, min_size=3, max_size=12))
def test_the_log_alone_gives_the_tables(places: Places, steps: list[tuple[Any, Any, Any]]) -> None:
    place, clock = places.ready(), ManualClock(NOW)
    with Books(place, clock) as books:
        books.add_decisions([decision(0), decision(1), decision(2, "n2")])
        for step in steps:
            take(books, clock, step)
    check_log(place)


def test_an_entry_says_who_what_when_and_why(place: Path | str, clock: ManualClock) -> None:
    with Books(place, clock) as books:
        books.add_decisions([decision(1), decision(2)], by="recommender")
        clock.advance(5)
        books.transition("d1", DecisionState.REJECTED, "ann", "größer wäre besser")
        token, text = books.tokens.add("laptop", Role.OPERATOR, "root", reason="asked for")
        first, second, third, fourth = books.changes()
        assert first.before is None and first.after["memory_bytes"] == 1 << 30 and first.after["state"] == "proposed"
        assert first.transaction_id == second.transaction_id != third.transaction_id
        assert (third.number, third.at_us, third.by, third.subject, third.key, third.reason) == (
            3, NOW + 5, "ann", "decisions", "d1", "größer wäre besser",
        )  # fmt: skip
        assert third.before == first.after and third.after["state"] == "rejected" and third.after["decided_at_us"] == NOW + 5
        assert (fourth.subject, fourth.key, fourth.by, fourth.reason) == ("tokens", token.id, "root", "asked for")
        # Nothing that helps to be somebody.
        assert not {"secret_sha256", "token"} & set(fourth.after) and text.rpartition("_")[2] not in str(fourth)
        assert books.changes("decisions", "d1") == [first, third]
        assert books.changes(start_us=NOW + 5) == [third, fourth] and books.changes(end_us=NOW + 5) == [first, second]
        assert books.changes(after_number=2, limit=1) == [third]
        assert books.changes("decisions", "\0") == []


ANYWHERE = (
    "UPDATE change_log SET by = 'nobody'",
    "UPDATE change_log SET reason = NULL WHERE number = 1",
    "DELETE FROM change_log",
    "DELETE FROM change_log WHERE number = 2",
    "INSERT INTO change_log SELECT * FROM change_log WHERE true ON CONFLICT (number) DO UPDATE SET by = 'nobody'",
)
SPECIAL = {
    Sqlite: ("INSERT OR REPLACE INTO change_log SELECT * FROM change_log", "UPDATE OR REPLACE change_log SET number = 1 WHERE number = 2"),
    Postgres: ("TRUNCATE change_log", "TRUNCATE change_log CASCADE"),
}


def test_the_log_is_only_added_to(place: Path | str, places: Places) -> None:
    with Books(place) as books:
        books.add_decisions([decision(1), decision(2)])
        before = books.changes()
        backend = backend_of(place)
        for statement in ANYWHERE + SPECIAL[places.kind]:
            with pytest.raises(DBAPIError, match="the log of the books is only added to"), backend.begin(Purpose.UPGRADE) as connection:
                connection.execute(text(statement))
            assert books.changes() == before, statement
        backend.close()


WRITES: dict[str, Callable[[Books], object]] = {
    "add": lambda books: books.add_decisions([decision(7), decision(8), decision(9, "n2")]),
    "approve": lambda books: books.transition("d1", DecisionState.APPROVED, "ann"),
    "outcome": lambda books: books.record_outcome("d3", "n1", "applied", "done", NOW),
    "expire": lambda books: books.expire_due(),
    "token": lambda books: books.tokens.add("second", Role.ADMIN, "ann"),
    "revoke": lambda books: books.tokens.revoke(books.tokens.list()[0].id, "ann"),
}


@pytest.mark.parametrize("verb", WRITES)
def test_killed_at_any_statement_a_writer_leaves_all_or_nothing(place: Path | str, clock: ManualClock, verb: str) -> None:
    with Books(place, clock) as books:
        books.add_decisions([decision(1), decision(2, expires_us=NOW + 1), decision(3), decision(4, expires_us=NOW + 1)])
        books.transition("d3", DecisionState.APPROVED, "ann")
        books.tokens.add("first", Role.OPERATOR, "ann")
    clock.advance(5)
    before = content(place)

    def work() -> None:
        with Books(place, clock) as books:
            WRITES[verb](books)

    number = 0
    while crash_at(number, work):
        assert content(place) == before
        number += 1
    # The last one was not killed, and did all of it.
    assert number >= 6 and len(content(place)[2]) > len(before[2])
    check_log(place)


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "x" * 3 + "\0"])
def test_text_that_a_back_end_cannot_hold_is_refused_by_all(place: Path | str, clock: ManualClock, bad: str) -> None:
    with Books(place, clock) as books:
        books.add_decisions([decision(1)])
        with pytest.raises(BadInput, match="expected text without NUL"):
            books.add_decisions([decision(2), decision(3, reason=bad)])
        with pytest.raises(BadInput, match="expected text without NUL"):
            books.transition("d1", DecisionState.APPROVED, bad)
        for call in (lambda: books.get(bad), lambda: books.transition(bad, DecisionState.APPROVED, "ann")):
            with pytest.raises(NotInBooks):
                call()
        assert books.list(node=bad) == [] and books.log(bad) == []
        assert not books.record_outcome(bad, "n1", "applied", None, NOW) and books.tokens.find(f"pm_{bad}_x") is None
        # A node's word is kept as far as it can be.
        assert books.record_outcome("d1", "n1", "refused", f"why {bad}", NOW)
        assert "\ufffd" in (books.get("d1").outcome_reason or "")
        assert [booked.decision.id for booked in books.list()] == ["d1"]


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_numbers_beyond_64_bits_are_refused_by_all(place: Path | str, clock: ManualClock, number: int) -> None:
    with Books(place, clock) as books:
        with pytest.raises(BadInput, match=r"memory_bytes is .*, expected an integer of 64 bits"):
            books.add_decisions([decision(1, memory_bytes=number)])
        assert books.list() == [] and books.changes() == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "books.sqlite"
    with Books(path) as books:
        books.add_decisions([decision(number) for number in range(1, 200)])
    body = bytearray(path.read_bytes())
    body[4096:] = b"\xa5" * (len(body) - 4096)
    path.write_bytes(body)
    with pytest.raises((DataError, PoolmeterError), match="no SQLite database"), Books(path) as books:
        books.list()


def test_a_file_that_is_taken_away_under_open_books_is_missed(tmp_path: Path, clock: ManualClock) -> None:
    """Nothing is written to a file that no name leads to; what is put in its place is used."""
    path, other = tmp_path / "books.sqlite", tmp_path / "other.sqlite"
    with Books(other, clock) as books:
        books.add_decisions([decision(9)])
    with Books(path, clock) as books:
        books.add_decisions([decision(1)])
        path.rename(tmp_path / "away")
        with pytest.raises(Unavailable, match="cannot be used: the file is not there any more"):
            books.add_decisions([decision(2)])
        assert not path.exists()
        for name in tmp_path.glob("books.sqlite-*"):
            name.unlink()
        other.rename(path)
        books.add_decisions([decision(2)])
        assert [booked.decision.id for booked in books.list()] == ["d9", "d2"]
