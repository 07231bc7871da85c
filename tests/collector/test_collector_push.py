"""What is pushed: one path with what is pulled, nothing for whoever has no token, bounded bodies, nodes that fall silent or leave."""

import asyncio
import contextlib
import gzip
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector_fakes import NOW, device, event, records, snapshot, stored
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from poolmeter import arrow, now
from poolmeter.books.tokens import Role as TokenRole
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.collector import push as push_module
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import Authority, Credentials
from poolmeter.collector.catalog import query
from poolmeter.collector.face import find_in, nodes_in
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pullers import Names
from poolmeter.collector.push import Pushes, PushTokens, parse_push_tokens, unpacked
from poolmeter.collector.store import Store
from poolmeter.errors import BadInput, PoolmeterError, Unavailable
from poolmeter.model.units import DAY_US, HOUR_US
from poolmeter.model.usage import UsageRecord

DAY = NOW - 12 * HOUR_US
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
TOKENS = {"n1": "a" * 20, "n2": "b" * 20, **{f"m{n}": f"{n}" * 20 for n in range(8)}}


class Rig:
    """An application that takes pushes, over one store."""

    def __init__(self, store: Store, publisher: Publisher, books: Books) -> None:
        self.store, self.publisher = store, publisher
        self.allowed = frozenset(TOKENS)
        self.names = Names({})
        self.told: list[object] = []
        self.pushes = self.start()
        self.authority = Authority(Credentials("admin", find=find_in(books, self.node_of)))
        self.state = ApiState(
            store, books, "admin", lambda: self.pushes.statuses(), publisher, clock=ManualClock(NOW), authority=self.authority
        )

    def node_of(self, token: str) -> str | None:
        return next((node for node, known in TOKENS.items() if known == token), None)

    def start(self) -> Pushes:
        """A collector that starts with what the store knows."""
        return Pushes(
            self.store.state.nodes, self.publisher, self.names, "collector", ManualClock(NOW), self.told.append,
            nodes=lambda: self.allowed, silent_s=60.0,
        )  # fmt: skip

    def token_of(self, role: TokenRole) -> str:
        return self.state.books.tokens.add(role.value, role, "test")[1]

    @property
    def app(self) -> Starlette:
        self.state.push = self.pushes.push
        return create_app(self.state)

    async def post(self, body: bytes, headers: dict[str, str], token: str | None = TOKENS["n1"]) -> httpx.Response:
        own = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://x") as http:
            return await http.post("/v1/push", content=body, headers={**own, **headers})

    async def health(self) -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://x") as http:
            found: dict[str, Any] = (await http.get("/v1/health")).json()
            return found

    async def push(self, rows: list[UsageRecord], node: str = "n1", packed: bool = True, **changes: str) -> httpx.Response:
        body, headers = request(rows, node)
        if packed:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        return await self.post(body, headers | {name.replace("_", "-"): value for name, value in changes.items()}, TOKENS[node])


def request(rows: list[UsageRecord], node: str = "n1", epoch: str = EPOCH, whole: bool = True) -> tuple[bytes, dict[str, str]]:
    """A body and its headers."""
    usage = arrow.to_bytes(arrow.to_table(rows))
    headers = {
        "X-Poolmeter-Node": node,
        "X-Poolmeter-Epoch": epoch,
        "X-Poolmeter-Last-Sequence": str(rows[-1].sequence if rows else 0),
        "X-Poolmeter-More": "false",
        "X-Poolmeter-Snapshot": str(len(usage)),
    }
    return usage + (now.to_bytes(now.now_tables(snapshot(node, epoch, NOW))) if whole else b""), headers


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    with Store(tmp_path / "store") as store, Books(tmp_path / "books.sqlite", ManualClock(NOW)) as books:
        publisher = Publisher(store)
        task = asyncio.create_task(publisher.run())
        yield Rig(store, publisher, books)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_is_pushed_is_stored_before_it_is_acknowledged_and_known_when_it_comes_again(rig: Rig) -> None:
    rows = [*records("n1", EPOCH, 1, 7, DAY), event("n1", EPOCH, 8, DAY, event="decision", decision_id="d1", outcome="applied")]
    for packed in (True, False):
        answer = await rig.push(rows, packed=packed)
        assert (answer.status_code, answer.json()) == (
            200, {"schema": "poolmeter.push/1", "node": "n1", "consumer": "collector", "epoch": EPOCH, "seq": 8},
        )  # fmt: skip
        assert stored(rig.store.root) == [("n1", EPOCH, n) for n in range(1, 9)]
    assert len(rig.told) == 2  # outcomes of decisions are told again, as after a pull
    assert (await rig.push([])).json().keys() == {"schema", "node", "consumer", "epoch"}
    health = await rig.health()
    row = health["rows"][0]
    assert (health["status"], row["url"], row["node"], row["state"], row["last_sequence"], row["pool"]) == (
        "ok",
        "push:n1",
        "n1",
        "up",
        8,
        "p",
    )
    assert (row["rows"], row["pulls"]) == (16, 3)
    assert query(rig.store.root, "SELECT node FROM now_nodes").column(0).to_pylist() == ["n1"]


