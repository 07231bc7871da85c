"""What a breaker sends: each gets a status and one sentence, nothing is half-written, no traceback is logged, and others are served."""

import contextlib
import gzip
import json
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, records
from collector_served import ADMIN, client, collector, serving, token_of

from poolmeter.accounting.routes import routes as report_routes
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import ACCESS, Authority, Credentials, Role
from poolmeter.collector.face import find_in, issued_in
from poolmeter.collector.state import NodeRow
from poolmeter.config import AccountingSection
from poolmeter.model.decision import Decision
from poolmeter.model.plain import to_plain
from poolmeter.model.units import HOUR_US
from poolmeter.serve import asking_tenant
from poolmeter.web.protocol import PatientProtocol

DECISION = Decision("d1", "n1", "a-t1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)
GOOD = to_plain(DECISION)
ODD = (None, 0, -1, 1 << 63, 1 << 200, 1.5, float("inf"), float("nan"), "", "x", "\0", "\ud800", [], {}, [[]], True, "a" * 2000)
WORDS = (
    "", "0", "-1", "1", "9" * 30, "NaN", "Infinity", "1e309", "\0", "é", "😀", "999999w", "0001-01-01", "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00:00+23:59", "2027-13-45", "now", "tenant,tenant", "user,index", "'; DROP", "../../etc/passwd", "Europe/Vienna",
    "UTC\0", "arrow", "day", "n1", "null", "\r\nX: y", "a" * 9000, "W1tbW1tb", "bnVsbA", "used", "１",
)  # fmt: skip


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiState]:
    with collector(tmp_path_factory.mktemp("breakers")) as made:
        made.store.publish(
            [batch(records("n1", EPOCH, 1, 42, DAY))], nodes=[NodeRow("http://n1", "n1", EPOCH, NOW, "up", None, "p", True)], now_us=NOW
        )
        made.books.add_decisions([DECISION])
        yield made


def application(state: ApiState):  # type: ignore[no-untyped-def]
    return create_app(state, report_routes(state.store.root, AccountingSection(), state.clock, asking_tenant))


async def test_no_parameter_makes_a_fault(state: ApiState, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    app = application(state)
    async with client(state, app=app) as admin, client(state, token_of(state, Role.TENANT), app=app) as tenant:
        paths = (await admin.get("/openapi.json")).json()["paths"]
        reads = [path for method, path in ACCESS if method == "GET" and path.startswith("/v1/")]
        for _ in rounds(400, 20_000):
            path = rng.choice(reads)
            names = [item["name"] for item in paths[path]["get"]["parameters"]] or ["none"]
            params = [(rng.choice(names), rng.choice(WORDS)) for _ in range(rng.randint(1, 3))]
            started = time.monotonic()
            answer = await rng.choice((admin, tenant)).get(path, params=params)
            assert answer.status_code in (200, 400, 403, 404), (path, params, answer.text)
            assert answer.status_code == 200 or "\n" not in answer.json()["error"].rstrip()
            assert time.monotonic() - started < 10, (path, params)


async def test_no_body_makes_a_fault_or_half_an_entry(state: ApiState) -> None:
    before = state.books.list()
    bodies: list[str] = [json.dumps(value) for value in ODD] + ["", "{", "[" * 100_000, '{"decisions":[null]}', '{"decisions":{}}', "\xff"]
    for name in GOOD:
        # The good one before the odd one must not be entered alone.
        bodies += [json.dumps({"decisions": [{**GOOD, "id": "new"}, {**GOOD, "id": "odd", name: value}]}) for value in ODD]
    bodies += [
        json.dumps({"decisions": [{**GOOD, "id": "by"}], "by": value}) for value in ODD if not isinstance(value, str) and value is not None
    ]
    async with client(state) as http:
        for body in bodies:
            known = {entry.decision.id for entry in state.books.list()}
            answer = await http.post(
                "/v1/decisions", content=body.encode("utf-8", "surrogatepass"), headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (200, 400, 409), (body[:200], answer.text)
            now = {entry.decision.id for entry in state.books.list()}
            if answer.status_code != 200:
                assert answer.json()["error"] and now == known, body[:200]
        for name in ("%00", "%ff", "a" * 5000, "%ED%A0%80", "..", "d1%2f.."):
            answer = await http.post(f"/v1/decisions/{name}/approve", json={})
            assert answer.status_code in (400, 404) and answer.json()["error"]
    assert [entry for entry in state.books.list() if entry.decision.id == "d1"] == list(before)


@contextlib.contextmanager
def answered(url: str, data: bytes) -> Iterator[bytes]:
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), 20) as peer:
        out = b""
        with contextlib.suppress(ConnectionError):
            peer.sendall(data)
            while piece := peer.recv(65_536):
                out += piece
        yield out


AUTH = f"Authorization: Bearer {ADMIN}\r\n".encode()
HEAD = b"Host: x\r\nConnection: close\r\n"
JSON = b"Content-Type: application/json\r\n"
BOMB = gzip.compress(bytes(20_000_000))


