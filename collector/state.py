"""What a store's catalog says, in memory: the state that a publication replaces, and its way to tables and back."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from poolmeter.collector.now import Newest, now_by_node, records_to_table, rows_to_table, tuples_to_table
from poolmeter.collector.segments import Lost, Segment
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.tables import STORE_VERSION, TABLES, SegmentKind
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import RecordKind
from poolmeter.model.wire import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa

# What a node may invent of each is kept in every catalog: an honest one has an epoch for each spool it ever had, and a few devices.
EPOCHS_MOST = 100
DEVICES_MOST = 1024
SEEN_US = MINUTE_US  # a device that is as it was is noted once in so long: of a thousand nodes most bring nothing else with each pull
_SNAPSHOT_COLUMNS = ("uuid", "node", "index", "model", "vendor", "memory_total_bytes", "driver_version", "taken_us", "taken_us")


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


class DeviceRow(NamedTuple):
    """A device as last seen on a node; `last_seen_us` may lag by `SEEN_US`."""

    uuid: str
    node: str
    number: int | None  # column `index`
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
        devices={(row["node"], row["uuid"]): DeviceRow._make(row[column.name] for column in TABLES["devices"]) for row in rows["devices"]},
        now=now_by_node(tables),
        lost=tuple(Lost(**row) for row in tables["lost"].to_pylist()),
    )


def last_sequence(sequences: Mapping[tuple[str, str], Ranges], row: NodeRow) -> int | None:
    """The highest sequence stored of the spool that a node has now."""
    ranges = sequences.get((row.node or "", row.epoch or ""))
    return ranges.last if ranges else row.last_sequence


def with_devices(
    devices: dict[tuple[str, str], DeviceRow],
    wide: "pa.Table | None",
    snapshots: Sequence[Newest],
    before: Mapping[str, Mapping[str, "pa.Table"]],
) -> dict[tuple[str, str], DeviceRow]:
    """`devices` and those of new rows and snapshots, of a node `DEVICES_MOST` that were seen last; `before` are the newest snapshots until now."""
    out = dict(devices)
    for seen in (*_of_rows(wide, devices), *_of_snapshots(snapshots, devices, before)):
        key = (seen.node, seen.uuid)
        out[key] = _merged(out.get(key), seen)
    if len(out) > len(devices):
        counts = Counter(node for node, _ in out)
        for node in [node for node, count in counts.items() if count > DEVICES_MOST]:
            oldest = sorted((row.last_seen_us, row.uuid) for row in out.values() if row.node == node)[: counts[node] - DEVICES_MOST]
            for _, uuid in oldest:
                del out[node, uuid]
    return out


def forget_epochs(sequences: dict[tuple[str, str], Ranges], current: Collection[tuple[str, str]]) -> None:
    """Drop the epochs that came first of a node that has more than `EPOCHS_MOST`, none of `current`, (node, epoch)."""
    counts = Counter(node for node, _ in sequences)
    for node in [node for node, count in counts.items() if count > EPOCHS_MOST]:
        others = [key for key in sequences if key[0] == node and key not in current]
        for key in others[: counts[node] - EPOCHS_MOST]:
            del sequences[key]


def _of_rows(wide: "pa.Table | None", devices: Mapping[tuple[str, str], DeviceRow]) -> Iterator[DeviceRow]:
    import pyarrow.compute as pc

    if wide is None:
        return
    keys = ["node", "device_uuid", "device_model", "memory_total_bytes"]
    rows = wide.select([*keys, "minute_us"]).filter(pc.equal(wide.column("kind"), RecordKind.DEVICE.value))
    found = rows.group_by(keys).aggregate([("minute_us", "min"), ("minute_us", "max")])
    columns = (found.column(name).to_pylist() for name in (*keys, "minute_us_min", "minute_us_max"))
    for node, uuid, model, memory, first_us, last_us in zip(*columns, strict=True):
        known = devices.get((node, uuid))
        # Snapshots are newer than closed minutes: rows tell of a device that no snapshot has shown.
        if known is None or known.first_seen_us > first_us or known.last_seen_us + SEEN_US <= last_us:
            yield DeviceRow(uuid, node, None, model, None, memory, None, first_us, last_us)


def _of_snapshots(
    snapshots: Sequence[Newest], devices: Mapping[tuple[str, str], DeviceRow], before: Mapping[str, Mapping[str, "pa.Table"]]
) -> Iterator[DeviceRow]:
    for newest in snapshots:
        table = newest.tables["now_devices"]
        if not table.num_rows:
            continue
        old = before.get(newest.node)
        known = devices.get((newest.node, table.column("uuid")[0].as_py()))
        if old is not None and known is not None and known.last_seen_us + SEEN_US > table.column("taken_us")[0].as_py():
            lasting = list(_SNAPSHOT_COLUMNS[:-2])
            if table.select(lasting).equals(old["now_devices"].select(lasting)):
                continue
        yield from map(DeviceRow._make, zip(*(table.column(name).to_pylist() for name in _SNAPSHOT_COLUMNS), strict=True))


def _merged(old: DeviceRow | None, seen: DeviceRow) -> DeviceRow:
    if old is None:
        return seen
    newer, older = (seen, old) if seen.last_seen_us >= old.last_seen_us else (old, seen)
    return DeviceRow(
        newer.uuid,
        newer.node,
        newer.number if newer.number is not None else older.number,
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
    ranges = [(node, epoch, first, last) for (node, epoch), found in state.sequences.items() for first, last in found.ranges]
    return {
        "meta": rows_to_table("meta", [meta]),
        "nodes": records_to_table("nodes", list(state.nodes.values())),
        "sequences": tuples_to_table("sequences", ranges),
        "devices": tuples_to_table("devices", list(state.devices.values())),
        "segments": records_to_table("segments", list(state.segments.values())),
        "lost": records_to_table("lost", state.lost),
    }
