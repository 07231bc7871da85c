"""A small exporter for tests: a spool in memory behind the real protocol, with faults on demand."""

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web

from poolmeter import arrow, now
from poolmeter.collector.catalog import query
from poolmeter.collector.check import Expected, check_usage
from poolmeter.collector.store import Batch
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import DeviceSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.model.usage import DeviceRecord, EventRecord, ProcessRecord, RecordKind, SliceRecord, UsageRecord

CARD = 141 << 30


def device(node: str, epoch: str, sequence: int, minute_us: int, uuid_: str = "GPU-1", **changes: object) -> DeviceRecord:
    plain = DeviceRecord(
        node=node, epoch=epoch, sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=MINUTE_US, pool="p", device_uuid=uuid_,
        device_model="H200", allocated_us=MINUTE_US // 2, reserved_unused_us=0, unallocated_us=MINUTE_US // 2, suspended_us=0, down_us=0,
        memory_total_bytes=CARD, busy_us=1_000_000, energy_uj=7_000_000,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def slice_(node: str, epoch: str, sequence: int, minute_us: int, tenant: str = "t1", **changes: object) -> SliceRecord:
    plain = SliceRecord(
        node=node, epoch=epoch, sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=MINUTE_US, pool="p",
        device_uuid="GPU-1", device_model="H200", allocation_id=f"a-{tenant}", tenant=tenant, mode="hook", state="active", used_basis="hook",
        generation=1, promised_us=MINUTE_US // 2, allocated_us=MINUTE_US // 2, suspended_us=0,
        memory_allocated_kib_us=(CARD >> 10) * MINUTE_US, used_us=1_000_000,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def process(node: str, epoch: str, sequence: int, minute_us: int, **changes: object) -> ProcessRecord:
    plain = ProcessRecord(
        node=node, epoch=epoch, sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=MINUTE_US, device_uuid="GPU-1",
        device_model="H200", pid=100, start_ticks=5, command="python", hooked=True, used_us=5,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def event(node: str, epoch: str, sequence: int, minute_us: int, **changes: object) -> EventRecord:
    plain = EventRecord(
        node=node, epoch=epoch, sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=0, event="resized", at_us=minute_us + 5
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def records(node: str, epoch: str, first: int, count: int, minute_us: int) -> list[UsageRecord]:
    """`count` records with sequences from `first`, of all kinds in turn, four a minute."""
    makers = (device, slice_, process, event)
    return [makers[n % 4](node, epoch, n, minute_us + (n // 4) * MINUTE_US) for n in range(first, first + count)]


def snapshot(node: str, epoch: str, taken_us: int, sequence: int = 0) -> Snapshot:
    return Snapshot(
        node=node, epoch=epoch, sequence=sequence, taken_us=taken_us, simulated=True, pool="p",
        devices=(DeviceSnapshot(uuid="GPU-1", index=0, model="H200", vendor="nvidia", up=True, memory_total_bytes=CARD, origin="boot-1"),),
        slices=(
            SliceSnapshot(
                allocation_id="a-t1", device_uuid="GPU-1", tenant="t1", mode="hook", state="active", used_basis="hook", generation=2,
                enforcement="hook", promise_ppm=500_000, memory_promise_bytes=1 << 30, created_us=5, origin="x", memory_limit_bytes=1 << 30,
            ),
        ),
        sources=(SourceHealth(source="nvml", ok=True, at_us=taken_us, duration_us=9),),
    )  # fmt: skip


@dataclass
class FakeExporter:
    """Serves `spool` to any number of pulls until it is acknowledged. `acked` keeps every acknowledged sequence, `asked` each position.

    `old`: it knows its snapshot as a JSON page alone; `arrow_snapshot` is what stands behind the records in place of the snapshot.
    """

    node: str = "n1"
    epoch: str = field(default_factory=lambda: str(uuid.uuid4()))
    token: str | None = None
    page: int = 1000
    spool: list[UsageRecord] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    acked_through: int = 0
    asked: list[str | None] = field(default_factory=list)
    fail: int | None = None
    fail_acks: int | None = None
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    snapshot_body: bytes | None = None
    arrow_snapshot: bytes | None = None
    old: bool = False
    json_snapshots: int = 0
    hang: bool = False
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> "FakeExporter":
        app = web.Application()
        app.add_routes([web.get("/v1/usage", self._usage), web.post("/v1/ack", self._ack), web.get("/v1/snapshot", self._snapshot)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, new: Sequence[UsageRecord]) -> None:
        self.spool.extend(new)

    async def _usage(self, request: web.Request) -> web.Response:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if self.hang:
            await asyncio.sleep(60)
        if self.fail:
            return web.Response(status=self.fail)
        after = request.query.get("after")
        self.asked.append(after)
        start = self.acked_through
        if after is not None:
            epoch, _, sequence = after.partition(",")
            start = int(sequence) if epoch == self.epoch else 0
        waiting = [record for record in self.spool if record.sequence > start]
        page = waiting[: self.page]
        headers = {
            "X-Poolmeter-Node": self.node,
            "X-Poolmeter-Epoch": self.epoch,
            "X-Poolmeter-Last-Sequence": str(page[-1].sequence if page else start),
            "X-Poolmeter-More": "true" if len(waiting) > len(page) else "false",
        } | self.headers
        body = arrow.to_bytes(arrow.to_table(page)) if self.body is None else self.body
        if request.query.get("snapshot") == "arrow" and not self.old:
            headers.setdefault("X-Poolmeter-Snapshot", str(len(body)))
            plain = snapshot(self.node, self.epoch, 1_800_000_000_000_000)
            body += now.to_bytes(now.now_tables(plain)) if self.arrow_snapshot is None else self.arrow_snapshot
        return web.Response(body=body, headers=headers)

    async def _snapshot(self, request: web.Request) -> web.Response:
        self.json_snapshots += 1
        if self.snapshot_body is not None:
            return web.Response(body=self.snapshot_body)
        return web.json_response(to_plain(snapshot(self.node, self.epoch, 1_800_000_000_000_000)))

    async def _ack(self, request: web.Request) -> web.Response:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if self.fail_acks:
            return web.Response(status=self.fail_acks, text="no")
        given = json.loads(await request.text())
        if given["epoch"] != self.epoch:
            return web.Response(status=409)
        self.acked += [record.sequence for record in self.spool if record.sequence <= given["seq"]]
        self.acked_through = max(self.acked_through, given["seq"])
        self.spool = [record for record in self.spool if record.sequence > given["seq"]]
        return web.json_response({"consumer": given["consumer"]})


# A store's own: its day, and what it holds.
DAY = 1_799_971_200_000_000  # 2027-01-15
NOW = DAY + 12 * HOUR_US
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
MINUTES = {RecordKind.DEVICE: "device_minutes", RecordKind.SLICE: "slice_minutes", RecordKind.PROCESS: "process_minutes"}
ALL_ROWS = " UNION ALL ".join(f"SELECT node, epoch, sequence FROM {view}" for view in (*MINUTES.values(), "event_log"))


def batch(rows: Sequence[UsageRecord], node: str = "n1", epoch: str = EPOCH, last: int = 1 << 40, now: int = NOW + 20 * DAY_US) -> Batch:
    return Batch(node, epoch, check_usage(arrow.to_table(rows), Expected(node, epoch, last, now)), now)


def stored(root: Path) -> list[tuple[str, str, int]]:
    return sorted((row["node"], row["epoch"], row["sequence"]) for row in query(root, ALL_ROWS).to_pylist())


def scalar(root: Path, sql: str) -> object:
    return query(root, sql).column(0)[0].as_py()
