"""Hostile sources beside an honest one, against the real process: bounded memory, nobody else's data changed, each named on the health page."""

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from aiohttp import web
from collector_daemon import Daemon, fetch, stored, until
from collector_fakes import FakeExporter, device, records, snapshot

from poolmeter import arrow, now
from poolmeter.collector.bodies import parse_answer, parse_now, parse_snapshot
from poolmeter.collector.check import Expected, check_usage
from poolmeter.collector.now import newest
from poolmeter.errors import DataError
from poolmeter.model.plain import to_plain
from poolmeter.model.units import DAY_US, MINUTE_US

NOW = time.time_ns() // 1000 // MINUTE_US * MINUTE_US
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
HEADERS = {"X-Poolmeter-Node": "n1", "X-Poolmeter-Epoch": EPOCH, "X-Poolmeter-Last-Sequence": "8", "X-Poolmeter-More": "false"}
MEMORY_MOST = 900 << 20  # generous: the process alone takes 200 MiB, one body of 64 MiB is held a few times over


class Hostile:
    """An exporter that answers each question about usage by `answer`."""

    def __init__(self, name: str, answer: Callable[[web.Request], "web.StreamResponse | AsyncIterator[bytes]"]) -> None:
        self.name, self.answer, self.url, self.asked = name, answer, "", 0

    async def start(self) -> "Hostile":
        app = web.Application()
        app.add_routes([web.get("/v1/usage", self._usage), web.post("/v1/ack", self._fine), web.get("/v1/snapshot", self._fine)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def _usage(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        found = self.answer(request)
        if isinstance(found, web.StreamResponse):
            found.headers.update({**HEADERS, "X-Poolmeter-Node": self.name} | dict(found.headers))
            return found
        response = web.StreamResponse(headers={**HEADERS, "X-Poolmeter-Node": self.name})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for chunk in found:
                await response.write(chunk)
        return response

    async def _fine(self, _: web.Request) -> web.Response:
        return web.json_response({})


async def endless(_: web.Request) -> AsyncIterator[bytes]:
    while True:
        yield b"\0" * (1 << 20)


async def drip(_: web.Request) -> AsyncIterator[bytes]:
    while True:
        yield b"\0"
        await asyncio.sleep(0.05)


def many_rows(count: int) -> bytes:
    """So many rows in as few bytes as the format allows: columns that may be absent are."""
    zeros = pa.array(np.zeros(count, np.int64))
    empty = pa.array([""]).take(pa.array(np.zeros(count, np.int64)))
    fields = [field for field in arrow.usage_schema() if not field.nullable]
    table = pa.table({field.name: zeros if field.type == pa.int64() else empty for field in fields})
    return arrow.to_bytes(table.cast(pa.schema(fields)).replace_schema_metadata(arrow.usage_schema().metadata))


def many_batches(count: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow.usage_schema()) as writer:
        batch = arrow.to_table([]).combine_chunks()
        for _ in range(count):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in batch.schema], schema=batch.schema))
    return bytes(sink.getvalue())


def lying(node: str, when: int) -> bytes:
    return arrow.to_bytes(arrow.to_table([device(node, EPOCH, 1, when)]))


def wrong_types(_: web.Request) -> web.Response:
    table = arrow.to_table(records("h-types", EPOCH, 1, 8, NOW))
    return web.Response(body=arrow.to_bytes(table.set_column(3, "sequence", pa.array([str(n) for n in range(8)]))))


