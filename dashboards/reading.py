"""The pool now, read from a collector's store: nodes, cards, slices and sources as frozen records, nothing computed.

Device time comes from the last closed minute of each card, memory and states from the last snapshot. What the store does not know is
None; a node whose snapshot is old is `stale`, and nothing about its cards counts as known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.collector.catalog import open_catalog, unreadable
from poolmeter.model.units import MICROSECONDS, MINUTE_US

if TYPE_CHECKING:
    import duckdb

STALE_US = 120 * MICROSECONDS  # eight pulls at the default interval
RECENT_US = 10 * MINUTE_US


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    """One node. `taken_us` None: never seen. `reason` says what the collector found wrong with it."""

    name: str
    taken_us: int | None
    stale: bool
    reason: str | None = None
    pool: str | None = None
    simulated: bool | None = None


@dataclass(frozen=True, kw_only=True)
class CardNow:
    """One card; `minute_us` and what follows are its last closed minute (None: no recent one)."""

    node: str
    uuid: str
    index: int
    model: str
    up: bool
    stale: bool
    memory_total_bytes: int
    memory_used_bytes: int | None = None
    memory_allocated_bytes: int | None = None
    unaccounted_memory_bytes: int | None = None
    power_mw: int | None = None
    temperature_celsius: int | None = None
    minute_us: int | None = None
    span_us: int | None = None
    allocated_us: int | None = None
    unallocated_us: int | None = None
    busy_us: int | None = None
    unaccounted_us: int | None = None
    switch_overhead_us: int | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.node} card {self.index}"


@dataclass(frozen=True, kw_only=True)
class SliceNow:
    """An allocation's part of a card; `used_us` and `allocated_us` are of the card's last closed minute."""

    node: str
    allocation_id: str
    device_uuid: str
    tenant: str
    state: str
    mode: str
    stale: bool
    promise_ppm: int
    memory_promise_bytes: int
    project: str | None = None
    user: str | None = None
    workload: str | None = None
    workload_class: str | None = None
    compute_limit_ppm: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    last_activity_us: int | None = None
    created_us: int | None = None
    denied_allocations_total: int | None = None
    allocated_us: int | None = None
    used_us: int | None = None


@dataclass(frozen=True, kw_only=True)
class SourceNow:
    """One source of one node's snapshot."""

    node: str
    source: str
    ok: bool
    at_us: int | None
    reason: str | None = None


@dataclass(frozen=True)
class PoolNow:
    """Everything the page "Pool now" shows; `tenants` are all the store has ever seen, in order, so that colours stay."""

    at_us: int
    nodes: tuple[NodeNow, ...]
    cards: tuple[CardNow, ...]
    slices: tuple[SliceNow, ...]
    sources: tuple[SourceNow, ...]
    tenants: tuple[str, ...]


# The first minute of a pool is short and says nothing of what runs now: one that was watched for less is passed over.
_LEAST_US = MINUTE_US // 2
# A minute can come in several records, of exporters before and after a restart: they add up. A sum with an unknown part is unknown.
_MINUTES = """
    SELECT {keys}, minute_us, {sums}
    FROM {view} WHERE minute_us >= ?
    GROUP BY {keys}, minute_us
    HAVING {having}
    QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY minute_us DESC) = 1
"""


def read_pool(root: Path, now_us: int) -> PoolNow:
    """The state of the pool in the store `root` as of `now_us`. Raises Unavailable or DataError, as the catalog does."""
    import duckdb

    for last in (False, True):
        try:
            with open_catalog(root) as connection:
                return _read(connection, now_us)
        except duckdb.Error as error:
            # A segment was replaced between the two reads; the next catalog names the new one.
            if last or not isinstance(error, duckdb.IOException):
                raise unreadable(root, error) from None
    raise AssertionError("unreachable")


def read_tenants(root: Path) -> tuple[str, ...]:
    """All tenants the store has ever seen, in order. Raises as `read_pool` does."""
    with open_catalog(root) as connection:
        return _tenants(connection)


