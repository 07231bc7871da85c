"""Questions to the collector's store: one catalog for all queries of a report, checked filters, the pool's own identity."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from poolmeter.accounting.dimensions import COLUMNS, DEVICE_FIELDS, Filters
from poolmeter.accounting.measures import hours
from poolmeter.collector.catalog import open_catalog, unreadable
from poolmeter.errors import BadInput, DataError
from poolmeter.model.units import DAY_US, MINUTE_US
from poolmeter.period import Period, rfc3339

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
MOST_WARNED = 20
LONG_US = 1000 * DAY_US
_room: "ContextVar[_Room | None]" = ContextVar("room", default=None)


class TooMany(BadInput):
    """A report that needs more rows of the store than whoever makes it permits."""


class _Room:
    def __init__(self, rows: int) -> None:
        self.rows, self.left = rows, rows


@contextmanager
def at_most(rows: int) -> Iterator[None]:
    """Reports made inside take so many rows from the store in all, then raise TooMany: a server's memory is everybody's."""
    token = _room.set(_Room(rows))
    try:
        yield
    finally:
        _room.reset(token)


def ask(root: Path, question: "Callable[[duckdb.DuckDBPyConnection], T]") -> T:
    """The answer of `question` to the newest catalog, asked again once when a segment was deleted under it.

    Raises Unavailable when there is no store, DataError when it has another version or is torn.
    """
    import duckdb

    for last in (False, True):
        with open_catalog(root) as connection:
            try:
                return question(connection)
            except duckdb.Error as error:
                if last or not isinstance(error, duckdb.IOException):
                    raise unreadable(root, error) from None
    raise AssertionError("unreachable")


def rows_of(connection: "duckdb.DuckDBPyConnection", sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """All rows of a query. Raises TooMany inside `at_most`, before they are all in memory."""
    answer = connection.execute(sql, list(parameters))
    room = _room.get()
    found: list[tuple[object, ...]] = answer.fetchall() if room is None else answer.fetchmany(room.left + 1)
    if room is not None:
        if len(found) > room.left:
            raise TooMany(f"the report needs more than {room.rows} rows, expected fewer: a shorter period, or fewer fields in by")
        room.left -= len(found)
    return found


def stored_part(connection: "duckdb.DuckDBPyConnection", period: Period) -> Period:
    """The part of a period in which the store may have records; at least a minute. A period may be ten thousand years.

    Asked of long periods alone: others are as they are.
    """
    if period.end_us - period.start_us < LONG_US:
        return period
    sql = "SELECT MIN(min_minute_us), MAX(max_minute_us) FROM segments WHERE kind IN ('device', 'slice')"
    low, high = (None if value is None else int(str(value)) for value in rows_of(connection, sql)[0])
    start_us = period.start_us if low is None else min(max(period.start_us, low), period.end_us - MINUTE_US)
    end_us = start_us + MINUTE_US if high is None else max(min(period.end_us, high + MINUTE_US), start_us + MINUTE_US)
    return replace(period, start_us=start_us, end_us=end_us)


def where(period: Period, filters: Filters, fields: frozenset[str] | None = None) -> tuple[str, tuple[object, ...]]:
    """SQL condition and its parameters for records of a period; of the filters, only those on `fields` (all)."""
    parameters: list[object] = []
    conditions = [f"minute_us >= {period.start_us} AND minute_us < {period.end_us}"]
    for name, values in filters.chosen().items():
        if fields is None or name in fields:
            conditions.append(f"{COLUMNS[name]} IN ({', '.join('?' * len(values))})")
            parameters.extend(values)
    return " AND ".join(conditions), tuple(parameters)


def check_filters(connection: "duckdb.DuckDBPyConnection", filters: Filters) -> None:
    """Refuse a filter on a tenant, node or pool that the store has never seen. Raises BadInput naming those it has.

    A private question just finds nothing.
    """
    if filters.private:
        return
    for name, values in filters.chosen().items():
        view = "slice_minutes" if name == "tenant" else "device_minutes"
        column = COLUMNS[name]
        known = [str(row[0]) for row in rows_of(connection, f"SELECT DISTINCT {column} FROM {view} WHERE {column} IS NOT NULL ORDER BY 1")]
        for value in values:
            if value not in known:
                shown = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
                raise BadInput(
                    f"{name} is {value!r}, expected one of {shown}" if known else f"{name} is {value!r}, and the store has no {name} yet"
                )


def check_identity(connection: "duckdb.DuckDBPyConnection", period: Period) -> None:
    """Refuse device records that break the capacity identity. Raises DataError naming the first."""
    broken = rows_of(
        connection,
        f"""SELECT node, device_uuid, minute_us, span_us, allocated_us, reserved_unused_us, unallocated_us, suspended_us, down_us
        FROM device_minutes WHERE minute_us >= {period.start_us} AND minute_us < {period.end_us} AND (
          allocated_us + reserved_unused_us + unallocated_us + suspended_us + down_us <> span_us
          OR LEAST(allocated_us, reserved_unused_us, unallocated_us, suspended_us, down_us) < 0)
        ORDER BY node, device_uuid, minute_us, sequence LIMIT 1""",
    )
    for node, device, minute_us, span_us, *parts in broken:
        raise DataError(
            f"device record {node}/{device} of {rfc3339(int(str(minute_us)))}: allocated, reserved, unallocated, suspended and down are"
            f" {', '.join(str(part) for part in parts)} us, expected parts of at least 0 that sum to its span of {span_us} us"
        )


def unaccounted_warnings(connection: "duckdb.DuckDBPyConnection", period: Period, filters: Filters) -> tuple[str, ...]:
    """A sentence for each device that programs without the hook used in a period, most used first, and one for what is not known.

    No line of a report is anybody's use of that kind: on the bill it lies in what the device was not promised or not used for. Empty
    under a tenant filter, for it is no tenant's.
    """
    if filters.tenant:
        return ()
    condition, parameters = where(period, filters, DEVICE_FIELDS)
    found = rows_of(
        connection,
        f"""SELECT node, device_uuid, SUM(unaccounted_us), COUNT(*), COUNT(*) FILTER (WHERE unaccounted_us IS NULL)
        FROM device_minutes WHERE {condition} GROUP BY 1, 2 ORDER BY 3 DESC NULLS LAST, 1, 2""",
        parameters,
    )
    used = [(node, device, int(str(us))) for node, device, us, *_ in found if us]
    warnings = [
        f"device {device} of node {node}: {hours(us)} device-hours were used by programs without the hook (unaccounted); nobody is billed for them"
        for node, device, us in used[:MOST_WARNED]
    ]
    if len(used) > MOST_WARNED:
        rest = sum(us for _, _, us in used[MOST_WARNED:])
        warnings.append(f"{len(used) - MOST_WARNED} more devices: {hours(rest)} device-hours unaccounted; see usage --by device and --node")
    records, unmeasured = (sum(int(str(row[index])) for row in found) for index in (3, 4))
    if unmeasured:
        warnings.append(
            f"use without the hook is unknown for {unmeasured} of {records} device records; what is said of it is the known part"
        )
    return tuple(warnings)


def is_simulated(connection: "duckdb.DuckDBPyConnection") -> bool:
    """Whether every node the store knows is simulated (and it knows one)."""
    found = rows_of(connection, "SELECT COUNT(simulated), COUNT(*) FILTER (WHERE simulated) FROM nodes")
    known, simulated = found[0]
    return bool(known) and known == simulated
