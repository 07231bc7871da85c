"""Invariants of usage and chargeback over generated pools: the data decides, not the code."""

import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest
from accounting_pools import FIRST_US, PERIOD, PLAN, QUICK, TENANTS, Pool, Stores, pools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import BY, CHARGE_BY, EVERYTHING, Calendar, Filters
from poolmeter.accounting.focus import focus_of
from poolmeter.accounting.parts import METHODS, OVERHEAD_PARTS, PARTS
from poolmeter.accounting.plans import parse_plan
from poolmeter.accounting.policies import share_out
from poolmeter.accounting.rating import day_total, rate
from poolmeter.accounting.shares import read_shares
from poolmeter.accounting.usage import usage_of
from poolmeter.model.units import HOUR_US, MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord
from poolmeter.period import Period
from poolmeter.report import Report, render


def bill(stores: Stores, pool: Pool, by: tuple[str, ...] = ("tenant",), filters: Filters = EVERYTHING) -> Report:
    with stores(pool.records) as connection:
        return chargeback_of(connection, PERIOD, pool.plan, by, filters)


def exact(
    stores: Stores, pool: Pool, by_tenant: Callable[[str | None], str | None] = lambda name: name
) -> dict[tuple[str, str | None, int], tuple[int, Fraction]]:
    """Device time and unrounded cost per line, tenant and day."""
    sums: dict[tuple[str, str | None, int], tuple[int, Fraction]] = {}
    with stores(pool.records) as connection:
        found = read_shares(connection, Calendar.of(PERIOD), pool.plan.basis, pool.plan.changes(PERIOD.start_us, PERIOD.end_us), 1)
    for share in found.shares:
        us, cost = sums.get(key := (share.line, by_tenant(share.tenant), share.day), (0, Fraction(0)))
        sums[key] = (us + share.us, cost + Fraction(pool.plan.price(share.model, share.first_minute_us)) * share.us)
    return sums


def costs(report: Report, column: str = "cost") -> Decimal:
    return sum((row[column] for row in report.rows if column in row), Decimal(0))  # type: ignore[misc]


def money_columns(pool: Pool) -> tuple[str, ...]:
    """The columns of a bill that hold amounts."""
    return ("cost", "shared_cost", *(f"shared_{part}" for part, _ in pool.plan.policies), "total_cost") if pool.plan.policies else ("cost",)


@QUICK
@given(pool=pools())
def test_every_microsecond_has_one_owner(stores: Stores, pool: Pool) -> None:
    capacity = sum(record.span_us for record in pool.records if isinstance(record, DeviceRecord))
    for basis in ("allocated", "used"):
        with stores(pool.records) as connection:
            found = read_shares(connection, Calendar.of(PERIOD), basis, pool.plan.changes(PERIOD.start_us, PERIOD.end_us), 4)
            parts = ("paid", *PARTS)
            assert connection.execute(f"SELECT COUNT(*) FROM parts WHERE LEAST({', '.join(parts)}) < 0").fetchall() == [(0,)]
            assert connection.execute(f"SELECT COUNT(*) FROM parts WHERE {' + '.join(parts)} <> span_us").fetchall() == [(0,)]
        assert all(share.us >= 0 for share in found.shares)
        assert sum(share.us for share in found.shares) == found.capacity_us == capacity
    with stores(pool.records) as connection:
        totals = usage_of(connection, PERIOD, ("tenant",), EVERYTHING).totals
    parts = ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us")
    assert sum(int(str(totals[part])) for part in parts) == totals["capacity_us"] == capacity


@QUICK
@given(pool=pools())
def test_lines_sum_to_the_cost_of_the_pool(stores: Stores, pool: Pool) -> None:
    digits = pool.plan.minor_digits
    report = bill(stores, pool, ("day",))
    weights: dict[int, Fraction] = {}
    for (_, _, day), (_, cost) in exact(stores, pool).items():
        weights[day] = weights.get(day, Fraction(0)) + cost
    expected = sum(day_total(int(cost * 10**9), digits) for cost in weights.values())
    totals = report.totals
    assert totals["cost"] == Decimal(expected).scaleb(-digits) == costs(report)
    assert totals["cost"] == sum(Decimal(str(totals[name])) for name in ("tenants", "idle", "unallocated", "overhead"))


