"""Revisions of the books: from every one that was released to today's, once, whole, and never back."""

import json
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from books_crash import crash_at
from books_places import Places
from sqlalchemy import text

from poolmeter.books import migrate
from poolmeter.books.backend import Purpose
from poolmeter.books.database import backend_of
from poolmeter.books.migrate import MIGRATIONS, bring_up
from poolmeter.books.models import REVISION, REVISION_TABLE, REVISIONS, Base
from poolmeter.books.sqlite import Sqlite
from poolmeter.books.upgrade import upgrade
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, DataError
from poolmeter.model.decision import DecisionState

GOLDEN = Path(__file__).parent / "golden" / "version-1.sql"
# What the first revision's log said, which only SQLite ever had.
LOG = [
    (1, "d1", 1_800_000_000_000_000, "recommender", None, "proposed", "limit far above peak"),
    (2, "d2", 1_800_000_000_000_000, "recommender", None, "proposed", "limit far above peak"),
    (3, "d3", 1_800_000_000_000_000, "recommender", None, "proposed", "größer, 'quoted'"),
    (4, "d4", 1_800_000_000_000_000, "ann", None, "proposed", "limit far above peak"),
    (5, "d5", 1_800_000_000_000_000, "ann", None, "proposed", "limit far above peak"),
    (6, "d1", 1_800_000_060_000_000, "ann", "proposed", "approved", "looks right"),
    (7, "d3", 1_800_000_060_000_000, "bob", "proposed", "rejected", None),
    (8, "d5", 1_800_000_060_000_000, "ann", "proposed", "approved", None),
    (9, "d1", 1_800_000_090_000_000, "enforcer@n1", "approved", "applied", "done"),
    (10, "d2", 1_800_000_095_000_000, "enforcer@n1", "proposed", "proposed", "refused by the enforcer although proposed: not approved"),
    (11, "d2", 1_800_007_260_000_000, "collector", "proposed", "expired", "not approved in time"),
    (12, "d4", 1_800_007_260_000_000, "collector", "proposed", "expired", "not approved in time"),
    (13, "d5", 1_800_007_260_000_000, "collector", "approved", "expired", "no answer of the enforcer"),
]


def run_sql(place: Path | str, *statements: str) -> Sequence[Sequence[object]]:
    """Rows of the last statement, run as nobody but an administrator would."""
    backend = backend_of(place)
    try:
        with backend.begin(Purpose.UPGRADE) as connection:
            for statement in statements:
                found = connection.execute(text(statement))
            return [tuple(row) for row in found] if found.returns_rows else []
    finally:
        backend.close()


def version_one(places: Places, monkeypatch: pytest.MonkeyPatch) -> Path | str:
    """The golden books. On SQLite as that version left them; elsewhere its rows in the tables of revision 1."""
    place = places.new()
    if places.kind is Sqlite:
        with sqlite3.connect(place) as connection:
            connection.executescript(GOLDEN.read_text())
        connection.close()
        return place
    with monkeypatch.context() as older:
        older.setattr(migrate, "REVISION", REVISIONS[0])
        upgrade(place)
    rows = [line for line in GOLDEN.read_text().splitlines() if line.startswith(('INSERT INTO "decisions"', 'INSERT INTO "decision_log"'))]
    backend = backend_of(place)
    with backend.begin(Purpose.UPGRADE) as connection:
        for row in rows:
            connection.exec_driver_sql(row.replace("%", "%%"))
    backend.close()
    return place


def check_golden(place: Path | str) -> None:
    """Everything that the golden books said is still said."""
    with Books(place, ManualClock(1_800_010_000_000_000)) as books:
        found = {booked.decision.id: booked for booked in books.list()}
        log = [
            (entry.number, entry.decision_id, entry.at_us, entry.by, entry.from_state, entry.to_state, entry.reason)
            for entry in books.log()
        ]
        assert log == LOG
        assert [entry.number for entry in books.log("d1")] == [1, 6, 9]
        assert [(name, booked.decision.sequence, booked.decision.state.value) for name, booked in sorted(found.items())] == [
            ("d1", 1, "applied"), ("d2", 2, "expired"), ("d3", 1, "rejected"), ("d4", 3, "expired"), ("d5", 4, "expired"),
        ]  # fmt: skip
        first, third = found["d1"], found["d3"]
        assert (first.decided_by, first.decided_at_us, first.outcome, first.outcome_reason, first.outcome_at_us) == (
            "ann", 1_800_000_060_000_000, "applied", "done", 1_800_000_090_000_000,
        )  # fmt: skip
        assert (first.decision.memory_bytes, first.decision.memory_before_bytes, first.decision.compute_ppm) == (1 << 30, 1 << 33, None)
        assert (third.decision.reason, third.decision.compute_ppm, third.decision.memory_bytes, third.decision.signature) == (
            "größer, 'quoted'", 250_000, None, "sig",
        )  # fmt: skip
        # And they go on: an answer that comes late still counts, with the next number of the log.
        assert books.record_outcome("d5", "n1", "applied", "late", 5)
        assert books.get("d5").decision.state is DecisionState.APPLIED
        assert (books.log()[-1].number, books.log()[-1].from_state) == (14, "expired")


