"""Compaction of the journal: nothing that is in force or undecided is forgotten, no reader counts twice or misses silently."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.enforcer import journal as module
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Owner
from poolmeter.enforcer.compaction import KEEP_US, compact
from poolmeter.enforcer.journal import COMPACTED, Journal, read_events
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import Refused, Unavailable
from poolmeter.exporter.journal import read_journal
from poolmeter.exporter.timeline import Timeline
from poolmeter.model.allocation import Labels
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import canonical_json
from poolmeter.model.units import GIB

DAY_US = 86_400_000_000
NAMES = ("a-1", "a-2", "a-3")


def line(event: JournalEvent) -> bytes:
    return canonical_json(event).encode() + b"\n"


@st.composite
def histories(draw: st.DrawFn) -> list[JournalEvent]:
    """Events of a node, over up to three weeks."""
    events: list[JournalEvent] = []
    at = 0
    for sequence in range(1, draw(st.integers(1, 25)) + 1):
        at += draw(st.sampled_from((0, 1, DAY_US, 3 * DAY_US)))
        kind = draw(st.sampled_from(("created", "resized", "released", "refused", "decision")))
        name = draw(st.sampled_from(NAMES))
        plain: dict[str, object] | None = {"id": name, "generation": sequence}
        if kind == "refused" or (kind == "decision" and draw(st.booleans())):
            plain = None
        decision = f"d-{sequence}" if kind == "decision" else None
        events.append(JournalEvent(sequence, at, kind, None if kind == "refused" else name, plain, "acme", decision))
    return events


def told(events: list[JournalEvent], there: set[str]) -> dict[str, object]:
    return {event.allocation_id: event.allocation for event in events if event.allocation is not None and event.allocation_id in there}


@given(
    events=histories(),
    there=st.sets(st.sampled_from(NAMES)),
    seen=st.integers(0, 25),
    keep_bytes=st.sampled_from((0, 300, 10**6)),
    twice=st.booleans(),
)
def test_what_matters_is_kept_and_readers_know_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, events: list[JournalEvent], there: set[str], seen: int, keep_bytes: int, twice: bool
) -> None:
    now = events[-1].at_us
    lines = [line(event) for event in events]
    seen = min(seen, len(events))
    path = tmp_path_factory.getbasetemp() / f"compaction-{os.getpid()}.jsonl"
    path.write_bytes(b"".join(lines[:seen]))
    before = read_journal(path, 0, "")
    reader = Timeline()
    reader.learn(before.events)
    out = compact(lines, there, now, keep_bytes=keep_bytes, keep_decisions=3)
    if out is not None and twice:
        out = compact(out, there, now, keep_bytes=0, keep_decisions=2) or out
    path.write_bytes(b"".join(out if out is not None else lines))
    left = list(read_events(path))
    real = [event for event in left if event.kind != COMPACTED]
    # The enforcer's view.
    assert [event for event in events if event in real] == real
    assert told(real, there) == told(events, there)
    assert [event for event in events if event.decision_id][-2:] == [event for event in real if event.decision_id][-2:]
    assert max(event.sequence for event in left) == len(events)
    # The exporter's: everything that is left and new to it, once, in order; what is missing is told by a mark.
    after = read_journal(path, before.offset, before.head)
    fresh, _ = reader.learn(after.events)
    assert [event for event in fresh if event.kind != COMPACTED] == [event for event in real if event.sequence > seen]
    missing = {event.sequence for event in events if event.sequence > seen} - {event.sequence for event in real}
    assert bool(missing) == any(event.kind == COMPACTED for event in fresh)


def test_old_refusals_go_and_young_ones_stay() -> None:
    events = [JournalEvent(number, number * DAY_US, "refused", tenant="acme") for number in range(1, 21)]
    out = compact([line(event) for event in events], (), 20 * DAY_US)
    assert out is not None
    assert b'"reason":"11 events up to 11 are no longer here"' in out[0] and b'"sequence":0' in out[0]
    assert out[2:] == [line(event) for event in events if event.at_us >= 20 * DAY_US - KEEP_US]
    assert compact(out, (), 20 * DAY_US) is None  # nothing more to drop
    again = compact(out, (), 21 * DAY_US)
    assert again is not None and b'"reason":"12 events up to 12 are no longer here"' in again[0] and again[0] != out[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_BYTES", 20_000)
    monkeypatch.setattr("poolmeter.enforcer.book.compact", partial(compact, keep_bytes=4000))


def test_a_book_stays_bounded_and_opens_with_everything_in_force(
    small: None, open_book: Callable[..., Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    book = open_book()
    book.journal._bound = 20_000
    kept = book.create(AllocationRequest(Labels("keeper"), compute_ppm=500_000, memory_bytes=GIB), Owner(0))
    book.decide("d-first", kept.id, "refused", "no")
    largest = 0
    for number in range(300):
        with pytest.raises(Refused):
            book.create(AllocationRequest(Labels("greedy"), device_count=60), Owner(1))
        if number % 50 == 0:
            kept = book.resize(ResizeRequest(kept.id, memory_bytes=(number // 50 + 2) * GIB)).allocation
        book.tend()
        largest = max(largest, book.journal.path.stat().st_size)
    assert largest < 22_000
    first = next(read_events(book.journal.path))
    assert (first.kind, first.sequence) == (COMPACTED, 0)
    sequence = book.journal.append("refused", 1).sequence
    path = book.journal.path
    book.close()
    again = open_book()
    assert again.journal.path == path and again.entries() == (kept,) and again.decided == {"d-first"}
    assert again.journal.append("refused", 1).sequence == sequence + 1


def test_a_compaction_that_fails_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.open()
    for _ in range(3):
        journal.append("refused", 1)
    before = journal.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match="cannot be compacted: No space left on device"):
        journal.rewrite(lambda lines: lines[1:])
    monkeypatch.undo()
    assert journal.path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["events.jsonl"]
    assert journal.append("refused", 1).sequence == 4


def test_a_second_enforcer_does_not_take_the_file_that_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the compaction and locked after it, it would be a journal that nobody reads."""
    first = Journal(tmp_path / "events.jsonl")
    first.open()
    first.append("refused", 1)
    lock, tries = module.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not tries:
            tries.append(descriptor)
            monkeypatch.setattr(module.fcntl, "flock", lock)
            first.rewrite(lambda lines: [*lines, *lines])
        lock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with pytest.raises(Unavailable, match="has an enforcer already"):
        Journal(first.path).open()
    assert tries
    first.close()