@QUICK
@given(pool=pools(), by=st.lists(st.sampled_from(BY), min_size=1, max_size=3, unique=True))
def test_grouping_and_filtering_move_no_cent(stores: Stores, pool: Pool, by: list[str]) -> None:
    whole, grouped = bill(stores, pool, ("tenant", "day")), bill(stores, pool, tuple(by))
    assert costs(grouped) == costs(whole) and grouped.totals == whole.totals
    finer = bill(stores, pool, tuple(dict.fromkeys((*by, "tenant", "day", "device", "hour"))))
    for row in grouped.rows:
        same = [other for other in finer.rows if all(other.get(name) == row.get(name) for name in (*by, "line"))]
        for column in money_columns(pool):
            assert sum((other.get(column, 0) for other in same), Decimal(0)) == row.get(column, 0)  # type: ignore[misc]
    nodes = sorted({record.node for record in pool.records})
    assert sum((costs(bill(stores, pool, filters=Filters(node=(node,)))) for node in nodes), Decimal(0)) == costs(whole)
    tenants = sorted({record.tenant for record in pool.records if isinstance(record, SliceRecord)})
    assert sum((costs(bill(stores, pool, filters=Filters(tenant=(tenant,)))) for tenant in tenants), Decimal(0)) == whole.totals["tenants"]


@QUICK
@given(pool=pools())
def test_no_line_is_a_whole_unit_off_its_exact_cost(stores: Stores, pool: Pool) -> None:
    unit = Decimal(1).scaleb(-pool.plan.minor_digits)
    rows = bill(stores, pool, ("tenant", "day")).rows
    for (line, tenant, day), (us, cost) in exact(stores, pool).items():
        same = [row for row in rows if row["line"] == line and row.get("tenant") == tenant]
        days = sorted({str(row["day"]) for row in rows})
        if us and len(days) == 1 and day:
            assert abs(Fraction(same[0]["cost"]) - cost / HOUR_US) < 2 * Fraction(unit)  # type: ignore[arg-type]


@QUICK
@given(pool=pools(), seed=st.integers(0, 2**32))
def test_order_of_rows_changes_no_byte(stores: Stores, pool: Pool, seed: int) -> None:
    shuffled = list(pool.records)
    random.Random(seed).shuffle(shuffled)
    for by in (("tenant",), ("project", "device", "hour")):
        one, other = bill(stores, pool, by), bill(stores, replace(pool, records=tuple(shuffled)), by)
        for fmt in ("table", "json", "csv", "arrow", "parquet"):
            assert render(one, fmt) == render(other, fmt)
        with stores(pool.records) as first, stores(shuffled) as second:
            assert render(usage_of(first, PERIOD, by, EVERYTHING), "json") == render(usage_of(second, PERIOD, by, EVERYTHING), "json")
            assert render(focus_of(first, PERIOD, pool.plan), "csv") == render(focus_of(second, PERIOD, pool.plan), "csv")


@QUICK
@given(pool=pools())
def test_renaming_tenants_moves_no_cent(stores: Stores, pool: Pool) -> None:
    names = dict(zip(TENANTS, ("zeta", "yankee", "xray", "whisky"), strict=True))
    renamed = tuple(replace(record, tenant=names[record.tenant]) if isinstance(record, SliceRecord) else record for record in pool.records)
    before, after = (
        {
            (row.get("tenant"), row["line"], row["day"]): [row.get(column) for column in money_columns(pool)]
            for row in bill(stores, one, ("tenant", "day")).rows
        }
        for one in (pool, replace(pool, records=renamed))
    )
    assert {(names.get(str(tenant)), *rest): cost for (tenant, *rest), cost in before.items()} == after


