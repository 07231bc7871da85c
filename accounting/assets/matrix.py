"""The owner x user matrix: whose cards each tenant used, what that cost by the bill, and who owes whom for it.

Charges are the bill's own, rated to the device: deeper levels of rating only divide, so every sum is the bill's `cost`,
before policies share out what nobody used. The owner of a device
is the one that the register names now, for the whole period (docs/decisions/assets-register.md).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from poolmeter.accounting import measures
from poolmeter.accounting.chargeback import level_of, rated, warnings_of
from poolmeter.accounting.dimensions import EVERYTHING
from poolmeter.accounting.plans import PricePlan
from poolmeter.accounting.rating import LINES, Charge, money
from poolmeter.accounting.shares import DEVICE
from poolmeter.period import Period
from poolmeter.report import Report

if TYPE_CHECKING:
    import duckdb

COLUMNS = ("owner", "line", "tenant", "quantity", "unit", "cost", "currency")
NO_OWNER = "(no owner)"


def matrix_of(
    connection: "duckdb.DuckDBPyConnection", period: Period, plan: PricePlan, owners: Mapping[str, str | None], basis: str | None = None
) -> Report:
    """A row for each owner, line and tenant of a period. `owners` is uuid to owner; a device that it lacks has none.

    A row of devices without an owner has no `owner`. Raises what `chargeback_of` raises.
    """
    basis = basis or plan.basis
    shares, charges = rated(connection, period, plan, level_of(("device",), EVERYTHING), EVERYTHING, basis)
    cells = cells_of(charges, owners)
    rows = []
    for (owner, line, tenant), (us, amount) in sorted(cells.items(), key=_order):
        row: dict[str, object] = {} if owner is None else {"owner": owner}
        row["line"] = line
        if tenant is not None:
            row["tenant"] = tenant
        row |= {"quantity": measures.hours(us), "unit": "device-hour", "cost": money(amount, plan.minor_digits), "currency": plan.currency}
        rows.append(row)
    owed = transfers({key: amount for key, (_, amount) in cells.items()})
    totals: dict[str, object] = {
        "quantity": measures.hours(sum(us for us, _ in cells.values())),
        "cost": money(sum(amount for _, amount in cells.values()), plan.minor_digits),
        "currency": plan.currency,
    }
    digits = plan.minor_digits
    extra = {
        "basis": basis,
        "plan": {"name": plan.name, "version": plan.version, "sha256": plan.sha256},
        "transfers": [{"from": payer, "to": payee, "cost": money(amount, digits)} for payer, payee, amount in owed],
        "balances": [{"team": team, "cost": money(amount, digits)} for team, amount in sorted(balances(owed).items())],
    }
    unowned = sum(us for (owner, _, _), (us, _) in cells.items() if owner is None)
    warnings = (f"devices without an owner carry {measures.hours(unowned)} device-hours: no transfer follows from them",) if unowned else ()
    warnings = (*warnings_of(shares, charges, False), *warnings)
    return Report("matrix", COLUMNS, tuple(rows), period.start_text(), period.end_text(), totals, warnings, extra)


Cell = tuple[str | None, str, str | None]


def cells_of(charges: Sequence[Charge], owners: Mapping[str, str | None]) -> dict[Cell, tuple[int, int]]:
    """Device-microseconds and smallest currency units of each owner, line and tenant."""
    cells: dict[Cell, tuple[int, int]] = {}
    for charge in charges:
        share = charge.share
        uuid = share.device[DEVICE.index("device_uuid")]
        key = (owners.get(uuid or ""), share.line, share.tenant)
        us, amount = cells.get(key, (0, 0))
        if charge.us or charge.amount or share.line == "usage":
            cells[key] = (us + charge.us, amount + charge.amount)
    return cells


def transfers(amounts: Mapping[Cell, int]) -> list[tuple[str, str, int]]:
    """(payer, payee, amount), each pair once, netted: a tenant owes an owner for that owner's cards; nobody owes itself.

    What nobody used stays with the owner. Cards without an owner make nobody a creditor.
    """
    net: dict[tuple[str, str], int] = {}
    for (owner, line, tenant), amount in amounts.items():
        if line != "usage" or owner is None or tenant is None or owner == tenant:
            continue
        first, second = sorted((tenant, owner))
        net[first, second] = net.get((first, second), 0) + (amount if first == tenant else -amount)
    owed = ((first, second, amount) if amount > 0 else (second, first, -amount) for (first, second), amount in net.items() if amount)
    return sorted(owed)


def balances(owed: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """What each team gets (above 0) or pays (below 0); they sum to 0."""
    found: dict[str, int] = {}
    for payer, payee, amount in owed:
        found[payer] = found.get(payer, 0) - amount
        found[payee] = found.get(payee, 0) + amount
    return found


def crossed(report: Report) -> Report:
    """The same as a table for people: a row for each owner and measure, a column for each tenant, then idle, unallocated, overhead."""

    def column(row: Mapping[str, object]) -> str:
        return str(row["tenant"]) if row["line"] == "usage" else f"({row['line']})"

    wanted = sorted({column(row) for row in report.rows}, key=lambda name: (name.startswith("("), name))
    table: dict[tuple[str, str], dict[str, object]] = {}
    for row in report.rows:
        owner = str(row.get("owner", NO_OWNER))
        for measure, name in (("device-hours", "quantity"), (f"cost {row['currency']}", "cost")):
            line = table.setdefault((owner, measure), {"owner": owner, "measure": measure})
            line[column(row)] = row[name]
    names = ("owner", "measure", *wanted)
    return Report(report.name, names, tuple(table.values()), report.start, report.end, report.totals, report.warnings, report.extra)


def _order(item: tuple[Cell, object]) -> tuple[object, ...]:
    (owner, line, tenant), _ = item
    return (owner is None, owner or "", LINES.index(line), tenant or "")
