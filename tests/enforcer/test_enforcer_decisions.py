"""Decisions: each carried out or refused once, whatever is asked again and however often the enforcer starts."""

import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal

import pytest

from poolmeter.enforcer import allocations as disk
from poolmeter.enforcer import decisions as module
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Owner
from poolmeter.enforcer.decisions import DecisionPoll, decide, fetch_url, parse_decisions
from poolmeter.enforcer.journal import read_events
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import DataError, Unavailable
from poolmeter.model.allocation import Allocation, Labels
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import to_plain
from poolmeter.pages.grant import read_grant

GIB = 1 << 30
FAR = 4_000_000_000_000_000


@pytest.fixture
def book(open_book) -> Book:
    return open_book()


@pytest.fixture
def allocation(book: Book) -> Allocation:
    return book.create(AllocationRequest(Labels("acme"), device_count=2, compute_ppm=500_000), Owner())


def decision(allocation: Allocation, **changes: object) -> Decision:
    base = Decision(
        id="d-1",
        node="alpha",
        allocation_id=allocation.id,
        device_uuid=allocation.slices[0].device_uuid,
        generation=allocation.generation,
        sequence=1,
        created_us=1,
        expires_us=FAR,
        rule="memory-far-above-peak",
        reason="peak 5 GiB of 40 GiB",
        input_hash="00",
        memory_bytes=8 * GIB,
        state=DecisionState.APPROVED,
    )
    return replace(base, **changes)


def test_an_approved_decision_is_in_force_in_grant_file_and_journal(book, allocation, agree) -> None:
    event = decide(book, decision(allocation), "alpha")
    assert event is not None
    assert (event.kind, event.decision_id, event.outcome) == ("decision", "d-1", "applied")
    assert event.allocation is not None
    after = book.get(allocation.id)
    assert to_plain(after) == event.allocation
    assert (after.decision_id, after.generation) == ("d-1", allocation.generation + 2)
    assert [item.memory_bytes for item in after.slices] == [8 * GIB, 40 * GIB]
    grant = read_grant(book.run.allocations / allocation.id / "grant")
    assert (grant.decision_id, grant.generation, grant.devices[0].memory_bytes) == ("d-1", after.generation, 8 * GIB)
    agree(book)


def test_a_compute_decision_moves_promise_and_limit(book, allocation) -> None:
    decide(book, decision(allocation, memory_bytes=None, compute_ppm=300_000), "alpha")
    first = book.get(allocation.id).slices[0]
    assert (first.promise_ppm, first.compute_limit_ppm, first.memory_bytes) == (300_000, 300_000, 40 * GIB)


REFUSALS = {
    "stale": ({"generation": 4}, "refused", "made against generation 4, the grant has 2"),
    "expired": ({"expires_us": 5}, "expired", "it expired at 5 us"),
    "no allocation": ({"allocation_id": "a-0000000000-0123456789ab"}, "refused", "not on this node"),
    "odd id": ({"allocation_id": "../x"}, "refused", "allocation id is"),
    "other device": ({"device_uuid": "GPU-00000003"}, "refused", "has no share of device"),
    "no change": ({"memory_bytes": None}, "refused", "changes nothing"),
    "too much memory": ({"memory_bytes": 81 * GIB}, "refused", "the card has 80.0 GiB"),
    "too much time": ({"compute_ppm": 1_000_001}, "refused", "expected 1 to 1000000"),
    "no memory": ({"memory_bytes": 0}, "refused", "expected a positive number"),
}