def test_a_kill_within_leaves_one_or_the_other(tmp_path: Path) -> None:
    """The process ends before the rename and after it; the next start finds every event of the one file or of the other."""
    for moment in ("before", "after"):
        path = tmp_path / moment / "events.jsonl"
        code = f"""
import os, pathlib
from poolmeter.enforcer.journal import Journal
journal = Journal(pathlib.Path({str(path)!r}))
journal.open()
for _ in range(4):
    journal.append("refused", 1)
replace = pathlib.Path.replace
def killed(self, target):
    if {moment!r} == "after":
        replace(self, target)
    os._exit(9)
pathlib.Path.replace = killed
journal.rewrite(lambda lines: lines[2:])
"""
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 9
        seen: list[JournalEvent] = []
        journal = Journal(path)
        journal.open(seen.append)
        assert [event.sequence for event in seen] == ([1, 2, 3, 4] if moment == "before" else [3, 4])
        assert [entry.name for entry in path.parent.iterdir()] == ["events.jsonl"]
        assert journal.append("refused", 1).sequence == 5
        journal.close()


def test_numbers_never_run_backwards() -> None:
    """The newest event goes with the first compaction, an older one with the second: the mark stays where the newest was."""
    events = [JournalEvent(number, number, "decision", "a-1", None, decision_id=f"d-{number}") for number in (1, 2, 3)]
    events.append(JournalEvent(4, 4, "refused", tenant="acme"))
    once = compact([line(event) for event in events], (), 5, keep_bytes=0, keep_decisions=3)
    assert once is not None
    twice = compact(once, (), 5, keep_bytes=0, keep_decisions=2)
    assert twice is not None and [b'"sequence":%d}' % number in item for number, item in ((0, twice[0]), (4, twice[-1]))] == [True, True]
    assert len(twice) == 4 and b"2 events up to 4 are no longer here" in twice[0]