@QUICK
@given(pool=pools())
def test_merging_tenants_gives_the_sum(stores: Stores, pool: Pool) -> None:
    merge = {"beta": "acme"}
    merged = tuple(
        replace(record, tenant=merge.get(record.tenant, record.tenant)) if isinstance(record, SliceRecord) else record
        for record in pool.records
    )
    assert exact(stores, replace(pool, records=merged)) == exact(stores, pool, lambda name: merge.get(str(name), name))


def _halved(number: int | None) -> tuple[int | None, int | None]:
    return (None, None) if number is None else (number // 2, number - number // 2)


@QUICK
@given(pool=pools())
def test_splitting_intervals_changes_no_total(stores: Stores, pool: Pool) -> None:
    split: list[UsageRecord] = []
    for record in pool.records:
        fields = [
            name
            for name, value in vars(record).items()
            if name.endswith("_us") and name not in ("minute_us", "start_us") and isinstance(value, int)
        ]
        if isinstance(record, DeviceRecord):
            fields.remove("span_us")
        halves = {name: _halved(getattr(record, name)) for name in fields}
        if "used_us" in halves:
            halves["used_us"] = (record.used_us, 0)  # all of it in the first part, beyond its promise perhaps
        for index in (0, 1):
            part = replace(record, sequence=record.sequence * 2 + index, **{name: pair[index] for name, pair in halves.items()})
            if isinstance(part, DeviceRecord):
                part = replace(
                    part, span_us=part.allocated_us + part.reserved_unused_us + part.unallocated_us + part.suspended_us + part.down_us
                )
            split.append(part)
    assert exact(stores, replace(pool, records=tuple(split))) == exact(stores, pool)
    assert bill(stores, replace(pool, records=tuple(split)), ("tenant", "day")).totals == bill(stores, pool, ("tenant", "day")).totals


@QUICK
@given(pool=pools())
def test_k_sharers_use_at_most_the_card(stores: Stores, pool: Pool) -> None:
    with stores(pool.records) as connection:
        report = chargeback_of(connection, PERIOD, pool.plan, ("device",), EVERYTHING, "used")
    spans: dict[str, int] = {}
    for record in pool.records:
        if isinstance(record, DeviceRecord):
            spans[record.device_uuid] = spans.get(record.device_uuid, 0) + record.span_us
    for row in report.rows:
        assert Fraction(row["quantity"]) <= Fraction(spans[str(row["device"])], HOUR_US) + Fraction(1, 10**9)  # type: ignore[arg-type]


@QUICK
@given(pool=pools())
def test_free_work_stays_visible(stores: Stores, pool: Pool) -> None:
    free = parse_plan(
        PLAN.format(currency="EUR", basis="allocated", price='"0"', edge="2030-01-01", policy='overhead = "even"', bands="")
        .replace("7.123456789", "0")
        .replace("3.07", "0")
        .encode(),
        "free",
    )
    report = bill(stores, replace(pool, plan=free))
    capacity = sum(record.span_us for record in pool.records if isinstance(record, DeviceRecord))
    assert report.totals["cost"] == Decimal("0.00")
    assert abs(sum(Fraction(row["quantity"]) for row in report.rows) - Fraction(capacity, HOUR_US)) < Fraction(len(report.rows), 10**9)  # type: ignore[arg-type]


@QUICK
@given(pool=pools(), factor=st.sampled_from((2, 10, 1000)), method=st.sampled_from(METHODS))
def test_scaling_all_weights_changes_nothing(stores: Stores, pool: Pool, factor: int, method: str) -> None:
    with stores(pool.records) as connection:
        shares = read_shares(connection, Calendar.of(PERIOD), pool.plan.basis, (), 4, with_use=True).shares
    text = 'schema = "poolmeter.plan/1"\nname = "p"\nversion = 1\ncurrency = "EUR"\n[[prices]]\nfrom = 2000-01-01\ndevice_hour = {{ "*" = "{}" }}'
    plan, dearer = (parse_plan(text.format(price).encode(), "p") for price in (Decimal("17.35"), Decimal("17.35") * factor))
    longer = [replace(share, us=share.us * factor) for share in shares]
    assert [charge.amount for charge in rate(longer, plan)] == [charge.amount for charge in rate(shares, dearer)]
    # The same amounts to share, and weights of which all are so many times as large: the same for everybody.
    policies = tuple((part, method) for part in PARTS)
    charges, heavier = rate(shares, plan), rate(shares, plan)
    for charge in heavier:
        charge.allocated_weight, charge.used_weight = charge.allocated_weight * factor, charge.used_weight * factor
    one, other = (share_out(some, policies, frozenset(CHARGE_BY)).charges for some in (charges, heavier))
    assert [(charge.share, charge.shared) for charge in one] == [(charge.share, charge.shared) for charge in other]


@QUICK
@given(pool=pools(), cut=st.integers(1, 5))
def test_adjacent_periods_add_up(stores: Stores, pool: Pool, cut: int) -> None:
    middle_us = FIRST_US + cut * MINUTE_US
    with stores(pool.records) as connection:
        totals = [
            usage_of(connection, Period(start_us, end_us, PERIOD.zone), ("tenant",), EVERYTHING).totals
            for start_us, end_us in ((FIRST_US, middle_us), (middle_us, PERIOD.end_us), (FIRST_US, PERIOD.end_us))
        ]
        days = [
            chargeback_of(connection, Period(start_us, end_us, PERIOD.zone), pool.plan, ("day",), EVERYTHING).totals["cost"]
            for start_us, end_us in (
                (FIRST_US, FIRST_US + 3 * MINUTE_US),
                (FIRST_US + 3 * MINUTE_US, PERIOD.end_us),
                (FIRST_US, PERIOD.end_us),
            )
        ]
    for name in ("capacity_us", "allocated_us", "down_us", "unallocated_us"):
        first, second, whole = (int(str(total.get(name, 0))) for total in totals)
        assert first + second == whole
    # Cut at midnight of the zone, money adds up too: months are sums of days.
    assert days[0] + days[1] == days[2]  # type: ignore[operator]


def test_the_generator_reaches_what_it_is_for(stores: Stores) -> None:
    seen = dict.fromkeys(("scaled", "idle", "edge", "band", "unknown", "shared", "left", *OVERHEAD_PARTS), False)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(pool=pools())
    def look(pool: Pool) -> None:
        with stores(pool.records) as connection:
            found = read_shares(connection, Calendar.of(PERIOD), "used", pool.plan.changes(PERIOD.start_us, PERIOD.end_us), 1)
            shared = share_out(rate(found.shares, pool.plan), pool.plan.policies, frozenset(CHARGE_BY))
        seen["shared"] |= sum(bool(charge.shared) for charge in shared.charges) > 2
        seen["left"] |= bool(shared.left)
        for part in OVERHEAD_PARTS:
            seen[part] |= any(share.part == part and share.us for share in found.shares)
        seen["scaled"] |= found.scaled_minutes > 0
        seen["idle"] |= any(share.line == "idle" and share.us for share in found.shares)
        seen["band"] |= any(share.us and pool.plan.tariffs[share.segment].band is not None for share in found.shares)
        seen["edge"] |= len({share.segment for share in found.shares}) > 1
        seen["unknown"] |= any(share.measures is not None and share.measures.used_us is None for share in found.shares)

    look()
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("weight", "expected"), [(HOUR_US * 10**9 * 5 // 1000, 0), (HOUR_US * 10**9 * 15 // 1000, 2), (HOUR_US * 10**9 * 25 // 1000, 2)]
)
def test_a_half_goes_to_the_even_unit(weight: int, expected: int) -> None:
    assert day_total(weight, 2) == expected
