"""Hours and days from minutes: one SQL for both the stored rollup of a closed day and the live one of a day that still gets rows."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from poolmeter.collector.segments import Segment
from poolmeter.collector.tables import MEASURES, ROLLUPS, WIDE, SegmentKind, literal, quoted, segment_fields


def read_segments(segments: Sequence[Segment]) -> str:
    """The FROM clause over exactly these segments; files are relative to the root."""
    return f"read_parquet([{', '.join(literal(segment.file) for segment in segments)}], hive_partitioning = false)"


def rollup_select(kind: SegmentKind, source: str) -> str:
    """SELECT of a rollup's columns from minute rows. A sum is NULL when no row of the period knows the quantity, never 0."""
    rollup = ROLLUPS[kind]
    measures = MEASURES[rollup.source]
    start = f"(minute_us // {rollup.period_us}) * {rollup.period_us}"
    columns = {rollup.start: start, "records": "count(*)"}
    columns |= {name: quoted(name) for name in measures.keys}
    columns |= {name: f"CAST(sum({quoted(name)}) AS BIGINT)" for name in measures.sums}
    columns |= {name: f"CAST(sum({quoted(name)}) AS {WIDE})" for name in measures.wide}
    columns |= {name: f"max({quoted(name)})" for name in measures.maxima}
    columns["measured_span_us"] = f"CAST(coalesce(sum(span_us) FILTER ({quoted(measures.measured)} IS NOT NULL), 0) AS BIGINT)"
    columns["complete_us"] = "CAST(sum(CAST(span_us AS HUGEINT) * completeness_ppm) // 1000000 AS BIGINT)"
    columns["first_minute_us"] = "min(minute_us)"
    columns["last_minute_us"] = "max(minute_us)"
    chosen = ", ".join(f"{columns[field.name]} AS {quoted(field.name)}" for field in segment_fields(kind))
    return f"SELECT {chosen} FROM {source} GROUP BY {', '.join([start, *map(quoted, measures.keys)])}"


def view_lists(kind: SegmentKind, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Which of the live `segments` (of all kinds) a view reads: its own, and for a rollup the minutes of days that are not stored."""
    own = [segment for segment in segments if segment.kind is kind]
    if kind not in ROLLUPS:
        return own, []
    rolled = {segment.day for segment in own}
    return own, [segment for segment in segments if segment.kind is ROLLUPS[kind].source and segment.day not in rolled]


def view_source(kind: SegmentKind, segments: Sequence[Segment], damaged: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The SELECT behind a view over the live `segments`: stored days, and live ones aggregated; None: no rows at all.

    `damaged` says of segments what is wrong with them. DuckDB reads the first file of a view when the view is made, so they come last, and
    a view that has no other raises the sentence when it is asked: one torn file must not keep all others from being published.
    """
    own, live = view_lists(kind, segments)
    names = ", ".join(quoted(field.name) for field in segment_fields(kind))
    parts = []
    for found in (own, live):
        whole = [segment for segment in found if segment.file not in damaged]
        torn = [segment for segment in found if segment.file in damaged]
        if whole:
            source = read_segments([*whole, *torn])
            parts.append(f"SELECT {names} FROM {source}" if found is own else rollup_select(kind, source))
        elif torn:
            columns = ", ".join(f"CAST(NULL AS {field.type}) AS {quoted(field.name)}" for field in segment_fields(kind))
            parts.append(f"SELECT {columns} WHERE error({literal(damaged[torn[0].file])}) IS NOT NULL")
    return " UNION ALL ".join(parts) or None
