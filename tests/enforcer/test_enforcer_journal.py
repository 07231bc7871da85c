"""The journal: on the disk before anybody is told, whole lines only, one sequence for ever."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.enforcer.journal import Journal, read_events
from poolmeter.errors import DataError, Unavailable
from poolmeter.model.decision import JournalEvent


def written(path: Path, count: int) -> bytes:
    journal = Journal(path)
    journal.open()
    for number in range(count):
        journal.append("refused", 1000 + number, tenant="acme", reason=f"no room é {number}")
    journal.close()
    return path.read_bytes()


def test_events_come_back_in_order_and_the_sequence_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    written(path, 3)
    journal = Journal(path)
    seen: list[JournalEvent] = []
    journal.open(seen.append)
    assert [event.sequence for event in seen] == [1, 2, 3]
    event = journal.append("refused", 5)
    assert event.sequence == 4
    assert event.at_us == 1002  # the clock stepped back; order and time still agree
    assert tuple(read_events(path))[-1] == event


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("journal") / "events.jsonl"
    return path, written(path, 4)


@given(cut=st.integers(0, 400), junk=st.sampled_from([b"", b"\0" * 40, b"{", b'{"sequence":9}\n', b"\xff\n"]))
def test_a_torn_last_line_is_cut_off_and_no_whole_line_is_lost(sample: tuple[Path, bytes], cut: int, junk: bytes) -> None:
    path, body = sample
    kept = body[: max(0, len(body) - cut)]
    path.write_bytes(kept + junk)
    whole = kept.count(b"\n")
    journal = Journal(path)
    events: list[JournalEvent] = []
    journal.open(events.append)
    journal.close()
    assert [event.sequence for event in events] == list(range(1, whole + 1))
    assert path.read_bytes() == body[: sum(len(line) for line in body.splitlines(keepends=True)[:whole])]


def test_a_broken_line_before_the_last_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = written(path, 3).splitlines(keepends=True)
    path.write_bytes(lines[0] + b"oops\n" + lines[2])
    with pytest.raises(DataError, match=r"events\.jsonl line 2"):
        Journal(path).open()


def test_readers_leave_a_line_that_is_being_written_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    body = written(path, 2)
    path.write_bytes(body[:-1])
    assert [event.sequence for event in read_events(path)] == [1]
    assert tuple(read_events(tmp_path / "none")) == ()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    before = written(path, 1)
    journal = Journal(path)
    journal.open()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, body: write(descriptor, body[:20]))
    with pytest.raises(Unavailable, match="full"):
        journal.append("refused", 1)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert journal.append("refused", 1).sequence == 2


def test_one_enforcer_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.open()
    with pytest.raises(Unavailable, match="has an enforcer already"):
        Journal(journal.path).open()
    journal.close()
    second = Journal(journal.path)
    second.open()
    second.close()


def test_a_journal_that_is_no_file_is_refused() -> None:
    with pytest.raises(Unavailable, match="expected a regular file"):
        Journal(Path("/dev/full")).open()