def test_the_revisions_are_one_line_and_end_in_the_models(places: Places) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == REVISIONS
    place = places.new()
    assert upgrade(place).before is None
    backend = backend_of(place)
    with backend.begin(Purpose.READ) as connection:
        context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    backend.close()


def test_books_of_version_1_are_taken_over(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    place = version_one(places, monkeypatch)
    with pytest.raises(BadInput, match=r"have revision 0001, expected 0003: poolmeter store migrate, or the start of a collector"):
        Books(place)
    done = upgrade(place)
    assert (done.before, done.after) == (REVISIONS[0], REVISION)
    assert upgrade(place).before == REVISION
    check_golden(place)


def test_the_owner_brings_them_up_when_it_opens_them(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    place = version_one(places, monkeypatch)
    Books(place, upgrade=True).close()
    check_golden(place)


def test_upgraded_books_have_the_tables_of_new_ones(tmp_path: Path) -> None:
    """Not only what the models say: triggers and indexes too."""

    def schema(path: Path) -> set[tuple[str, str]]:
        with sqlite3.connect(path) as connection:
            found = set(connection.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
        connection.close()
        return found

    old, new = tmp_path / "old.sqlite", tmp_path / "new.sqlite"
    with sqlite3.connect(old) as connection:
        connection.executescript(GOLDEN.read_text())
    connection.close()
    upgrade(old)
    upgrade(new)
    assert schema(old) == schema(new)
    assert len([kind for kind, _ in schema(new) if kind == "trigger"]) == 3


def test_books_of_a_newer_program_are_refused_and_left_alone(places: Places) -> None:
    place = places.new()
    with Books(place) as books:
        run_sql(place, f"UPDATE {REVISION_TABLE} SET version_num = '0009'")
        sentence = r"have revision 0009, expected 0003 or older: a newer poolmeter made them"
        # Also those that were opened before: the newer program may have come meanwhile.
        for call in (books.list, books.expire_due, lambda: books.tokens.find("pm_1_2"), lambda: books.add_decisions([])):
            with pytest.raises(BadInput, match=sentence):
                call()
    for opened in (Books, lambda where: Books(where, upgrade=True), upgrade):
        with pytest.raises(BadInput, match=sentence):
            opened(place)
    assert run_sql(place, f"SELECT version_num FROM {REVISION_TABLE}") == [("0009",)]


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        (["CREATE TABLE things (a INTEGER)"], "have no revision but the table 'things', expected an empty database or books"),
        (["CREATE TABLE books_version (version INTEGER)"], "have version absent, expected 1"),
        (["CREATE TABLE books_version (version INTEGER)", "INSERT INTO books_version VALUES (9)"], "have version 9, expected 1"),
        ([f"CREATE TABLE {REVISION_TABLE} (version_num VARCHAR(32))"], "have 0 revisions, expected one"),
    ],
)
def test_what_is_not_books_is_refused_and_left_alone(places: Places, statements: list[str], sentence: str) -> None:
    place = places.new()
    run_sql(place, *statements)
    for opened in (Books, lambda where: Books(where, upgrade=True), upgrade):
        with pytest.raises(BadInput, match=sentence):
            opened(place)
    names = (
        "SELECT count(*) FROM sqlite_master"
        if places.kind is Sqlite
        else "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()"
    )
    assert run_sql(place, names) == [(1,)]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "books.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    for opened in (Books, upgrade):
        with pytest.raises(DataError, match="no SQLite database"):
            opened(path)


def test_starts_at_the_same_time_bring_them_up_once(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (version_one(places, monkeypatch), places.new()):
        gate = threading.Barrier(6)

        def start(place: Path | str = place, gate: threading.Barrier = gate) -> str | None:
            gate.wait()
            return upgrade(place).before

        with ThreadPoolExecutor(6) as pool:
            found = [future.result() for future in [pool.submit(start) for _ in range(6)]]
        assert found.count(REVISION) == 5


def test_killed_at_any_statement_an_upgrade_leaves_the_old_books_or_the_new(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    place = version_one(places, monkeypatch)
    number = 0
    while crash_at(number, lambda: upgrade(place)):
        with pytest.raises(BadInput, match="have revision 0001"):
            Books(place)
        number += 1
    assert number > 20
    check_golden(place)


def test_an_upgrade_that_fails_leaves_the_old_books(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    place = version_one(places, monkeypatch)
    backend = backend_of(place)
    with pytest.raises(RuntimeError), backend.begin(Purpose.UPGRADE) as connection:
        bring_up(connection, backend.name)
        raise RuntimeError
    backend.close()
    with pytest.raises(BadInput, match="have revision 0001"):
        Books(place)


def test_a_path_with_strange_signs_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "100% of?a=b #books" / "b o%20oks.sqlite"
    with Books(path) as books:
        assert books.list() == []
    assert path.is_file()
    assert json.dumps([found.name for found in path.parent.iterdir()]) == json.dumps([path.name])