async def test_pushes_that_come_together_share_a_publication(rig: Rig) -> None:
    rig.publisher._gap_s = 0.5
    await rig.push(records("n1", EPOCH, 1, 4, DAY))
    before = rig.publisher.publications
    answers = await asyncio.gather(*(rig.push(records(f"m{n}", EPOCH, 1, 4, DAY), f"m{n}") for n in range(8)))
    assert [answer.json()["seq"] for answer in answers] == [4] * 8 and rig.publisher.publications - before < 8
    assert len(stored(rig.store.root)) == 36


async def test_bad_rows_go_to_quarantine_as_with_a_pull(rig: Rig) -> None:
    rows: list[UsageRecord] = [device("n1", EPOCH, 1, DAY), device("n2", EPOCH, 2, DAY), device("n1", EPOCH, 3, DAY, down_us=1)]
    assert (await rig.push(rows)).json()["seq"] == 3
    assert stored(rig.store.root) == [("n1", EPOCH, 1)]
    reasons = query(rig.store.root, "SELECT reason FROM quarantine ORDER BY sequence").column(0).to_pylist()
    assert [reason.partition(" is ")[0] for reason in reasons] == [
        "node",
        "allocated_us + reserved_unused_us + unallocated_us + suspended_us + down_us",
    ]


async def test_a_token_of_the_books_pushes_as_the_node_it_is_bound_to(rig: Rig) -> None:
    rows = records("b1", EPOCH, 1, 4, DAY)
    made, token = rig.state.books.tokens.add("b1", TokenRole.NODE, "test", node="b1")
    answer = await rig.post(*request(rows, "b1"), token)
    assert (answer.status_code, answer.json()["node"], answer.json()["seq"]) == (200, "b1", 4)
    assert (await rig.post(*request(records("n1", EPOCH, 1, 4, DAY)), token)).status_code == 409
    assert {node for node, *_ in stored(rig.store.root)} == {"b1"}
    clock = ManualClock(NOW)
    assert nodes_in(rig.state.books, clock)() == {"b1"}
    rig.state.books.tokens.revoke(made.id, "test")
    rig.authority.forget()
    assert (await rig.post(*request(rows, "b1"), token)).status_code == 401
    assert nodes_in(rig.state.books, clock)() == frozenset()


async def test_books_that_cannot_be_asked_turn_a_push_away_for_later(rig: Rig) -> None:
    def away(_: str) -> None:
        raise Unavailable("books are away, expected a server")

    rig.authority.credentials.find = away
    answer = await rig.post(*request(records("n1", EPOCH, 1, 4, DAY)))
    assert (answer.status_code, answer.json()["error"]) == (503, "books are away, expected a server") and answer.headers["Retry-After"]


async def test_a_token_is_one_nodes_alone(rig: Rig) -> None:
    body, headers = request(records("n2", EPOCH, 1, 4, DAY), "n2")
    for token in (None, "", "c" * 20):
        answer = await rig.post(body, headers, token)
        assert answer.status_code == 401 and "push_tokens_file" in answer.json()["error"]
    # One that is bound to no node says of none whose records these are.
    for token in ("admin", rig.token_of(TokenRole.OPERATOR), rig.token_of(TokenRole.ADMIN)):
        assert (await rig.post(body, headers, token)).status_code == 403
    assert rig.store.state.nodes == {}
    answer = await rig.post(body, headers, TOKENS["n1"])
    assert (answer.status_code, answer.json()["error"]) == (409, "node is 'n2', expected 'n1', whose token it is")
    assert stored(rig.store.root) == []
    health = await rig.health()
    assert health["status"] == "degraded" and "expected 'n1', whose token it is" in health["warnings"][0]
    # The snapshot of another node stops no records and is not stored.
    body, headers = request(records("n1", EPOCH, 1, 4, DAY), "n1", whole=False)
    answer = await rig.post(body + now.to_bytes(now.now_tables(snapshot("n2", EPOCH, NOW))), headers)
    assert answer.status_code == 200 and query(rig.store.root, "SELECT node FROM now_nodes").num_rows == 0
    assert "no snapshot: " in (reason := (await rig.health())["rows"][0]["reason"]) and "'n2'" in reason


