"""A backup is the books of one moment, whole, in one file, whatever others write meanwhile."""

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from books_crash import crash_at
from books_decisions import decision

from poolmeter.books.backup import backup
from poolmeter.books.models import REVISION
from poolmeter.books.tokens import Role
from poolmeter.books.upgrade import upgrade
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, DataError, Unavailable

GOLDEN = Path(__file__).parent / "golden" / "version-1.sql"


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        found = list(connection.iterdump())
    connection.close()
    return found


def test_a_backup_has_everything_and_is_one_file(tmp_path: Path, clock: ManualClock) -> None:
    path, copy = tmp_path / "books.sqlite", tmp_path / "to" / "copy.sqlite"
    copy.parent.mkdir()
    with Books(path, clock) as books:
        books.add_decisions([decision(1), decision(2)])
        _, text = books.tokens.add("mine", Role.ADMIN, "ann")
        path.chmod(0o600)
        books.backup_to(copy)
        assert dump(copy) == dump(path)
    assert [found.name for found in copy.parent.iterdir()] == ["copy.sqlite"]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with Books(copy, clock) as books:
        assert [booked.decision.id for booked in books.list()] == ["d1", "d2"] and books.tokens.find(text) is not None


def test_a_backup_beside_writers_is_one_moment(tmp_path: Path) -> None:
    path = tmp_path / "books.sqlite"
    Books(path).close()
    stop = threading.Event()

    def write() -> None:
        number = 0
        with Books(path) as books:
            while not stop.is_set():
                # Both or none of them are in any copy.
                books.add_decisions([decision(number, "n1"), decision(number + 1, "n2")])
                number += 2

    writer = threading.Thread(target=write)
    writer.start()
    try:
        counts = []
        for number in range(6):
            copy = tmp_path / f"copy-{number}"
            backup(path, copy)
            with Books(copy) as books:
                one, other = books.list(node="n1"), books.list(node="n2")
                assert len(one) == len(other) and len(books.changes()) == 2 * len(one)
                counts.append(len(one))
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)


def test_books_of_version_1_can_be_copied_before_they_are_brought_up(tmp_path: Path) -> None:
    path, copy = tmp_path / "books.sqlite", tmp_path / "copy.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(GOLDEN.read_text())
    connection.close()
    backup(path, copy)
    assert dump(copy) == dump(path)
    assert upgrade(copy).after == REVISION


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    path, copy = tmp_path / "books.sqlite", tmp_path / "copy.sqlite"
    Books(path).close()
    copy.write_text("mine")
    with pytest.raises(BadInput, match=r"copy.sqlite is there already, expected a new file"):
        backup(path, copy)
    with pytest.raises(BadInput, match="is there already"):
        backup(path, path)
    assert copy.read_text() == "mine"
    with pytest.raises(Unavailable, match=r"books \S+none.sqlite are not there"):
        backup(tmp_path / "none.sqlite", tmp_path / "new")
    assert not (tmp_path / "none.sqlite").exists() and not (tmp_path / "new").exists()
    with pytest.raises(Unavailable, match="cannot be"):
        backup(path, tmp_path / "nowhere" / "new")


def test_damaged_books_are_not_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "books.sqlite"
    with Books(path) as books:
        books.add_decisions([decision(number) for number in range(200)])
    body = bytearray(path.read_bytes())
    body[8192:20480] = b"\xa5" * 12288
    path.write_bytes(body)
    with pytest.raises(DataError, match="cannot be copied"):
        backup(path, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["books.sqlite"]


def test_postgresql_has_its_own_way() -> None:
    with pytest.raises(BadInput, match=r"books postgresql://db/books are in PostgreSQL, expected pg_dump for a backup of them"):
        backup("postgresql://db/books", Path("/nowhere"))


def test_a_killed_writer_does_not_spoil_the_backup(tmp_path: Path, clock: ManualClock) -> None:
    path, copy = tmp_path / "books.sqlite", tmp_path / "copy"
    with Books(path, clock) as books:
        books.add_decisions([decision(1)])

    def write() -> None:
        with Books(path, clock) as own:
            own.add_decisions([decision(2), decision(3)])

    assert crash_at(9, write)
    backup(path, copy)
    with Books(copy, clock) as books:
        assert [booked.decision.id for booked in books.list()] == ["d1"]
