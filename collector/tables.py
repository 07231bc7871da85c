"""The store's schema: what a segment of each kind holds, and the views and tables that every catalog offers.

Columns of usage records and snapshots are read off the model's classes, so that the store cannot drift from them. docs/reference/store.md
lists the same columns; a test compares the two.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from poolmeter.model.now import NOW_PARTS, now_columns, wide_now_columns
from poolmeter.model.usage import RecordKind
from poolmeter.model.wire import SCHEMA_VERSION, Column, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

STORE_VERSION = 1
SCHEMA_KEY = b"poolmeter.schema"


class SegmentKind(StrEnum):
    """Kinds of segment: a folder each under `segments/`."""

    DEVICE = "device"
    SLICE = "slice"
    PROCESS = "process"
    EVENT = "event"
    QUARANTINE = "quarantine"
    SLICE_DAY = "slice_day"
    DEVICE_DAY = "device_day"
    NOW = "now"  # the newest snapshots of all nodes; one segment at most is live


@dataclass(frozen=True)
class Field:
    """One column; `type` is a DuckDB type: BIGINT, VARCHAR, BOOLEAN, TIMESTAMP, DATE or DECIMAL(38,0)."""

    name: str
    type: str
    nullable: bool


# A day of a large card's memory in KiB x us passes 2^63, and DuckDB writes HUGEINT to Parquet as DOUBLE: decimal stays exact.
WIDE = "DECIMAL(38,0)"
_FROM_WIRE = {"int64": "BIGINT", "utf8": "VARCHAR", "bool": "BOOLEAN"}

_QUARANTINE = (
    Field("node", "VARCHAR", False),
    Field("epoch", "VARCHAR", True),
    Field("sequence", "BIGINT", True),
    Field("minute_us", "BIGINT", True),
    Field("received_us", "BIGINT", False),
    Field("reason", "VARCHAR", False),
    Field("rows", "BIGINT", False),
    Field("record", "VARCHAR", True),
)

# How a minute column becomes a day column: key (grouped by), sum, wide (a sum that may pass 2^63), max.
DAY_KEYS: dict[SegmentKind, tuple[str, ...]] = {
    SegmentKind.SLICE_DAY: (
        "node", "pool", "device_uuid", "device_model", "allocation_id", "tenant", "project", "user", "workload", "workload_class",
        "environment", "mode", "used_basis",
    ),
    SegmentKind.DEVICE_DAY: ("node", "pool", "device_uuid", "device_model"),
}  # fmt: skip
DAY_SUMS: dict[SegmentKind, tuple[str, ...]] = {
    SegmentKind.SLICE_DAY: (
        "span_us", "promised_us", "allocated_us", "suspended_us", "used_us", "energy_uj", "launches", "graph_launches", "throttled_us",
        "denied_allocations", "denied_bytes", "hook_faults",
    ),
    SegmentKind.DEVICE_DAY: (
        "span_us", "allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us", "busy_us", "hooked_us",
        "switch_overhead_us", "unaccounted_us", "energy_uj",
    ),
}  # fmt: skip
DAY_WIDE_SUMS: dict[SegmentKind, tuple[str, ...]] = {
    SegmentKind.SLICE_DAY: ("memory_allocated_kib_us", "memory_used_kib_us"),
    SegmentKind.DEVICE_DAY: ("memory_allocated_kib_us", "memory_used_kib_us", "unaccounted_memory_kib_us"),
}
DAY_MAXIMA: dict[SegmentKind, tuple[str, ...]] = {
    SegmentKind.SLICE_DAY: ("memory_peak_bytes", "last_activity_us"),
    SegmentKind.DEVICE_DAY: ("memory_total_bytes", "memory_peak_bytes"),
}
MEASURED: dict[SegmentKind, str] = {SegmentKind.SLICE_DAY: "used_us", SegmentKind.DEVICE_DAY: "busy_us"}
DAY_SOURCES: dict[SegmentKind, SegmentKind] = {SegmentKind.SLICE_DAY: SegmentKind.SLICE, SegmentKind.DEVICE_DAY: SegmentKind.DEVICE}


@cache
def segment_fields(kind: SegmentKind) -> tuple[Field, ...]:
    """The columns of a segment of `kind`, in order."""
    if kind is SegmentKind.QUARANTINE:
        return _QUARANTINE
    if kind in DAY_SOURCES:
        source = {column.name: column for column in segment_fields(DAY_SOURCES[kind])}
        return (
            Field("day_us", "BIGINT", False),
            *(source[name] for name in DAY_KEYS[kind]),
            Field("records", "BIGINT", False),
            *(source[name] for name in DAY_SUMS[kind]),
            *(Field(name, WIDE, source[name].nullable) for name in DAY_WIDE_SUMS[kind]),
            *(source[name] for name in DAY_MAXIMA[kind]),
            # Span of the rows whose used quantity is known, and span weighted by completeness: a sum of some must not pass for all.
            Field("measured_span_us", "BIGINT", False),
            Field("complete_us", "BIGINT", False),
            Field("first_minute_us", "BIGINT", False),
            Field("last_minute_us", "BIGINT", False),
        )
    if kind is SegmentKind.NOW:
        return _from_columns(wide_now_columns())
    return _from_columns(columns_of(RecordKind(kind.value)))


@cache
def arrow_schema(kind: SegmentKind) -> "pa.Schema":
    """The Arrow schema of a segment, with the record schema's version as metadata."""
    return schema_of(segment_fields(kind)).with_metadata({SCHEMA_KEY: SCHEMA_VERSION.encode()})


