"""Snapshots for the live view, and a feed that says what a test tells it to."""

import dataclasses
from pathlib import Path

from poolmeter.clock import ManualClock
from poolmeter.exporter.top.feed import Address, Answer, Feed
from poolmeter.exporter.top.host import Host
from poolmeter.exporter.top.watch import Watch
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import GIB

T0 = 1_764_500_000_000_000
SECOND = 1_000_000
URL = "http://127.0.0.1:1"
HOSTILE = "a\x1b[31m\n\u202e[b]x[/b]\x07"


def device(index: int, **values: object) -> DeviceSnapshot:
    """A card in good health."""
    base: dict[str, object] = {
        "model": "NVIDIA H200", "vendor": "nvidia", "up": True, "memory_total_bytes": 141 * GIB, "origin": "e", "driver_version": "580.1",
        "memory_used_bytes": 20 * GIB, "utilization_ppm": 500_000, "power_mw": 300_400, "temperature_celsius": 51, "allocated_ppm": 500_000,
        "busy_us_total": 0, "unaccounted_us_total": 0, "unaccounted_memory_bytes": 0,
    }  # fmt: skip
    return DeviceSnapshot(uuid=f"GPU-{index}", index=index, **{**base, **values})  # type: ignore[arg-type]


def part(name: str, tenant: str, card: int = 0, **values: object) -> SliceSnapshot:
    """An allocation's part of a card."""
    base: dict[str, object] = {
        "mode": "hook", "state": "active", "used_basis": "hook", "generation": 1, "enforcement": "cooperative", "promise_ppm": 250_000,
        "memory_promise_bytes": 40 * GIB, "created_us": T0, "origin": "e:1", "compute_limit_ppm": 250_000, "memory_limit_bytes": 40 * GIB,
        "memory_used_bytes": 10 * GIB, "memory_peak_bytes": 12 * GIB, "busy_us_total": 0, "throttled_us_total": 0,
        "denied_allocations_total": 0, "processes": 1,
    }  # fmt: skip
    return SliceSnapshot(allocation_id=name, device_uuid=f"GPU-{card}", tenant=tenant, **{**base, **values})  # type: ignore[arg-type]


def process(pid: int, tenant: str | None, card: int = 0, **values: object) -> ProcessSnapshot:
    """A process on a card; without a tenant it has no hook."""
    base: dict[str, object] = {
        "start_ticks": 100 + pid, "hooked": tenant is not None, "command": f"prog{pid}", "tenant": tenant, "busy_us_total": 0,
        "memory_used_bytes": 10 * GIB, "used_basis": "hook", "allocation_id": f"a-{tenant}" if tenant else None,
    }  # fmt: skip
    return ProcessSnapshot(pid=pid, device_uuid=f"GPU-{card}", **{**base, **values})  # type: ignore[arg-type]


def snapshot(node: str = "gpu-01", at_us: int = T0, **values: object) -> Snapshot:
    """One card, two tenants and a stranger."""
    base: dict[str, object] = {
        "devices": (device(0),),
        "slices": (part("a-vision", "vision"), part("a-search", "search", state="held", compute_limit_ppm=None)),
        "processes": (process(10, "vision"), process(9, "search", memory_used_bytes=2 * GIB), process(200, None, memory_used_bytes=None)),
        "sources": (SourceHealth(source="nvml", ok=True, at_us=at_us, duration_us=10),),
    }
    return Snapshot(node=node, epoch="e", sequence=1, taken_us=at_us, simulated=False, **{**base, **values})  # type: ignore[arg-type]


def later(first: Snapshot, us: int = SECOND, **busy: int) -> Snapshot:
    """The same node `us` later; `busy` maps a tenant (or `card`, `stranger`) to what it has used since then."""
    return dataclasses.replace(
        first,
        taken_us=first.taken_us + us,
        devices=tuple(
            dataclasses.replace(item, busy_us_total=(item.busy_us_total or 0) + busy.get("card", 0)) if item.up else item
            for item in first.devices
        ),
        slices=tuple(
            dataclasses.replace(
                item,
                busy_us_total=None if item.busy_us_total is None else item.busy_us_total + busy.get(item.tenant, 0),
                throttled_us_total=None if item.throttled_us_total is None else item.throttled_us_total + busy.get("throttled", 0),
            )
            for item in first.slices
        ),
        processes=tuple(
            dataclasses.replace(
                item,
                busy_us_total=None if item.busy_us_total is None else item.busy_us_total + busy.get(item.tenant or "stranger", 0),
            )
            for item in first.processes
        ),
    )


class FakeFeed(Feed):
    """Answers what `answers` holds."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__([Address(answer.url) for answer in answers] or [Address(URL)])
        self.answers = list(answers)
        self.polls = 0

    def poll(self) -> tuple[Answer, ...]:
        self.polls += 1
        return tuple(self.answers)


class Watched:
    """A watch over a fake feed, on a clock that the test moves."""

    def __init__(self, proc: Path, *snapshots: Snapshot, pooled: bool = False) -> None:
        self.clock = ManualClock(T0 + SECOND // 2, 1_000 * SECOND)
        self.feed = FakeFeed(Answer(URL, T0, snapshots, None, pooled))
        self.pooled = pooled
        self.watch = Watch(self.feed, Host(proc), self.clock)

    def say(self, *snapshots: Snapshot, us: int = SECOND) -> None:
        """Time passes and these are the snapshots now."""
        self.clock.advance(us)
        self.feed.answers = [Answer(URL, T0, snapshots, None, self.pooled)]
        self.watch.poll()

    def fail(self, error: str = "nothing listens there", us: int = SECOND) -> None:
        """Time passes and it answers no more."""
        self.clock.advance(us)
        self.feed.answers = [Answer(URL, T0, (), error)]
        self.watch.poll()
