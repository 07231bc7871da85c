"""Newest snapshots as Arrow: the tables of `poolmeter.model.now`, encoded by exporters, decoded and kept by the collector.

On the wire a snapshot is an IPC stream of the wide table, a batch for each part. What it lacks of a whole snapshot (hardware, attribution,
host, bus) is in the JSON of the same snapshot.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from poolmeter.errors import DataError
from poolmeter.model.now import NOW_FIELDS, NOW_MAJOR, NOW_PARTS, NOW_TYPES, NOW_VERSION, now_columns, wide_now_columns
from poolmeter.model.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"poolmeter.now"
BATCHES_MOST = 64
_NAMES = {part: name for name, part in NOW_PARTS.items()}


@cache
def table_schema(name: str) -> "pa.Schema":
    """The schema of one of the tables: columns of the wide one, where every one but the first may be empty."""
    import pyarrow as pa

    return pa.schema([wide_schema().field(column.name) for column in now_columns(name)])


@cache
def wide_schema() -> "pa.Schema":
    """The wide table's schema, with its version in the metadata."""
    import pyarrow as pa

    types = {"int64": pa.int64(), "utf8": pa.utf8(), "bool": pa.bool_()}
    return pa.schema(
        [pa.field(column.name, types[column.type], column.nullable) for column in wide_now_columns()],
        metadata={METADATA_KEY: NOW_VERSION.encode()},
    )


def now_tables(snapshot: Snapshot) -> dict[str, "pa.Table"]:
    """One snapshot as rows of every table. Raises pyarrow's errors on a number past 64 bits or text that is no Unicode."""
    import pyarrow as pa

    head = {"node": snapshot.node, "taken_us": snapshot.taken_us}
    whole = {**head, **{name: getattr(snapshot, name) for name in ("epoch", "sequence", "simulated", "pool")}}
    out = {"now_nodes": pa.Table.from_pylist([whole], schema=table_schema("now_nodes"))}
    for name in NOW_TYPES:
        parts = getattr(snapshot, NOW_FIELDS[name])
        schema = table_schema(name)
        columns = [pa.array([value] * len(parts), schema.field(key).type) for key, value in head.items()]
        columns += [pa.array([getattr(part, field.name) for part in parts], field.type) for field in list(schema)[len(head) :]]
        out[name] = pa.Table.from_arrays(columns, schema=schema)
    return out


def widened(name: str, table: "pa.Table") -> "pa.Table":
    """Rows of one of the tables as rows of the wide one."""
    import pyarrow as pa

    rows = table.num_rows
    columns = {name: table.column(name) for name in table.column_names}
    part = pa.DictionaryArray.from_arrays(pa.array([0]).take(pa.nulls(rows, pa.int32()).fill_null(0)), [NOW_PARTS[name]]).cast(pa.utf8())
    columns["part"] = part
    return pa.Table.from_arrays(
        [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in wide_schema()], schema=wide_schema()
    )


def to_bytes(tables: Mapping[str, "pa.Table"]) -> bytes:
    """One snapshot's tables as an IPC stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, wide_schema()) as writer:
        for name in NOW_PARTS:
            if tables[name].num_rows:
                writer.write_table(widened(name, tables[name]))
    return bytes(sink.getvalue())


def from_bytes(body: bytes, node: str) -> dict[str, "pa.Table"]:
    """The tables of a snapshot of `node`, in this version's columns.

    Takes any minor version of this major: columns it does not know are dropped, nullable ones it lacks are null. Raises DataError on a
    body that is no Arrow stream, on another major version, on a missing or mistyped value, on another node's snapshot.
    """
    import pyarrow as pa

    found: dict[str, list[pa.RecordBatch]] = {name: [] for name in NOW_PARTS}
    try:
        with pa.ipc.open_stream(body) as reader:
            _check_schema(reader.schema)
            for number, batch in enumerate(reader):
                if number >= BATCHES_MOST:
                    raise DataError(f"snapshot has more than {BATCHES_MOST} batches, expected one for each part")
                batch.validate(full=True)
                if batch.num_rows:
                    found[_part_of(batch, node)].append(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"snapshot is not an Arrow stream: {str(error).splitlines()[0]:.120}") from None
    tables = {name: pa.Table.from_batches([_own(name, batch) for batch in batches], table_schema(name)) for name, batches in found.items()}
    rows = tables["now_nodes"].num_rows
    if rows != 1:
        raise DataError(f"snapshot has {rows} rows of its node, expected 1")
    return tables


def _check_schema(schema: "pa.Schema") -> None:
    if schema.equals(wide_schema(), check_metadata=True):
        return
    version = (schema.metadata or {}).get(METADATA_KEY, b"").decode("utf-8", "replace")
    if version.split(".")[0] != str(NOW_MAJOR):
        raise DataError(f"snapshot schema is {version[:40] or 'absent'}, expected {NOW_MAJOR}.x")
    for field in wide_schema():
        count = schema.names.count(field.name)
        if count > 1 or (count == 0 and not field.nullable):
            raise DataError(f"snapshot column {field.name} is there {count} times, expected once")
        if count and schema.field(field.name).type != field.type:
            raise DataError(f"snapshot column {field.name} is {schema.field(field.name).type!s:.60}, expected {field.type}")


def _part_of(batch: "pa.RecordBatch", node: str) -> str:
    """The table that a batch's rows belong to."""
    import pyarrow.compute as pc

    parts = pc.unique(batch.column("part")).to_pylist()
    if len(parts) != 1 or parts[0] not in _NAMES:
        raise DataError(f"snapshot has a batch of parts {parts!r:.80}, expected one of {', '.join(_NAMES)}")
    nodes = pc.unique(batch.column("node")).to_pylist()
    if nodes != [node]:
        raise DataError(f"snapshot is of node {nodes[0]!r:.80}, expected {node!r}")
    return _NAMES[parts[0]]


def _own(name: str, batch: "pa.RecordBatch") -> "pa.RecordBatch":
    import pyarrow as pa

    schema = table_schema(name)
    if batch.schema.equals(wide_schema()):
        own = batch.select(_places(name)).replace_schema_metadata()
    else:
        at = [(field, batch.schema.get_field_index(field.name)) for field in schema]
        columns = [batch.column(index) if index >= 0 else pa.nulls(batch.num_rows, field.type) for field, index in at]
        own = pa.RecordBatch.from_arrays(columns, schema=schema)
    for index, field in _required(name):
        if own.column(index).null_count:
            raise DataError(f"snapshot column {field} holds {own.column(index).null_count} nulls in {name}, expected none")
    return own


@cache
def _places(name: str) -> list[int]:
    names = wide_schema().names
    return [names.index(column.name) for column in now_columns(name)]


@cache
def _required(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((index, column.name) for index, column in enumerate(now_columns(name)) if not column.nullable)


def joined(name: str, tables: Sequence["pa.Table"]) -> "pa.Table":
    """The rows of many nodes' tables of one name, in one piece."""
    import pyarrow as pa

    return pa.concat_tables([table_schema(name).empty_table(), *tables]).combine_chunks()
