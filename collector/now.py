"""The newest snapshot of each node as rows of the `now_*` tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poolmeter.collector.tables import NOW_TYPES, TABLES, record_fields, schema_of
from poolmeter.errors import DataError
from poolmeter.model.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

NOW_TABLES = ("now_nodes", *NOW_TYPES)
_PARTS = {"now_devices": "devices", "now_slices": "slices", "now_processes": "processes", "now_sources": "sources"}


@dataclass(frozen=True)
class Newest:
    """A node's newest snapshot, and its rows."""

    snapshot: Snapshot
    tables: dict[str, "pa.Table"]


def newest(snapshot: Snapshot) -> Newest:
    """A snapshot that the store can hold. Raises DataError on a number past 64 bits or text that is no Unicode."""
    import pyarrow as pa

    try:
        return Newest(snapshot, now_tables(snapshot))
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise DataError(f"snapshot of node {snapshot.node!r:.80} cannot be stored: {str(error).splitlines()[0]:.120}") from None


def now_tables(snapshot: Snapshot) -> dict[str, "pa.Table"]:
    """One snapshot as rows of every `now_*` table."""
    head = {"node": snapshot.node, "taken_us": snapshot.taken_us}
    whole = {**head, **{name: getattr(snapshot, name) for name in ("epoch", "sequence", "simulated", "pool")}}
    out = {"now_nodes": rows_to_table("now_nodes", [whole])}
    for name, record_type in NOW_TYPES.items():
        names = [field.name for field in record_fields(record_type)]
        rows = [{**head, **{field: getattr(part, field) for field in names}} for part in getattr(snapshot, _PARTS[name])]
        out[name] = rows_to_table(name, rows)
    return out


def rows_to_table(name: str, rows: Sequence[Mapping[str, object]]) -> "pa.Table":
    """Rows of one of the catalog's tables, typed also when there are none."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=schema_of(TABLES[name]))


def snapshot_objects(tables: Mapping[str, "pa.Table"]) -> list[dict[str, Any]]:
    """`now_*` tables back as plain snapshots, one per node, fields that are unknown left out (the JSON of an exporter's snapshot)."""
    nodes: dict[str, dict[str, Any]] = {}
    for row in tables["now_nodes"].to_pylist():
        nodes[row["node"]] = {**_known(row), **{part: [] for part in _PARTS.values()}}
    for name, part in _PARTS.items():
        for row in tables[name].to_pylist():
            node = row.pop("node")
            row.pop("taken_us")
            if node in nodes:
                nodes[node][part].append(_known(row))
    return list(nodes.values())


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
