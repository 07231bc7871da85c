"""The real process: ready file, SIGTERM, refusals at the start, and kill -9 at any moment with nothing lost and nothing twice."""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from collector_daemon import Daemon, exporters, fetch, refused, stored, until
from collector_fakes import records

from poolmeter.collector.pullers import Names
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Store
from poolmeter.collector.tables import STORE_VERSION
from poolmeter.model.units import DAY_US, MINUTE_US

NOW = time.time_ns() // 1000 // MINUTE_US * MINUTE_US


async def test_it_serves_pulls_and_ends_with_a_last_pull(tmp_path: Path) -> None:
    async with exporters("n1", "n2") as (one, two):
        one.add(records("n1", one.epoch, 1, 20, NOW - DAY_US))
        daemon = Daemon(tmp_path, f"{one.url},{two.url}/", "--interval", "3600")
        try:
            url = await daemon.url()
            await until(lambda: len(one.acked) == 20)
            two.add(records("n2", two.epoch, 1, 8, NOW - DAY_US))
            health = await fetch(f"{url}/v1/health")
            assert health["status"] == "ok"
            assert await daemon.end() == 0
        finally:
            daemon.kill()
        assert two.acked == list(range(1, 9))
        assert stored(tmp_path) == {"n1": list(range(1, 21)), "n2": list(range(1, 9))}
        assert not daemon.ready.exists()


async def test_killed_at_any_moment_every_acknowledged_row_is_stored_exactly_once(
    tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    async with exporters("n1", "n2") as fakes:
        made = dict.fromkeys(("n1", "n2"), 0)

        def produce() -> None:
            for fake in fakes:
                count = rng.randint(1, 40)
                fake.add(records(fake.node, fake.epoch, made[fake.node] + 1, count, NOW - 20 * DAY_US))
                made[fake.node] += count

        for _ in rounds(3, 400):
            daemon = Daemon(tmp_path, ",".join(fake.url for fake in fakes))
            try:
                produce()
                if rng.random() < 0.8:
                    await daemon.url()
                ends = time.monotonic() + rng.uniform(0, 0.5)
                while time.monotonic() < ends:
                    await asyncio.sleep(rng.uniform(0, 0.05))
                    produce()
            finally:
                daemon.kill()
            found = stored(tmp_path)
            for fake in fakes:
                rows = found.get(fake.node, [])
                assert len(rows) == len(set(rows)), f"{fake.node}: rows stored twice"
                assert set(fake.acked) <= set(rows), f"{fake.node}: acknowledged rows lost"
        last = Daemon(tmp_path, ",".join(fake.url for fake in fakes))
        try:
            await until(lambda: all(not fake.spool for fake in fakes))
            assert await last.end() == 0
        finally:
            last.kill()
        assert stored(tmp_path) == {node: list(range(1, count + 1)) for node, count in made.items()}
        assert not list((tmp_path / "store").glob(".tmp-*"))


async def test_a_second_collector_and_a_taken_port_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with Store(tmp_path / "store"):
        code, said = await refused(tmp_path, "--port", "0")
        assert code == 3 and "owned by another collector" in said
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, said = await refused(tmp_path, "--port", str(port))
        assert code == 3 and f"cannot listen on 127.0.0.1 port {port}: Address already in use" in said


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--nodes", "ftp://x"], 2, "node is 'ftp://x', expected a URL"),
        (["--nodes", "http://x:99999"], 2, "expected a URL"),
        (["--interval", "0"], 2, "--interval is 0.0, expected 0.2 to 3600 seconds"),
        (["--port", "70000"], 2, "--port is 70000, expected 0 to 65535"),
        (["--host", "203.0.113.7", "--port", "0"], 3, "cannot listen on 203.0.113.7"),
        (["--data", "/proc/nothing", "--port", "0"], 3, "cannot be written"),
    ],
)
async def test_bad_flags_end_with_one_sentence(tmp_path: Path, words: list[str], code: int, sentence: str) -> None:
    found, said = await refused(tmp_path, *words)
    assert (found, said.count("\n")) == (code, 1) and sentence in said


async def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    import duckdb

    Store(tmp_path / "store").close()
    name = (tmp_path / "store" / "CURRENT").read_text().strip()
    with duckdb.connect(str(tmp_path / "store" / name)) as connection:
        connection.execute("UPDATE meta SET store_version = 7")
    code, said = await refused(tmp_path, "--port", "0")
    assert code == 2 and f"has version 7, expected {STORE_VERSION}" in said


def test_names_belong_to_the_first_and_last() -> None:
    names = Names({"http://a": NodeRow("http://a", "n1", None, None, "up"), "http://b": NodeRow("http://b", None, None, None, "new")})
    assert names.claim("http://a", "n1") is None
    assert "as before" in (names.claim("http://a", "n2") or "")
    assert "http://a already does" in (names.claim("http://b", "n1") or "")
    assert names.claim("http://b", "n2") is None
