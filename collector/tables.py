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
from poolmeter.model.units import DAY_US, HOUR_US
from poolmeter.model.usage import RecordKind
from poolmeter.model.wire import SCHEMA_VERSION, Column, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

STORE_VERSION = 2
SCHEMA_KEY = b"poolmeter.schema"


class SegmentKind(StrEnum):
    """Kinds of segment: a folder each under `segments/`."""

    DEVICE = "device"
    SLICE = "slice"
    PROCESS = "process"
    EVENT = "event"
    QUARANTINE = "quarantine"
    SLICE_HOUR = "slice_hour"
    DEVICE_HOUR = "device_hour"
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


@dataclass(frozen=True)
class Measures:
    """How a minute column becomes one of an hour or a day: keys are grouped by; `wide` are sums that may pass 2^63.

    `measured` is the used quantity: the span of the rows that know it is kept beside the sums.
    """

    keys: tuple[str, ...]
    sums: tuple[str, ...]
    wide: tuple[str, ...]
    maxima: tuple[str, ...]
    measured: str


@dataclass(frozen=True)
class Rollup:
    """Rows of `source`, one for each period and set of labels; `start` is the column that says when the period begins."""

    source: SegmentKind
    start: str
    period_us: int


MEASURES: dict[SegmentKind, Measures] = {
    SegmentKind.SLICE: Measures(
        keys=(
            "node", "pool", "device_uuid", "device_model", "allocation_id", "tenant", "project", "user", "workload", "workload_class",
            "environment", "mode", "used_basis",
        ),
        sums=(
            "span_us", "promised_us", "allocated_us", "suspended_us", "used_us", "energy_uj", "launches", "graph_launches", "throttled_us",
            "denied_allocations", "denied_bytes", "hook_faults",
        ),
        wide=("memory_allocated_kib_us", "memory_used_kib_us"),
        maxima=("memory_peak_bytes", "last_activity_us"),
        measured="used_us",
    ),
    SegmentKind.DEVICE: Measures(
        keys=("node", "pool", "device_uuid", "device_model"),
        sums=(
            "span_us", "allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us", "busy_us", "hooked_us",
            "switch_overhead_us", "unaccounted_us", "energy_uj",
        ),
        wide=("memory_allocated_kib_us", "memory_used_kib_us", "unaccounted_memory_kib_us"),
        maxima=("memory_total_bytes", "memory_peak_bytes"),
        measured="busy_us",
    ),
}  # fmt: skip
ROLLUPS: dict[SegmentKind, Rollup] = {
    SegmentKind.SLICE_HOUR: Rollup(SegmentKind.SLICE, "hour_us", HOUR_US),
    SegmentKind.DEVICE_HOUR: Rollup(SegmentKind.DEVICE, "hour_us", HOUR_US),
    SegmentKind.SLICE_DAY: Rollup(SegmentKind.SLICE, "day_us", DAY_US),
    SegmentKind.DEVICE_DAY: Rollup(SegmentKind.DEVICE, "day_us", DAY_US),
}


def rollups_of(source: SegmentKind) -> tuple[SegmentKind, ...]:
    """The kinds that rows of `source` are rolled up into; none for most."""
    return tuple(kind for kind, rollup in ROLLUPS.items() if rollup.source is source)


def time_column(kind: SegmentKind) -> str:
    """The column that a segment's bounds (`min_minute_us`, `max_minute_us`) are taken of."""
    if kind in ROLLUPS:
        return "first_minute_us"
    return {SegmentKind.QUARANTINE: "received_us", SegmentKind.NOW: "taken_us"}.get(kind, "minute_us")


@cache
def segment_fields(kind: SegmentKind) -> tuple[Field, ...]:
    """The columns of a segment of `kind`, in order."""
    if kind is SegmentKind.QUARANTINE:
        return _QUARANTINE
    if kind in ROLLUPS:
        rollup = ROLLUPS[kind]
        measures = MEASURES[rollup.source]
        source = {column.name: column for column in segment_fields(rollup.source)}
        return (
            Field(rollup.start, "BIGINT", False),
            *(source[name] for name in measures.keys),
            Field("records", "BIGINT", False),
            *(source[name] for name in measures.sums),
            *(Field(name, WIDE, source[name].nullable) for name in measures.wide),
            *(source[name] for name in measures.maxima),
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
    "slice_hours": (SegmentKind.SLICE_HOUR, Field("hour", "TIMESTAMP", False), "make_timestamp(hour_us)"),
    "device_hours": (SegmentKind.DEVICE_HOUR, Field("hour", "TIMESTAMP", False), "make_timestamp(hour_us)"),
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
        # NULL: the segment is from a store version that had none.
        Field("sha256", "VARCHAR", True),
    ),
    "lost": (
        Field("kind", "VARCHAR", False),
        Field("day", "VARCHAR", False),
        Field("file", "VARCHAR", False),
        Field("node", "VARCHAR", True),
        Field("rows", "BIGINT", False),
        Field("exact", "BOOLEAN", False),
        Field("min_minute_us", "BIGINT", False),
        Field("max_minute_us", "BIGINT", False),
        Field("at_us", "BIGINT", False),
        Field("reason", "VARCHAR", False),
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
