"""Real collectors and real pushers: rows arrive once under disconnects, kills and duplicates; discovery follows files while it runs."""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collector_daemon import Daemon, exporters, fetch, refused, stored, until
from collector_fakes import records

from poolmeter.books.tokens import Role
from poolmeter.books.writer import Books
from poolmeter.exporter.push import Push, PushPlan
from poolmeter.exporter.spool import Spool
from poolmeter.model.units import DAY_US, MINUTE_US

NOW = time.time_ns() // 1000 // MINUTE_US * MINUTE_US


class Nothing:
    """What pushes: a spool without an agent."""

    stalled_us = 1

    def __init__(self, spool: Spool) -> None:
        self.spool = spool

    def page(self) -> None:
        return None

    def age_us(self) -> None:
        return None


class Line:
    """A network that breaks: forwards to `port`, and by chance cuts a connection before, within or behind a request, or repeats it."""

    def __init__(self, rng: random.Random, trouble: float) -> None:
        self._rng = rng
        self.trouble = trouble
        self.port = 0
        self.cut = self.repeated = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            request = head + await reader.readexactly(size)
            fate = self._rng.choice(("before", "within", "behind", "again")) if self._rng.random() < self.trouble else "whole"
            if fate == "again":
                self.repeated += 1
                await self._forward(request)
            if fate in ("before", "within", "behind"):
                self.cut += 1
            if fate == "within":
                await self._forward(request[: self._rng.randrange(len(request))], wait=False)
            elif fate in ("behind", "whole", "again"):
                answer = await self._forward(request)
                if fate != "behind":
                    writer.write(answer)
                    await writer.drain()
        writer.close()

    async def _forward(self, request: bytes, wait: bool = True) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            # One connection a request, so that an answer ends where it does.
            writer.write(request)
            await writer.drain()
            if not wait:
                return b""
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            return head + await reader.readexactly(size)
        finally:
            writer.close()


class Node:
    """An exporter that pushes: its spool is on disk, everything else is lost when it is killed."""

    def __init__(self, name: str, folder: Path, url: str) -> None:
        self.name, self.folder = name, folder
        self.token = folder / f"{name}.token"
        self.token.write_text(f"token-of-{name}-0123456789\n")
        self._plan = PushPlan(url + "/v1/push", self.token, None, 0.02, 5.0)
        self.open()

    def open(self) -> None:
        self.spool = Spool(self.folder / f"{self.name}.sqlite", self.name, ("collector",))
        self.push = Push(self._plan, self.name, Nothing(self.spool), first_pause_s=0.02, page=37)

    def make(self, count: int) -> None:
        first = self.spool.last_sequence + 1
        self.spool.commit(records(self.name, self.spool.epoch, first, count, NOW - 20 * DAY_US), "{}")

    async def restart(self) -> None:
        """Killed between two requests, or while one is on its way: what was sent and not answered is not remembered."""
        self.spool.close()
        self.open()


@contextlib.asynccontextmanager
async def pool(tmp_path: Path, rng: random.Random, trouble: float) -> AsyncIterator[tuple[Line, list[Node], list[str]]]:
    line = Line(rng, trouble)
    url = await line.start()
    nodes = [Node(name, tmp_path, url) for name in ("n1", "n2")]
    tokens, config = tmp_path / "tokens", tmp_path / "config.toml"
    tokens.touch(0o600)
    # One node's token is a line of the file, the other's is in the books, after which reading asks for a token too.
    tokens.write_text(f"n1={nodes[0].token.read_text()}")
    with Books(tmp_path / "data" / "books.sqlite") as books:
        nodes[1].token.write_text(books.tokens.add("n2", Role.NODE, "test", node="n2")[1])
    config.write_text(f'[collector]\nprocess_days = 366\npush_tokens_file = "{tokens}"\n')
    try:
        yield line, nodes, ["--config", str(config)]
    finally:
        for node in nodes:
            node.spool.close()
        await line.stop()


