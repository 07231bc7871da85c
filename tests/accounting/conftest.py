"""A store in memory: the catalog's views over records. Makes accounting_pools importable."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from poolmeter.arrow import kind_schema
from poolmeter.model.units import GIB, MINUTE_US
from poolmeter.model.usage import DeviceRecord, RecordKind, SliceRecord, UsageRecord, kind_of

sys.path.insert(0, str(Path(__file__).parent))
VIEWS = {
    RecordKind.DEVICE: "device_minutes",
    RecordKind.SLICE: "slice_minutes",
    RecordKind.PROCESS: "process_minutes",
    RecordKind.EVENT: "event_log",
}


def fill(
    records: Sequence[UsageRecord], simulated: bool = True, connection: duckdb.DuckDBPyConnection | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection (the one given, else a new one) that answers like a catalog whose store holds `records`."""
    if connection is None:
        connection = duckdb.connect(config={"threads": 1})  # many small questions: threads only cost
    for kind, view in VIEWS.items():
        schema = kind_schema(kind)
        chosen = [record for record in records if kind_of(record) is kind]
        table = pa.Table.from_arrays([pa.array([getattr(r, f.name) for r in chosen], f.type) for f in schema], schema=schema)
        connection.register(view, table)
    connection.register("nodes", pa.table({"node": ["n1"], "simulated": [simulated]}))
    return connection


@pytest.fixture(scope="session")
def store() -> Callable[..., duckdb.DuckDBPyConnection]:
    """`fill`, for tests."""
    return fill


class Shelf:
    """Connections kept open from store to store, for properties: opening one costs more than the questions asked of it.

    Stores that are open at the same time have a connection each; the same records again are not entered again.
    """

    def __init__(self) -> None:
        self._free: list[tuple[duckdb.DuckDBPyConnection, Sequence[UsageRecord]]] = []

    @contextmanager
    def store(self, records: Sequence[UsageRecord]) -> Iterator[duckdb.DuckDBPyConnection]:
        """A catalog whose store holds `records`, until the block ends."""
        connection, held = self._free.pop() if self._free else (fill(records), records)
        if held is not records:
            fill(records, connection=connection)
        yield connection
        # Not after a failure: what a question left behind must not be the next one's.
        self._free.append((connection, records))

    def close(self) -> None:
        """Close what is free."""
        while self._free:
            self._free.pop()[0].close()


@pytest.fixture(scope="session")
def stores() -> Iterator[Callable[[Sequence[UsageRecord]], AbstractContextManager[duckdb.DuckDBPyConnection]]]:
    """`Shelf.store`, for properties."""
    shelf = Shelf()
    yield shelf.store
    shelf.close()


START_US = 1_790_000_000_000_000 - 1_790_000_000_000_000 % (24 * 3_600_000_000)  # 2026-09-21T00:00Z


class Minutes:
    """Records of a small pool, minute by minute; numbers are easy to add up by hand."""

    def __init__(self) -> None:
        self.records: list[UsageRecord] = []

    def key(self, minute: int, node: str, span_us: int) -> dict[str, Any]:
        minute_us = START_US + minute * MINUTE_US
        return {
            "node": node,
            "epoch": f"00000000-0000-4000-8000-{node:0>12}",
            "sequence": 1 + sum(record.node == node for record in self.records),
            "minute_us": minute_us,
            "start_us": minute_us,
            "span_us": span_us,
            "pool": "main",
        }

    def device(
        self, minute: int, uuid: str = "GPU-1", *, node: str = "n1", model: str = "Sim H200", span_us: int = MINUTE_US, **parts: Any
    ) -> None:
        """A device-minute; what `parts` do not name is unallocated."""
        named = {name: parts.pop(name, 0) for name in ("allocated_us", "reserved_unused_us", "suspended_us", "down_us")}
        self.records.append(
            DeviceRecord(
                **self.key(minute, node, span_us),
                device_uuid=uuid,
                device_model=model,
                unallocated_us=span_us - sum(named.values()),
                memory_total_bytes=141 * GIB,
                **named,
                **parts,
            )
        )

    def slice(
        self, minute: int, tenant: str, allocated_us: int, used_us: int | None, uuid: str = "GPU-1", *, node: str = "n1", **fields: Any
    ) -> None:
        """A slice-minute of allocation `a-TENANT`."""
        values: dict[str, Any] = {
            "device_model": "Sim H200",
            "allocation_id": f"a-{tenant}",
            "mode": "hook",
            "state": "active",
            "used_basis": "allocated" if used_us is None else "hook",
            "generation": 2,
            "promised_us": allocated_us,
            "suspended_us": 0,
            "memory_allocated_kib_us": 40 * GIB // 1024 * MINUTE_US,
            "memory_limit_bytes": 40 * GIB,
            **fields,
        }
        span_us = values.pop("span_us", MINUTE_US)
        self.records.append(
            SliceRecord(
                **self.key(minute, node, span_us), device_uuid=uuid, tenant=tenant, allocated_us=allocated_us, used_us=used_us, **values
            )
        )


@pytest.fixture
def minutes() -> Minutes:
    """An empty pool to fill."""
    return Minutes()


@pytest.fixture
def hour(minutes: Minutes) -> Minutes:
    """An hour of one card: acme has half and uses a quarter, beta a quarter and its use is unknown; a second card is free."""
    for minute in range(60):
        minutes.device(minute, allocated_us=45_000_000, unaccounted_us=0)
        minutes.slice(
            minute, "acme", 30_000_000, 15_000_000, project="search", workload_class="training", energy_uj=6_000_000, throttled_us=1_000_000,
            denied_allocations=int(minute == 3), memory_used_kib_us=10 * GIB // 1024 * MINUTE_US, memory_peak_bytes=12 * GIB,
        )  # fmt: skip
        minutes.slice(minute, "beta", 15_000_000, None, memory_allocated_kib_us=20 * GIB // 1024 * MINUTE_US)
        minutes.device(minute, "GPU-2", model="Sim A100", node="n2")
    return minutes
