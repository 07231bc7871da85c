"""Properties of shared cost over generated pools: what policies give to tenants is what they take from lines, whatever is asked."""

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from accounting_pools import PERIOD, QUICK, Pool, Stores, pools
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import CHARGE_BY, EVERYTHING, Calendar, Filters, day_text
from poolmeter.accounting.shares import read_shares
from poolmeter.report import Report


def bill(stores: Stores, pool: Pool, by: tuple[str, ...] = ("tenant",), filters: Filters = EVERYTHING) -> Report:
    with stores(pool.records) as connection:
        return chargeback_of(connection, PERIOD, pool.plan, by, filters)


def costs(report: Report, column: str) -> Decimal:
    return sum((Decimal(str(row[column])) for row in report.rows if column in row), Decimal(0))


@QUICK
@given(pool=pools(), by=st.lists(st.sampled_from(CHARGE_BY), min_size=1, max_size=3, unique=True))
def test_policies_take_what_they_give(stores: Stores, pool: Pool, by: list[str]) -> None:
    """Beside costs that no policy changes: what is added to tenants is what the lines of others lose, for each card and hour too."""
    plain = replace(pool, plan=replace(pool.plan, policies=()))
    report, without = bill(stores, pool, tuple(by)), bill(stores, plain, tuple(by))
    for name in ("cost", "tenants", "idle", "unallocated", "overhead"):
        assert report.totals[name] == without.totals[name]
    assert "shared_cost" not in without.columns and "shared" not in without.totals
    if not pool.plan.policies:
        assert report == without
        return
    assert costs(report, "shared_cost") == 0 and costs(report, "total_cost") == report.totals["total_cost"] == report.totals["cost"]
    added = sum((max(Decimal(str(row["shared_cost"])), Decimal(0)) for row in report.rows if row["line"] == "usage"), Decimal(0))
    parts = [part for part, _ in pool.plan.policies]
    assert report.totals["shared"] == added == sum(Decimal(str(report.totals[f"shared_{part}"])) for part in parts)
    for row in report.rows:
        shared = [Decimal(str(row[f"shared_{part}"])) for part in parts if f"shared_{part}" in row]
        assert row["shared_cost"] == sum(shared, Decimal(0)) and ("allocated_method" in row) == bool(shared)
        assert row["total_cost"] == Decimal(str(row["cost"])) + Decimal(str(row["shared_cost"]))
        # A tenant is never given a credit, and a line never loses more than it has.
        assert all(amount >= 0 for amount in shared) if row["line"] == "usage" else Decimal(str(row["total_cost"])) >= 0
    placed = {name: bill(stores, pool, (name,)) for name in ("device", "hour", "node", "day")}
    for found in placed.values():
        for group in {tuple(row.get(name) for name in found.columns[:1]) for row in found.rows}:
            same = [row for row in found.rows if (row.get(found.columns[0]),) == group]
            assert sum((Decimal(str(row["shared_cost"])) for row in same), Decimal(0)) == 0


@QUICK
@given(pool=pools())
def test_a_tenants_report_is_its_part_of_the_whole(stores: Stores, pool: Pool) -> None:
    for by in (("tenant", "day"), ("tenant", "project", "device", "part"), ("tenant", "hour")):
        whole = bill(stores, pool, by)
        for tenant in sorted({str(row["tenant"]) for row in whole.rows if "tenant" in row}):
            own = bill(stores, pool, by, Filters(tenant=(tenant,)))
            assert list(own.rows) == [row for row in whole.rows if row.get("tenant") == tenant]
            assert own.totals.get("total_cost") == (costs(own, "total_cost") if pool.plan.policies else None)
            assert not any("stays its own line" in warning for warning in own.warnings)
    nodes = sorted({record.node for record in pool.records})
    whole = bill(stores, pool, ("tenant", "node"))
    for node in nodes:
        own = bill(stores, pool, ("tenant", "node"), Filters(node=(node,)))
        assert list(own.rows) == [row for row in whole.rows if row.get("node") == node]


@QUICK
@given(pool=pools())
def test_shares_follow_the_weights_within_a_unit(stores: Stores, pool: Pool) -> None:
    """What a tenant is given of a day's part is at most a unit off its exact share, and goes by the method that the plan names."""
    unit = Fraction(1, 10**pool.plan.minor_digits)
    with stores(pool.records) as connection:
        found = read_shares(
            connection, Calendar.of(PERIOD), pool.plan.basis, pool.plan.changes(PERIOD.start_us, PERIOD.end_us), 1, with_use=True
        ).shares
    report = bill(stores, pool, ("tenant", "day", "part"))
    for part, method in pool.plan.policies:
        for day in {str(row["day"]) for row in report.rows}:
            weights: dict[str, Fraction] = {}
            for share in found:
                if share.tenant is not None and day_text(share.day) == day:
                    assert share.measures is not None
                    price = Fraction(pool.plan.price(share.model, share.first_minute_us))
                    us = {"even": 0, "by-allocation": share.measures.allocated_us, "by-use": share.used_us}[method]
                    weights[share.tenant] = 1 if method == "even" else weights.get(share.tenant, Fraction(0)) + us * price
            rows = [row for row in report.rows if row["day"] == day and row["part"] == part]
            (given_up,) = [-Fraction(str(row["shared_cost"])) for row in rows if row["line"] != "usage"] or [Fraction(0)]
            if not sum(weights.values()):
                assert given_up == 0
            elif given_up:
                for tenant, weight in weights.items():
                    got = sum(Fraction(str(row["shared_cost"])) for row in rows if row.get("tenant") == tenant)
                    assert abs(got - given_up * weight / sum(weights.values())) < unit
