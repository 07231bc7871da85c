"""A collector under load: so many exporters, simulated in one process on loopback, pulled by the real daemon in another.

Each node has 8 cards, 64 slices and 64 processes, closes minute records on the minute, and has a new snapshot each second. Measured once the
first round of pulls is over: CPU of the collector (percent of one core), resident memory, time of a publication, lag. At the end every
record must be in the store exactly once, with its own numbers. Exits 1 when one is not.

`--old` lets the exporters answer as version 0.0 did: one request for usage, another for the snapshot as JSON.
"""

import argparse
import asyncio
import functools
import gc
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pyarrow as pa
from cards import Card, Results
from processes import cpu_seconds, resident_mib

from poolmeter import arrow, now
from poolmeter.collector.catalog import open_catalog
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import GIB, MINUTE_US
from poolmeter.model.usage import DeviceRecord, ProcessRecord, SliceRecord, UsageRecord

CARDS, SLICES, PROCESSES = 8, 64, 64
ROWS = CARDS + SLICES + PROCESSES
SPREAD_S = 3.0  # exporters close their minute so much apart
EPOCH = str(uuid.UUID(int=0x5A55 << 64 | 0x4 << 76 | 0x8 << 60))
VIEWS = {"device_minutes": ("busy_us", CARDS), "slice_minutes": ("used_us", SLICES), "process_minutes": ("used_us", PROCESSES)}


def minute_template() -> pa.Table:
    """One node's minute as a wide table; node, sequence, minute and what is used are filled in later."""
    head = {"node": "n", "epoch": EPOCH, "minute_us": MINUTE_US, "start_us": MINUTE_US, "span_us": MINUTE_US, "pool": "pool"}
    rows: list[UsageRecord] = [
        DeviceRecord(
            **head, sequence=number, device_uuid=f"GPU-{number}", device_model="NVIDIA H200", allocated_us=MINUTE_US // 2, busy_us=0,
            reserved_unused_us=0, unallocated_us=MINUTE_US // 2, suspended_us=0, down_us=0, memory_total_bytes=141 * GIB, energy_uj=7_000_000,
        )
        for number in range(CARDS)
    ]  # fmt: skip
    rows += [
        SliceRecord(
            **head, sequence=number, device_uuid=f"GPU-{number % CARDS}", device_model="NVIDIA H200", allocation_id=f"a-{number}", mode="hook",
            tenant=f"tenant-{number % 10}", project="project", user="user", state="active", used_basis="hook", generation=1,
            promised_us=MINUTE_US // 16, allocated_us=MINUTE_US // 16, suspended_us=0, memory_allocated_kib_us=MINUTE_US << 20, used_us=0,
            memory_used_kib_us=MINUTE_US << 19, memory_peak_bytes=GIB, launches=number, throttled_us=0, denied_allocations=0,
        )
        for number in range(SLICES)
    ]  # fmt: skip
    rows += [
        ProcessRecord(
            **head, sequence=number, device_uuid=f"GPU-{number % CARDS}", device_model="NVIDIA H200", pid=1000 + number, start_ticks=5,
            command="python", hooked=True, used_basis="hook", allocation_id=f"a-{number}", tenant=f"tenant-{number % 10}", used_us=0,
            memory_used_kib_us=MINUTE_US << 19, launches=number,
        )
        for number in range(PROCESSES)
    ]  # fmt: skip
    return arrow.to_table(rows)


TEMPLATE = minute_template()
IS_DEVICE = np.arange(ROWS) < CARDS


def used(sequences: np.ndarray) -> np.ndarray:
    """What row number `sequences` says was used: every row says something of its own."""
    return 1_000_000 + sequences % 997