def schema_of(columns: tuple[Field, ...]) -> "pa.Schema":
    """The Arrow schema of some columns."""
    import pyarrow as pa

    arrow_types = {"BIGINT": pa.int64(), "VARCHAR": pa.utf8(), "BOOLEAN": pa.bool_(), WIDE: pa.decimal128(38, 0)}
    return pa.schema([pa.field(column.name, arrow_types[column.type], column.nullable) for column in columns])


# View -> kind of the segments it reads, and the derived column it adds (name, DuckDB type, expression).
VIEWS: dict[str, tuple[SegmentKind, Field, str]] = {
    "device_minutes": (SegmentKind.DEVICE, Field("minute", "TIMESTAMP", False), "make_timestamp(minute_us)"),
    "slice_minutes": (SegmentKind.SLICE, Field("minute", "TIMESTAMP", False), "make_timestamp(minute_us)"),
    "process_minutes": (SegmentKind.PROCESS, Field("minute", "TIMESTAMP", False), "make_timestamp(minute_us)"),
    "event_log": (SegmentKind.EVENT, Field("at", "TIMESTAMP", False), "make_timestamp(at_us)"),
    "quarantine": (SegmentKind.QUARANTINE, Field("received", "TIMESTAMP", False), "make_timestamp(received_us)"),
    "slice_days": (SegmentKind.SLICE_DAY, Field("day", "DATE", False), "make_timestamp(day_us)::DATE"),
    "device_days": (SegmentKind.DEVICE_DAY, Field("day", "DATE", False), "make_timestamp(day_us)::DATE"),
}


def _from_columns(columns: Iterable[Column]) -> tuple[Field, ...]:
    return tuple(Field(column.name, _FROM_WIRE[column.type], column.nullable) for column in columns)


TABLES: dict[str, tuple[Field, ...]] = {
    "meta": (
        Field("store_version", "BIGINT", False),
        Field("schema_version", "VARCHAR", False),
        Field("generation", "BIGINT", False),
        Field("published_us", "BIGINT", False),
    ),
    "nodes": (
        Field("url", "VARCHAR", False),
        Field("node", "VARCHAR", True),
        Field("epoch", "VARCHAR", True),
        Field("last_sequence", "BIGINT", True),
        Field("last_pull_us", "BIGINT", True),
        Field("state", "VARCHAR", False),
        Field("reason", "VARCHAR", True),
        Field("pool", "VARCHAR", True),
        Field("simulated", "BOOLEAN", True),
    ),
    "sequences": (
        Field("node", "VARCHAR", False),
        Field("epoch", "VARCHAR", False),
        Field("first_sequence", "BIGINT", False),
        Field("last_sequence", "BIGINT", False),
    ),
    "devices": (
        Field("uuid", "VARCHAR", False),
        Field("node", "VARCHAR", False),
        Field("index", "BIGINT", True),
        Field("model", "VARCHAR", False),
        Field("vendor", "VARCHAR", True),
        Field("memory_total_bytes", "BIGINT", False),
        Field("driver", "VARCHAR", True),
        Field("first_seen_us", "BIGINT", False),
        Field("last_seen_us", "BIGINT", False),
    ),
    "segments": (
        Field("kind", "VARCHAR", False),
        Field("day", "VARCHAR", False),
        Field("file", "VARCHAR", False),
        Field("rows", "BIGINT", False),
        Field("bytes", "BIGINT", False),
        Field("min_minute_us", "BIGINT", False),
        Field("max_minute_us", "BIGINT", False),
        Field("level", "BIGINT", False),
    ),
    # Views over the one segment of newest snapshots.
    **{name: _from_columns(now_columns(name)) for name in NOW_PARTS},
}


def view_fields(view: str) -> tuple[Field, ...]:
    """The columns of a view, the derived one last."""
    kind, derived, _ = VIEWS[view]
    return (*segment_fields(kind), derived)


def quoted(name: str) -> str:
    """A column name for SQL: `user` and `index` are words of the language."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string for SQL that takes no parameters (views, settings)."""
    return "'" + text.replace("'", "''") + "'"
