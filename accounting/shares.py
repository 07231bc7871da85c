"""Whose each device-microsecond is: SQL that splits every device-minute into disjoint parts which sum to its span exactly.

Allocated basis: tenants have what was promised to them; overhead is reserved unused, suspended, down, and a promise of which no slice
record tells whose it is; unallocated is the rest. Used basis: down first; then tenants have what they used (a slice of unknown use,
what was promised to it), scaled to the span when measurements exceed it; then switch overhead; idle is what was promised and not used;
then suspended, reserved unused and the promise without a slice record; unallocated is the rest. Each claim takes at most what the
claims before it left. docs/decisions/rating-parts.md gives the reasons.

Whole numbers throughout: BIGINT sums to HUGEINT, `//` only to scale an over-full minute, its remainders dealt out largest first, ties
by allocation id.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from poolmeter.accounting import measures
from poolmeter.accounting.dimensions import Calendar
from poolmeter.accounting.measures import Measures
from poolmeter.accounting.parts import LINE_OF, OWN, PARTS
from poolmeter.accounting.source import rows_of
from poolmeter.collector.catalog import quoted
from poolmeter.model.units import DAY_US
from poolmeter.period import Period

if TYPE_CHECKING:
    import duckdb

# Levels of detail, each containing those before it: 1 tenant and day, 2 allocation and its labels, 3 device, 4 hour.
LABELS = ("allocation_id", "project", "user", "workload_class", "environment", "mode", "workload")
DEVICE = ("node", "device_uuid", "pool", "device_model")
CHUNK_ROWS = 1_500_000
REST = ("idle", "unallocated", "overhead")


@dataclass(frozen=True)
class Share:
    """Device time of one line, and the finest keys asked for. `line` is usage or one of `REST`; only usage has a tenant and measures.

    `part` is what of the line it is (`poolmeter.accounting.parts`). `used_us` of usage is its use, the promise where that is unknown; 0
    unless it was asked for.
    `labels`, `device` and `hour_us` are empty or None below their level. `order` breaks ties: the smallest allocation id in it.
    `segment` is the plan's tariff (`PricePlan.changes`); `first_minute_us` is the earliest minute in it.
    """

    line: str
    tenant: str | None
    day: int
    labels: tuple[str | None, ...]
    device: tuple[str | None, ...]
    hour_us: int | None
    model: str
    segment: int
    first_minute_us: int
    order: str
    us: int
    measures: Measures | None = None
    part: str = OWN
    used_us: int = 0


@dataclass(frozen=True)
class Shares:
    """All shares of a period. They sum to `capacity_us`; the rest says what the data lacked."""

    shares: tuple[Share, ...]
    capacity_us: int
    unattributed_us: int
    scaled_minutes: int
    orphan_minutes: int


def read_shares(
    connection: "duckdb.DuckDBPyConnection",
    calendar: Calendar,
    basis: str,
    changes: Sequence[tuple[int, int]],
    level: int,
    with_use: bool = False,
) -> Shares:
    """The shares of a period on a basis (`allocated` or `used`), split where the tariff changes, to a level of detail.

    `changes` are (from this moment on, number of the tariff), ascending, as `PricePlan.changes` gives them. `with_use` asks
    for `Share.used_us`.
    """
    period = calendar.period
    times = {"day": calendar.day_sql()}
    if level >= 4:
        times["hour"] = calendar.hour_sql()
    shares: list[Share] = []
    sums = [0, 0, 0, 0]
    for start_us, end_us in _chunks(connection, period):
        span = f"minute_us >= {start_us} AND minute_us < {end_us}"
        times["segment"] = _segment_sql(_inside(changes, start_us, end_us))
        scaled = _prepare(connection, span, basis)
        shares += _tenant_shares(connection, span, basis, times, level, scaled, with_use)
        rest, capacity_us, unattributed_us = _rest_shares(connection, times, level)
        shares += rest
        found = rows_of(connection, "SELECT COUNT(*) FILTER (WHERE NOT orphan), COUNT(*) FILTER (WHERE orphan) FROM over_full")[0]
        sums = [total + part for total, part in zip(sums, (capacity_us, unattributed_us, *(int(str(n)) for n in found)), strict=True)]
    if sum(share.us for share in shares) != sums[0]:
        raise AssertionError(f"shares do not sum to the capacity of {sums[0]} us")
    return Shares(tuple(shares), *sums)


def _chunks(connection: "duckdb.DuckDBPyConnection", period: Period) -> list[tuple[int, int]]:
    """The period in pieces of whole UTC days with about `CHUNK_ROWS` slice records each, so that memory stays bounded."""
    days = rows_of(
        connection,
        f"""SELECT minute_us // {DAY_US} AS day, COUNT(*) FROM slice_minutes
        WHERE minute_us >= {period.start_us} AND minute_us < {period.end_us} GROUP BY 1 ORDER BY 1""",
    )
    edges, rows = [period.start_us], 0
    for day, count in days:
        if rows and rows + int(str(count)) > CHUNK_ROWS:
            edges.append(int(str(day)) * DAY_US)
            rows = 0
        rows += int(str(count))
    return list(pairwise([*edges, period.end_us]))


def _prepare(connection: "duckdb.DuckDBPyConnection", span: str, basis: str) -> bool:
    """Temporary tables: `parts` per device-minute, `over_full` minutes, and where there are any, `dealt` corrections that scale them down.

    Whether there are any.
    """
    claim = "allocated_us" if basis == "allocated" else "COALESCE(used_us, allocated_us)"
    cap = "allocated_us" if basis == "allocated" else "span_us - down_us"
    # What an allocation did not use is told by all its records of the minute; in the allocated basis nothing is unused.
    per_allocation = f"""(SELECT node, device_uuid, minute_us, allocation_id, SUM({claim}) AS claim, SUM(allocated_us) AS promised
          FROM slice_minutes WHERE {span} GROUP BY 1, 2, 3, 4)"""
    per_record = f"(SELECT node, device_uuid, minute_us, allocated_us AS claim, allocated_us AS promised FROM slice_minutes WHERE {span})"
    connection.execute(f"""
    CREATE OR REPLACE TEMP TABLE loads AS
    SELECT node, device_uuid, minute_us, SUM(claim)::BIGINT AS load, SUM(promised)::BIGINT AS promised,
      SUM(GREATEST(promised - claim, 0))::BIGINT AS spare
    FROM {per_record if basis == "allocated" else per_allocation}
    GROUP BY 1, 2, 3""")
    connection.execute(f"""
    CREATE OR REPLACE TEMP TABLE parts AS
    WITH devices AS (
      SELECT node, device_uuid, minute_us, MAX(pool) AS pool, MAX(device_model) AS device_model,
        SUM(span_us)::BIGINT AS span_us, SUM(allocated_us)::BIGINT AS allocated_us, SUM(reserved_unused_us)::BIGINT AS reserved_us,
        SUM(suspended_us)::BIGINT AS suspended_us, SUM(down_us)::BIGINT AS down_us, COALESCE(SUM(switch_overhead_us), 0)::BIGINT AS switch_us
      FROM device_minutes WHERE {span} GROUP BY 1, 2, 3
    ), claims AS (
      SELECT d.*, {cap} AS cap, COALESCE(l.load, 0) AS load, COALESCE(l.spare, 0) AS spare,
        GREATEST(allocated_us - COALESCE(l.promised, 0), 0) AS gap
      FROM devices d LEFT JOIN loads l USING (node, device_uuid, minute_us))
    {_PARTS[basis]}""")
    connection.execute("""
    CREATE OR REPLACE TEMP TABLE over_full AS
    SELECT l.node, l.device_uuid, l.minute_us, l.load, COALESCE(p.cap, 0) AS cap, p.cap IS NULL AS orphan
    FROM loads l LEFT JOIN parts p USING (node, device_uuid, minute_us) WHERE l.load > COALESCE(p.cap, 0)""")
    if rows_of(connection, "SELECT COUNT(*) FROM over_full") == [(0,)]:
        return False
    # By all that a record says of itself: who claims another's allocation is a line beside it, and nobody's key is a mixture of two.
    labels = ", ".join(quoted(name) for name in ("tenant", *LABELS[1:], "pool", "device_model"))
    connection.execute(f"""
    CREATE OR REPLACE TEMP TABLE dealt AS
    WITH units AS (
      SELECT node, device_uuid, minute_us, allocation_id, {labels}, SUM({claim})::BIGINT AS claim, MAX(load) AS load, MAX(cap) AS cap
      FROM slice_minutes JOIN over_full USING (node, device_uuid, minute_us) WHERE {span} GROUP BY ALL
    ), floors AS (
      SELECT *, claim::HUGEINT * cap // load AS part, claim::HUGEINT * cap % load AS remainder FROM units
    ), ranked AS (
      SELECT *, cap - SUM(part) OVER minute AS left_over,
        ROW_NUMBER() OVER (PARTITION BY node, device_uuid, minute_us ORDER BY remainder DESC, allocation_id, {labels}) AS place
      FROM floors WINDOW minute AS (PARTITION BY node, device_uuid, minute_us))
    SELECT *, part + CASE WHEN place <= left_over THEN 1 ELSE 0 END - claim AS correction FROM ranked""")
    return True


# What is overhead, part by part, after the time it may take: see docs/decisions/rating-parts.md.
_PARTS = {
    "allocated": """
    SELECT *, LEAST(load, cap) AS paid, 0 AS idle, span_us - allocated_us - reserved_us - suspended_us - down_us AS unallocated,
      reserved_us AS reserved, suspended_us AS suspended, down_us AS down, 0 AS switching, allocated_us - LEAST(load, cap) AS unattributed
    FROM claims""",
    "used": """
    , one AS (SELECT *, LEAST(load, cap) AS paid FROM claims)
    , two AS (SELECT *, LEAST(switch_us, cap - paid) AS switching FROM one)
    , three AS (SELECT *, LEAST(spare, cap - paid - switching) AS idle FROM two)
    , four AS (SELECT *, LEAST(suspended_us, cap - paid - switching - idle) AS suspended FROM three)
    , five AS (SELECT *, LEAST(reserved_us, cap - paid - switching - idle - suspended) AS reserved FROM four)
    , six AS (SELECT *, LEAST(gap, cap - paid - switching - idle - suspended - reserved) AS unattributed FROM five)
    SELECT *, down_us AS down, cap - paid - switching - idle - suspended - reserved - unattributed AS unallocated FROM six""",
}


def _inside(changes: Sequence[tuple[int, int]], start_us: int, end_us: int) -> Sequence[tuple[int, int]]:
    """The changes that matter to a part of the period: the one in force at its start, and those within."""
    first = max(bisect_right(changes, start_us, key=lambda change: change[0]) - 1, 0)
    return changes[first : bisect_left(changes, end_us, key=lambda change: change[0])]


def _segment_sql(changes: Sequence[tuple[int, int]]) -> str:
    """SQL for the tariff of `minute_us`: a tree of comparisons, so that a month of hundreds of bands asks each row eight times."""
    if len(changes) < 2:
        return str(changes[0][1] if changes else 0)
    middle = len(changes) // 2
    return f"(CASE WHEN minute_us < {changes[middle][0]} THEN {_segment_sql(changes[:middle])} ELSE {_segment_sql(changes[middle:])} END)"


def _keys(times: Mapping[str, str], level: int, usage: bool) -> tuple[list[str], str]:
    """The columns of day, segment, hour, tenant, `LABELS` and `DEVICE`, and the GROUP BY of those that this level has."""
    wanted = {"day", "segment", "device_model", *(["tenant"] if usage else [])}
    wanted |= {*LABELS} if level >= 2 and usage else set()
    wanted |= {*DEVICE} if level >= 3 else set()
    wanted |= {"hour"} if level >= 4 else set()
    names = ("day", "segment", "hour", "tenant", *LABELS, *DEVICE)
    columns = [f'{times.get(name, quoted(name))} AS "{name}"' if name in wanted else f'NULL AS "{name}"' for name in names]
    # By place, and only what is there: grouping by many constant columns is slow.
    return columns, ", ".join(str(index + 1) for index, name in enumerate(names) if name in wanted)


def _tenant_shares(
    connection: "duckdb.DuckDBPyConnection", span: str, basis: str, times: Mapping[str, str], level: int, scaled: bool, with_use: bool
) -> list[Share]:
    claim = "allocated_us" if basis == "allocated" else "COALESCE(used_us, allocated_us)"
    keys, group = _keys(times, level, usage=True)
    use = "SUM(COALESCE(used_us, allocated_us))" if with_use else "0"
    ordering = f"MIN(allocation_id), MIN(minute_us), {use}"
    found = rows_of(
        connection,
        f"SELECT {', '.join(keys)}, {ordering}, SUM({claim}), {measures.SLICE_SQL} FROM slice_minutes WHERE {span} GROUP BY {group}",
    )
    corrections: dict[tuple[object, ...], int] = defaultdict(int)
    for row in rows_of(connection, f"SELECT {', '.join(keys)}, SUM(correction) FROM dealt GROUP BY {group}") if scaled else ():
        corrections[row[: len(keys)]] += int(str(row[-1]))
    shares = []
    for row in found:
        values: tuple[object, ...] = row[: len(keys)]
        order, first_us, used_us, us, *measured = row[len(keys) :]
        paid = int(str(us)) + corrections.pop(values, 0)
        known = Measures(*measured)  # type: ignore[arg-type]
        shares.append(_share("usage", values, str(order), int(str(first_us)), paid, level, known, used_us=int(str(used_us))))
    assert not corrections
    return shares


def _rest_shares(connection: "duckdb.DuckDBPyConnection", times: Mapping[str, str], level: int) -> tuple[list[Share], int, int]:
    keys, group = _keys(times, level, usage=False)
    sums = ", ".join(f"SUM({name})" for name in ("span_us", *PARTS))
    shares, capacity_us, unattributed_us = [], 0, 0
    for row in rows_of(connection, f"SELECT {', '.join(keys)}, MIN(minute_us), {sums} FROM parts GROUP BY {group}"):
        first_us, span_us, *rest = (int(str(value)) for value in row[len(keys) :])
        capacity_us += span_us
        for part, us in zip(PARTS, rest, strict=True):
            unattributed_us += us if part == "unattributed" else 0
            if us or part == "unallocated":  # every device has a line, so that its model must have a price
                shares.append(_share(LINE_OF[part], row[: len(keys)], "", first_us, us, level, None, part=part))
    return shares, capacity_us, unattributed_us


def _share(
    line: str,
    values: tuple[object, ...],
    order: str,
    first_us: int,
    us: int,
    level: int,
    measured: Measures | None,
    *,
    part: str = OWN,
    used_us: int = 0,
) -> Share:
    day, segment, hour, tenant, *texts = values
    labels = texts[: len(LABELS)] if level >= 2 and line == "usage" else []
    device = texts[len(LABELS) :] if level >= 3 else []
    return Share(
        line=line,
        tenant=None if tenant is None else str(tenant),
        day=int(str(day)),
        labels=tuple(None if text is None else str(text) for text in labels),
        device=tuple(None if text is None else str(text) for text in device),
        hour_us=None if hour is None else int(str(hour)),
        model=str(texts[-1]),
        segment=int(str(segment)),
        first_minute_us=first_us,
        order=order,
        us=us,
        measures=measured,
        part=part,
        used_us=used_us,
    )
