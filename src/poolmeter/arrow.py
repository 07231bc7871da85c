"""Usage records as Arrow: the schema of `poolmeter.model.wire`, encoded by exporters and decoded by the collector."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from poolmeter.errors import DataError
from poolmeter.model import wire
from poolmeter.model.usage import RecordKind, UsageRecord, kind_of

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"poolmeter.schema"
ROWS_MOST = 500_000  # of one answer: what an exporter gives at most


@cache
def usage_schema() -> "pa.Schema":
    """The wide table's schema, with its version in the metadata."""
    return _schema((column.name, column.type, column.nullable) for column in wire.wire_columns())


@cache
def kind_schema(kind: RecordKind) -> "pa.Schema":
    """The schema of one kind alone: what a segment of the store holds."""
    return _schema((column.name, column.type, column.nullable) for column in wire.columns_of(kind))


def _schema(columns: Iterable[tuple[str, str, bool]]) -> "pa.Schema":
    import pyarrow as pa

    types = {"int64": pa.int64(), "utf8": pa.utf8(), "bool": pa.bool_()}
    return pa.schema(
        [pa.field(name, types[kind], nullable) for name, kind, nullable in columns], metadata={METADATA_KEY: wire.SCHEMA_VERSION.encode()}
    )


def to_table(records: Sequence[UsageRecord]) -> "pa.Table":
    """Records of any kinds as one wide table, in the order given."""
    import pyarrow as pa

    schema = usage_schema()
    kinds = [kind_of(record).value for record in records]
    arrays = [pa.array(kinds, pa.utf8())]
    arrays += [pa.array([getattr(record, field.name, None) for record in records], field.type) for field in list(schema)[1:]]
    return pa.Table.from_arrays(arrays, schema=schema)


def to_bytes(table: "pa.Table") -> bytes:
    """An Arrow IPC stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(body: bytes) -> "pa.Table":
    """The table of an IPC stream, brought to this version's schema.

    Takes any minor version of this major: columns it does not know are dropped, nullable ones it lacks are null. Raises DataError
    on a body that is no Arrow stream, on another major version, on a missing or mistyped column.
    """
    import pyarrow as pa

    if body == _nothing():  # most answers of most nodes: a minute is closed once a minute
        return _no_records()
    try:
        with pa.ipc.open_stream(body) as reader:
            table = reader.read_all()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"usage body of {len(body)} bytes is not an Arrow stream: {str(error).splitlines()[0]:.120}") from None
    if table.num_rows > ROWS_MOST:  # a column that is left out costs nothing on the wire and eight bytes a row here
        raise DataError(f"usage body has {table.num_rows} rows, expected at most {ROWS_MOST}")
    found = (table.schema.metadata or {}).get(METADATA_KEY, b"").decode("utf-8", "replace")
    if found.split(".")[0] != str(wire.SCHEMA_MAJOR):
        raise DataError(f"usage schema is {found or 'absent'}, expected {wire.SCHEMA_MAJOR}.x")
    schema = usage_schema()
    if table.schema.equals(schema):  # a writer of this version: nothing to bring to it
        for index, name in _required():
            if table.column(index).null_count:
                raise DataError(f"usage column {name} holds {table.column(index).null_count} nulls, expected none")
        return table
    names = table.column_names
    arrays = []
    for field in schema:
        count = names.count(field.name)
        if count == 0:
            if not field.nullable:
                raise DataError(f"usage column {field.name} is missing")
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        if count > 1:
            raise DataError(f"usage column {field.name} is there {count} times, expected once")
        column = table.column(names.index(field.name))
        if column.type != field.type:
            raise DataError(f"usage column {field.name} is {column.type}, expected {field.type}")
        if not field.nullable and column.null_count:
            raise DataError(f"usage column {field.name} holds {column.null_count} nulls, expected none")
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)


@cache
def _no_records() -> "pa.Table":
    return usage_schema().empty_table()


@cache
def _nothing() -> bytes:
    """The stream of no records, as this version writes it."""
    return to_bytes(to_table([]))


@cache
def _required() -> tuple[tuple[int, str], ...]:
    return tuple((index, column.name) for index, column in enumerate(wire.wire_columns()) if not column.nullable)
