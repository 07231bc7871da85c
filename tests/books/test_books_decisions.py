"""Books: decisions, the state machine, the log, versions, where they may lie."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from books_decisions import HOUR, NOW, decision

from poolmeter.books.disk import filesystem_of, parse_mounts, refuse_network
from poolmeter.books.models import DecisionRow
from poolmeter.books.states import NEXT
from poolmeter.books.writer import ANSWER_US, Books, NotInBooks
from poolmeter.clock import ManualClock
from poolmeter.errors import BadInput, Refused
from poolmeter.model.decision import Decision, DecisionState


@pytest.fixture
def books(place: Path | str, clock: ManualClock) -> Iterator[Books]:
    with Books(place, clock) as books:
        yield books


def test_every_field_of_a_decision_comes_back(books: Books) -> None:
    wanted = decision(
        sequence=7, compute_ppm=250_000, compute_before_ppm=500_000, signature="sig", memory_bytes=(1 << 63) - 1, reason="größer"
    )
    books.add_decisions([wanted])
    found = books.get("d1")
    assert found.decision == wanted
    assert all(hasattr(DecisionRow, field.name) for field in fields(Decision))
    assert found.outcome is None and found.decided_by is None


def test_sequences_grow_per_node_and_adding_again_changes_nothing(books: Books) -> None:
    first = books.add_decisions([decision(1), decision(2), decision(3, node="n2")])
    assert [booked.decision.sequence for booked in first] == [1, 2, 1]
    assert books.next_sequence("n1") == 3 and books.next_sequence("n9") == 1
    again = books.add_decisions([decision(1)])
    assert again == first[:1]
    assert len(books.log()) == 3
    with pytest.raises(Refused, match="other content"):
        books.add_decisions([decision(1, memory_bytes=5)])
    with pytest.raises(Refused, match=r"sequence 2 of node n1 is taken, expected 3"):
        books.add_decisions([decision(4, sequence=2)])


def test_a_batch_is_entered_whole_or_not_at_all(books: Books) -> None:
    books.add_decisions([decision(1)])
    with pytest.raises(Refused):
        books.add_decisions([decision(2), decision(1, generation=99)])
    assert [booked.decision.id for booked in books.list()] == ["d1"]


@pytest.mark.parametrize(("start", "to"), list(itertools.product(DecisionState, DecisionState)))
def test_only_the_legal_changes_of_state_happen(books: Books, start: DecisionState, to: DecisionState) -> None:
    books.add_decisions([decision()])
    way = {
        DecisionState.PROPOSED: [],
        DecisionState.APPROVED: [DecisionState.APPROVED],
        DecisionState.REJECTED: [DecisionState.REJECTED],
        DecisionState.EXPIRED: [DecisionState.EXPIRED],
        DecisionState.APPLIED: [DecisionState.APPROVED, DecisionState.APPLIED],
        DecisionState.REFUSED: [DecisionState.APPROVED, DecisionState.REFUSED],
    }[start]
    for step in way:
        books.transition("d1", step, "ann", "why not")
    before = books.log("d1")
    if to in NEXT[start]:
        moved = books.transition("d1", to, "bob", "because")
        assert (moved.decision.state, moved.decided_by, moved.state_reason, moved.decided_at_us) == (to, "bob", "because", NOW)
        last = books.log("d1")[-1]
        assert (last.from_state, last.to_state, last.by, last.reason, last.at_us) == (start.value, to.value, "bob", "because", NOW)
    else:
        with pytest.raises(Refused, match=f"decision d1 is {start.value} and cannot become {to.value}"):
            books.transition("d1", to, "bob", "because")
        assert books.get("d1").decision.state is start
        assert books.log("d1") == before


def test_an_unknown_decision_and_a_late_approval_are_refused(books: Books, clock: ManualClock) -> None:
    with pytest.raises(NotInBooks, match="'d9' is not in the books"):
        books.transition("d9", DecisionState.APPROVED, "ann")
    books.add_decisions([decision()])
    clock.advance(HOUR)
    with pytest.raises(Refused, match="expired at"):
        books.transition("d1", DecisionState.APPROVED, "ann")


def test_the_enforcers_word_is_taken_once_and_only_for_its_own_node(books: Books) -> None:
    books.add_decisions([decision()])
    books.transition("d1", DecisionState.APPROVED, "ann")
    assert not books.record_outcome("d1", "n2", "applied", None, NOW + 1)
    assert not books.record_outcome("d9", "n1", "applied", None, NOW + 1)
    assert not books.record_outcome("d1", "n1", "exploded", None, NOW + 1)
    assert books.record_outcome("d1", "n1", "applied", "done", NOW + 1)
    assert not books.record_outcome("d1", "n1", "applied", "done", NOW + 1)
    found = books.get("d1")
    assert (found.decision.state, found.outcome, found.outcome_reason, found.outcome_at_us) == (
        DecisionState.APPLIED,
        "applied",
        "done",
        NOW + 1,
    )
    assert [entry.to_state for entry in books.log("d1")] == ["proposed", "approved", "applied"]


def test_an_outcome_nobody_approved_is_kept_without_moving_the_state(books: Books) -> None:
    books.add_decisions([decision()])
    assert books.record_outcome("d1", "n1", "applied", None, NOW + 1)
    found = books.get("d1")
    assert (found.decision.state, found.outcome) == (DecisionState.PROPOSED, "applied")
    assert "although proposed" in (books.log("d1")[-1].reason or "")


def test_what_is_never_answered_expires_and_a_late_answer_still_counts(books: Books, clock: ManualClock) -> None:
    books.add_decisions([decision(1), decision(2)])
    books.transition("d2", DecisionState.APPROVED, "ann")
    assert books.expire_due() == 0
    clock.advance(HOUR)
    assert books.expire_due() == 1
    assert books.get("d1").decision.state is DecisionState.EXPIRED
    clock.advance(ANSWER_US)
    assert books.expire_due() == 1
    assert books.record_outcome("d2", "n1", "applied", None, NOW + 5)
    assert books.get("d2").decision.state is DecisionState.APPLIED


def test_lists_filter_by_state_and_node(books: Books) -> None:
    books.add_decisions([decision(1), decision(2), decision(3, node="n2")])
    books.transition("d2", DecisionState.APPROVED, "ann")
    assert [booked.decision.id for booked in books.list(state=DecisionState.APPROVED)] == ["d2"]
    assert [booked.decision.id for booked in books.list(node="n2")] == ["d3"]
    assert [booked.decision.id for booked in books.list(state=DecisionState.PROPOSED, node="n1")] == ["d1"]


def test_pages_of_a_list_join_to_the_whole_whatever_nodes_are_called(books: Books) -> None:
    names = ["n1", "N1", "n10", "n2", "ñ", "n-1", "n_1", "é"]
    books.add_decisions([decision(10 * number + turn, node=name) for number, name in enumerate(names) for turn in (1, 2, 3)])
    whole = books.list()
    keys = [(booked.decision.node, booked.decision.sequence) for booked in whole]
    assert len(whole) == 24 and keys == sorted(keys)
    for limit in (1, 5, 24, 100):
        found, after = [], None
        while page := books.list(after=after, limit=limit):
            assert len(page) <= limit
            found += page
            after = page[-1].decision.id
        assert found == whole
    books.transition(whole[3].decision.id, DecisionState.APPROVED, "ann")
    # Also behind one that the list no longer has.
    assert books.list(state=DecisionState.PROPOSED, after=whole[3].decision.id) == whole[4:]
    with pytest.raises(NotInBooks, match="'nobody'"):
        books.list(after="nobody")


def test_writers_beside_each_other_lose_nothing(place: Path | str, clock: ManualClock) -> None:
    Books(place, clock).close()
    errors: list[BaseException] = []

    def work(base: int) -> None:
        try:
            with Books(place, clock) as own:
                for number in range(10):
                    own.add_decisions([decision(base + number)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with Books(place, clock) as books:
        assert [booked.decision.sequence for booked in books.list()] == list(range(1, 41))


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    text = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"30 22 0:40 / {str(tmp_path).replace(' ', chr(92) + '040')} rw shared:1 - nfs4 server:/x rw\n"
        "31 22 0:41 / /mnt/with\\040blank rw - cifs //s/x rw\n"
    )
    mounts = parse_mounts(text)
    assert filesystem_of(Path("/var/lib"), mounts) == "ext4"
    assert filesystem_of(Path("/mnt/with blank/books"), mounts) == "cifs"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(text)
    with pytest.raises(BadInput, match="network file system"):
        refuse_network(tmp_path / "books.sqlite", mountinfo)
    refuse_network(Path("/var/lib/books.sqlite"), mountinfo)
