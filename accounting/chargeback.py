"""`poolmeter chargeback`: what each line cost, exactly; tenants, idle, unallocated and overhead sum to the cost of the pool."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting import measures
from poolmeter.accounting.dimensions import (
    COLUMNS,
    DEVICE_FIELDS,
    EVERYTHING,
    LABEL_FIELDS,
    Calendar,
    Filters,
    day_text,
    hour_text,
    sort_key,
)
from poolmeter.accounting.measures import Measures
from poolmeter.accounting.plans import PricePlan, demo_plan, load_plan
from poolmeter.accounting.policies import share_out
from poolmeter.accounting.rating import LINES, Charge, money, rate
from poolmeter.accounting.shares import DEVICE, LABELS, Shares, read_shares
from poolmeter.accounting.source import ask, check_filters, check_identity, is_simulated, stored_part, unaccounted_warnings
from poolmeter.errors import BadInput
from poolmeter.period import Period
from poolmeter.report import Report

if TYPE_CHECKING:
    import duckdb

MONEY_COLUMNS = ("line", "quantity", "unit", "unit_price", "cost", "currency")
TOTAL_COLUMNS = ("total_cost", "allocated_method")
_TOTAL_OF = {"usage": "tenants", "idle": "idle", "unallocated": "unallocated", "overhead": "overhead"}


def chargeback_report(
    root: Path, period: Period, plan: PricePlan, by: tuple[str, ...] = ("tenant",), filters: Filters = EVERYTHING, basis: str | None = None
) -> Report:
    """The bill of a period, a row per line and combination of the `by` fields.

    `root` is the store's folder; days are cut in the period's zone, a day that the period only touches is a line-day of that part;
    `basis` overrides the plan's. Raises BadInput on a missing price or a filter value the store has never seen, DataError on stored
    records that break the capacity identity, Unavailable without a store.
    """
    return ask(root, lambda connection: chargeback_of(connection, period, plan, by, filters, basis))


def chosen_plan(root: Path, flag: Path | None, configured: Path | None) -> tuple[PricePlan, tuple[str, ...]]:
    """The plan to rate with, and a warning when it is the packaged one: the flag's, else the configured, else a simulated pool's.

    Raises BadInput when there is none.
    """
    path = flag or configured
    if path is not None:
        return load_plan(path), ()
    if not ask(root, is_simulated):
        raise BadInput(
            "no price plan is given, expected --plan FILE or accounting.plan in the configuration (deploy/plan.example.toml is one)"
        )
    return demo_plan(), ("the pool is simulated and no price plan is given: rated with the packaged demo plan",)


def chargeback_for(
    root: Path,
    period: Callable[[str | None], Period],
    by: tuple[str, ...],
    filters: Filters,
    *,
    flag: Path | None,
    configured: Path | None,
    basis: str | None,
) -> Report:
    """The bill as a command or a request asks for it: the plan is chosen first, because its time zone may cut the days.

    `period` gives the period in a zone's name (None: the plan names none). Raises what `chosen_plan` and `chargeback_report` raise.
    """
    plan, warnings = chosen_plan(root, flag, configured)
    report = chargeback_report(root, period(None if plan.zone is None else plan.zone.key), plan, by, filters, basis)
    return replace(report, warnings=(*warnings, *report.warnings))


def chargeback_of(
    connection: "duckdb.DuckDBPyConnection",
    period: Period,
    plan: PricePlan,
    by: tuple[str, ...],
    filters: Filters,
    basis: str | None = None,
) -> Report:
    """`chargeback_report` of an open catalog."""
    basis = basis or plan.basis
    shares, every = rated(connection, period, plan, level_of(by, filters), filters, basis)
    shared = share_out(every, plan.policies, filters.told(by))
    charges = [charge for charge in shared.charges if chosen(charge, filters)]
    rows = _rows(charges, by, plan)
    kept = () if filters.tenant else shared.left
    extra = {"basis": basis, "plan": {"name": plan.name, "version": plan.version, "sha256": plan.sha256}}
    return Report(
        "chargeback",
        (*by, *MONEY_COLUMNS, *_shared_columns(plan), *measures.COLUMNS),
        tuple(rows),
        period.start_text(),
        period.end_text(),
        _totals(charges, plan, filters.private),
        (
            *warnings_of(shares, charges, filters.private),
            *(_nobody(*left) for left in kept),
            *unaccounted_warnings(connection, period, filters),
        ),
        extra,
    )


def rated(
    connection: "duckdb.DuckDBPyConnection", period: Period, plan: PricePlan, level: int, filters: Filters, basis: str
) -> tuple[Shares, list[Charge]]:
    """All shares and charges of a period at a level of detail (`shares.LABELS`), once the filters name what is there."""
    check_filters(connection, filters)
    check_identity(connection, period)
    with_use = any(method == "by-use" for _, method in plan.policies)
    part = stored_part(connection, period)
    shares = read_shares(connection, Calendar.of(period, part), basis, plan.changes(part.start_us, part.end_us), level, with_use)
    return shares, rate(shares.shares, plan)


def level_of(by: tuple[str, ...], filters: Filters) -> int:
    """How deep the question goes: see `shares.LABELS`. Deeper levels only divide, so the answer does not depend on it."""
    fields = {*by, *filters.chosen()}
    if "hour" in fields:
        return 4
    if fields & DEVICE_FIELDS:
        return 3
    return 2 if fields & LABEL_FIELDS else 1


def value_of(charge: Charge, name: str) -> str | None:
    """The value of a --by field on a charge; None where the line has none."""
    share = charge.share
    if name == "tenant":
        return share.tenant
    if name == "part":
        return share.part
    if name == "day":
        return day_text(share.day)
    if name == "hour":
        return None if share.hour_us is None else hour_text(share.hour_us)
    column = COLUMNS[name]
    if column in DEVICE:
        return share.device[DEVICE.index(column)] if share.device else None
    return share.labels[LABELS.index(column)] if share.labels else None


def chosen(charge: Charge, filters: Filters) -> bool:
    """Whether a report with these filters has the charge."""
    return all(value_of(charge, name) in values for name, values in filters.chosen().items())


def _rows(charges: list[Charge], by: tuple[str, ...], plan: PricePlan) -> list[dict[str, object]]:
    groups: dict[tuple[object, ...], list[Charge]] = {}
    for charge in charges:
        if charge.share.line == "usage" or charge.us or charge.amount or charge.shared:
            groups.setdefault((charge.share.line, *(value_of(charge, name) for name in by)), []).append(charge)
    rows = []
    for (line, *values), members in sorted(groups.items(), key=lambda item: (sort_key(item[0][1:]), LINES.index(str(item[0][0])))):
        row: dict[str, object] = {name: value for name, value in zip(by, values, strict=True) if value is not None}
        row["line"] = line
        row["quantity"] = measures.hours(sum(charge.us for charge in members))
        row["unit"] = "device-hour"
        prices = {price for charge in members for price, us in charge.spent.items() if us}
        prices = prices or {price for charge in members for price in charge.spent}
        if len(prices) == 1:
            row["unit_price"] = next(iter(prices))
        row["cost"] = money(sum(charge.amount for charge in members), plan.minor_digits)
        row["currency"] = plan.currency
        row.update(_shared(members, plan))
        measured: Measures | None = None
        for charge in members:
            if charge.measures is not None:
                measured = charge.measures if measured is None else measured.plus(charge.measures)
        if measured is not None:
            row.update(measured.shown())
        rows.append(row)
    return rows


def _totals(charges: list[Charge], plan: PricePlan, private: bool) -> dict[str, object]:
    amounts = dict.fromkeys(LINES, 0)
    for charge in charges:
        amounts[charge.share.line] += charge.amount
    totals: dict[str, object] = {"cost": money(sum(amounts.values()), plan.minor_digits), "currency": plan.currency}
    lines = ("usage",) if private else LINES
    totals.update({_TOTAL_OF[line]: money(amounts[line], plan.minor_digits) for line in lines})
    totals["adjustments"] = money(0, plan.minor_digits)
    if plan.policies:
        added = {part: sum(max(charge.shared.get(part, 0), 0) for charge in charges) for part, _ in plan.policies}
        totals["shared"] = money(sum(added.values()), plan.minor_digits)
        totals.update({f"shared_{part}": money(amount, plan.minor_digits) for part, amount in added.items()})
        everything = sum(amounts.values()) + sum(sum(charge.shared.values()) for charge in charges)
        totals["total_cost"] = money(everything, plan.minor_digits)
    return totals


def _shared_columns(plan: PricePlan) -> tuple[str, ...]:
    """The columns of what policies share; none where everything stays its own line."""
    return ("shared_cost", *(f"shared_{part}" for part, _ in plan.policies), *TOTAL_COLUMNS) if plan.policies else ()


def _shared(members: list[Charge], plan: PricePlan) -> dict[str, object]:
    """What policies add to a row (negative: take from it), by the part it comes from, and by which methods."""
    if not plan.policies:
        return {}
    by_part = {
        part: sum(c.shared[part] for c in members if part in c.shared)
        for part, _ in plan.policies
        if any(part in c.shared for c in members)
    }
    found: dict[str, object] = {"shared_cost": money(sum(by_part.values()), plan.minor_digits)}
    found.update({f"shared_{part}": money(amount, plan.minor_digits) for part, amount in by_part.items()})
    found["total_cost"] = money(sum(charge.amount for charge in members) + sum(by_part.values()), plan.minor_digits)
    methods = {part: method for part, method in plan.policies if part in by_part}
    if len(set(methods.values())) == 1:
        found["allocated_method"] = next(iter(methods.values()))
    elif methods:
        found["allocated_method"] = ", ".join(f"{part}: {method}" for part, method in methods.items())
    return found


def _nobody(part: str, method: str, days: int) -> str:
    among = {"even": "no tenant", "by-allocation": "no tenant with a promise at a price", "by-use": "no tenant with use at a price"}[method]
    return f"on {days} day{'s' if days > 1 else ''} there is {among} to share {part} among ({method}): it stays its own line"


def warnings_of(shares: Shares, charges: Sequence[Charge], private: bool) -> tuple[str, ...]:
    """What whoever reads the charges of these shares must know; what the shares lack is the pool's, and not for a private question."""
    return (*(() if private else _lacking(shares)), *_unknown(charges))


def _lacking(shares: Shares) -> list[str]:
    warnings = []
    if not shares.capacity_us:
        warnings.append("no device was watched in this period")
    if shares.unattributed_us:
        warnings.append(f"{shares.unattributed_us} us are promised without a slice record that tells to whom: they are in the overhead")
    if shares.scaled_minutes:
        warnings.append(f"in {shares.scaled_minutes} device-minutes the claims exceed the device's time and are scaled to it")
    if shares.orphan_minutes:
        warnings.append(f"in {shares.orphan_minutes} device-minutes slices have no device record: shown as usage, not charged")
    return warnings


def _unknown(charges: Sequence[Charge]) -> list[str]:
    unknown = [charge for charge in charges if charge.measures is not None and charge.measures.used_us is None and charge.us]
    return [f"use is unknown for {len(unknown)} lines: charged by allocation, completeness below 1"] if unknown else []
