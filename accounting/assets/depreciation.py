"""Straight-line depreciation, in whole currency units: the days of a device's life sum to its price without the residual, exactly.

A day's part is that of `split_exactly` over equal days: the remainder goes to the earliest days, a unit each. So any period is a
difference of two running sums, and periods that meet sum to the one that both are.
"""

import calendar
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.accounting.rating import money
from poolmeter.errors import BadInput, DataError
from poolmeter.model.units import MICROSECONDS
from poolmeter.period import Period
from poolmeter.report import Report

BY = ("owner", "model", "device", "month")
NEEDED = ("bought", "price", "life_months", "residual")
COLUMNS = ("devices", "cost", "currency", "book_value", "state")


@dataclass(frozen=True)
class Schedule:
    """A device's loss of worth: `amount` and `residual` in the currency's smallest unit, over `days` days from `bought` on."""

    bought: date
    days: int
    amount: int
    residual: int
    currency: str

    def until(self, day: date) -> int:
        """What all days before `day` cost together."""
        passed = min(max((day - self.bought).days, 0), self.days)
        base, extra = divmod(self.amount, self.days)
        return passed * base + min(passed, extra)

    def cost(self, start: date, end: date) -> int:
        """What the days from `start` up to and without `end` cost."""
        return self.until(end) - self.until(start)

    def state(self, day: date) -> str:
        """`not bought`, `in use` or `written off` on a day."""
        if day < self.bought:
            return "not bought"
        return "in use" if (day - self.bought).days < self.days else "written off"


def missing(asset: Mapping[str, object]) -> tuple[str, ...]:
    """The fields without which a device has no depreciation, and which the register does not know."""
    return tuple(name for name in NEEDED if asset.get(name) is None)


def schedule_of(asset: Mapping[str, object]) -> Schedule:
    """The schedule of a device that misses nothing. Raises DataError on a currency without known units or an amount finer than them."""
    currency = str(asset["currency"])
    if currency not in MINOR_DIGITS:
        raise DataError(f"currency of asset {asset['uuid']} is {currency!r}, expected one of ISO 4217")
    bought = date.fromisoformat(str(asset["bought"]))
    try:
        days = (months_after(bought, int(str(asset["life_months"]))) - bought).days
    except ValueError:
        raise DataError(f"life of asset {asset['uuid']} ends after the year 9999, expected an end before") from None
    price, residual = (minor_units(str(asset[name]), currency, f"{name} of asset {asset['uuid']}") for name in ("price", "residual"))
    return Schedule(bought, days, price - residual, residual, currency)


def months_after(start: date, months: int) -> date:
    """The same day so many months later; the last of the month where that has no such day. Raises ValueError past the year 9999."""
    year, month = divmod(start.year * 12 + start.month - 1 + months, 12)
    if year > 9999:
        raise ValueError(year)
    return date(year, month + 1, min(start.day, calendar.monthrange(year, month + 1)[1]))


def minor_units(text: str, currency: str, what: str) -> int:
    """An exact decimal in the currency's smallest unit. Raises DataError when it is finer than that."""
    digits = MINOR_DIGITS[currency]
    amount = Decimal(text).scaleb(digits)
    if amount != int(amount):
        raise DataError(f"{what} is {text} {currency}, expected at most {digits} decimals")
    return int(amount)


def days_of(period: Period) -> tuple[date, date]:
    """The days whose midnight in the period's zone lies in it, as [first, end): so that periods that meet share no day and miss none."""
    return _first_midnight(period.start_us, period), _first_midnight(period.end_us, period)


def _first_midnight(us: int, period: Period) -> date:
    local = datetime.fromtimestamp(us // MICROSECONDS, UTC).astimezone(period.zone)
    later = local.hour or local.minute or local.second or us % MICROSECONDS
    return local.date() + timedelta(days=1) if later else local.date()


def depreciation_report(assets: Sequence[Mapping[str, object]], period: Period, by: str) -> Report:
    """What devices lost in worth in a period, a row for each value of `by` and currency.

    Devices that miss a field are named in the warnings, and are in no row and no sum. Raises BadInput on another `by`.
    """
    if by not in BY:
        raise BadInput(f"--by is {by!r:.40}, expected one of {', '.join(BY)}")
    start, end = days_of(period)
    groups: dict[tuple[str | None, str], list[tuple[Schedule, int, date]]] = {}
    warnings = []
    for asset in assets:
        if lacking := missing(asset):
            warnings.append(f"device {asset['uuid']} has no {', '.join(lacking)} in the register: it is not in these sums")
            continue
        schedule = schedule_of(asset)
        for key, first, last in _parts(asset, by, start, end):
            groups.setdefault((key, schedule.currency), []).append((schedule, schedule.cost(first, last), last))
    rows: list[dict[str, object]] = []
    sums: dict[str, int] = {}
    for (key, currency), members in sorted(groups.items(), key=lambda item: (item[0][0] is None, item[0][0] or "", item[0][1])):
        digits = MINOR_DIGITS[currency]
        cost = sum(part for _, part, _ in members)
        left = sum(schedule.residual + schedule.amount - schedule.until(last) for schedule, _, last in members)
        row: dict[str, object] = {} if key is None else {by: key}
        row |= {"devices": len(members), "cost": money(cost, digits), "currency": currency, "book_value": format(money(left, digits), "f")}
        if by == "device":
            row["state"] = members[0][0].state(max(start, end - timedelta(days=1)))
        rows.append(row)
        sums[currency] = sums.get(currency, 0) + cost
    totals = [{"currency": currency, "cost": money(cost, MINOR_DIGITS[currency])} for currency, cost in sorted(sums.items())]
    extra = {"sums": totals, "days": (end - start).days}
    return Report("depreciation", (by, *COLUMNS), tuple(rows), period.start_text(), period.end_text(), {}, tuple(warnings), extra)


def _parts(asset: Mapping[str, object], by: str, start: date, end: date) -> list[tuple[str | None, date, date]]:
    if by != "month":
        value = asset.get("uuid" if by == "device" else by)
        return [(None if value is None else str(value), start, end)]
    found: list[tuple[str | None, date, date]] = []
    first = start
    while first < end:
        last = min(months_after(first.replace(day=1), 1), end)
        found.append((f"{first:%Y-%m}", first, last))
        first = last
    return found