def minutes(node: str, first: int, last: int, origin_us: int) -> bytes:
    """The closed minutes [first, last) of a node as an Arrow stream; sequences start at 1."""
    tables = []
    for number in range(first, last):
        sequence = np.arange(number * ROWS + 1, (number + 1) * ROWS + 1)
        when = pa.array(np.full(ROWS, origin_us + number * MINUTE_US))
        values: Mapping[str, pa.Array] = {
            "node": pa.array([node]).take(pa.array(np.zeros(ROWS, np.int64))),
            "sequence": pa.array(sequence),
            "minute_us": when,
            "start_us": when,
            "busy_us": pa.array(used(sequence), mask=~IS_DEVICE),
            "used_us": pa.array(used(sequence), mask=IS_DEVICE),
        }
        names = TEMPLATE.column_names
        tables.append(pa.Table.from_arrays([values.get(n, TEMPLATE.column(n)) for n in names], schema=TEMPLATE.schema))
    table = pa.concat_tables(tables).combine_chunks() if tables else TEMPLATE.slice(0, 0)
    return arrow.to_bytes(table)


def snapshot(node: str, taken_us: int) -> Snapshot:
    """One node now."""
    return Snapshot(
        node=node, epoch=EPOCH, sequence=1, taken_us=taken_us, simulated=True, pool="pool",
        devices=tuple(
            DeviceSnapshot(
                uuid=f"GPU-{card}", index=card, model="NVIDIA H200", vendor="nvidia", up=True, memory_total_bytes=141 * GIB, origin=EPOCH,
                memory_used_bytes=8 * GIB, utilization_ppm=500_000, power_mw=400_000, temperature_celsius=50, busy_us_total=taken_us // 2,
                unaccounted_us_total=0, allocated_ppm=900_000, driver_version="580", pci_bus_id=f"0000:{card:02x}:00.0", minor=card,
            )
            for card in range(CARDS)
        ),
        slices=tuple(
            SliceSnapshot(
                allocation_id=f"a-{number}", device_uuid=f"GPU-{number % CARDS}", tenant=f"tenant-{number % 10}", mode="hook", state="active",
                used_basis="hook", generation=1, enforcement="hook", promise_ppm=62_500, memory_promise_bytes=GIB, created_us=1, origin=EPOCH,
                project="project", user="user", busy_us_total=taken_us // 20, throttled_us_total=0, memory_used_bytes=GIB // 4,
                memory_limit_bytes=GIB, memory_peak_bytes=GIB // 2, denied_allocations_total=0, processes=1, launches_total=taken_us // 50,
            )
            for number in range(SLICES)
        ),
        processes=tuple(
            ProcessSnapshot(
                pid=1000 + number, start_ticks=5, device_uuid=f"GPU-{number % CARDS}", hooked=True, command="python", used_basis="hook",
                allocation_id=f"a-{number}", tenant=f"tenant-{number % 10}", busy_us_total=taken_us // 20, memory_used_bytes=GIB // 4,
            )
            for number in range(PROCESSES)
        ),
        sources=tuple(SourceHealth(source=name, ok=True, at_us=taken_us, duration_us=900) for name in ("nvml", "hook", "spool")),
    )  # fmt: skip


MARK_NODE, MARK_US = "NODE-NAME", 1_111_111_111_111_111


def name_of(node: int) -> str:
    """A node's name, as long as the mark in its place."""
    return f"node-{node:04}"


@functools.cache
def snapshot_json() -> bytes:
    """The JSON of a snapshot, node and time to be filled in."""
    return json.dumps({"schema": "poolmeter.snapshot/1", **to_plain(snapshot(MARK_NODE, MARK_US))}, separators=(",", ":")).encode()


@functools.cache
def snapshot_arrow() -> bytes:
    """The Arrow stream of a snapshot, node and time to be filled in."""
    return now.to_bytes(now.now_tables(snapshot(MARK_NODE, MARK_US)))


def filled(body: bytes, node: int, mark: bytes, taken: bytes) -> bytes:
    """A snapshot of this node and moment."""
    return body.replace(MARK_NODE.encode(), name_of(node).encode()).replace(mark, taken)