async def test_a_node_is_pulled_or_pushed_never_both(rig: Rig) -> None:
    assert rig.names.claim("http://n1:9877", "n1") is None
    answer = await rig.push(records("n1", EPOCH, 1, 4, DAY))
    assert (answer.status_code, stored(rig.store.root)) == (409, [])
    assert "push:n1 answers as node 'n1', which http://n1:9877 already does" in answer.json()["error"]
    assert (await rig.push(records("n2", EPOCH, 1, 4, DAY), "n2")).status_code == 200
    assert "which push:n2 already does" in (rig.names.claim("http://n2:9877", "n2") or "")
    # It pushes no more: its name is free, its rows stay.
    rig.allowed = frozenset({"n1"})
    rig.pushes.retire(rig.allowed)
    assert rig.names.claim("http://n2:9877", "n2") is None
    rig.names.release("http://n1:9877")
    assert (await rig.push(records("n1", EPOCH, 1, 4, DAY))).status_code == 200
    assert rig.store.state.nodes.keys() == {"push:n1"} and len(stored(rig.store.root)) == 8


async def test_hostile_bodies_cost_little_and_are_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "BODY_LIMIT", 50_000)
    monkeypatch.setattr(push_module, "USAGE_LIMIT", 100_000)
    body, headers = request(records("n1", EPOCH, 1, 4, DAY))
    usage = int(headers["X-Poolmeter-Snapshot"])
    cases: list[tuple[bytes, dict[str, str], int, str]] = [
        (b"x" * 60_000, {}, 413, "more than 50000 bytes"),
        (gzip.compress(b"\0" * 50_000_000), {"Content-Encoding": "gzip"}, 413, "unpacks to more than 100000 bytes"),
        (body, {"Content-Encoding": "zstd"}, 415, "Content-Encoding is 'zstd', expected gzip or identity"),
        (body, {"Content-Encoding": "gzip, gzip"}, 415, "expected gzip or identity"),
        (body, {"Content-Encoding": "gzip"}, 400, "body is not gzip"),
        (gzip.compress(body)[:-9], {"Content-Encoding": "gzip"}, 400, "cut short"),
        (gzip.compress(body) * 2, {"Content-Encoding": "gzip"}, 400, "something behind it"),
        (body, {"X-Poolmeter-Snapshot": "-1"}, 400, "X-Poolmeter-Snapshot is '-1'"),
        (body, {"X-Poolmeter-Snapshot": str(len(body) + 1)}, 400, "expected a place in a body of"),
        (body, {"X-Poolmeter-Snapshot": str(usage - 50)}, 400, "usage body"),
        (body, {"X-Poolmeter-Epoch": "x"}, 400, "X-Poolmeter-Epoch is 'x'"),
        (body, {"X-Poolmeter-Last-Sequence": "9" * 30}, 400, "X-Poolmeter-Last-Sequence"),
        (b"", {"X-Poolmeter-Snapshot": "0"}, 400, "not an Arrow stream"),
    ]
    for sent, more, status, reason in cases:
        answer = await rig.post(sent, {**headers, **more})
        assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.text
        assert reason in (await rig.health())["warnings"][0]
        rig.pushes._nodes["n1"]._tokens = 30
    assert stored(rig.store.root) == [] and rig.pushes._received == 0
    assert (await rig.post(body, headers)).status_code == 200 and (await rig.health())["status"] == "ok"


async def test_records_of_thousands_of_days_are_refused(rig: Rig) -> None:
    answer = await rig.push([device("n1", EPOCH, n + 1, DAY - n * DAY_US) for n in range(401)])
    assert answer.status_code == 400 and "push:n1 sent records of 401 days, expected at most 400" in answer.json()["error"]


async def test_one_request_at_a_time_so_many_a_second_and_so_many_bytes_in_all(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    body, headers = request(records("n1", EPOCH, 1, 4, DAY))
    held = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:100]
        await held.wait()
        yield body[100:]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
        own = {**headers, "Authorization": f"Bearer {TOKENS['n1']}"}
        first = asyncio.create_task(http.post("/v1/push", content=slowly(), headers=own))
        async with asyncio.timeout(30):
            while rig.pushes._received == 0:
                await asyncio.sleep(0)
        second = await rig.post(body, headers)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        with monkeypatch.context() as patch:
            patch.setattr(push_module, "TOTAL_LIMIT", 100 + 50)
            other = await rig.push(records("n2", EPOCH, 1, 4, DAY), "n2")
            assert other.status_code == 503 and "100 bytes are being received, expected at most 150" in other.json()["error"]
        held.set()
        assert (await first).status_code == 200
    monkeypatch.setattr(push_module, "PER_SECOND", 0.0)
    rig.pushes._nodes["n1"]._tokens = 3.0
    statuses = [(await rig.post(b"", headers)).status_code for _ in range(4)]
    assert statuses == [400, 400, 400, 429]
    assert (await rig.push(records("n2", EPOCH, 1, 4, DAY), "n2")).status_code == 200


