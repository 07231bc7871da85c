"""The HTTP face: what each path answers, and what it refuses."""

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from exporter_fakes import Node

from poolmeter import arrow, now
from poolmeter.errors import Unavailable
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.model.plain import from_plain
from poolmeter.model.snapshot import Snapshot

TOKEN = "s3cret"


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    node.create("a")
    node.tick(turns=61)
    server = Server(Face(node.agent, TOKEN).application(), listen("127.0.0.1", 0))
    server.start()
    yield server.url
    server.stop()


def get(url: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def post(url: str, body: object, token: str | None = TOKEN) -> tuple[int, dict[str, object]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_usage_and_acknowledgement(node: Node, url: str) -> None:
    status, body, headers = get(f"{url}/v1/usage")
    table = arrow.from_bytes(body)
    epoch = headers["x-poolmeter-epoch"]
    assert status == 200 and table.column("sequence").to_pylist() == [1, 2, 3]
    assert table.column("kind").to_pylist() == ["event", "device", "slice"]
    assert (headers["x-poolmeter-node"], headers["x-poolmeter-last-sequence"], headers["x-poolmeter-more"]) == ("node-a", "3", "false")
    _, body, headers = get(f"{url}/v1/usage?after={epoch},1&limit=1")
    assert arrow.from_bytes(body).column("sequence").to_pylist() == [2] and headers["x-poolmeter-more"] == "true"
    assert post(f"{url}/v1/ack", {"consumer": "collector", "epoch": epoch, "seq": 2}) == (
        200,
        {"schema": "poolmeter.ack/1", "consumer": "collector", "epoch": epoch, "seq": 2},
    )
    assert node.spool.held() == 1 and len(arrow.from_bytes(get(f"{url}/v1/usage")[1])) == 1


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"consumer": "stranger", "seq": 1}, 400, "expected one of collector"),
        ({"consumer": "collector", "seq": 99}, 409, "expected at most 3"),
        ({"consumer": "collector", "seq": 1, "epoch": "other"}, 409, "epoch is"),
        ({"consumer": "collector", "seq": True}, 400, "whole number"),
        ({"consumer": "collector", "seq": "1"}, 400, "whole number"),
        (b"[", 400, "no JSON"),
        (b"[]", 400, "no object"),
        (b" " * 70_000, 413, "more than"),
    ],
)
def test_refused_acknowledgements(node: Node, url: str, body: object, status: int, said: str) -> None:
    if isinstance(body, dict):
        body = {"epoch": node.spool.epoch, **body}
    found, answer = post(f"{url}/v1/ack", body)
    assert found == status and said in str(answer["error"])
    assert node.spool.held() == 3


@pytest.mark.parametrize("token", [None, "wrong"])
def test_an_acknowledgement_needs_the_token(node: Node, url: str, token: str | None) -> None:
    status, _ = post(f"{url}/v1/ack", {"consumer": "collector", "epoch": node.spool.epoch, "seq": 1}, token)
    assert status == 401 and node.spool.held() == 3


@pytest.mark.parametrize("after", ["x", ",1", "e,", "e,-1", "e,1x", "e,9999999999999999999999", "e,٣"])
def test_a_bad_position(url: str, after: str) -> None:
    status, body, _ = get(f"{url}/v1/usage?after={urllib.parse.quote(after)}")
    assert status == 400 and b"expected" in body


def test_snapshot_health_and_readiness(node: Node, url: str) -> None:
    value = json.loads(get(f"{url}/v1/snapshot")[1])
    assert value.pop("schema") == "poolmeter.snapshot/1"
    page = node.agent.page()
    assert page is not None and from_plain(Snapshot, value) == page.snapshot
    assert get(f"{url}/healthz")[0] == 200 and get(f"{url}/readyz")[0] == 200
    node.sampler.answers = False
    node.tick(turns=7)
    status, body, _ = get(f"{url}/readyz")
    assert status == 503 and json.loads(body)["failing"] == ["nvml"]
    assert get(f"{url}/healthz")[0] == 200
    status, body, _ = get(f"{url}/metrics")
    assert status == 200 and b'poolmeter_collect_success{source="nvml"} 0.0' in body and b"poolmeter_slice_info" in body


def test_many_scrapes_are_one_collection(node: Node, url: str) -> None:
    polls = node.sampler.polls
    with ThreadPoolExecutor(50) as pool:
        bodies = {body for _, body, _ in pool.map(get, [f"{url}/metrics"] * 50)}
    assert len(bodies) == 1 and node.sampler.polls == polls


def test_reads_go_on_while_turns_and_acknowledgements_do(node: Node, url: str) -> None:
    stop = threading.Event()
    faults: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for path in ("/v1/usage", "/metrics", "/v1/snapshot"):
                status, _, _ = get(url + path)
                if status != 200:
                    faults.append((path, status))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        node.tick(turns=30)
        post(f"{url}/v1/ack", {"consumer": "collector", "epoch": node.spool.epoch, "seq": node.spool.last_sequence})
    stop.set()
    for reader in readers:
        reader.join()
    assert not faults


def test_a_port_that_is_taken() -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port} cannot be listened on") as caught:
        listen("127.0.0.1", port)
    assert caught.value.exit_code == 3
    first.close()


def test_records_and_snapshot_in_one_answer(node: Node, url: str) -> None:
    _, plain, headers = get(f"{url}/v1/usage")
    assert "x-poolmeter-snapshot" not in headers
    _, body, headers = get(f"{url}/v1/usage?snapshot=arrow")
    at = int(headers["x-poolmeter-snapshot"])
    assert body[:at] == plain
    tables = now.from_bytes(body[at:], "node-a")
    whole = from_plain(Snapshot, json.loads(get(f"{url}/v1/snapshot")[1]))
    assert tables["now_nodes"].column("taken_us").to_pylist() == [whole.taken_us]
    assert tables["now_slices"].column("memory_limit_bytes").to_pylist() == [part.memory_limit_bytes for part in whole.slices]
    assert tables["now_sources"].column("source").to_pylist() == [part.source for part in whole.sources]


def test_before_the_first_look_there_is_no_snapshot_behind_the_records(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolmeter.exporter.answer.newest", lambda _: None)
    server = Server(Face(node.agent, TOKEN).application(), listen("127.0.0.1", 0))
    server.start()
    try:
        _, body, headers = get(f"{server.url}/v1/usage?snapshot=arrow")
        assert int(headers["x-poolmeter-snapshot"]) == len(body)
    finally:
        server.stop()
