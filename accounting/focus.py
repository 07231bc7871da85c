"""`poolmeter focus export`: the bill as FOCUS 1.4 Cost and Usage rows (focus.finops.org), the same amounts as chargeback.

A row for each finest charge: a tenant's allocation, or an idle, unallocated or overhead line, on one device, one day, at one price. A
device is shared, so each row is a part of what the device cost: `ResourceId` is the device, `AllocatedResourceId` the allocation (or the
line), `AllocatedMethodId` by what it was split. docs/reference/focus.md says what each column holds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting.chargeback import chosen, chosen_plan, rated, warnings_of
from poolmeter.accounting.dimensions import EVERYTHING, Filters, day_text
from poolmeter.accounting.measures import hours
from poolmeter.accounting.parts import OWN
from poolmeter.accounting.plans import PRICE_DECIMALS, PricePlan
from poolmeter.accounting.policies import share_out
from poolmeter.accounting.rating import Charge, money
from poolmeter.accounting.shares import DEVICE, LABELS
from poolmeter.accounting.source import ask, unaccounted_warnings
from poolmeter.model.units import EXACT, split_exactly
from poolmeter.period import Period, epoch_us, rfc3339
from poolmeter.report import Report, dumps

if TYPE_CHECKING:
    import duckdb

VERSION = "1.4"
UNIT = "Device-Hours"
SERVICE = "GPU pool"
_DAY_LEVEL = 3  # day, allocation and device
_WHAT = {
    "usage": "Device time of {tenant} on {model}",
    "idle": "Promised and not used on {model}",
    "unallocated": "Promised to nobody on {model}",
    "overhead": "Reserved, suspended, down or spent on switching on {model}",
}

# In FOCUS's order, which is that of the alphabet; columns of our own behind them.
COLUMNS = (
    "AllocatedMethodDetails", "AllocatedMethodId", "AllocatedResourceId", "AllocatedResourceName", "AllocatedTags", "BilledCost",
    "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass",
    "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory",
    "PricingQuantity", "PricingUnit", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceProviderName",
    "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
    "x_AllocatedDeviceHours", "x_Basis", "x_Completeness", "x_EnergyKwh", "x_Line", "x_MemoryAllocatedGibHours", "x_Mode", "x_Node",
    "x_PlanName", "x_PlanSha256", "x_PlanVersion", "x_SplitOriginCost", "x_SplitOriginId", "x_UsedBasis", "x_UsedDeviceHours",
)  # fmt: skip
_MEASURED = {
    "allocated_device_hours": "x_AllocatedDeviceHours",
    "used_device_hours": "x_UsedDeviceHours",
    "used_basis": "x_UsedBasis",
    "completeness": "x_Completeness",
    "energy_kwh": "x_EnergyKwh",
    "memory_allocated_gib_hours": "x_MemoryAllocatedGibHours",
}
_TAGS = ("project", "user", "workload", "workload_class", "environment")


@dataclass(frozen=True)
class _Bill:
    """What all rows of an export have in common."""

    period: Period
    plan: PricePlan
    basis: str
    issuer: str | None


def focus_report(
    root: Path,
    period: Callable[[str | None], Period],
    *,
    flag: Path | None,
    configured: Path | None,
    basis: str | None = None,
    issuer: str | None = None,
    filters: Filters = EVERYTHING,
) -> Report:
    """The rows of a period. `issuer` is who bills (None: each row's pool is named).

    `period` gives the period in a zone's name, as for chargeback. Raises what `chargeback_for` raises.
    """
    plan, warnings = chosen_plan(root, flag, configured)
    asked = period(None if plan.zone is None else plan.zone.key)
    report = ask(root, lambda connection: focus_of(connection, asked, plan, basis, issuer, filters))
    return replace(report, warnings=(*warnings, *report.warnings))


def focus_of(
    connection: "duckdb.DuckDBPyConnection",
    period: Period,
    plan: PricePlan,
    basis: str | None = None,
    issuer: str | None = None,
    filters: Filters = EVERYTHING,
) -> Report:
    """`focus_report` of an open catalog."""
    bill = _Bill(period, plan, basis or plan.basis, issuer)
    shares, every = rated(connection, period, plan, _DAY_LEVEL, filters, bill.basis)
    shared = share_out(every, plan.policies, filters.told(("tenant", "pool"))).charges
    charges = [charge for charge in shared if chosen(charge, filters)]
    # A filter leaves rows out; the parts of a device's day are those of the whole day.
    rows = tuple(_row(part, bill) for part in _parts(every) if chosen(part.charge, filters))
    if filters.private:  # what is left of a device's cost says how others used it
        rows = tuple({name: value for name, value in row.items() if name != "x_SplitOriginCost"} for row in rows)
    rows += tuple(_shared_row(charge, bill) for charge in charges if charge.share.part != OWN and charge.share.tenant is not None)
    return Report(
        "focus",
        COLUMNS,
        rows,
        period.start_text(),
        period.end_text(),
        {"cost": money(sum(map(_billed, charges)), plan.minor_digits), "currency": plan.currency},
        (*warnings_of(shares, charges, filters.private), *unaccounted_warnings(connection, period, filters)),
        {"focus_version": VERSION},
    )


def _billed(charge: Charge) -> int:
    """What is left of a charge, or added, once the plan's policies have shared it: in all, the pool's cost."""
    return charge.amount + sum(charge.shared.values())


@dataclass
class _Part:
    """What of a charge was rated at one price: a part of what the device cost that day at that price.

    `ppb` is how large a part, by device time; `whole` what all of it cost, in the smallest unit. `first` of the charge's parts.
    """

    charge: Charge
    price: Decimal
    us: int
    amount: int
    first: bool
    ppb: int = 0
    whole: int = 0


def _parts(charges: Iterable[Charge]) -> list[_Part]:
    """All charges by price. Costs add up to what is billed of the charge, and the parts of a device's day at a price to one."""
    parts: list[_Part] = []
    origins: dict[tuple[object, ...], list[_Part]] = {}
    for charge in charges:
        # Without device time there is no amount either; a price of 0 has no weight, and its part none.
        spent = sorted((price, us) for price, us in charge.spent.items() if us)
        amounts = split_exactly(_billed(charge), [int(price.scaleb(PRICE_DECIMALS, EXACT)) * us for price, us in spent])
        for number, ((price, us), amount) in enumerate(zip(spent, amounts, strict=True)):
            parts.append(_Part(charge, price, us, amount, number == 0))
            origins.setdefault((charge.share.day, charge.share.device, price), []).append(parts[-1])
    for found in origins.values():
        whole = sum(part.amount for part in found)
        for part, ppb in zip(found, split_exactly(10**9, [part.us for part in found]), strict=True):
            part.ppb, part.whole = ppb, whole
    return parts


def _head(charge: Charge, bill: _Bill, amount: int) -> dict[str, object]:
    """The columns that every row has: when, who bills, what it costs."""
    share, plan = charge.share, bill.plan
    pool = (share.device[DEVICE.index("pool")] if share.device else None) or plan.name
    issuer, billed = bill.issuer or pool, money(amount, plan.minor_digits)
    start_us, end_us = day_edges(share.day, bill.period)
    month_us, next_month_us = month_edges(share.day, bill.period)
    return {
        "BilledCost": billed,
        "EffectiveCost": billed,
        "BillingAccountId": pool,
        "BillingAccountName": pool,
        "BillingCurrency": plan.currency,
        "BillingPeriodStart": rfc3339(month_us),
        "BillingPeriodEnd": rfc3339(next_month_us),
        "ChargePeriodStart": rfc3339(start_us),
        "ChargePeriodEnd": rfc3339(end_us),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "HostProviderName": issuer,
        "InvoiceIssuerName": issuer,
        "ServiceProviderName": issuer,
        "ServiceCategory": "Compute",
        "ServiceSubcategory": "Other (Compute)",
        "ServiceName": SERVICE,
        "SubAccountId": share.tenant,
        "SubAccountName": share.tenant,
        "SubAccountType": None if share.tenant is None else "Tenant",
        "x_Basis": bill.basis,
        "x_PlanName": plan.name,
        "x_PlanVersion": plan.version,
        "x_PlanSha256": plan.sha256,
    }


def _row(part: _Part, bill: _Bill) -> dict[str, object]:
    share, price, plan = part.charge.share, part.price, bill.plan
    device = dict(zip(DEVICE, share.device, strict=True))
    quantity = hours(part.us)
    listed = EXACT.multiply(price, quantity)
    element = {"AllocatedRatio": Decimal(part.ppb).scaleb(-9, EXACT), "UsageUnit": UNIT, "UsageQuantity": quantity}
    sku = f"{plan.name}/device-hour/{device['device_model']}"
    row = _head(part.charge, bill, part.amount) | {
        "AllocatedMethodId": f"{bill.basis} device time",
        "AllocatedMethodDetails": dumps({"Elements": [element]}),
        "AllocatedResourceId": share.part,  # of a tenant: its allocation, see below
        "AllocatedResourceName": share.part,
        "ListCost": listed,
        "ContractedCost": listed,
        "ListUnitPrice": price,
        "ContractedUnitPrice": price,
        "ChargeDescription": _WHAT[share.line].format(tenant=share.tenant, model=device["device_model"]),
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": UNIT,
        "ResourceId": device["device_uuid"],
        "ResourceName": device["device_model"],
        "ResourceType": "GPU",
        "SkuId": sku,
        "SkuMeter": "Device time",
        "SkuPriceId": f"{sku}@{format(price, 'f')} {plan.currency}",
        "SkuPriceDetails": dumps({"x_DeviceModel": device["device_model"], "x_Basis": bill.basis}),
        "x_Line": share.line,
        "x_Node": device["node"],
        "x_SplitOriginCost": money(part.whole, plan.minor_digits),
        "x_SplitOriginId": f"{device['node']}/{device['device_uuid']}/{day_text(share.day)}/{format(price, 'f')}",
    }
    if share.line == "usage":
        row |= _whose(part, dict(zip(LABELS, share.labels, strict=True)))
    return row


def _shared_row(charge: Charge, bill: _Bill) -> dict[str, object]:
    """What a policy of the plan adds to a tenant, of a part of the pool's cost; the list cost stays where the time was."""
    method = dict(bill.plan.policies)[charge.share.part]
    nothing = money(0, bill.plan.minor_digits)
    return _head(charge, bill, _billed(charge)) | {
        "AllocatedMethodId": method,
        "AllocatedResourceId": charge.share.tenant,
        "AllocatedResourceName": charge.share.tenant,
        "ListCost": nothing,
        "ContractedCost": nothing,
        "ChargeCategory": "Adjustment",  # usage has a price and a quantity
        "ChargeDescription": f"Part of what is {charge.share.part}, shared among tenants ({method})",
        "x_Line": f"shared {charge.share.part}",
    }


def _whose(part: _Part, labels: Mapping[str, str | None]) -> dict[str, object]:
    """The columns of a tenant's row."""
    tags = dumps({name: labels[name] for name in _TAGS if labels[name] is not None})
    row: dict[str, object] = {
        "AllocatedResourceId": labels["allocation_id"],
        "AllocatedResourceName": labels["workload"] or labels["allocation_id"],
        "AllocatedTags": tags,
        "ConsumedQuantity": hours(part.us),
        "ConsumedUnit": UNIT,
        "Tags": tags,
        "x_Mode": labels["mode"],
    }
    if part.first and part.charge.measures is not None:
        # Told once of a charge, however many prices it has: sums over rows are then what was measured.
        shown = part.charge.measures.shown()
        row |= {column: shown[name] for name, column in _MEASURED.items() if name in shown}
    return row


def day_edges(day: int, period: Period) -> tuple[int, int]:
    """The local day number `day` in the period's zone as [start, end) in epoch microseconds, as far as the period reaches."""
    start = datetime(1970, 1, 1) + timedelta(days=day)
    return max(period.start_us, _midnight(start, period)), min(period.end_us, _midnight(start + timedelta(days=1), period))


def month_edges(day: int, period: Period) -> tuple[int, int]:
    """The whole local calendar month of a day, as [start, end)."""
    start = (datetime(1970, 1, 1) + timedelta(days=day)).replace(day=1)
    return _midnight(start, period), _midnight((start + timedelta(days=32)).replace(day=1), period)


def _midnight(day: datetime, period: Period) -> int:
    # A midnight that a clock change skips is the moment of the change: zoneinfo takes the offset before it.
    return epoch_us(day.replace(tzinfo=period.zone))