def memory(pid: int) -> int:
    """The most memory that the process ever had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) << 10


async def test_hostile_sources_cost_bounded_memory_and_change_no_other_nodes_data(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    rows, batches = many_rows(600_000), many_batches(8_000)
    honest = await FakeExporter("n1").start()
    expected = {
        "h-endless": "more than 67108864 bytes",
        "h-drip": "",  # whatever a time-out says
        "h-bomb": "Content-Encoding 'gzip', expected identity",
        "h-rows": "600000 rows, expected at most 500000",
        "h-batches": "more than 1000 Arrow messages",
        "h-types": "usage column sequence is string, expected int64",
        "h-future": "rows within a day that broke a rule, last: minute_us is",
        "n1": "",
    }
    answers: dict[str, Callable[[web.Request], web.StreamResponse | AsyncIterator[bytes]]] = {
        "h-endless": endless,
        "h-drip": drip,
        "h-bomb": lambda _: web.Response(body=bomb, headers={"Content-Encoding": "gzip"}),
        "h-rows": lambda _: web.Response(body=rows),
        "h-batches": lambda _: web.Response(body=batches),
        "h-types": wrong_types,
        "h-future": lambda _: web.Response(body=lying("h-future", NOW + 900 * DAY_US)),
    }
    hostile = [await Hostile(name, answer).start() for name, answer in answers.items()]
    # Another node's name, on the wire and in the records.
    thief = await Hostile("n1", lambda _: web.Response(body=lying("n1", NOW - DAY_US))).start()
    forger = await Hostile("h-forger", lambda _: web.Response(body=lying("n1", NOW - DAY_US))).start()
    hostile += [thief, forger]
    config = tmp_path / "config.toml"
    config.write_text("[collector]\ntimeout_s = 2.0\n")
    daemon = Daemon(tmp_path, honest.url, "--config", str(config))
    try:
        await until(lambda: daemon.ready.exists() or daemon.process.poll() is not None)
        await daemon.url()
        await until(lambda: len(honest.asked) > 1)
        assert await daemon.end() == 0
        daemon = Daemon(tmp_path, ",".join([honest.url, *(one.url for one in hostile)]), "--config", str(config))
        url = await daemon.url()
        for turn in range(3):
            honest.add(records("n1", honest.epoch, 1 + 8 * turn, 8, NOW - DAY_US))
            await until(lambda turn=turn: honest.acked_through == 8 * (turn + 1))  # type: ignore[misc]
            await until(lambda turn=turn: all(one.asked > turn for one in hostile))  # type: ignore[misc]

        async def unnamed() -> dict[str, list[str]]:
            health = await fetch(f"{url}/v1/health")
            lines = health["warnings"]
            assert isinstance(lines, list)
            found = {one.name: [line for line in lines if f"node {one.name} " in line or one.url in line] for one in hostile}
            return {name: said for name, said in found.items() if not any(expected.get(name, "") in line for line in said)}

        async with asyncio.timeout(60):
            while await unnamed():
                await asyncio.sleep(0.2)
        assert memory(daemon.process.pid) < MEMORY_MOST
        rows_of = {row["url"]: row for row in (await fetch(f"{url}/v1/nodes"))["rows"]}  # type: ignore[attr-defined]
        assert rows_of[honest.url]["state"] == "up" and rows_of[thief.url]["state"] == "refused"
        assert "which" in rows_of[thief.url]["reason"] and rows_of[forger.url]["quarantined"] > 0
        assert await daemon.end() == 0
    finally:
        daemon.kill()
        await honest.stop()
        for one in hostile:
            await one.runner.cleanup()
    assert stored(tmp_path) == {"n1": list(range(1, 25))}


BODY = arrow.to_bytes(arrow.to_table(records("n1", EPOCH, 1, 8, NOW)))
NEWEST = now.to_bytes(now.now_tables(snapshot("n1", EPOCH, NOW)))
JSON = json.dumps(to_plain(snapshot("n1", EPOCH, NOW)), separators=(",", ":")).encode()
SHORT, FULL = 300, 100_000


def mutated(body: bytes, rng: random.Random) -> bytes:
    """A body as a fault or an attacker leaves it: bytes and words changed, parts cut out, doubled, moved."""
    found = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 4, 8, rng.randint(1, 200)))
        how = rng.randrange(5)
        if how == 0:
            found[at : at + length] = rng.randbytes(length)
        elif how == 1:
            found[at : at + 4] = rng.choice((0, 1, 8, 0x7FFFFFFF, 0xFFFFFFFF, len(body))).to_bytes(4, "little")
        elif how == 2:
            del found[at : at + length]
        elif how == 3:
            found[at:at] = found[at : at + length]
        elif found and rng.random() < 0.2:
            del found[at:]
    return bytes(found)


def test_fuzzed_records_are_refused_or_checked(rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    taken = 0
    for _ in rounds(SHORT, FULL):
        body = mutated(BODY, rng)
        try:
            answer = parse_answer(HEADERS, body)
        except DataError as error:
            assert "\n" not in str(error)
            continue
        checked = check_usage(answer.table, Expected("n1", EPOCH, 8, NOW))
        taken += 1
        assert checked.good.num_rows + sum(row.rows for row in checked.bad) == answer.table.num_rows
        assert set(checked.good.column("node").to_pylist()) <= {"n1"} and set(checked.good.column("epoch").to_pylist()) <= {EPOCH}
        assert checked.through is None or 0 <= checked.through <= 8
    assert taken  # the fuzzer reaches beyond the parser


def test_fuzzed_snapshots_are_refused_or_this_nodes(rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    taken = 0
    for _ in rounds(SHORT, FULL):
        body = BODY + mutated(NEWEST, rng)
        try:
            found = parse_now(parse_answer({**HEADERS, "X-Poolmeter-Snapshot": str(len(BODY))}, body), body)
        except DataError as error:
            assert "\n" not in str(error)
            continue
        if found is not None:
            taken += 1
            assert found.node == "n1" and found.tables["now_nodes"].num_rows == 1
            assert all(set(table.column("node").to_pylist()) <= {"n1"} for table in found.tables.values())
    assert taken


def test_fuzzed_json_snapshots_are_refused_or_this_nodes(rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    for _ in rounds(SHORT, FULL):
        try:
            found = newest(parse_snapshot(mutated(JSON, rng), "n1"))
        except DataError as error:
            assert "\n" not in str(error)
            continue
        assert found.node == "n1" and found.tables["now_nodes"].num_rows == 1


@pytest.mark.parametrize("text", ["-1", "1e3", "", "99999999", "9" * 20])
def test_a_snapshot_begins_within_the_body(text: str) -> None:
    with pytest.raises(DataError, match="X-Poolmeter-Snapshot is"):
        parse_answer({**HEADERS, "X-Poolmeter-Snapshot": text}, BODY)