@pytest.fixture(scope="module")
def url(state: ApiState) -> Iterator[str]:
    token_of(state, Role.OPERATOR, name="so that reading asks for one")
    with serving(application(state)) as found:
        yield found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 200),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + AUTH + b"\r\n", 401),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"Authorization: Basic eA==\r\n\r\n", 401),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + f"Authorization: Bearer x, Bearer {ADMIN}\r\n\r\n".encode(), 401),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + b"Authorization: Basic ====\r\n\r\n", 401),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + b"Authorization: Bearer " + b"a" * 60_000 + b"\r\n\r\n", 401),
        (f"GET /v1/nodes?token={ADMIN} HTTP/1.1\r\n".encode() + HEAD + b"\r\n", 401),
        (f"GET /v1/nodes?token={ADMIN} HTTP/1.1\r\n".encode() + HEAD + AUTH + b"\r\n", 400),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n", 400),
        (b"GET /v1/nodes?" + b"a" * 1_000_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 400),
        (b"GET /v1/nodes HTTP/1.1\r\n" + HEAD + b"Authorization: Bearer \xff\0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
        (b"GET /v1/nodes/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n" + AUTH + b"\r\n", 404),
        (b"GET //v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 404),
        (b"GET /v1/../v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 404),
        (b"OPTIONS /v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 405),
        (b"TRACE /v1/nodes HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 405),
        (b"GET /v1/usage HTTP/1.1\r\nRange: bytes=0-1\r\n" + HEAD + AUTH + b"\r\n", 200),
        (b"GET /v1/usage?from=%ff%fe HTTP/1.1\r\n" + HEAD + AUTH + b"\r\n", 400),
        (b"GET /v1/nodes HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n" + AUTH + b"\r\n", 200),
        (b"POST /v1/decisions HTTP/1.1\r\n" + HEAD + AUTH + JSON + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, 415),
        (b"POST /v1/decisions HTTP/1.1\r\n" + HEAD + AUTH + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}a", 400),
        (b"POST /v1/decisions HTTP/1.1\r\n" + HEAD + AUTH + JSON + b"Content-Length: -2\r\n\r\n{}", 400),
        (b"POST /v1/decisions HTTP/1.1\r\n" + HEAD + AUTH + JSON + b"Content-Length: 2000000\r\n\r\n" + b"a" * 2_000_000, 413),
    ],
)  # fmt: skip
def test_what_is_sent_gets_its_status_and_one_sentence(url: str, sent: bytes, status: int) -> None:
    with answered(url, sent) as out:
        assert out.startswith(b"HTTP/1.1 %d " % status), out[:300]
        head, _, body = out.partition(b"\r\n\r\n")
        if status >= 400:
            assert b"application/json" in head and json.loads(body)["error"]


def test_a_body_that_is_cut_short_is_no_fault_and_enters_nothing(url: str, state: ApiState, caplog: pytest.LogCaptureFixture) -> None:
    before = len(state.books.list())
    where = urlsplit(url)
    with caplog.at_level(logging.WARNING):
        with socket.create_connection((where.hostname or "", where.port or 0), 20) as peer:
            peer.sendall(b"POST /v1/decisions HTTP/1.1\r\nHost: x\r\n" + AUTH + JSON + b'Content-Length: 999\r\n\r\n{"decisions": [')
            while state.observed.in_flight._value.get() == 0:
                time.sleep(0.01)
        deadline = time.monotonic() + 20
        while state.observed.in_flight._value.get() > 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(state.books.list()) == before and not [record for record in caplog.records if record.exc_info]


def test_one_address_does_not_keep_all_others_out(state: ApiState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand connections of one address, of eight that there may be: the rest is closed at once, and others are answered."""
    monkeypatch.setattr("poolmeter.collector.face.CONNECTIONS_MOST", 8)
    before = PatientProtocol.dropped["crowd"]
    with serving(application(state)) as url, contextlib.ExitStack() as stack:
        where = urlsplit(url)
        for _ in range(500):
            peer = stack.enter_context(socket.create_connection((where.hostname or "", where.port or 0), 20))
        assert peer.recv(1) == b""  # or a reset
        other = stack.enter_context(socket.create_connection((where.hostname or "", where.port or 0), 20, ("127.0.0.2", 0)))
        other.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert PatientProtocol.dropped["crowd"] >= before + 490 and PatientProtocol.held["127.0.0.1"] <= 6
    assert not PatientProtocol.held["127.0.0.2"]


async def test_a_token_that_is_revoked_between_two_pages_ends_there(state: ApiState) -> None:
    now = [0.0]
    authority = Authority(Credentials(ADMIN, find=find_in(state.books), issued=issued_in(state.books)), lambda: now[0])
    before, state.authority = state.authority, authority
    try:
        secret = token_of(state, Role.TENANT, "t1", name="going")
        async with client(state, secret) as http:
            period = {"from": "2027-01-15", "to": "2027-01-16", "limit": "1"}
            page = (await http.get("/v1/usage", params=period)).json()
            token = next(token for token in state.books.tokens.list() if token.name == "going")
            state.books.tokens.revoke(token.id, "test")
            now[0] += 2.1
            answer = await http.get("/v1/usage", params={**period, "cursor": page["cursor"]})
            assert answer.status_code == 401 and "rows" not in answer.json()
    finally:
        state.authority = before


async def test_a_fault_of_our_own_is_a_sentence_without_a_traceback(state: ApiState, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setattr(state.books, "list", lambda *_: 1 / 0)
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers={"Authorization": f"Bearer {ADMIN}"}) as http:
        answer = await http.get("/v1/decisions")
    assert answer.status_code == 500 and "fault of its own" in answer.json()["error"] and "Zero" not in answer.text