@pytest.mark.parametrize(("changes", "outcome", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_applied_is_journalled_with_its_reason_once(
    changes: dict[str, object], outcome: str, reason: str, book: Book, allocation: Allocation, open_book: Callable[..., Book], agree
) -> None:
    wrong = decision(allocation, **changes)
    event = decide(book, wrong, "alpha")
    assert event is not None
    assert (event.outcome, event.decision_id, event.allocation) == (outcome, "d-1", None)
    assert event.reason is not None and reason in event.reason
    assert book.get(allocation.id) == allocation
    assert decide(book, wrong, "alpha") is None
    book = open_book()  # a restart remembers
    assert decide(book, wrong, "alpha") is None
    assert sum(event.kind == "decision" for event in read_events(book.journal.path)) == 1
    agree(book)


def test_an_applied_decision_is_not_applied_again_after_a_restart(book, allocation, open_book, agree) -> None:
    decide(book, decision(allocation), "alpha")
    book = open_book()
    assert decide(book, decision(allocation), "alpha") is None
    assert decide(book, decision(allocation, generation=4), "alpha") is None
    assert book.get(allocation.id).generation == 4
    agree(book)


def test_a_resize_in_between_makes_a_decision_stale(book, allocation) -> None:
    book.resize(ResizeRequest(allocation.id, memory_bytes=30 * GIB))
    event = decide(book, decision(allocation), "alpha")
    assert event is not None and event.outcome == "refused"
    assert book.get(allocation.id).decision_id is None


def test_a_resize_while_a_decision_is_looked_at_is_not_undone_by_it(book, allocation, monkeypatch: pytest.MonkeyPatch, agree) -> None:
    admitted = book.admitted

    def late(*arguments: object) -> Allocation:
        after = admitted(*arguments)
        book.resize(ResizeRequest(allocation.id, memory_bytes=30 * GIB))
        return after

    monkeypatch.setattr(book, "admitted", late)
    event = decide(book, decision(allocation), "alpha")
    assert event is not None and event.outcome == "refused" and "generation 4 meanwhile" in str(event.reason)
    assert [item.memory_bytes for item in book.get(allocation.id).slices] == [30 * GIB] * 2
    agree(book)


def test_a_limit_is_never_lowered_below_what_is_in_use_and_its_margin(book, allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {allocation.slices[0].device_uuid: 10 * GIB}
    monkeypatch.setattr(disk, "memory_in_use", lambda _: used)
    event = decide(book, decision(allocation, memory_bytes=11 * GIB - 1), "alpha", Decimal("1.1"))
    assert event is not None and event.outcome == "refused" and "10.0 GiB is in use" in str(event.reason)
    event = decide(book, decision(allocation, id="d-2", memory_bytes=11 * GIB), "alpha", Decimal("1.1"))
    assert event is not None and event.outcome == "applied"


def test_decisions_for_others_or_not_approved_are_left_alone(book, allocation) -> None:
    assert decide(book, decision(allocation), "beta") is None
    for state in DecisionState:
        if state is not DecisionState.APPROVED:
            assert decide(book, decision(allocation, state=state), "alpha") is None
    assert [event.kind for event in read_events(book.journal.path)] == ["created"]


class Collector:
    """The collector's decisions endpoint, answering whatever `rows` holds."""

    def __init__(self) -> None:
        self.rows: list[Decision] = []
        self.asked: list[str] = []
        self.page = 1000
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                after = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("after", [""])[0]
                start = next((number + 1 for number, row in enumerate(outer.rows) if row.id == after), 0)
                page = outer.rows[start : start + outer.page]
                more = {"after": page[-1].id} if start + outer.page < len(outer.rows) else {}
                body = json.dumps({"rows": to_plain(page), **more}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_the_poll_carries_out_what_the_collector_lists_in_order_and_once(book, allocation, collector: Collector, agree) -> None:
    poll = DecisionPoll(book, "alpha", collector.url, 1)
    second = decision(allocation, id="d-2", sequence=2, generation=4, memory_bytes=6 * GIB)
    collector.rows = [second, decision(allocation)]
    assert [(event.decision_id, event.outcome) for event in poll.once()] == [("d-1", "applied"), ("d-2", "applied")]
    assert poll.once() == ()
    assert collector.asked == ["/v1/decisions?state=approved&node=alpha"] * 2
    agree(book)


def test_the_poll_takes_all_pages(book, allocation, collector: Collector) -> None:
    collector.page = 1
    second = decision(allocation, id="d 2&x", sequence=2, generation=4, memory_bytes=6 * GIB)
    collector.rows = [decision(allocation), second]
    poll = DecisionPoll(book, "alpha", collector.url, 1)
    assert [(event.decision_id, event.outcome) for event in poll.once()] == [("d-1", "applied"), ("d 2&x", "applied")]
    assert collector.asked == [f"/v1/decisions?state=approved&node=alpha{more}" for more in ("", "&after=d-1")]


def test_without_a_collector_it_is_unavailable_and_nothing_else(book) -> None:
    with pytest.raises(Unavailable, match="gave no decisions"):
        DecisionPoll(book, "alpha", "http://127.0.0.1:9", 1).once()
    with pytest.raises(Unavailable, match="gave no decisions"):
        fetch_url("nonsense")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"rows":1}', b'{"rows":[],"after":1}', b'{"rows":[{"id":1}]}', b"[" * 100_000])
def test_an_answer_that_is_none_is_data_error(body: bytes) -> None:
    with pytest.raises(DataError):
        parse_decisions(body)


def test_a_running_enforcer_applies_an_approved_decision(make_node, collector: Collector) -> None:
    node = make_node("alpha", options=("--collector", collector.url))
    (node.root / "config.toml").write_text('[node]\nname = "alpha"\n[enforcer]\ndecision_interval_s = 0.2\n')
    node.kill()
    node.start()
    allocation = node.client.create(AllocationRequest(Labels("acme"), compute_ppm=500_000))
    collector.rows = [decision(allocation)]
    deadline = module._TIMEOUT_S
    seen = threading.Event()
    for _ in range(int(deadline / 0.05)):
        if node.client.list()[0].decision_id == "d-1":
            break
        seen.wait(0.05)
    assert node.client.list()[0].slices[0].memory_bytes == 8 * GIB
