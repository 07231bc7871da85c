"""The page "Chargeback": the numbers of `poolmeter chargeback`, from the same function, with a bar per tenant and the CSV."""

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

import pandas as pd
import streamlit as st

from poolmeter.accounting.chargeback import chargeback_report, chosen_plan
from poolmeter.accounting.dimensions import CHARGE_BY
from poolmeter.accounting.plans import PricePlan, parse_plan
from poolmeter.clock import SystemClock
from poolmeter.dashboards import charts
from poolmeter.dashboards.figures import plain_text
from poolmeter.dashboards.reading import read_tenants
from poolmeter.dashboards.settings import Settings, settings
from poolmeter.errors import PoolmeterError
from poolmeter.period import Period, parse_period
from poolmeter.report import Report, as_csv, cell

if TYPE_CHECKING:
    import altair as alt

PERIODS: dict[str, tuple[str, str]] = {
    "Today": ("today", "now"),
    "Yesterday": ("yesterday", "today"),
    "Last 7 days": ("7d", "now"),
    "This month": ("this-month", "now"),
    "Last month": ("last-month", "this-month"),
}
OTHER = "From … to …"
BASES = {"As the plan says": None, "Allocated": "allocated", "Used": "used"}
SHARED = ("shared_cost", "total_cost", "allocated_method")
FIRST = ("line", "quantity", "unit", "unit_price", "cost", *SHARED, "currency", "used_device_hours", "used_basis", "completeness")


def show() -> None:
    """The page."""
    st.title("Chargeback")
    try:
        chosen = settings()
        report = _asked(chosen)
        tenants = read_tenants(chosen.store)
    except PoolmeterError as error:
        st.error(plain_text(str(error)), icon=":material/error:")
        return
    st.caption(f"{report.start} to {report.end} (end not included){_plan_text(report)}")
    _totals(report)
    for warning in report.warnings:
        st.warning(plain_text(warning), icon=":material/info:")
    if not report.rows:
        st.info("Nothing was watched in this period, so there is nothing to bill.")
        return
    by = tuple(column for column in report.columns if column in CHARGE_BY)
    st.altair_chart(_chart(report, by, charts.colours_of(tenants)), width="stretch")
    st.dataframe(table(report), hide_index=True, width="stretch")
    st.download_button("Download CSV", as_csv(report).encode(), "chargeback.csv", "text/csv", icon=":material/download:")


def _asked(chosen: Settings) -> Report:
    columns = st.columns([2, 3, 2])
    name = columns[0].selectbox("Period", [*PERIODS, OTHER], index=list(PERIODS).index("This month"))
    by = columns[1].multiselect("By", CHARGE_BY, default=["tenant"], help="One row per line and combination of these.")
    basis = columns[2].selectbox("Basis", list(BASES), help="What is charged: the promise, or what was used of it.")
    start, end = PERIODS.get(name, ("this-month", "now"))
    if name == OTHER:
        left, right, _ = st.columns([2, 2, 3])
        start = left.text_input("From", "this-month", help="RFC 3339, a date, 7d, today, last-month")
        end = right.text_input("To, not included", "now")
    with st.expander("Price plan and time zone"):
        left, right = st.columns(2)
        zone = left.text_input("Time zone that days are cut in", chosen.config.accounting.time_zone)
        upload = right.file_uploader("Try another price plan (TOML)", type="toml", help="For this page alone; nothing is stored.")
    period = parse_period(start, end, zone, SystemClock().wall_us())
    if upload is not None:
        plan: PricePlan = parse_plan(upload.getvalue(), upload.name)
        warnings: tuple[str, ...] = ()
    else:
        plan, warnings = chosen_plan(chosen.store, None, chosen.config.accounting.plan)
    return with_warnings(rated(chosen, period, plan, tuple(by) or ("tenant",), BASES[basis]), warnings)


def rated(chosen: Settings, period: Period, plan: PricePlan, by: tuple[str, ...], basis: str | None) -> Report:
    """The report that the command line would print for the same question."""
    return chargeback_report(chosen.store, period, plan, by, basis=basis)


def with_warnings(report: Report, warnings: tuple[str, ...]) -> Report:
    """The report with more warnings before its own."""
    return Report(
        report.name, report.columns, report.rows, report.start, report.end, report.totals, (*warnings, *report.warnings), report.extra
    )


def _plan_text(report: Report) -> str:
    plan = report.extra.get("plan")
    words = []
    if isinstance(plan, Mapping):
        words.append(f"plan {plain_text(str(plan.get('name')))} version {plan.get('version')}")
    if basis := report.extra.get("basis"):
        words.append(f"basis {basis}")
    return "".join(f" · {word}" for word in words)


def _totals(report: Report) -> None:
    currency = cell(report.totals.get("currency"))
    figures = [("Pool cost", "cost"), ("Tenants", "tenants"), ("Idle", "idle"), ("Unallocated", "unallocated"), ("Overhead", "overhead")]
    if "shared" in report.totals:
        figures.append(("Of these shared", "shared"))
    for column, (label, key) in zip(st.columns(len(figures)), figures, strict=True):
        value = report.totals.get(key)
        column.metric(label, "unknown" if value is None else f"{cell(value)} {currency}", border=True)


def table(report: Report) -> pd.DataFrame:
    """The report's rows as text, exactly as in its CSV; columns that say nothing are left out, what the bill is about comes first."""
    by = [column for column in report.columns if column in CHARGE_BY]
    rest = [column for column in report.columns if column not in by and column not in FIRST]
    order = [*by, *(column for column in FIRST if column in report.columns), *rest]
    filled = [column for column in order if any(row.get(column) is not None for row in report.rows)]
    return pd.DataFrame([{column: cell(row.get(column)) for column in filled} for row in report.rows])


def _chart(report: Report, by: tuple[str, ...], colours: dict[str, str]) -> "alt.Chart":
    first = "tenant" if "tenant" in by else by[0]
    rows: list[tuple[str, str, Decimal]] = []
    for row in report.rows:
        cost, line, shared = row.get("cost"), cell(row.get("line")), row.get("shared_cost")
        owner = cell(row.get(first)) or f"({line})"
        if isinstance(cost, Decimal):
            # What a policy gives to a tenant is a piece of its bar, and no longer of the line that it is taken from.
            moved = shared if isinstance(shared, Decimal) else Decimal(0)
            rows.append((owner, line, cost + min(moved, Decimal(0))))
            rows += [(owner, "shared", moved)] if moved > 0 else []
    # Tenants first, largest first; then what belongs to nobody.
    sums: dict[str, Decimal] = {}
    for owner, _, cost in rows:
        sums[owner] = sums.get(owner, Decimal(0)) + cost
    rows.sort(key=lambda item: (item[0].startswith("("), -sums[item[0]], item[0], item[1] != "usage"))
    return charts.cost_bars(rows, cell(report.totals.get("currency")), colours)
