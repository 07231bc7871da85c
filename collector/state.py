"""What a store's catalog says, in memory: the state that a publication replaces, and its way to tables and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poolmeter.collector.now import Newest, now_by_node, records_to_table, rows_to_table
from poolmeter.collector.segments import Lost, Segment
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.tables import STORE_VERSION, SegmentKind
from poolmeter.model.usage import RecordKind
from poolmeter.model.wire import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class NodeRow:
    """The collector's word on one exporter; `node` is None until it has answered. state: new | up | failing | refused | gone."""

    url: str
    node: str | None
    epoch: str | None
    last_pull_us: int | None
    state: str
    reason: str | None = None
    pool: str | None = None
    simulated: bool | None = None
    last_sequence: int | None = None


@dataclass(frozen=True)
class DeviceRow:
    """A device as last seen on a node."""

    uuid: str
    node: str
    index: int | None
    model: str
    vendor: str | None
    memory_total_bytes: int
    driver: str | None
    first_seen_us: int
    last_seen_us: int


@dataclass(frozen=True)
class State:
    """What `CURRENT` names, in memory. Never changed: a publication makes the next one."""

    generation: int = 0
    published_us: int = 0
    segments: dict[str, Segment] = field(default_factory=dict)
    sequences: dict[tuple[str, str], Ranges] = field(default_factory=dict)
    nodes: dict[str, NodeRow] = field(default_factory=dict)
    devices: dict[tuple[str, str], DeviceRow] = field(default_factory=dict)
    now: dict[str, dict[str, "pa.Table"]] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()


def state_from(tables: Mapping[str, "pa.Table"]) -> State:
    """The state that a catalog's tables say."""
    rows = {name: tables[name].to_pylist() for name in ("meta", "segments", "sequences", "nodes", "devices")}
    ranges: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows["sequences"]:
        ranges.setdefault((row["node"], row["epoch"]), []).append((row["first_sequence"], row["last_sequence"]))
    segments = {row["file"]: Segment(**{**row, "kind": SegmentKind(row["kind"])}) for row in rows["segments"]}
    return State(
        generation=rows["meta"][0]["generation"],
        published_us=rows["meta"][0]["published_us"],
        segments=segments,
        sequences={key: Ranges(tuple(sorted(found))) for key, found in ranges.items()},
        nodes={row["url"]: NodeRow(**row) for row in rows["nodes"]},
        devices={(row["node"], row["uuid"]): DeviceRow(**row) for row in rows["devices"]},
        now=now_by_node(tables),
        lost=tuple(Lost(**row) for row in tables["lost"].to_pylist()),
    )


def last_sequence(sequences: Mapping[tuple[str, str], Ranges], row: NodeRow) -> int | None:
    """The highest sequence stored of the spool that a node has now."""
    ranges = sequences.get((row.node or "", row.epoch or ""))
    return ranges.last if ranges else row.last_sequence


def with_devices(
    devices: dict[tuple[str, str], DeviceRow], wide: "pa.Table | None", snapshots: Sequence[Newest]
) -> dict[tuple[str, str], DeviceRow]:
    """`devices` and those of new rows and snapshots."""
    import pyarrow.compute as pc

    out = dict(devices)
    if wide is not None:
        keys = ["node", "device_uuid", "device_model", "memory_total_bytes"]
        rows = wide.select([*keys, "minute_us"]).filter(pc.equal(wide.column("kind"), RecordKind.DEVICE.value))
        for row in rows.group_by(keys).aggregate([("minute_us", "min"), ("minute_us", "max")]).to_pylist():
            key = (row["node"], row["device_uuid"])
            seen = DeviceRow(
                row["device_uuid"], row["node"], None, row["device_model"], None, row["memory_total_bytes"], None,
                row["minute_us_min"], row["minute_us_max"],
            )  # fmt: skip
            out[key] = _merged(out.get(key), seen)
    columns = ("uuid", "node", "index", "model", "vendor", "memory_total_bytes", "driver_version", "taken_us", "taken_us")
    for newest in snapshots:
        table = newest.tables["now_devices"]
        for values in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
            seen = DeviceRow(*values)
            out[(seen.node, seen.uuid)] = _merged(out.get((seen.node, seen.uuid)), seen)
    return out


def _merged(old: DeviceRow | None, seen: DeviceRow) -> DeviceRow:
    if old is None:
        return seen
    newer, older = (seen, old) if seen.last_seen_us >= old.last_seen_us else (old, seen)
    return DeviceRow(
        newer.uuid,
        newer.node,
        newer.index if newer.index is not None else older.index,
        newer.model,
        newer.vendor or older.vendor,
        newer.memory_total_bytes,
        newer.driver or older.driver,
        min(old.first_seen_us, seen.first_seen_us),
        newer.last_seen_us,
    )


def catalog_tables(state: State) -> dict[str, "pa.Table"]:
    """Every table of the catalog; the `now_*` ones are views over a segment."""
    meta = {
        "store_version": STORE_VERSION,
        "schema_version": SCHEMA_VERSION,
        "generation": state.generation,
        "published_us": state.published_us,
    }
    ranges = [
        {"node": node, "epoch": epoch, "first_sequence": first, "last_sequence": last}
        for (node, epoch), found in state.sequences.items()
        for first, last in found.ranges
    ]
    return {
        "meta": rows_to_table("meta", [meta]),
        "nodes": records_to_table("nodes", list(state.nodes.values())),
        "sequences": rows_to_table("sequences", ranges),
        "devices": records_to_table("devices", list(state.devices.values())),
        "segments": records_to_table("segments", list(state.segments.values())),
        "lost": records_to_table("lost", state.lost),
    }