async def test_rows_arrive_once_under_disconnects_kills_and_repetitions(
    tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with pool(tmp_path, rng, trouble=0.5) as (line, nodes, words):

        def collector() -> Daemon:
            return Daemon(data, "", *words)

        daemon = collector()
        try:
            line.port = int((await daemon.url()).rsplit(":", 1)[1])
            for _ in rounds(2, 300):
                for _ in range(rng.randint(2, 8)):
                    node = rng.choice(nodes)
                    node.make(rng.randint(1, 60))
                    if rng.random() < 0.3:
                        await node.restart()
                    # Both at once, as nodes do; a request may break off anywhere.
                    await asyncio.gather(*(asyncio.to_thread(each.push.once) for each in nodes))
                if rng.random() < 0.6:
                    sending = [asyncio.create_task(asyncio.to_thread(each.push.once)) for each in nodes]
                    await asyncio.sleep(rng.uniform(0, 0.05))
                    daemon.kill()
                    await asyncio.gather(*sending)
                    found = stored(data)
                    for node in nodes:
                        rows = found.get(node.name, [])
                        assert len(rows) == len(set(rows)), f"{node.name}: rows stored twice"
                        assert set(range(1, node.spool.acknowledged() + 1)) <= set(rows), f"{node.name}: acknowledged rows lost"
                    daemon = collector()
                    line.port = int((await daemon.url()).rsplit(":", 1)[1])
            line.trouble = 0.0
            for node in nodes:
                node.push.start()
            await until(lambda: all(node.spool.held() == 0 for node in nodes))
            for node in nodes:
                await asyncio.to_thread(node.push.finish)
            health: dict[str, Any] = await fetch(daemon.address + "/v1/health", data / "token")
            assert [(row["url"], row["node"], row["state"]) for row in by_url(health)] == [("push:n1", "n1", "up"), ("push:n2", "n2", "up")]
            assert await daemon.end() == 0
        finally:
            daemon.kill()
        assert stored(data) == {node.name: list(range(1, node.spool.last_sequence + 1)) for node in nodes}
        assert line.cut + line.repeated > 0
        print(f"cut {line.cut}, repeated {line.repeated}, rows {sum(node.spool.last_sequence for node in nodes)}")


async def test_nodes_of_a_file_come_go_and_return_without_a_restart(tmp_path: Path) -> None:
    nodes, config = tmp_path / "nodes.txt", tmp_path / "config.toml"
    config.write_text(f'[[collector.discovery]]\ntype = "file"\npath = "{nodes}"\nrefresh_s = 0.2\n')
    data = tmp_path / "data"
    data.mkdir()

    def name(*urls: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(f"{url}\n" for url in urls) or "# nobody\n")
        os.utime(fresh, (1_700_000_000 + name_count[0], 1_700_000_000 + name_count[0]))
        name_count[0] += 1
        fresh.replace(nodes)

    name_count = [0]
    async with exporters("n1", "n2") as (one, two):
        name(one.url)
        one.add(records("n1", one.epoch, 1, 8, NOW - DAY_US))
        daemon = Daemon(data, None, "--config", str(config))
        try:
            url = await daemon.url()
            await until(lambda: len(one.acked) == 8)
            two.add(records("n2", two.epoch, 1, 8, NOW - DAY_US))
            name(one.url, two.url)
            await until(lambda: len(two.acked) == 8)
            name(one.url)
            await until_state(url, two.url, "gone")
            health = await fetch(f"{url}/v1/health")
            row = next(row for row in health["rows"] if row["url"] == two.url)
            assert row["reason"] == f"discovery file {nodes} names it no more" and row["node"] == "n2" and health["status"] == "ok"
            two.add(records("n2", two.epoch, 9, 4, NOW - DAY_US))
            nodes.write_text("nonsense\n")
            await until_state(url, None, "failing")
            health = await fetch(f"{url}/v1/health")
            assert health["status"] == "degraded" and f"{nodes} line 1: target is 'nonsense'" in health["warnings"][0]
            assert health["discovery"][0]["targets"] == 1
            # The collector starts while its source is broken: who was known goes on, who was gone is not forgotten.
            assert await daemon.end() == 0
            one.add(records("n1", one.epoch, 9, 4, NOW - DAY_US))
            daemon = Daemon(data, None, "--config", str(config))
            url = await daemon.url()
            await until(lambda: len(one.acked) == 12)
            await until_state(url, two.url, "gone")
            assert len(two.acked) == 8
            name(one.url, two.url)
            await until(lambda: len(two.acked) == 12)
            await until_state(url, two.url, "up")
            assert await daemon.end() == 0
        finally:
            daemon.kill()
        assert stored(data) == {"n1": list(range(1, 13)), "n2": list(range(1, 13))}
    # Without discovery it is as before: who is not configured is forgotten.
    async with exporters("n3") as (three,):
        daemon = Daemon(data, three.url)
        try:
            url = await daemon.url()
            three.add(records("n3", three.epoch, 1, 4, NOW - DAY_US))
            await until(lambda: len(three.acked) == 4)
            assert [row["url"] for row in (await fetch(f"{url}/v1/nodes"))["rows"]] == [three.url]
            assert await daemon.end() == 0
        finally:
            daemon.kill()


def by_url(health: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(health["rows"], key=lambda row: str(row["url"]))


async def test_an_exporter_pushes_its_minutes_to_the_last(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with pool(tmp_path, random.Random(1), trouble=0.0) as (line, nodes, words):
        daemon = Daemon(data, "", *words)
        try:
            url = await daemon.url()
            line.port = int(url.rsplit(":", 1)[1])
            folders = ["--data", str(tmp_path / "node"), "--run", str(tmp_path / "run"), "--config", str(tmp_path / "node.toml")]
            (tmp_path / "node.toml").write_text("[exporter]\npush_interval_s = 0.2\n")
            push = ["--push", url, "--push-token-file", str(nodes[0].token)]
            environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLMETER_")}
            exporter = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "poolmeter.cli",
                "exporter",
                "--simulate",
                "--name",
                "n1",
                "--port",
                "0",
                *folders,
                *push,
                env=environment,
            )
            try:
                await until_state(url, "push:n1", "up", data / "token")
                snapshots: dict[str, Any] = await fetch(f"{url}/v1/snapshot", data / "token")
                assert [(row["node"], row["simulated"]) for row in snapshots["rows"]] == [("n1", True)] and snapshots["rows"][0]["devices"]
                exporter.terminate()
                assert await exporter.wait() == 0
            finally:
                with contextlib.suppress(ProcessLookupError):
                    exporter.kill()
            # The minute that SIGTERM closed has come too.
            assert stored(data)["n1"]
            assert await daemon.end() == 0
        finally:
            daemon.kill()


async def until_state(url: str, exporter: str | None, state: str, token_file: Path | None = None) -> None:
    """Until an exporter, or the only source of discovery, has a state."""
    async with asyncio.timeout(30):
        while True:
            health: dict[str, Any] = await fetch(f"{url}/v1/health", token_file)
            rows = health["discovery"] if exporter is None else [row for row in health["rows"] if row["url"] == exporter]
            if [row["state"] for row in rows] == [state]:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("config", "code", "sentence"),
    [
        ('[collector]\npush_tokens_file = "/nonexistent/tokens"\n', 2, "push tokens file /nonexistent/tokens cannot be read"),
        ('[[collector.discovery]]\ntype = "kubernetes"\nselector = "a=b"\n', 2, "expected to run in a pod"),
        ('[[collector.discovery]]\ntype = "http_sd"\nurl = "https://x"\nca_file = "/nonexistent/ca"\n', 2, "expected a PEM file"),
        ('[[collector.discovery]]\ntype = "dns"\nnames = ["x"]\nserver = "y"\n', 2, "DNS server is y"),
        ('[[collector.discovery]]\ntype = "consul"\n', 2, "'consul'"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_at_the_start(tmp_path: Path, config: str, code: int, sentence: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    found, said = await refused(tmp_path, "--config", str(tmp_path / "config.toml"), "--port", "0")
    assert (found, said.count("\n")) == (code, 1) and sentence in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]  # nothing half done
