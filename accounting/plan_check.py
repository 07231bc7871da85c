"""What a price plan says, minute by minute: `poolmeter plan check` reads the file as rating does and prints its calendar.

One row per stretch of one local day with one set of prices and per model; a model is a key of the plan, patterns included, unless models
are named.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import pairwise

from poolmeter.accounting.dimensions import Calendar, day_text
from poolmeter.accounting.measures import hours
from poolmeter.accounting.parts import OWN_LINE, PARTS
from poolmeter.accounting.plans import PricePlan
from poolmeter.accounting.plans.bands import DAYS, HOLIDAY, kind_of_day
from poolmeter.accounting.plans.plan import UNPRICED, Tariff
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, HOUR_US, MICROSECONDS, MINUTE_US
from poolmeter.period import Period, parse_period, rfc3339, time_zone
from poolmeter.report import Report

COLUMNS = ("day", "kind", "clock", "from", "to", "hours", "band", "model", "device_hour", "currency")


@dataclass(frozen=True)
class Stretch:
    """Part of a local day with one tariff (None: no price). `clock` is its local time, `08:00-20:00`."""

    start_us: int
    end_us: int
    day: int
    clock: str
    tariff: Tariff | None


def calendar_period(plan: PricePlan, start: str | None, end: str | None, now_us: int) -> Period:
    """The period asked for; without `start` this week from Monday on, or the plan's first week when it has no price now; without `end` a week.

    Raises BadInput as `parse_period`.
    """
    zone = plan.zone or time_zone("UTC")
    if start is None:
        covered = plan.tariff_at(now_us - now_us % MINUTE_US) is not None
        at = now_us if covered else min(prices.start_us for prices in plan.price_sets)
        local = datetime.fromtimestamp(at // MICROSECONDS, zone).date()
        start = (local - timedelta(days=local.weekday()) if covered else local).isoformat()
    if end is None:
        first = parse_period(start, "9999-12-31", zone.key, now_us).start_us
        end = (datetime.fromtimestamp(first // MICROSECONDS, zone).replace(tzinfo=None) + timedelta(days=7)).isoformat()
    return parse_period(start, end, zone.key, now_us)


def stretches(plan: PricePlan, period: Period) -> tuple[Stretch, ...]:
    """The period cut where the tariff, the local day or the zone's offset changes."""
    offsets = Calendar.of(period).offsets
    changes = plan.changes(period.start_us, period.end_us)
    edges = {at for at, _ in (*offsets, *changes)} | {period.end_us}
    for (from_us, offset), until_us in zip(offsets, [*(at for at, _ in offsets[1:]), period.end_us], strict=True):
        edges |= {day * DAY_US - offset for day in range((from_us + offset) // DAY_US + 1, (until_us + offset - 1) // DAY_US + 1)}
    ordered = sorted(edges)
    found = []
    for start_us, end_us in pairwise(ordered):
        offset, place = (table[bisect_right(table, start_us, key=lambda entry: entry[0]) - 1][1] for table in (offsets, changes))
        local, until = start_us + offset, (end_us + offset) % DAY_US or DAY_US
        clock = f"{_clock(local % DAY_US)}-{_clock(until)}"
        found.append(Stretch(start_us, end_us, local // DAY_US, clock, None if place == UNPRICED else plan.tariffs[place]))
    return tuple(found)


def plan_report(plan: PricePlan, period: Period, models: Sequence[str] = (), wide: bool = False) -> Report:
    """The calendar of a period. `wide` puts the models side by side, a column each, for people.

    Raises BadInput where a model that is named has no price, or two.
    """
    asked = tuple(dict.fromkeys(models or _models(plan)))
    rows: list[dict[str, object]] = []
    missing: dict[str, None] = {}
    for stretch in stretches(plan, period):
        head: dict[str, object] = {
            "day": day_text(stretch.day),
            "kind": _kind(plan, stretch.day),
            "clock": stretch.clock,
            "from": rfc3339(stretch.start_us),
            "to": rfc3339(stretch.end_us),
            "hours": hours(stretch.end_us - stretch.start_us),
        }
        prices: dict[str, object] = {}
        if stretch.tariff is None:
            missing[f"no prices entry covers {rfc3339(stretch.start_us)}: what is used then cannot be rated"] = None
        else:
            entry = plan.price_sets[stretch.tariff.entry]
            if stretch.tariff.band is not None:
                head["band"] = entry.bands[stretch.tariff.band].name
            for model in asked:
                try:
                    prices[model] = str(plan.price_in(stretch.tariff, model, rfc3339(stretch.start_us)))
                except BadInput as error:
                    if models:
                        raise
                    missing.setdefault(_what(plan, stretch.tariff, model, error))
        if wide:
            rows.append({**prices, **head})
        else:
            rows += [{**head, "model": model, "device_hour": price, "currency": plan.currency} for model, price in prices.items()] or [head]
    columns = (*COLUMNS[:3], "band", *asked) if wide else COLUMNS
    policy = {part: dict(plan.policies).get(part, OWN_LINE) for part in PARTS}
    extra = {"policy": policy, "plan": {"name": plan.name, "version": plan.version, "sha256": plan.sha256}}
    zone = (plan.zone or time_zone("UTC")).key
    totals: dict[str, object] = {"currency": plan.currency, "basis": plan.basis, "time_zone": zone}
    warnings = (*missing, *_years_without_holidays(plan, period))
    return Report("plan-check", columns, tuple(rows), period.start_text(), period.end_text(), totals, warnings, extra)


def _models(plan: PricePlan) -> list[str]:
    found: list[str] = []
    for prices in plan.price_sets:
        for table in (prices.device_hour, *(band.device_hour for band in prices.bands)):
            found += [pattern for pattern, _ in table]
    return found


def _what(plan: PricePlan, tariff: Tariff, model: str, error: BadInput) -> str:
    # Once for each band and model, not for each day.
    bands = plan.price_sets[tariff.entry].bands
    band = "" if tariff.band is None else f" in the band {bands[tariff.band].name!r}"
    ambiguous = "equally specific" in str(error)
    return f"{model!r} has {'two prices' if ambiguous else 'no price'}{band} of prices[{tariff.entry}]: a device of it cannot be rated then"


def _kind(plan: PricePlan, day: int) -> str:
    kind = kind_of_day(day, plan.holidays)
    return "holiday" if kind == HOLIDAY else DAYS[kind]


def _clock(us: int) -> str:
    hour, minute = divmod(us // MINUTE_US, HOUR_US // MINUTE_US)
    return f"{hour:02}:{minute:02}"


def _years_without_holidays(plan: PricePlan, period: Period) -> list[str]:
    """A list of holidays that ends is easily forgotten: the days after it are days of the week, at their price."""
    if not any(HOLIDAY in band.days for prices in plan.price_sets for band in prices.bands) or not plan.holidays:
        return []
    listed = {(date(1970, 1, 1) + timedelta(days=day)).year for day in plan.holidays}
    first, last = (datetime.fromtimestamp(us // MICROSECONDS, period.zone).year for us in (period.start_us, period.end_us - 1))
    return [f"holidays has no date of {year}, and bands name holidays" for year in range(first, last + 1) if year not in listed]
