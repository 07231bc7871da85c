"""No request takes more than its part: time and memory of questions, how many at once, bytes of a page, and peers that only take time."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, event, records
from collector_served import client, collector, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from poolmeter.collector.api import ApiState
from poolmeter.collector.catalog import open_catalog, query
from poolmeter.collector.limits import Limits
from poolmeter.collector.usage import read_page
from poolmeter.model.units import MINUTE_US
from poolmeter.web.protocol import PatientProtocol

PERIOD = {"from": "2027-01-15", "to": "2027-01-16"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiState]:
    with collector(tmp_path_factory.mktemp("limits")) as made:
        made.store.publish([batch(records("n1", EPOCH, 1, 42, DAY))], now_us=NOW)
        yield made


def asking(work: Callable[[], object]) -> Route:
    """A report of another component, which asks the store in its own way."""

    def report(_: Request) -> Response:
        return PlainTextResponse(str(work()))

    return Route("/v1/reports/usage", report)


async def test_a_question_that_takes_too_long_is_ended_wherever_it_is_asked(state: ApiState) -> None:
    ended = threading.Event()

    def slow() -> object:
        try:
            with open_catalog(state.store.root) as connection:
                return connection.execute(
                    "SELECT count(*) FROM range(100000) a, range(10000000) b WHERE (a.range * b.range) % 7 = 3"
                ).fetchall()
        finally:
            ended.set()

    state.limits = Limits(query_timeout_s=0.3)
    async with client(state, extra=[asking(slow)]) as http:
        answer = await http.get("/v1/reports/usage")
        assert answer.status_code == 503 and "took longer than 0.3 s, expected a smaller one" in answer.json()["error"]
        assert answer.headers["Retry-After"] == "30" and ended.is_set()
        state.limits = Limits()
        assert (await http.get("/v1/nodes")).status_code == 200
    assert state.observed.rejected.labels("time")._value.get() == 1


async def test_a_question_that_takes_too_much_memory_is_refused_and_the_next_is_answered(state: ApiState) -> None:
    def large() -> object:
        return query(state.store.root, "SELECT list(md5(range::VARCHAR) ORDER BY random()) FROM range(8000000)").num_rows

    state.limits = Limits(query_memory_mib=64)
    async with client(state, extra=[asking(large)]) as http:
        answer = await http.get("/v1/reports/usage")
        assert answer.status_code == 503, answer.text
        assert (await http.get("/v1/usage", params=PERIOD)).status_code == 200


async def test_what_does_not_fit_in_memory_is_not_written_into_the_store(state: ApiState) -> None:
    during: list[set[str]] = []

    def sorted_by_digest() -> object:
        with open_catalog(state.store.root) as connection:
            sql = "SELECT last(r) FROM (SELECT range r, row_number() OVER (ORDER BY md5(range::VARCHAR)) FROM range(2000000))"
            found = connection.execute(sql).fetchall()
            during.append({path.suffix for path in state.store.root.iterdir()})
            return found

    state.limits = Limits(query_memory_mib=128)
    async with client(state, extra=[asking(sorted_by_digest)]) as http:
        assert (await http.get("/v1/reports/usage")).text == "[(1999999,)]"
    assert during and ".tmp" not in during[0]


async def test_so_many_questions_run_so_many_wait_and_the_rest_is_turned_away(state: ApiState) -> None:
    go = threading.Event()
    state.limits = Limits(queries_at_once=1)
    async with client(state, extra=[asking(lambda: go.wait(60))]) as http:
        asked = [asyncio.create_task(http.get("/v1/reports/usage")) for _ in range(12)]
        while sum(task.done() for task in asked) < 3:
            await asyncio.sleep(0.01)
        assert state.queries is not None and (state.queries.running, state.queries.waiting) == (1, 8)
        # What asks nothing of the store is answered meanwhile.
        assert (await http.get("/v1/nodes")).status_code == 200
        go.set()
        answers = [await task for task in asked]
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [503] * 3
    turned = next(answer for answer in answers if answer.status_code == 503)
    assert turned.headers["Retry-After"] == "5" and "expected at most 8 waiting" in turned.json()["error"]
    assert (state.queries.running, state.queries.waiting) == (0, 0)


@given(limit=st.integers(1, 50), bytes_most=st.integers(1, 6000))
@settings(max_examples=max(10, settings().max_examples // 4))
def test_pages_of_any_size_hold_a_row_and_no_more_than_they_may(state: ApiState, limit: int, bytes_most: int) -> None:
    sql = "SELECT sequence, repeat('x', 100) AS text FROM device_minutes ORDER BY sequence"
    table, more = read_page(state.store.root, f"{sql} LIMIT {limit + 1}", [], limit, bytes_most)
    sequences = table.column("sequence").to_pylist()
    assert sequences == list(range(4, 43, 4))[: len(sequences)] and 1 <= len(sequences) <= limit
    assert more == (len(sequences) < 10)
    assert len(sequences) == 1 or 100 * len(sequences) <= bytes_most


async def test_long_texts_make_small_pages_that_join_to_the_whole(tmp_path: Path) -> None:
    with collector(tmp_path) as state:
        made = [event("n1", EPOCH, n, DAY + n // 60 * MINUTE_US, detail=json.dumps("x" * 60_000)) for n in range(1, 601)]
        state.store.publish([batch(made)], now_us=NOW)
        async with client(state) as http:
            seen: list[int] = []
            cursor, pages = None, 0
            while True:
                params = {**PERIOD, "kind": "event", "limit": "100000", **({"cursor": cursor} if cursor else {})}
                answer = await http.get("/v1/usage", params=params)
                assert len(answer.content) < 24 << 20
                seen += [row["sequence"] for row in answer.json()["rows"]]
                pages, cursor = pages + 1, answer.json().get("cursor")
                if cursor is None:
                    break
            assert seen == list(range(1, 601)) and pages >= 2


# ---- peers that take their time ----------------------------------------------------------------------------------------------------------


async def _app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Reads the body, and answers with 64 MiB for /large."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message.get("more_body", False)
    pieces = 1024 if scope["path"] == "/large" else 1
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(pieces * 65_536).encode())]})
    for left in range(pieces, 0, -1):
        await send({"type": "http.response.body", "body": bytes(65_536), "more_body": left > 1})


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "request"),
        (b"GET / HT", "request"),
        (HEAD + b"a" * 10, "request"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT", "request"),
        (b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", "answer"),
    ],
)
def test_a_peer_that_only_takes_time_is_let_go_of(monkeypatch: pytest.MonkeyPatch, sent: bytes, reason: str) -> None:
    monkeypatch.setattr(PatientProtocol, "REQUEST_S", 0.3)
    monkeypatch.setattr(PatientProtocol, "WRITE_S", 0.3)
    before = dict(PatientProtocol.dropped)
    with serving(_app) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname or "", where.port or 0), 20) as peer:
            peer.sendall(sent)
            while PatientProtocol.dropped == before:
                threading.Event().wait(0.02)
    assert PatientProtocol.dropped == {**before, reason: before[reason] + 1}


def test_a_peer_that_goes_on_sending_and_taking_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "REQUEST_S", 2.0)
    monkeypatch.setattr(PatientProtocol, "WRITE_S", 2.0)
    before = dict(PatientProtocol.dropped)
    with serving(_app) as url:
        where = urlsplit(url)
        for path in (b"/", b"/large"):
            with socket.create_connection((where.hostname or "", where.port or 0), 20) as peer:
                peer.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\n")
                for _ in range(10):
                    peer.sendall(b"a" * 100_000)
                size = 0
                while part := peer.recv(1 << 20):
                    size += len(part)
            assert size > (64 << 20 if path == b"/large" else 65_536)
    assert PatientProtocol.dropped == before