class Fleet:
    """The simulated exporters: node n answers at 127.x.y.z, all at one port; what has been acknowledged is kept per node."""

    def __init__(self, nodes: int, old: bool) -> None:
        self.count = nodes
        self.old = old
        self.origin_us = (time.time_ns() // 1000 // MINUTE_US) * MINUTE_US
        self.acknowledged = [0] * nodes
        self.requests = 0
        self.snapshots = 0
        self.doubtful = 0

    def closed(self, node: int) -> int:
        """How many minutes the node has closed by now."""
        late_us = int(node * SPREAD_S * 1e6 / self.count)
        return int((time.time_ns() // 1000 - self.origin_us - late_us) // MINUTE_US)

    def usage(self, node: int, query: str) -> tuple[bytes, str]:
        """Body and headers of GET /v1/usage."""
        asked = parse_qs(query)
        after = int(asked["after"][0].split(",")[1]) if "after" in asked else 0
        first = max(after, self.acknowledged[node]) // ROWS
        last = max(self.closed(node), first)
        name = name_of(node)
        body = minutes(name, first, last, self.origin_us)
        at = ""
        if not self.old and "snapshot" in asked:
            at = f"X-Poolmeter-Snapshot: {len(body)}\r\n"
            body += filled(snapshot_arrow(), node, int.to_bytes(MARK_US, 8, "little"), int.to_bytes(time.time_ns() // 1000, 8, "little"))
        head = f"X-Poolmeter-Node: {name}\r\nX-Poolmeter-Epoch: {EPOCH}\r\nX-Poolmeter-Last-Sequence: {last * ROWS}\r\nX-Poolmeter-More: false\r\n"
        return body, head + at

    def snapshot(self, node: int) -> bytes:
        """Body of GET /v1/snapshot, of this second."""
        self.snapshots += 1
        return (
            snapshot_json()
            .replace(MARK_NODE.encode(), f"node-{node}".encode())
            .replace(str(MARK_US).encode(), b"%d" % (time.time_ns() // 1000))
        )

    def acknowledge(self, node: int, body: bytes) -> bytes:
        """POST /v1/ack."""
        given = json.loads(body)
        if given["seq"] % ROWS or given["seq"] > self.closed(node) * ROWS:
            self.doubtful += 1
        self.acknowledged[node] = max(self.acknowledged[node], given["seq"])
        return b"{}"


class Exporter(asyncio.Protocol):
    """One connection: as little HTTP as the collector needs, so that the load costs little beside what is measured."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        a, b = transport.get_extra_info("sockname")[0].split(".")[2:]
        self.node = (int(a) - 1) * 250 + int(b) - 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].decode()
            lines = head.split("\r\n")
            length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            self.fleet.requests += 1
            path, _, query = lines[0].split(" ")[1].partition("?")
            more = ""
            if path == "/v1/usage":
                answer, more = self.fleet.usage(self.node, query)
            elif path == "/v1/snapshot":
                answer = self.fleet.snapshot(self.node)
            else:
                answer = self.fleet.acknowledge(self.node, body)
            self.transport.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n{more}\r\n".encode() + answer)  # type: ignore[attr-defined]


def address(node: int) -> str:
    """The loopback address of a node."""
    return f"127.0.{node // 250 + 1}.{node % 250 + 1}"


def quantile(values: list[float], part: float) -> float | None:
    """The nearest-rank quantile."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else None


def stored(root: Path, fleet: Fleet) -> dict[str, object]:
    """What the store holds beside what the fleet gave: rows lost, doubled, with another number than their own."""
    out: dict[str, object] = {"rows": 0, "lost": 0, "doubled": 0, "wrong": 0}
    with open_catalog(root) as connection:
        for view, (column, each) in VIEWS.items():
            sql = (
                f"SELECT node, count(*), count(DISTINCT sequence), max(sequence), sum(({column} <> 1000000 + sequence % 997)::INT) FROM {view} "
                "GROUP BY node"
            )
            found = {row[0]: row[1:] for row in connection.execute(sql).fetchall()}
            for node in range(fleet.count):
                rows, different, last, wrong = found.get(name_of(node), (0, 0, 0, 0))
                # All of an answer's rows are stored together: up to its last minute nothing may be missing.
                closed = max(fleet.acknowledged[node] // ROWS, -(-int(last) // ROWS))
                out["rows"] = int(out["rows"]) + rows  # type: ignore[call-overload]
                out["lost"] = int(out["lost"]) + closed * each - different  # type: ignore[call-overload]
                out["doubled"] = int(out["doubled"]) + rows - different  # type: ignore[call-overload]
                out["wrong"] = int(out["wrong"]) + int(wrong or 0)  # type: ignore[call-overload]
    return out


async def measure(args: argparse.Namespace, data: Path) -> dict[str, object]:
    """The figures of one run."""
    fleet = Fleet(args.nodes, args.old)
    loop = asyncio.get_running_loop()
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("0.0.0.0", 0))
    server = await loop.create_server(lambda: Exporter(fleet), sock=bound, backlog=4096)
    port = bound.getsockname()[1]
    config = data / "config.toml"
    nodes = ", ".join(f'"http://{address(node)}:{port}"' for node in range(args.nodes))
    config.write_text(f"[collector]\nport = 0\npull_interval_s = {args.interval}\nnodes = [{nodes}]\n")
    ready = data / "ready.json"
    words = [sys.executable, "-m", "poolmeter.cli", "collector", "--config", str(config), "--data", str(data), "--ready-file", str(ready)]
    with (data / "log").open("wb") as log:
        process = subprocess.Popen([*args.under, *words], stderr=log, stdout=log)
    try:
        began = time.monotonic()
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit((data / "log").read_text()[-2000:])
            await asyncio.sleep(0.05)
        started_s = time.monotonic() - began
        found = json.loads(ready.read_text())
        await asyncio.sleep(args.warm)
        pid, resident = found["pid"], 0.0
        cpu, clock, asked, snaps = cpu_seconds(pid), time.monotonic(), fleet.requests, fleet.snapshots
        halves = []
        while (spent := time.monotonic() - clock) < args.seconds:
            await asyncio.sleep(min(1.0, args.seconds - spent))
            resident = max(resident, resident_mib(pid))
            halves.append(cpu_seconds(pid))
        spent = time.monotonic() - clock
        middle = len(halves) // 2
        row = {
            "nodes": args.nodes,
            "seconds": round(spent),
            "cpu_percent": (cpu_seconds(pid) - cpu) / spent * 100,
            "first_half": (halves[middle] - cpu) / (middle + 1) * 100,
            "second_half": (halves[-1] - halves[middle]) / max(1, len(halves) - 1 - middle) * 100,
            "rss_mib": resident,
            "load_average": os.getloadavg()[1],
            "start_s": started_s,
            "requests_s": (fleet.requests - asked) / spent,
            "json_snapshots_s": (fleet.snapshots - snaps) / spent,
        }
        health = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(f"{found['url']}/v1/health", timeout=60)))
        lags = [node["lag_us"] / 1e6 for node in health["rows"] if "lag_us" in node]
        row |= {name: health["store"].get(name) for name in ("publish_p50_ms", "publish_p99_ms", "generation", "segments")}
        # A record's minute starts a minute before it can be pulled.
        row |= {
            "lag_p50_s": (quantile(lags, 0.5) or 60) - 60,
            "lag_p99_s": (quantile(lags, 0.99) or 60) - 60,
            "up": sum(node["state"] == "up" for node in health["rows"]),
        }
    finally:
        if process.poll() is None:
            began = time.monotonic()
            os.kill(int(json.loads(ready.read_text())["pid"]) if ready.exists() else process.pid, signal.SIGTERM)
            await asyncio.to_thread(process.wait)
    row["stop_s"] = time.monotonic() - began
    server.close()
    return row | stored(data / "store", fleet) | {"doubtful_acks": fleet.doubtful}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120, help="measured, after --warm (1800 for the real figure)")
    parser.add_argument("--warm", type=float, default=30)
    parser.add_argument("--interval", type=float, default=15)
    parser.add_argument("--old", action="store_true", help="exporters that know usage and a JSON snapshot alone")
    parser.add_argument("--under", type=str.split, default=[], help="words before the collector's command, such as a profiler's")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    gc.disable()
    results = Results(args.output, "collector", Card("", f"no card, {os.cpu_count()} cores", platform.machine(), 0))
    with tempfile.TemporaryDirectory(prefix="poolmeter-bench-") as folder:
        row = asyncio.run(measure(args, Path(folder)))
    results.add("collector", **row)
    results.table()
    return 1 if row["lost"] or row["doubled"] or row["wrong"] or row["doubtful_acks"] else 0


if __name__ == "__main__":
    sys.exit(main())
