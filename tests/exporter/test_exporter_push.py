"""Push: what goes out, what an answer frees, and what happens when there is none."""

import argparse
import dataclasses
import gzip
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from exporter_fakes import SECOND, Node
from exporter_receiver import BaseReceiver

from poolmeter import arrow, now
from poolmeter.config import parse_config
from poolmeter.errors import BadInput
from poolmeter.exporter.commands import Exporter
from poolmeter.exporter.plan import plan_of
from poolmeter.exporter.push import Push, PushPlan, endpoint_of, parse_acknowledgement, push_plan
from poolmeter.exporter.spool import Spool, event


class Receiver(BaseReceiver):
    """A collector in this process. `answers` are (status, headers, body) for the next requests; then everything is acknowledged."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        self.rows: list[list[int]] = []
        self.snapshots: list[dict[str, int]] = []
        self.answers: list[tuple[int, dict[str, str], object]] = []
        self.rows_most = 1 << 30
        super().__init__()

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = gzip.decompress(handler.rfile.read(int(headers["content-length"])))
        assert handler.path == "/v1/push" and headers["content-encoding"] == "gzip"
        size = int(headers["x-poolmeter-snapshot"])
        table = arrow.from_bytes(body[:size])
        self.requests.append(headers)
        self.rows.append(table.column("sequence").to_pylist())
        tables = now.from_bytes(body[size:], headers["x-poolmeter-node"]) if body[size:] else {}
        self.snapshots.append({name: table.num_rows for name, table in tables.items()})
        self.hang.wait(30)
        acknowledgement = {"consumer": "collector", "epoch": headers["x-poolmeter-epoch"]}
        if table.num_rows:
            acknowledgement |= {"seq": self.rows[-1][-1]}  # type: ignore[dict-item]
        status, more, answer = self.answers.pop(0) if self.answers else (200, {}, acknowledgement)
        if table.num_rows > self.rows_most:
            status, answer = 413, {"error": "too large"}
        said = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.answer(handler, status, more, said)


class Nothing:
    """A spool without an agent: nothing has been looked at."""

    stalled_us = SECOND

    def __init__(self, spool: Spool) -> None:
        self.spool = spool

    def page(self) -> None:
        return None

    def age_us(self) -> None:
        return None


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool.sqlite", "n1", ("collector", "other"))
    yield made
    made.close()


def fill(spool: Spool, count: int) -> None:
    """`count` more records."""
    first = spool.last_sequence + 1
    spool.commit([event("n1", spool.epoch, n, 1_800_000_000_000_000, "gap", "why") for n in range(first, first + count)], "{}")


def plan(url: str, folder: Path, interval_s: float = 0.05, token: str = "t" * 20) -> PushPlan:
    (folder / "token").write_text(token + "\n")
    found = push_plan(url, folder / "token", None, interval_s)
    assert found is not None
    return found


def until(done: Callable[[], object]) -> None:
    ends = time.monotonic() + 30
    while not done():
        assert time.monotonic() < ends, "still waiting"
        time.sleep(0.005)


def test_what_waits_goes_out_and_is_freed_by_the_answer(node: Node, receiver: Receiver, tmp_path: Path) -> None:
    node.tick(turns=65)
    spool = node.agent.spool
    assert spool.held() > 0
    name = node.agent.settings.node
    push = Push(plan(receiver.url + "/", tmp_path), name, node.agent)
    assert push.once().trouble is None
    headers = receiver.requests[0]
    assert receiver.rows == [list(range(1, spool.last_sequence + 1))] and spool.held() == 0
    assert headers["authorization"] == "Bearer " + "t" * 20 and headers["x-poolmeter-node"] == name
    assert (headers["x-poolmeter-epoch"], headers["x-poolmeter-last-sequence"]) == (spool.epoch, str(spool.last_sequence))
    assert receiver.snapshots[0]["now_nodes"] == receiver.snapshots[0]["now_devices"] == 1
    assert push.once().trouble is None and receiver.rows[1] == [] and push.ok == 2


def test_pages_follow_one_another_until_nothing_waits(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    fill(spool, 10)
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool), page=4)
    assert [push.once().more for _ in range(3)] == [True, True, False]
    assert receiver.rows == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]] and receiver.snapshots == [{}] * 3
    # The other consumer has not acknowledged: its records stay, and do not go out to this one again.
    assert spool.held() == 10 and push.once().trouble is None and receiver.rows[-1] == []
    spool.acknowledge("other", spool.epoch, 10)
    assert spool.held() == 0


@pytest.mark.parametrize(
    ("status", "body", "trouble"),
    [
        (401, {"error": "no token of a node"}, "status 401: no token of a node"),
        (503, b"<html>", "status 503: no reason given"),
        (302, b"", "status 302"),
        (200, b"{", "is no JSON"),
        (200, [1], "expected consumer, epoch and seq"),
        (200, {"consumer": "collector", "epoch": "another", "seq": 3}, "is of epoch 'another'"),
        (200, {"consumer": "collector", "epoch": None, "seq": 3}, "expected consumer, epoch and seq"),
        (200, {"consumer": "thief", "epoch": "EPOCH", "seq": 3}, "consumer is 'thief', expected one of collector, other"),
        (200, {"consumer": "collector", "epoch": "EPOCH", "seq": 2}, "is of sequence 2, expected 3"),
        (200, {"consumer": "collector", "epoch": "EPOCH"}, "is of sequence None, expected 3"),
        (200, {"consumer": "collector", "epoch": "EPOCH", "seq": True}, "expected consumer, epoch and seq"),
    ],
)
def test_without_a_right_answer_nothing_is_freed(
    receiver: Receiver, spool: Spool, tmp_path: Path, status: int, body: object, trouble: str
) -> None:
    fill(spool, 3)
    if isinstance(body, dict) and body.get("epoch") == "EPOCH":
        body = body | {"epoch": spool.epoch}
    receiver.answers.append((status, {"Location": receiver.url + "/v1/push"} if status == 302 else {}, body))
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool))
    outcome = push.once()
    assert trouble in (outcome.trouble or "") and spool.held() == 3 and len(receiver.requests) == 1
    assert push.once().trouble is None and receiver.rows == [[1, 2, 3]] * 2
    assert (push.ok, push.refused + push.failed, push.refused) == (1, 1, status != 200)


def test_a_collector_that_finds_it_too_large_gets_less_at_a_time(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    fill(spool, 40)
    receiver.rows_most = 6
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool), page=32)
    push.start()
    until(lambda: spool.read(None, 0).records and spool.acknowledge("collector", spool.epoch, 0) == 40)
    push.finish()
    taken = [row for rows in receiver.rows if len(rows) <= 6 for row in rows]
    assert taken == list(range(1, 41)) and max(map(len, receiver.rows)) == 32


def test_it_waits_longer_and_longer_as_the_collector_asks_and_goes_on(
    receiver: Receiver, spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(spool, 3)
    receiver.answers += [(503, {}, {"error": "full"})] * 3 + [(429, {"Retry-After": "7"}, {"error": "slowly"})]
    push = Push(plan(receiver.url, tmp_path, interval_s=3600), "n1", Nothing(spool), first_pause_s=100.0)
    pauses: list[float] = []
    real = push._ending.wait

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return real(0.0 if len(pauses) < 6 else 30.0)

    monkeypatch.setattr(push._ending, "wait", wait)
    with caplog.at_level(logging.INFO):
        push.start()
        until(lambda: len(pauses) == 6)
    push._ending.set()
    first, *failed, asked, idle = pauses
    assert 0 <= first <= 1 and all(30 <= pause <= 60 for pause in failed) and 7 <= asked <= 10.5 and 3200 < idle < 4000
    assert spool.acknowledge("collector", spool.epoch, 0) == 3 and receiver.rows == [[1, 2, 3]] * 5
    said = [record.message for record in caplog.records]
    # Said once, however often it fails, and again when it changes.
    assert sum("status 503: full" in line for line in said) == 1 and sum("succeeds again" in line for line in said) == 1
    assert any("not encrypted" in line for line in said)


def test_the_end_pushes_what_waits_and_does_not_wait_for_a_collector_that_hangs(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    fill(spool, 10)
    push = Push(plan(receiver.url, tmp_path, interval_s=3600), "n1", Nothing(spool), page=4)
    push.start()
    until(lambda: len(receiver.rows) >= 3)
    fill(spool, 9)
    push.finish()
    assert spool.acknowledge("collector", spool.epoch, 0) == 19
    assert [row for rows in receiver.rows for row in rows] == list(range(1, 20))


def test_with_patience_the_end_outlives_a_failure(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    fill(spool, 3)
    receiver.answers += [(503, {}, {"error": "full"})] * 3
    push = Push(plan(receiver.url, tmp_path, interval_s=3600), "n1", Nothing(spool), first_pause_s=0.01)
    push._until = time.monotonic() + 30.0  # as `finish` has it before it says that this is the end
    push._ending.set()
    push.start()
    push.finish(30.0)
    assert spool.acknowledge("collector", spool.epoch, 0) == 3
    fill(spool, 1)
    receiver.answers += [(503, {}, {"error": "full"})] * 9
    push = Push(plan(receiver.url, tmp_path, interval_s=3600), "n1", Nothing(spool))
    push._ending.set()
    push.start()
    push.finish()
    assert len(receiver.answers) == 8 and spool.acknowledge("collector", spool.epoch, 0) == 3


def test_a_token_changes_without_a_restart_and_its_loss_is_named(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool))
    push.once()
    (tmp_path / "token").write_text("u" * 20)
    push.once()
    assert [headers["authorization"][-1] for headers in receiver.requests] == ["t", "u"]
    (tmp_path / "token").unlink()
    assert "token file" in (push.once().trouble or "") and len(receiver.requests) == 2


def test_endpoints_and_acknowledgements() -> None:
    for text in ("https://c:9878", "https://c:9878/", "https://c:9878/v1/push", "https://c:9878/v1/push/"):
        assert endpoint_of(text) == "https://c:9878/v1/push"
    assert endpoint_of("http://[::1]:1/gpu") == "http://[::1]:1/gpu/v1/push"
    for text in ("c:9878", "ftp://c", "https://", "https://u:p@c", "https://c:0", "https://c:x", "https://c/?a=b", "https://c d"):
        with pytest.raises(BadInput, match="--push is "):
            endpoint_of(text)
    assert parse_acknowledgement(b'{"consumer": "c", "epoch": "e", "seq": 7, "more": 1}') == ("c", "e", 7)


def test_what_cannot_be_pushed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    assert push_plan(None, None, None, 15.0) is None
    for token, ca, sentence in (
        (None, None, "expected --push-token-file"),
        (tmp_path / "none", None, "token file"),
        (tmp_path / "token", tmp_path / "token", "expected a PEM file"),
    ):
        with pytest.raises(BadInput, match=sentence):
            push_plan("https://c:1", token, ca, 15.0)


def test_flags_go_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "config.toml").write_text(
        f'[exporter]\npush_url = "https://c:1"\npush_token_file = "{tmp_path / "token"}"\npush_interval_s = 3\n'
    )
    parser = argparse.ArgumentParser()
    for flag in ("--config", "--data"):
        parser.add_argument(flag)
    Exporter().configure(parser)
    found = plan_of(parser.parse_args(["--config", str(tmp_path / "config.toml")])).push
    assert found == PushPlan("https://c:1/v1/push", tmp_path / "token", None, 3.0)
    given = plan_of(parser.parse_args(["--config", str(tmp_path / "config.toml"), "--push", "https://d:2"])).push
    assert given == dataclasses.replace(found, url="https://d:2/v1/push")
    with pytest.raises(BadInput, match="push_interval_s"):
        parse_config(b"[exporter]\npush_interval_s = 0\n", "x")


def test_what_was_too_large_once_is_tried_again_later(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    receiver.rows_most = 6
    fill(spool, 32)
    push = Push(plan(receiver.url, tmp_path, interval_s=0.0005), "n1", Nothing(spool), page=32)
    push.start()
    until(lambda: spool.held() == 32 and push.waiting == 0)
    receiver.rows_most = 1 << 30  # a proxy was told to let more through
    until(lambda: push._page == 32)
    before = len(receiver.rows)
    fill(spool, 64)
    until(lambda: push.waiting == 0)
    push.finish()
    assert max(len(rows) for rows in receiver.rows[before:]) == 32


def test_a_collector_that_never_takes_more_is_asked_ever_more_seldom(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool), page=8)
    tries = []
    for number in range(600):
        taken = push._page <= 4
        tries += [] if taken else [number]
        push._grow() if taken else push._shrink()
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert gaps == [17, 33, 65, 129, 257] and push._page == 4


def test_the_page_says_how_pushes_go(receiver: Receiver, spool: Spool, tmp_path: Path) -> None:
    fill(spool, 3)
    push = Push(plan(receiver.url, tmp_path), "n1", Nothing(spool))
    assert (push.waiting, push.last_us) == (3, None)
    receiver.answers += [(401, {}, {"error": "no"}), (200, {}, b"{")]
    push.once()
    push.once()
    assert (push.ok, push.refused, push.failed, push.waiting, push.last_us) == (0, 1, 1, 3, None)
    before = time.time_ns() // 1000
    push.once()
    assert (push.ok, push.refused, push.failed, push.waiting) == (1, 1, 1, 0) and (push.last_us or 0) >= before
    fill(spool, 2)
    assert push.waiting == 2
