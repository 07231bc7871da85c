"""The newest snapshot of each node as rows of the `now_*` tables: what came, what is kept in a file, and back to plain snapshots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter import now
from poolmeter.collector.segments import Segment, write_segment
from poolmeter.collector.tables import TABLES, SegmentKind, schema_of
from poolmeter.errors import DataError
from poolmeter.model.now import NOW_FIELDS, NOW_PARTS
from poolmeter.model.snapshot import Snapshot

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

NOW_TABLES = tuple(NOW_PARTS)
NOW_DAY = "1970-01-01"  # newest snapshots belong to no day


@dataclass(frozen=True)
class Newest:
    """A node's newest snapshot as rows of every `now_*` table."""

    node: str
    pool: str | None
    simulated: bool
    tables: dict[str, "pa.Table"]


def newest(snapshot: Snapshot) -> Newest:
    """A snapshot that the store can hold. Raises DataError on a number past 64 bits or text that is no Unicode."""
    import pyarrow as pa

    try:
        return of_tables(now.now_tables(snapshot))
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise DataError(f"snapshot of node {snapshot.node!r:.80} cannot be stored: {str(error).splitlines()[0]:.120}") from None


def of_tables(tables: dict[str, "pa.Table"]) -> Newest:
    """The newest snapshot from its tables."""
    head = tables["now_nodes"]
    node, pool, simulated = (head.column(name)[0].as_py() for name in ("node", "pool", "simulated"))
    return Newest(node, pool, simulated, tables)


def now_rows(snapshots: Mapping[str, Mapping[str, "pa.Table"]]) -> int:
    """How many rows the newest snapshots have in all."""
    return sum(table.num_rows for tables in snapshots.values() for table in tables.values())


def now_segment_table(snapshots: Mapping[str, Mapping[str, "pa.Table"]]) -> "pa.Table":
    """All of them as one wide table, part by part."""
    import pyarrow as pa

    every = list(snapshots.values())
    return pa.concat_tables([now.widened(name, now.joined(name, [tables[name] for tables in every])) for name in NOW_TABLES])


def write_now(root: Path, snapshots: Mapping[str, Mapping[str, "pa.Table"]]) -> list[Segment]:
    """The segment of the newest snapshots, as `write_segment` leaves it; none when there are no snapshots."""
    return [write_segment(root, SegmentKind.NOW, NOW_DAY, now_segment_table(snapshots))] if snapshots else []


def now_tables_of(catalog: "duckdb.DuckDBPyConnection | None") -> dict[str, "pa.Table"]:
    """The `now_*` tables of an open catalog; empty ones without it."""
    if catalog is None:
        return {name: now.table_schema(name).empty_table() for name in NOW_TABLES}
    return {name: catalog.sql(f"SELECT * FROM {name}").to_arrow_table() for name in NOW_TABLES}


def now_by_node(tables: Mapping[str, "pa.Table"]) -> dict[str, dict[str, "pa.Table"]]:
    """Every node's own rows of the `now_*` tables."""
    import numpy as np
    import pyarrow as pa

    nodes = tables["now_nodes"].column("node").to_pylist()
    out: dict[str, dict[str, pa.Table]] = {node: {} for node in nodes}
    for name in NOW_TABLES:
        table = tables[name].cast(now.table_schema(name)).combine_chunks()
        codes = table.column("node").combine_chunks().dictionary_encode()
        codes = codes.chunk(0) if isinstance(codes, pa.ChunkedArray) and codes.num_chunks else codes
        found = codes.dictionary.to_pylist() if table.num_rows else []
        numbers = codes.indices.to_numpy() if table.num_rows else np.zeros(0, np.int64)
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(found)))
        table = table.take(pa.array(order))
        starts = dict(zip(found, [0, *ends[:-1].tolist()], strict=True)) if found else {}
        lengths = dict(zip(found, np.diff([0, *ends]).tolist(), strict=True)) if found else {}
        for node in nodes:
            out[node][name] = table.slice(starts.get(node, 0), lengths.get(node, 0))
    return out


def rows_to_table(name: str, rows: Sequence[Mapping[str, object]]) -> "pa.Table":
    """Rows of one of the catalog's tables, typed also when there are none."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=schema_of(TABLES[name]))


def records_to_table(name: str, records: Sequence[object]) -> "pa.Table":
    """The same of records whose fields are the columns; several times as fast for thousands of them."""
    import pyarrow as pa

    schema = schema_of(TABLES[name])
    return pa.Table.from_arrays([pa.array([getattr(row, field.name) for row in records], field.type) for field in schema], schema=schema)


def tuples_to_table(name: str, rows: Sequence[tuple[object, ...]]) -> "pa.Table":
    """The same of tuples in the order of the columns; the fastest by far."""
    import pyarrow as pa

    schema = schema_of(TABLES[name])
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    return pa.Table.from_arrays([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


def snapshot_objects(tables: Mapping[str, "pa.Table"]) -> list[dict[str, Any]]:
    """`now_*` tables back as plain snapshots, one per node, fields that are unknown left out (the JSON of an exporter's snapshot)."""
    nodes: dict[str, dict[str, Any]] = {}
    for row in tables["now_nodes"].to_pylist():
        nodes[row["node"]] = {**_known(row), **{part: [] for part in NOW_FIELDS.values()}}
    for name, part in NOW_FIELDS.items():
        for row in tables[name].to_pylist():
            node = row.pop("node")
            row.pop("taken_us")
            if node in nodes:
                nodes[node][part].append(_known(row))
    return list(nodes.values())


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