async def test_a_body_that_never_ends_and_one_that_breaks_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "BODY_S", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(30)

    _, headers = request([])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
        answer = await http.post("/v1/push", content=never(), headers={**headers, "Authorization": f"Bearer {TOKENS['n1']}"})
    assert answer.status_code == 408 and "took longer than 0.05 seconds" in answer.json()["error"]
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(b"authorization", f"Bearer {TOKENS['n1']}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/push", "headers": named, "query_string": b"", "root_path": ""}
    await rig.app(scope, receive, send)
    assert "the connection ended within the body" in (await rig.health())["warnings"][0] and rig.pushes._received == 0


async def test_nothing_is_acknowledged_when_the_store_cannot_be_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_commit", full)
        answer = await rig.push(records("n1", EPOCH, 1, 4, DAY))
    assert answer.status_code == 503 and "No space left" in answer.json()["error"] and int(answer.headers["retry-after"]) > 0
    assert stored(rig.store.root) == []
    assert (await rig.push(records("n1", EPOCH, 1, 4, DAY))).json()["seq"] == 4


async def test_a_node_that_falls_silent_is_failing_until_it_pushes_again(rig: Rig) -> None:
    await rig.push(records("n1", EPOCH, 1, 4, DAY))
    now = asyncio.get_running_loop().time()
    await rig.pushes.find_silent(now + 59)
    assert (await rig.health())["rows"][0]["state"] == "up"
    rig.pushes = rig.start()  # also of what an earlier collector heard last
    await rig.pushes.find_silent(now + 70)
    row = (await rig.health())["rows"][0]
    assert (row["state"], row["reason"]) == ("failing", "has not pushed for 60 seconds")
    await rig.push(records("n1", EPOCH, 5, 4, DAY + HOUR_US))
    row = (await rig.health())["rows"][0]
    assert row["state"] == "up" and "reason" not in row and row["last_sequence"] == 8


# ---- tokens


def tokens_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / f"tokens-{uuid.uuid4().hex}"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens_are_read_again_when_they_change_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, f"# ours\nn1={'a' * 20}\n\n n2 = {'b' * 20}= \n")
    tokens = PushTokens(path)
    assert [tokens.node_of(token) for token in ("a" * 20, "b" * 20 + "=", "b" * 20, "", "n1")] == ["n1", "n2", None, None, None]
    path.write_text(f"n3={'c' * 21}\n")
    assert (tokens.node_of("c" * 21), tokens.node_of("a" * 20), tokens.nodes()) == ("n3", None, {"n3"})
    path.write_text("n3=short\n# and longer than before\n")
    assert tokens.node_of("c" * 21) == "n3"
    path.write_text(f"n4={'d' * 30}\n")
    os.chmod(path, 0o644)
    assert tokens.node_of("c" * 21) == "n3" and tokens.node_of("d" * 30) is None
    path.unlink()
    assert tokens.nodes() == {"n3"}


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("n1=" + "a" * 20, 0o640, "has mode 0640, expected a file with 0600 or 0400"),
        ("n1=" + "a" * 15, 0o600, "line 1: token of n1 is no 16 characters long"),
        ("n1=" + "a" * 9 + " " + "a" * 9, 0o600, "or has spaces"),
        ("\n" + "a" * 20, 0o600, "line 2 names no node, expected node=token"),
        ("-n=" + "a" * 20, 0o600, "names no node"),
        ("n1=" + "a" * 20 + "\nn2=" + "a" * 20, 0o600, "line 2: node n2 or its token is there twice"),
        ("n1=" + "a" * 20 + "\nn1=" + "b" * 20, 0o600, "line 2: node n1 or its token is there twice"),
        ("n1=ä", 0o600, "is not ASCII text at byte 3"),
    ],
)
def test_a_wrong_tokens_file_is_refused_and_shows_no_token(tmp_path: Path, text: str, mode: int, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as refused:
        PushTokens(tokens_file(tmp_path, text, mode))
    assert "aaaa" not in str(refused.value)


def test_a_tokens_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        PushTokens(tmp_path / "none")
    with pytest.raises(BadInput):
        PushTokens(tmp_path)


@given(st.binary(max_size=300))
def test_any_tokens_file_is_tokens_or_one_sentence(body: bytes) -> None:
    try:
        found = parse_push_tokens(body, "x")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert len(set(found.values())) == len(found)


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 30))
def test_unpacking_gives_what_was_packed_or_one_sentence(body: bytes, limit: int, cut: int) -> None:
    packed = gzip.compress(body)
    if len(body) <= limit:
        assert unpacked(packed, limit) == body
    else:
        with pytest.raises(PoolmeterError, match="unpacks to more than"):
            unpacked(packed, limit)
    with contextlib.suppress(PoolmeterError):
        assert cut == 0 or unpacked(packed[:-cut], limit) is None  # always refused
