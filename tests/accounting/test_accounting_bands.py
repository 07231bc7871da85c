"""Bands of price plans: every minute has the one price that a reader of the plan and of a clock on the wall would say."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import duckdb
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from poolmeter.accounting import shares
from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import EVERYTHING
from poolmeter.accounting.plans import PricePlan, parse_plan
from poolmeter.accounting.plans.plan import UNPRICED
from poolmeter.accounting.rating import day_total
from poolmeter.accounting.usage import usage_of
from poolmeter.errors import BadInput
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord
from poolmeter.period import Period, parse_period
from poolmeter.report import Report, render

Store = Callable[[Sequence[UsageRecord]], AbstractContextManager[duckdb.DuckDBPyConnection]]
QUICK = settings(
    max_examples=settings.default.max_examples if os.environ.get("POOLMETER_LONG") == "1" else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
WEEK = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MODELS = ("Sim H200", "Sim L4")
# Zone and first day of four: clock changes both ways, at midnight, by half an hour; half-hour offsets; a day that never was; leap days;
# the turn of a year; and a zone that never changes.
PLACES = (
    ("Europe/Vienna", "2026-03-28"), ("Europe/Vienna", "2026-10-24"), ("Europe/Vienna", "2028-02-28"), ("America/New_York", "2026-11-01"),
    ("America/Havana", "2026-03-07"), ("America/Havana", "2026-10-31"), ("Australia/Lord_Howe", "2026-04-04"), ("Asia/Kolkata", "2026-12-30"),
    ("Asia/Kathmandu", "2026-05-01"), ("Pacific/Apia", "2011-12-29"), ("Asia/Tokyo", "2024-02-28"), ("UTC", "2026-09-21"),
)  # fmt: skip
HEAD = """schema = "poolmeter.plan/1"
name = "generated"
version = 1
currency = "EUR"
basis = "used"
time_zone = "{zone}"
holidays = [{holidays}]
[[prices]]
from = 2000-01-01
device_hour = {{ "Sim H*" = "{base}", "*" = "1.07" }}
"""


@dataclass(frozen=True)
class BandText:
    """A band as it is written: `days` are words, `hours` are clock times in minutes; an `end` at or before `start` passes midnight."""

    name: str
    days: tuple[str, ...]
    hours: tuple[tuple[int, int], ...]
    factor: str | None
    price: str | None

    def toml(self) -> str:
        hours = ", ".join(f'"{_clock(start)}-{_clock(end)}"' for start, end in self.hours)
        text = f'[[prices.bands]]\nname = "{self.name}"\ndays = [{", ".join(f"{day!r}" for day in self.days)}]\nhours = [{hours}]\n'
        text += "" if self.factor is None else f'factor = "{self.factor}"\n'
        return text + ("" if self.price is None else f'device_hour = {{ "Sim H200" = "{self.price}" }}\n')


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@dataclass(frozen=True)
class Case:
    """A plan as written, a pool on some minutes of four days of its zone, and the period of these days."""

    zone: ZoneInfo
    holidays: frozenset[date]
    base: str
    bands: tuple[BandText, ...]
    period: Period
    records: tuple[UsageRecord, ...]

    def text(self, bands: Sequence[BandText] | None = None) -> str:
        dates = ", ".join(sorted(day.isoformat() for day in self.holidays))
        return HEAD.format(zone=self.zone.key, holidays=dates, base=self.base) + "".join(
            band.toml() for band in (self.bands if bands is None else bands)
        )

    def plan(self, bands: Sequence[BandText] | None = None) -> PricePlan:
        return parse_plan(self.text(bands).encode(), "generated.toml")

    def bands_of(self, minute_us: int) -> list[BandText]:
        """The bands that cover a minute: what somebody with the plan, a calendar and a clock would say."""
        local = datetime.fromtimestamp(minute_us // 1_000_000, UTC).astimezone(self.zone)
        now = local.hour * 60 + local.minute

        def is_day(band: BandText, day: date) -> bool:
            return ("holidays" if day in self.holidays else WEEK[day.weekday()]) in band.days

        today, yesterday = local.date(), local.date() - timedelta(days=1)
        found = []
        for band in self.bands:
            for start, end in band.hours:
                evening = is_day(band, today) and start <= now and (now < end or end <= start)
                if evening or (is_day(band, yesterday) and end <= start and now < end):
                    found.append(band)
                    break
        return found

    def price(self, model: str, minute_us: int) -> Fraction:
        base = Fraction(self.base) if model == "Sim H200" else Fraction("1.07")
        for band in self.bands_of(minute_us):
            if band.price is not None and model == "Sim H200":
                return Fraction(band.price)
            assert band.factor is not None
            return base * Fraction(band.factor)
        return base

    def bill(self, stores: Store, plan: PricePlan, by: tuple[str, ...] = ("tenant",), basis: str | None = None) -> Report:
        with stores(self.records) as connection:
            return chargeback_of(connection, self.period, plan, by, EVERYTHING, basis)


@st.composite
def bands(draw: st.DrawFn) -> tuple[BandText, ...]:
    """Bands whose hours are a day cut in pieces; each piece on some days."""
    cuts = sorted(draw(st.lists(st.integers(0, 24 * 60 - 1), min_size=2, max_size=5, unique=True)))
    longer = draw(st.sampled_from((0, 90, 0)))  # so much each piece reaches into the next: bands that meet
    found = []
    for index, (start, end) in enumerate(zip(cuts, [*cuts[1:], cuts[0]], strict=True)):
        if draw(st.booleans()):
            continue
        sets = [tuple(draw(st.lists(st.sampled_from((*WEEK, "holidays")), min_size=1, unique=True)))]
        if draw(st.booleans()) and len(sets[0]) < 8:
            sets.append(tuple(day for day in (*WEEK, "holidays") if day not in sets[0]))
        for number, days in enumerate(sets):
            factor = draw(st.sampled_from(("0", "0.5", "1", "1.25", "3")))
            price = draw(st.one_of(st.none(), st.sampled_from(("0", "0.000000001", "9.99"))))
            until = (end + longer) % (24 * 60)
            found.append(BandText(f"band {index}.{number}", days, ((start, until if until != start else end),), factor, price))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name, first = draw(st.sampled_from(PLACES))
    zone, day = ZoneInfo(name), date.fromisoformat(first)
    period = parse_period(first, (day + timedelta(days=4)).isoformat(), name, 0)
    holidays = frozenset(draw(st.lists(st.sampled_from([day + timedelta(days=n) for n in range(-1, 5)]), min_size=1, max_size=3)))
    minutes = draw(st.lists(st.integers(0, (period.end_us - period.start_us) // MINUTE_US - 1), min_size=1, max_size=25, unique=True))
    records: list[UsageRecord] = []
    for number, minute in enumerate(minutes):
        at_us, model = period.start_us + minute * MINUTE_US, draw(st.sampled_from(MODELS))
        span = draw(st.sampled_from((MINUTE_US, 59_999_999, 7)))
        promised, used = draw(st.integers(0, span)), draw(st.one_of(st.none(), st.integers(0, span)))
        key = {
            "node": "n1", "epoch": "e", "pool": "main", "minute_us": at_us, "start_us": at_us, "span_us": span,
            "device_uuid": f"GPU-{model}", "device_model": model,
        }  # fmt: skip
        records.append(
            DeviceRecord(
                **key,
                sequence=2 * number,
                allocated_us=promised,
                reserved_unused_us=0,
                unallocated_us=span - promised,
                suspended_us=0,
                down_us=0,
                memory_total_bytes=1,
                switch_overhead_us=None,
                unaccounted_us=0,
            )
        )
        records.append(
            SliceRecord(
                **key,
                sequence=2 * number + 1,
                allocation_id=f"a{number % 3}",
                tenant=("acme", "beta", "coyote")[number % 3],
                mode="hook",
                state="active",
                used_basis="allocated" if used is None else "hook",
                generation=1,
                promised_us=promised,
                allocated_us=promised,
                suspended_us=0,
                memory_allocated_kib_us=1,
                used_us=used,
            )
        )
    return Case(zone, holidays, draw(st.sampled_from(("7.25", "0.40", "1999"))), draw(bands()), period, tuple(records))


def readable(case: Case) -> PricePlan:
    """The plan, unless its bands meet."""
    try:
        return case.plan()
    except BadInput as error:
        assume("meet on" not in str(error))
        raise


@QUICK
@given(case=cases())
def test_a_plan_is_refused_exactly_when_two_bands_meet(case: Case) -> None:
    # Five weeks around: every pair of days that follow each other, with the holidays as they are.
    start = case.period.start_us - case.period.start_us % MINUTE_US - 14 * 24 * 60 * MINUTE_US
    clash = next((at for at in range(start, start + 35 * 24 * 60 * MINUTE_US, 5 * MINUTE_US) if len(case.bands_of(at)) > 1), None)
    try:
        case.plan()
    except BadInput as error:
        words = str(error)
        assert "generated.toml line " in words and "meet on" in words
        moment = datetime.fromisoformat(words.split("(")[-1].split(")")[0])
        met = case.bands_of(int(moment.timestamp()) * 1_000_000)
        assert len(met) > 1 and all(f"{band.name!r}" in words for band in met[:2])
    else:
        assert clash is None


@QUICK
@given(case=cases())
def test_the_bill_is_the_sum_over_minutes_at_their_price(stores: Store, case: Case) -> None:
    plan = readable(case)
    days: dict[str, Fraction] = {}
    hours: dict[int, set[Fraction]] = {}
    for record in case.records:
        if isinstance(record, DeviceRecord):
            price = case.price(record.device_model, record.minute_us)
            assert price == Fraction(plan.price(record.device_model, record.minute_us))
            local = datetime.fromtimestamp(record.minute_us // 1_000_000, UTC).astimezone(case.zone)
            day = local.date().isoformat()
            days[day] = days.get(day, Fraction(0)) + record.span_us * price
            hour_us = record.minute_us - local.minute * MINUTE_US
            hours.setdefault(hour_us, set()).add(price)
    expected = {day: Decimal(day_total(int(weight * 10**9), 2)).scaleb(-2) for day, weight in days.items()}
    for basis in ("allocated", "used"):
        report = case.bill(stores, plan, ("day",), basis)
        assert report.totals["cost"] == sum(expected.values())
        assert report.totals["cost"] == sum(Decimal(str(report.totals[name])) for name in ("tenants", "idle", "unallocated", "overhead"))
        for day, cost in expected.items():
            assert sum(Decimal(str(row["cost"])) for row in report.rows if row["day"] == day) == cost
        by_hour = case.bill(stores, plan, ("hour", "tenant"), basis)
        assert by_hour.totals == report.totals
        for row in by_hour.rows:
            at = int(datetime.fromisoformat(str(row["hour"])).timestamp()) * 1_000_000
            assert "unit_price" not in row or Fraction(str(row["unit_price"])) in hours[at]
            assert len(hours[at]) > 1 or Fraction(str(row["unit_price"])) == next(iter(hours[at]))


@QUICK
@given(case=cases(), cut=st.integers(1, 24 * 60 - 1))
def test_splitting_a_band_changes_nothing(stores: Store, case: Case, cut: int) -> None:
    plan = readable(case)
    split: list[BandText] = []
    for band in case.bands:
        (start, end), length = band.hours[0], (band.hours[0][1] - band.hours[0][0]) % (24 * 60)
        middle = start + cut % length if length > 1 else start
        if start < middle and middle % (24 * 60) != end and middle < 24 * 60:
            split.append(BandText(band.name + " one", band.days, ((start, middle),), band.factor, band.price))
            # What passes midnight belongs to the day it began on; the second half of an evening does so too.
            split.append(BandText(band.name + " two", band.days, ((middle, end),), band.factor, band.price))
        else:
            split.append(band)
    for by in (("tenant",), ("hour", "device"), ("day", "tenant", "model")):
        one, other = case.bill(stores, plan, by), case.bill(stores, case.plan(split), by)
        assert (one.rows, one.totals) == (other.rows, other.totals)


@QUICK
@given(case=cases())
def test_one_band_over_all_hours_is_the_plan_without_bands(stores: Store, case: Case) -> None:
    always = BandText("always", (*WEEK, "holidays"), ((0, 24 * 60),), "1", None)
    hundred = BandText("hundredfold", (*WEEK, "holidays"), ((0, 24 * 60),), "100", None)
    plain = case.bill(stores, case.plan(()), ("tenant", "hour"))
    same = case.bill(stores, case.plan([always]), ("tenant", "hour"))
    assert (plain.rows, plain.totals) == (same.rows, same.totals)
    dearer = case.bill(stores, case.plan([hundred]), ("tenant", "hour"))
    assert abs(Fraction(str(dearer.totals["cost"])) - 100 * Fraction(str(plain.totals["cost"]))) <= Fraction(5 * 51, 100)


@QUICK
@given(case=cases(), minute=st.integers(1, 4 * 23 * 60))
def test_periods_cut_anywhere_price_the_same_minutes(stores: Store, case: Case, minute: int) -> None:
    plan = readable(case)
    middle_us = case.period.start_us + minute * MINUTE_US
    whole = dict(_spread(plan.changes(case.period.start_us, case.period.end_us), case.period.end_us))
    first = dict(_spread(plan.changes(case.period.start_us, middle_us), middle_us))
    second = dict(_spread(plan.changes(middle_us, case.period.end_us), case.period.end_us))
    assert {**first, **second} == whole and not first.keys() & second.keys()
    with stores(case.records) as connection:
        # Quantities do not know of prices.
        before = usage_of(connection, case.period, ("tenant",), EVERYTHING)
    assert sum(int(str(before.totals[part])) for part in ("allocated_us", "unallocated_us")) == before.totals["capacity_us"]


@QUICK
@given(case=cases())
def test_days_that_are_asked_for_one_by_one_have_the_same_bands(stores: Store, case: Case) -> None:
    plan = readable(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "CHUNK_ROWS", 1)
        parts = case.bill(stores, plan, ("hour", "tenant"))
    whole = case.bill(stores, plan, ("hour", "tenant"))
    assert (parts.rows, parts.totals) == (whole.rows, whole.totals)


def _spread(changes: Sequence[tuple[int, int]], end_us: int) -> list[tuple[int, int]]:
    return [
        (at_us, place)
        for (start_us, place), until_us in zip(changes, [*(at for at, _ in changes[1:]), end_us], strict=True)
        for at_us in range(start_us, until_us, MINUTE_US)
    ]


@QUICK
@given(case=cases())
def test_order_of_records_and_bands_changes_no_byte(stores: Store, case: Case) -> None:
    plan = readable(case)
    records = list(reversed(case.records))
    other = Case(case.zone, case.holidays, case.base, case.bands, case.period, tuple(records))
    for by in (("tenant",), ("hour",)):
        assert render(case.bill(stores, plan, by), "json") == render(other.bill(stores, plan, by), "json")
    # In another order the bands have other numbers, and the plan another hash; the rows are the same.
    turned = case.bill(stores, case.plan(tuple(reversed(case.bands))), ("tenant", "hour"))
    assert turned.rows == case.bill(stores, plan, ("tenant", "hour")).rows


@pytest.mark.parametrize(
    ("zone", "day", "hours", "night"),
    [
        ("Europe/Vienna", "2026-03-29", 23, 3 * 60 - 60),
        ("Europe/Vienna", "2026-10-25", 25, 3 * 60 + 60),
        ("America/New_York", "2026-03-08", 23, 3 * 60 - 60),
        ("Australia/Lord_Howe", "2026-04-05", 24.5, 3 * 60 + 30),
        ("Asia/Kolkata", "2026-03-29", 24, 3 * 60),
        ("Asia/Tokyo", "2028-02-29", 24, 3 * 60),
    ],
)
def test_the_hours_of_a_night_are_those_of_the_clock(zone: str, day: str, hours: float, night: int) -> None:
    """From midnight to 03:00 by the clock: an hour more or less on the days of a change."""
    text = HEAD.format(zone=zone, holidays="", base="1") + '[[prices.bands]]\nname = "night"\nhours = "00:00-03:00"\nfactor = 2\n'
    plan = parse_plan(text.encode(), "p.toml")
    period = parse_period(day, (date.fromisoformat(day) + timedelta(days=1)).isoformat(), zone, 0)
    minutes = _spread(plan.changes(period.start_us, period.end_us), period.end_us)
    assert len(minutes) == hours * 60 and all(place != UNPRICED for _, place in minutes)
    assert sum(plan.tariffs[place].band == 0 for _, place in minutes) == night


def test_the_generator_reaches_what_it_is_for() -> None:
    seen = {"refused": 0, "taken": 0, "banded": 0, "holiday": 0}

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(case=cases())
    def look(case: Case) -> None:
        try:
            case.plan()
        except BadInput:
            seen["refused"] += 1
            return
        seen["taken"] += 1
        seen["banded"] += any(case.bands_of(record.minute_us) for record in case.records)
        seen["holiday"] += any("holidays" in band.days for record in case.records for band in case.bands_of(record.minute_us))

    look()
    assert min(seen.values()) >= 5, seen
