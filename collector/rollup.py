"""Days from minutes: one SQL for both the stored rollup of a closed day and the live one of a day that still gets rows."""

from collections.abc import Sequence

from poolmeter.collector.segments import Segment
from poolmeter.collector.tables import (
    DAY_KEYS,
    DAY_MAXIMA,
    DAY_SOURCES,
    DAY_SUMS,
    DAY_WIDE_SUMS,
    MEASURED,
    WIDE,
    SegmentKind,
    literal,
    quoted,
    segment_fields,
)
from poolmeter.model.units import DAY_US


def read_segments(segments: Sequence[Segment]) -> str:
    """The FROM clause over exactly these segments; files are relative to the root."""
    return f"read_parquet([{', '.join(literal(segment.file) for segment in segments)}], hive_partitioning = false)"


def day_select(kind: SegmentKind, source: str) -> str:
    """SELECT of a day kind's columns from minute rows. A sum is NULL when no row of the day knows the quantity, never 0."""
    keys = [quoted(name) for name in DAY_KEYS[kind]]
    day = f"(minute_us // {DAY_US}) * {DAY_US}"
    columns = {"day_us": day, "records": "count(*)"}
    columns |= {name: quoted(name) for name in DAY_KEYS[kind]}
    columns |= {name: f"CAST(sum({quoted(name)}) AS BIGINT)" for name in DAY_SUMS[kind]}
    columns |= {name: f"CAST(sum({quoted(name)}) AS {WIDE})" for name in DAY_WIDE_SUMS[kind]}
    columns |= {name: f"max({quoted(name)})" for name in DAY_MAXIMA[kind]}
    columns["measured_span_us"] = f"CAST(coalesce(sum(span_us) FILTER ({quoted(MEASURED[kind])} IS NOT NULL), 0) AS BIGINT)"
    columns["complete_us"] = "CAST(sum(CAST(span_us AS HUGEINT) * completeness_ppm) // 1000000 AS BIGINT)"
    columns["first_minute_us"] = "min(minute_us)"
    columns["last_minute_us"] = "max(minute_us)"
    chosen = ", ".join(f"{columns[field.name]} AS {quoted(field.name)}" for field in segment_fields(kind))
    return f"SELECT {chosen} FROM {source} GROUP BY {', '.join([day, *keys])}"


def view_source(kind: SegmentKind, segments: Sequence[Segment]) -> str | None:
    """The SELECT behind a view over the live `segments` (of all kinds): stored days, and live ones aggregated; None: no rows at all."""
    own = [segment for segment in segments if segment.kind is kind]
    names = ", ".join(quoted(field.name) for field in segment_fields(kind))
    parts = [f"SELECT {names} FROM {read_segments(own)}"] if own else []
    if kind in DAY_SOURCES:
        rolled = {segment.day for segment in own}
        live = [segment for segment in segments if segment.kind is DAY_SOURCES[kind] and segment.day not in rolled]
        if live:
            parts.append(day_select(kind, read_segments(live)))
    return " UNION ALL ".join(parts) or None
