"""Invariants of usage and chargeback over generated pools: the data decides, not the code."""

import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import BY, EVERYTHING, Calendar, Filters
from poolmeter.accounting.plans import PricePlan, parse_plan
from poolmeter.accounting.rating import day_total, rate
from poolmeter.accounting.shares import read_shares
from poolmeter.accounting.usage import usage_of
from poolmeter.model.units import HOUR_US, MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord
from poolmeter.period import Period, parse_period
from poolmeter.report import Report, render

Store = Callable[[Sequence[UsageRecord]], AbstractContextManager[duckdb.DuckDBPyConnection]]
MODELS = ("Sim H200", "Sim A100", "Sim L4")
TENANTS = ("acme", "beta", "coyote", "delta")
# Five minutes across midnight in Vienna (and an hour's edge in UTC).
FIRST_US = 1_790_027_880_000_000 - 1_790_027_880_000_000 % HOUR_US + HOUR_US - 3 * MINUTE_US
PERIOD = Period(FIRST_US, FIRST_US + 6 * MINUTE_US, parse_period("2026-01-01", "2026-01-02", "Europe/Vienna", 0).zone)
PLAN = """
schema = "poolmeter.plan/1"
name = "generated"
version = 1
currency = "{currency}"
basis = "{basis}"
[[prices]]
from = 2026-01-01
to = {edge}
device_hour = {{ "Sim H*" = {price}, "Sim H200" = "7.123456789", "*" = "3.07" }}
[[prices]]
from = {edge}
device_hour = {{ "Sim H*" = "1", "*" = {price} }}
"""
QUICK = settings(
    max_examples=settings.default.max_examples if os.environ.get("POOLMETER_LONG") == "1" else 7,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Pool:
    """Generated records with the plan that prices them."""

    records: tuple[UsageRecord, ...]
    plan: PricePlan


def _split(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    cuts = sorted(draw(st.integers(0, total)) for _ in range(parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """A small pool: what is on each card changes from minute to minute, some use is unknown, some claims exceed the card."""
    records: list[UsageRecord] = []
    sequence = 0
    allocations = [
        (f"a{index}", draw(st.sampled_from(TENANTS)), draw(st.sampled_from(("p1", "p2", None)))) for index in range(draw(st.integers(0, 4)))
    ]
    for number in range(draw(st.integers(1, 3))):
        node, uuid, model = f"n{number % 2 + 1}", f"GPU-{number}", draw(st.sampled_from(MODELS))
        for minute in range(draw(st.integers(1, 6))):
            sequence += 1
            span = draw(st.sampled_from((MINUTE_US, MINUTE_US, 59_999_999, 1, 17_000_003)))
            allocated, reserved, unallocated, suspended, down = _split(draw, span, 5) if draw(st.booleans()) else (span, 0, 0, 0, 0)
            on_card = [allocation for allocation in allocations if draw(st.booleans())]
            if not on_card:
                allocated, unallocated = 0, allocated + unallocated
            key = {"node": node, "epoch": "e", "pool": "main", "minute_us": FIRST_US + minute * MINUTE_US, "start_us": FIRST_US + minute * MINUTE_US, "span_us": span, "device_uuid": uuid, "device_model": model}  # fmt: skip
            records.append(
                DeviceRecord(
                    **key,
                    sequence=sequence,
                    allocated_us=allocated,
                    reserved_unused_us=reserved,
                    unallocated_us=unallocated,
                    suspended_us=suspended,
                    down_us=down,
                    memory_total_bytes=1 << 33,
                    switch_overhead_us=draw(st.one_of(st.none(), st.integers(0, span // 4))),
                    unaccounted_us=draw(st.one_of(st.none(), st.integers(0, span))),
                )
            )
            for (allocation, tenant, project), promise in zip(on_card, _split(draw, allocated, max(1, len(on_card))), strict=False):
                sequence += 1
                used = draw(st.one_of(st.none(), st.integers(0, promise), st.integers(0, span)))
                records.append(
                    SliceRecord(
                        **key,
                        sequence=sequence,
                        allocation_id=allocation,
                        tenant=tenant,
                        project=project,
                        mode="hook",
                        state="active",
                        used_basis="allocated" if used is None else "hook",
                        generation=1,
                        promised_us=promise,
                        allocated_us=promise,
                        suspended_us=0,
                        memory_allocated_kib_us=draw(st.integers(0, 10**15)),
                        used_us=used,
                        memory_peak_bytes=draw(st.one_of(st.none(), st.integers(0, 1 << 33))),
                        denied_allocations=draw(st.one_of(st.none(), st.integers(0, 3))),
                        completeness_ppm=draw(st.sampled_from((1_000_000, 999_999, 0))),
                    )
                )
    text = PLAN.format(
        currency=draw(st.sampled_from(("EUR", "JPY", "KWD"))),
        basis=draw(st.sampled_from(("allocated", "used"))),
        price=draw(st.sampled_from(('"0"', '"36.00"', '"1999.999999999"', '"0.000000001"'))),
        edge="2026-09-21T22:01:00Z" if draw(st.booleans()) else "2030-01-01",
    )
    return Pool(tuple(records), parse_plan(text.encode(), "generated.toml"))


def bill(stores: Store, pool: Pool, by: tuple[str, ...] = ("tenant",), filters: Filters = EVERYTHING) -> Report:
    with stores(pool.records) as connection:
        return chargeback_of(connection, PERIOD, pool.plan, by, filters)


def exact(
    stores: Store, pool: Pool, by_tenant: Callable[[str | None], str | None] = lambda name: name
) -> dict[tuple[str, str | None, int], tuple[int, Fraction]]:
    """Device time and unrounded cost per line, tenant and day."""
    sums: dict[tuple[str, str | None, int], tuple[int, Fraction]] = {}
    with stores(pool.records) as connection:
        found = read_shares(connection, Calendar.of(PERIOD), pool.plan.basis, pool.plan.edges_us, 1)
    for share in found.shares:
        us, cost = sums.get(key := (share.line, by_tenant(share.tenant), share.day), (0, Fraction(0)))
        sums[key] = (us + share.us, cost + Fraction(pool.plan.price(share.model, share.first_minute_us)) * share.us)
    return sums


def costs(report: Report) -> Decimal:
    return sum((row["cost"] for row in report.rows), Decimal(0))  # type: ignore[misc]


@QUICK
@given(pool=pools())
def test_every_microsecond_has_one_owner(stores: Store, pool: Pool) -> None:
    capacity = sum(record.span_us for record in pool.records if isinstance(record, DeviceRecord))
    for basis in ("allocated", "used"):
        with stores(pool.records) as connection:
            found = read_shares(connection, Calendar.of(PERIOD), basis, pool.plan.edges_us, 4)
            assert connection.execute("SELECT COUNT(*) FROM parts WHERE LEAST(paid, idle, unallocated, overhead) < 0").fetchall() == [(0,)]
            assert connection.execute("SELECT COUNT(*) FROM parts WHERE paid + idle + unallocated + overhead <> span_us").fetchall() == [
                (0,)
            ]
        assert all(share.us >= 0 for share in found.shares)
        assert sum(share.us for share in found.shares) == found.capacity_us == capacity
    with stores(pool.records) as connection:
        totals = usage_of(connection, PERIOD, ("tenant",), EVERYTHING).totals
    parts = ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us")
    assert sum(int(str(totals[part])) for part in parts) == totals["capacity_us"] == capacity


@QUICK
@given(pool=pools())
def test_lines_sum_to_the_cost_of_the_pool(stores: Store, pool: Pool) -> None:
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
def test_grouping_and_filtering_move_no_cent(stores: Store, pool: Pool, by: list[str]) -> None:
    whole, grouped = bill(stores, pool, ("tenant", "day")), bill(stores, pool, tuple(by))
    assert costs(grouped) == costs(whole) and grouped.totals == whole.totals
    finer = bill(stores, pool, tuple(dict.fromkeys((*by, "tenant", "day", "device", "hour"))))
    for row in grouped.rows:
        same = [other for other in finer.rows if all(other.get(name) == row.get(name) for name in (*by, "line"))]
        assert sum((other["cost"] for other in same), Decimal(0)) == row["cost"]  # type: ignore[misc]
    nodes = sorted({record.node for record in pool.records})
    assert sum((costs(bill(stores, pool, filters=Filters(node=(node,)))) for node in nodes), Decimal(0)) == costs(whole)
    tenants = sorted({record.tenant for record in pool.records if isinstance(record, SliceRecord)})
    assert sum((costs(bill(stores, pool, filters=Filters(tenant=(tenant,)))) for tenant in tenants), Decimal(0)) == whole.totals["tenants"]


@QUICK
@given(pool=pools())
def test_no_line_is_a_whole_unit_off_its_exact_cost(stores: Store, pool: Pool) -> None:
    unit = Decimal(1).scaleb(-pool.plan.minor_digits)
    rows = bill(stores, pool, ("tenant", "day")).rows
    for (line, tenant, day), (us, cost) in exact(stores, pool).items():
        same = [row for row in rows if row["line"] == line and row.get("tenant") == tenant]
        days = sorted({str(row["day"]) for row in rows})
        if us and len(days) == 1 and day:
            assert abs(Fraction(same[0]["cost"]) - cost / HOUR_US) < 2 * Fraction(unit)  # type: ignore[arg-type]


@QUICK
@given(pool=pools(), seed=st.integers(0, 2**32))
def test_order_of_rows_changes_no_byte(stores: Store, pool: Pool, seed: int) -> None:
    shuffled = list(pool.records)
    random.Random(seed).shuffle(shuffled)
    for by in (("tenant",), ("project", "device", "hour")):
        one, other = bill(stores, pool, by), bill(stores, replace(pool, records=tuple(shuffled)), by)
        for fmt in ("table", "json", "csv", "arrow", "parquet"):
            assert render(one, fmt) == render(other, fmt)
        with stores(pool.records) as first, stores(shuffled) as second:
            assert render(usage_of(first, PERIOD, by, EVERYTHING), "json") == render(usage_of(second, PERIOD, by, EVERYTHING), "json")


@QUICK
@given(pool=pools())
def test_renaming_tenants_moves_no_cent(stores: Store, pool: Pool) -> None:
    names = dict(zip(TENANTS, ("zeta", "yankee", "xray", "whisky"), strict=True))
    renamed = tuple(replace(record, tenant=names[record.tenant]) if isinstance(record, SliceRecord) else record for record in pool.records)
    before = {(row.get("tenant"), row["line"], row["day"]): row["cost"] for row in bill(stores, pool, ("tenant", "day")).rows}
    after = {
        (row.get("tenant"), row["line"], row["day"]): row["cost"]
        for row in bill(stores, replace(pool, records=renamed), ("tenant", "day")).rows
    }
    assert {(names.get(str(tenant)), *rest): cost for (tenant, *rest), cost in before.items()} == after


@QUICK
@given(pool=pools())
def test_merging_tenants_gives_the_sum(stores: Store, pool: Pool) -> None:
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
def test_splitting_intervals_changes_no_total(stores: Store, pool: Pool) -> None:
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
def test_k_sharers_use_at_most_the_card(stores: Store, pool: Pool) -> None:
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
def test_free_work_stays_visible(stores: Store, pool: Pool) -> None:
    free = parse_plan(
        PLAN.format(currency="EUR", basis="allocated", price='"0"', edge="2030-01-01")
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
@given(pool=pools(), factor=st.sampled_from((2, 10, 1000)))
def test_scaling_all_weights_changes_nothing(stores: Store, pool: Pool, factor: int) -> None:
    with stores(pool.records) as connection:
        shares = read_shares(connection, Calendar.of(PERIOD), pool.plan.basis, (), 4).shares
    text = 'schema = "poolmeter.plan/1"\nname = "p"\nversion = 1\ncurrency = "EUR"\n[[prices]]\nfrom = 2000-01-01\ndevice_hour = {{ "*" = "{}" }}'
    plan, dearer = (parse_plan(text.format(price).encode(), "p") for price in (Decimal("17.35"), Decimal("17.35") * factor))
    longer = [replace(share, us=share.us * factor) for share in shares]
    assert [charge.amount for charge in rate(longer, plan)] == [charge.amount for charge in rate(shares, dearer)]


@QUICK
@given(pool=pools(), cut=st.integers(1, 5))
def test_adjacent_periods_add_up(stores: Store, pool: Pool, cut: int) -> None:
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


def test_the_generator_reaches_what_it_is_for(stores: Store) -> None:
    seen = {"scaled": False, "idle": False, "edge": False, "unknown": False}

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(pool=pools())
    def look(pool: Pool) -> None:
        with stores(pool.records) as connection:
            found = read_shares(connection, Calendar.of(PERIOD), "used", pool.plan.edges_us, 1)
        seen["scaled"] |= found.scaled_minutes > 0
        seen["idle"] |= any(share.line == "idle" and share.us for share in found.shares)
        seen["edge"] |= len({share.segment for share in found.shares}) > 1
        seen["unknown"] |= any(share.measures is not None and share.measures.used_us is None for share in found.shares)

    look()
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("weight", "expected"), [(HOUR_US * 10**9 * 5 // 1000, 0), (HOUR_US * 10**9 * 15 // 1000, 2), (HOUR_US * 10**9 * 25 // 1000, 2)]
)
def test_a_half_goes_to_the_even_unit(weight: int, expected: int) -> None:
    assert day_total(weight, 2) == expected
