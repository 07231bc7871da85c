"""`poolmeter usage`: who used what, in whole numbers summed by DuckDB and shown in the contract's units."""

from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting import measures
from poolmeter.accounting.dimensions import COLUMNS, DEVICE_FIELDS, EVERYTHING, Calendar, Filters, day_text, hour_text, sort_key
from poolmeter.accounting.measures import Measures
from poolmeter.accounting.source import ask, check_filters, check_identity, rows_of, stored_part, unaccounted_warnings, where
from poolmeter.period import Period
from poolmeter.report import Report

if TYPE_CHECKING:
    import duckdb

TOTALS = ("capacity_us", "allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us", "unaccounted_us")


def usage_report(root: Path, period: Period, by: tuple[str, ...] = ("tenant",), filters: Filters = EVERYTHING) -> Report:
    """Usage of a period, one row per combination of the `by` fields that an allocation had.

    `root` is the store's folder. Totals are the capacity identity of the devices that the node and pool filters choose, whoever
    had them: the tenant filter does not change them. Raises BadInput on a filter value the store has never seen, DataError on
    stored records that break the identity, Unavailable without a store.
    """
    return ask(root, lambda connection: usage_of(connection, period, by, filters))


def usage_of(connection: "duckdb.DuckDBPyConnection", period: Period, by: tuple[str, ...], filters: Filters) -> Report:
    """`usage_report` of an open catalog."""
    check_filters(connection, filters)
    check_identity(connection, period)
    calendar = Calendar.of(period, stored_part(connection, period))
    computed = {"day": calendar.day_sql(), "hour": calendar.hour_sql()}
    keys = [computed.get(name) or f'"{COLUMNS[name]}"' for name in by]
    condition, parameters = where(period, filters)
    groups = ", ".join(str(index + 1) for index in range(len(keys)))
    found = rows_of(
        connection, f"SELECT {', '.join(keys)}, {measures.SLICE_SQL} FROM slice_minutes WHERE {condition} GROUP BY {groups}", parameters
    )
    rows = []
    for values in found:
        named = dict(zip(by, (_label(name, value) for name, value in zip(by, values, strict=False)), strict=True))
        rows.append({**{name: value for name, value in named.items() if value is not None}, **Measures(*values[len(by) :]).shown()})  # type: ignore[arg-type]
    rows.sort(key=lambda row: sort_key([row.get(name) for name in by]))
    totals, warnings = ({}, ()) if filters.private else _totals(connection, period, filters)
    return Report("usage", (*by, *measures.COLUMNS), tuple(rows), period.start_text(), period.end_text(), totals, warnings)


def _label(name: str, value: object) -> object:
    if name == "day":
        return day_text(int(str(value)))
    if name == "hour":
        return hour_text(int(str(value)))
    return value


def _totals(connection: "duckdb.DuckDBPyConnection", period: Period, filters: Filters) -> tuple[dict[str, object], tuple[str, ...]]:
    condition, parameters = where(period, filters, DEVICE_FIELDS)
    sums = "SUM(span_us), " + ", ".join(f"SUM({name})" for name in TOTALS[1:])
    values = rows_of(
        connection,
        f"SELECT {sums}, COUNT(*) FROM device_minutes WHERE {condition}",
        parameters,
    )[0]
    if not values[-1]:
        return {}, ("no device was watched in this period",)
    totals = {name: value for name, value in zip(TOTALS, values, strict=False) if value is not None}
    return totals, unaccounted_warnings(connection, period, filters)
