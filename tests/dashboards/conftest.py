"""A small pool in a real store: two nodes of two cards, three tenants, one program without the hook, one card that is lost."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from poolmeter.clock import SystemClock
from poolmeter.collector.segments import publish_records
from poolmeter.model.snapshot import DeviceSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import GIB, MICROSECONDS, MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord
from poolmeter.places import CollectorData

MINUTES = 4
MODEL = "Simulated H200"
TOTAL = 140 * GIB
EPOCHS = {node: str(uuid.uuid5(uuid.NAMESPACE_DNS, node)) for node in ("node-a", "node-b")}
# (node, card, tenant, promise in %, used in % of the card or None, memory limit, memory used or None, state, last kernel s ago)
SLICES: tuple[tuple[str, int, str, int, int | None, int, int | None, str, int | None], ...] = (
    ("node-a", 0, "ada", 50, 40, 70, 60, "active", 0),
    ("node-a", 0, "bob", 25, 0, 20, 12, "held", 7200),
    ("node-a", 1, "cyn", 100, 90, 140, 100, "active", 1),
    ("node-b", 0, "ada", 50, None, 70, None, "unknown", None),
)
CARDS = (("node-a", 0), ("node-a", 1), ("node-b", 0), ("node-b", 1))
UNACCOUNTED = {("node-a", 0): 5}
LOST = ("node-b", 1)
UNKNOWN_CARD = ("node-b", 0)


def card_uuid(node: str, card: int) -> str:
    return f"GPU-{node}-{card}"


def allocation_of(node: str, card: int, tenant: str) -> str:
    return f"{tenant}-{node}-{card}"


def percent_us(percent: int | None) -> int | None:
    return None if percent is None else MINUTE_US * percent // 100


def device_record(node: str, card: int, sequence: int, minute_us: int) -> DeviceRecord:
    mine = [piece for piece in SLICES if piece[:2] == (node, card)]
    down = (node, card) == LOST
    unknown = down or (node, card) == UNKNOWN_CARD
    allocated = 0 if down else MINUTE_US * sum(piece[3] for piece in mine) // 100
    hooked = MINUTE_US * sum(piece[4] or 0 for piece in mine) // 100
    unaccounted = MINUTE_US * UNACCOUNTED.get((node, card), 0) // 100
    return DeviceRecord(
        node=node, epoch=EPOCHS[node], sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=MINUTE_US, pool="lab",
        device_uuid=card_uuid(node, card), device_model=MODEL, memory_total_bytes=TOTAL,
        allocated_us=allocated, reserved_unused_us=0, unallocated_us=0 if down else MINUTE_US - allocated, suspended_us=0,
        down_us=MINUTE_US if down else 0,
        busy_us=None if unknown else hooked + unaccounted, hooked_us=None if unknown else hooked,
        switch_overhead_us=None if unknown else 0, unaccounted_us=None if unknown else unaccounted,
    )  # fmt: skip


def slice_record(
    piece: tuple[str, int, str, int, int | None, int, int | None, str, int | None], sequence: int, minute_us: int
) -> SliceRecord:
    node, card, tenant, promise, used, limit, memory, state, _ = piece
    return SliceRecord(
        node=node, epoch=EPOCHS[node], sequence=sequence, minute_us=minute_us, start_us=minute_us, span_us=MINUTE_US, pool="lab",
        completeness_ppm=1_000_000 if used is not None else 0,
        device_uuid=card_uuid(node, card), device_model=MODEL, allocation_id=allocation_of(node, card, tenant), tenant=tenant,
        mode="hook", state=state, used_basis="hook" if used is not None else "allocated", generation=1,
        promised_us=MINUTE_US * promise // 100, allocated_us=MINUTE_US * promise // 100, suspended_us=0,
        memory_allocated_kib_us=limit * GIB // 1024 * MINUTE_US,
        used_us=percent_us(used), promise_ppm=promise * 10_000, memory_limit_bytes=limit * GIB,
        memory_used_kib_us=None if memory is None else memory * GIB // 1024 * MINUTE_US,
        project="search" if tenant == "ada" else None,
    )  # fmt: skip


def snapshot_of(node: str, now_us: int, failing: bool) -> Snapshot:
    devices = tuple(
        DeviceSnapshot(
            uuid=card_uuid(node, card), index=card, model=MODEL, vendor="nvidia", up=(node, card) != LOST, memory_total_bytes=TOTAL,
            origin="boot", power_mw=None if node == "node-b" else 250_000,
            memory_used_bytes=None if node == "node-b" else sum(p[6] or 0 for p in SLICES if p[:2] == (node, card)) * GIB,
        )
        for owner, card in CARDS
        if owner == node
    )  # fmt: skip
    slices = tuple(
        SliceSnapshot(
            allocation_id=allocation_of(node, card, tenant), device_uuid=card_uuid(node, card), tenant=tenant, mode="hook", state=state,
            used_basis="hook", generation=1, enforcement="cooperative", promise_ppm=promise * 10_000, memory_promise_bytes=limit * GIB,
            created_us=now_us - 10_000 * MICROSECONDS, origin="page", compute_limit_ppm=promise * 10_000,
            memory_limit_bytes=limit * GIB, memory_used_bytes=None if memory is None else memory * GIB,
            last_activity_us=None if last is None else now_us - last * MICROSECONDS,
        )
        for owner, card, tenant, promise, _, limit, memory, state, last in SLICES
        if owner == node
    )  # fmt: skip
    sources = (
        SourceHealth(source="allocations", ok=True, at_us=now_us, duration_us=900),
        SourceHealth(source="nvml", ok=not failing, at_us=now_us, duration_us=2_000, reason="a call hangs for 12 s" if failing else None),
    )
    return Snapshot(
        node=node, epoch=EPOCHS[node], sequence=10_000, taken_us=now_us, simulated=True, pool="lab", devices=devices, slices=slices,
        sources=sources,
    )  # fmt: skip


def fill_store(data: Path, now_us: int) -> None:
    """Closed minutes up to `now_us` and a snapshot of each node, through the collector's own write path."""
    records: list[UsageRecord] = []
    sequence = dict.fromkeys(EPOCHS, 0)
    first = now_us - now_us % MINUTE_US - MINUTES * MINUTE_US
    for minute_us in range(first, first + MINUTES * MINUTE_US, MINUTE_US):
        for node, card in CARDS:
            sequence[node] += 1
            records.append(device_record(node, card, sequence[node], minute_us))
        for piece in SLICES:
            sequence[piece[0]] += 1
            records.append(slice_record(piece, sequence[piece[0]], minute_us))
    publish_records(CollectorData(data).store, records, [snapshot_of(node, now_us, failing=node == "node-b") for node in EPOCHS])


@pytest.fixture
def short_minute() -> Callable[[Path, int], None]:
    """Makes a store in a data folder whose node has been watched for so many microseconds; nothing has run yet."""

    def fill(data: Path, span_us: int) -> None:
        now_us = SystemClock().wall_us()
        record = replace(
            device_record("node-a", 0, 1, now_us - now_us % MINUTE_US - MINUTE_US), span_us=span_us, allocated_us=span_us // 2,
            unallocated_us=span_us - span_us // 2, busy_us=0, hooked_us=0, unaccounted_us=0,
        )  # fmt: skip
        now = snapshot_of("node-a", now_us, failing=False)
        publish_records(CollectorData(data).store, [record], [replace(now, devices=now.devices[:1], slices=())])

    return fill


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A filled data folder that the pages read."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("POOLMETER_DATA", str(folder))
    monkeypatch.delenv("POOLMETER_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fill_store(folder, SystemClock().wall_us())
    return folder