def _read(connection: "duckdb.DuckDBPyConnection", now_us: int) -> PoolNow:
    nodes = _nodes(connection, now_us)
    stale = {node.name for node in nodes if node.stale}
    recent = now_us - RECENT_US
    device_minutes = _minutes(
        connection,
        "device_minutes",
        ("node", "device_uuid"),
        ("span_us", "allocated_us", "unallocated_us", "busy_us", "unaccounted_us", "switch_overhead_us"),
        recent,
        f"sum(span_us) >= {_LEAST_US}",
    )
    slice_minutes = _minutes(connection, "slice_minutes", ("node", "device_uuid", "allocation_id"), ("allocated_us", "used_us"), recent)
    cards = []
    for row in _rows(connection, 'SELECT * FROM now_devices ORDER BY node, "index", uuid'):
        minute = device_minutes.get((row["node"], row["uuid"]), {})
        cards.append(CardNow(stale=row["node"] in stale, **_fields(CardNow, row), **_fields(CardNow, minute, skip=("node",))))
    last_minute = {(card.node, card.uuid): card.minute_us for card in cards}
    slices = []
    for row in _rows(connection, "SELECT * FROM now_slices ORDER BY node, tenant, allocation_id, device_uuid"):
        minute = slice_minutes.get((row["node"], row["device_uuid"], row["allocation_id"]), {})
        # A slice that came or went within the card's last minute has none of its own there: that is not the minute before.
        if minute.get("minute_us") != last_minute.get((row["node"], row["device_uuid"])):
            minute = {}
        measured = {name: minute[name] for name in ("allocated_us", "used_us") if name in minute}
        slices.append(SliceNow(stale=row["node"] in stale, **_fields(SliceNow, row), **measured))
    sources = [SourceNow(**_fields(SourceNow, row)) for row in _rows(connection, "SELECT * FROM now_sources ORDER BY node, source")]
    return PoolNow(now_us, nodes, tuple(cards), tuple(slices), tuple(sources), _tenants(connection))


def _nodes(connection: "duckdb.DuckDBPyConnection", now_us: int) -> tuple[NodeNow, ...]:
    rows = _rows(
        connection,
        "SELECT coalesce(n.node, s.node, n.url) AS name, s.taken_us, n.reason, coalesce(s.pool, n.pool) AS pool,"
        " coalesce(s.simulated, n.simulated) AS simulated FROM nodes n FULL JOIN now_nodes s ON n.node = s.node ORDER BY 1",
    )
    return tuple(NodeNow(stale=row["taken_us"] is None or now_us - row["taken_us"] > STALE_US, **_fields(NodeNow, row)) for row in rows)


def _tenants(connection: "duckdb.DuckDBPyConnection") -> tuple[str, ...]:
    sql = "SELECT tenant FROM slice_days UNION SELECT tenant FROM slice_minutes UNION SELECT tenant FROM now_slices ORDER BY 1"
    return tuple(str(row["tenant"]) for row in _rows(connection, sql))


def _minutes(
    connection: "duckdb.DuckDBPyConnection", view: str, keys: tuple[str, ...], sums: tuple[str, ...], since_us: int, having: str = "true"
) -> dict[tuple[object, ...], dict[str, Any]]:
    columns = ", ".join(f"CASE WHEN count({name}) = count(*) THEN sum({name})::BIGINT END AS {name}" for name in sums)
    sql = _MINUTES.format(keys=", ".join(keys), sums=columns, view=view, having=having)
    return {tuple(row[key] for key in keys): row for row in _rows(connection, sql, since_us)}


def _rows(connection: "duckdb.DuckDBPyConnection", sql: str, *parameters: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = connection.sql(sql, params=list(parameters)).to_arrow_table().to_pylist()
    return rows


def _fields(record_type: type, row: Mapping[str, Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    names = {field.name for field in fields(record_type)}
    return {key: value for key, value in row.items() if key in names and key not in skip}
