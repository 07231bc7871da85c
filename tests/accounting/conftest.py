"""A store in memory: the catalog's views over records."""

from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa
import pytest

from poolmeter.arrow import kind_schema
from poolmeter.model.usage import RecordKind, UsageRecord, kind_of

VIEWS = {
    RecordKind.DEVICE: "device_minutes",
    RecordKind.SLICE: "slice_minutes",
    RecordKind.PROCESS: "process_minutes",
    RecordKind.EVENT: "event_log",
}


def fill(records: Sequence[UsageRecord], simulated: bool = True) -> duckdb.DuckDBPyConnection:
    """A connection that answers like a catalog whose store holds `records`."""
    connection = duckdb.connect()
    for kind, view in VIEWS.items():
        schema = kind_schema(kind)
        chosen = [record for record in records if kind_of(record) is kind]
        table = pa.Table.from_arrays([pa.array([getattr(r, f.name) for r in chosen], f.type) for f in schema], schema=schema)
        connection.register(view, table)
    connection.execute("CREATE TABLE nodes (node VARCHAR, simulated BOOLEAN)")
    connection.execute("INSERT INTO nodes VALUES ('n1', ?)", [simulated])
    return connection


@pytest.fixture(scope="session")
def store() -> Callable[..., duckdb.DuckDBPyConnection]:
    """`fill`, for tests and properties."""
    return fill
