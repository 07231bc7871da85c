"""The bill as FOCUS 1.4 rows: the chargeback's own amounts, and what an independent linter of the specification says of them."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import pytest
from accounting_http import get
from accounting_pools import PERIOD, Pool, pools
from focus_data_toolkit.model.validator import COND_UNIT_PRICING, lint_focus_1_4_structure
from focus_data_toolkit.validate.allocation import validate_split_allocation
from hypothesis import given, settings

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import EVERYTHING, Filters, day_text
from poolmeter.accounting.focus import COLUMNS, day_edges, focus_of, month_edges
from poolmeter.accounting.plans import demo_plan, parse_plan
from poolmeter.accounting.routes import routes
from poolmeter.cli import main
from poolmeter.collector.segments import publish_records
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import HOUR_US
from poolmeter.period import Period, parse_period, rfc3339
from poolmeter.places import CollectorData
from poolmeter.report import Report, as_csv

Store = Callable[..., duckdb.DuckDBPyConnection]
Stores = Callable[..., Any]
DAY = parse_period("2026-09-21", "2026-09-22", "UTC", 0)
TWO_PRICES = """schema = "poolmeter.plan/1"
name = "p"
version = 3
currency = "EUR"
[[prices]]
from = 2026-01-01
to = 2026-09-21T00:20:00Z
device_hour = { "*" = "1.00" }
[[prices]]
from = 2026-09-21T00:20:00Z
device_hour = { "*" = "3.01" }
"""


def lines(report: Report) -> list[dict[str, str]]:
    """The rows as a reader of the file gets them."""
    return list(csv.DictReader(io.StringIO(as_csv(report))))


def faults(report: Report) -> list[str]:
    return lint_focus_1_4_structure("cost and usage", lines(report), supported_conditions=[COND_UNIT_PRICING]).messages()


@settings(deadline=None)
@given(pool=pools())
def test_rows_add_up_to_the_bill_and_pass_the_linter(stores: Stores, pool: Pool) -> None:
    with stores(pool.records) as connection:
        report = focus_of(connection, PERIOD, pool.plan)
        bill = chargeback_of(connection, PERIOD, pool.plan, ("tenant", "day"), EVERYTHING)
    rows = lines(report)
    assert not rows or faults(report) == []
    billed: dict[str, Decimal] = {}
    for row in rows:
        billed[row["SubAccountId"]] = billed.get(row["SubAccountId"], Decimal(0)) + Decimal(row["BilledCost"])
        assert row["EffectiveCost"] == row["BilledCost"] and row["ListCost"] == row["ContractedCost"]
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        if row["x_Line"].startswith("shared "):
            assert row["SubAccountId"] and Decimal(row["ListCost"]) == 0 < Decimal(row["BilledCost"]) and row["PricingQuantity"] == ""
            continue
        assert Decimal(row["ListCost"]) == Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
        assert (row["SubAccountId"] != "") == (row["x_Line"] == "usage") == (row["Tags"] != "")
    # What a tenant is billed is its own cost and what policies share with it; nobody's is what they leave.
    assert sum(billed.values(), Decimal(0)) == bill.totals["cost"] == report.totals["cost"]
    column = "total_cost" if pool.plan.policies else "cost"
    for tenant in {str(row.get("tenant", "")) for row in bill.rows}:
        assert billed.get(tenant, Decimal(0)) == sum((row[column] for row in bill.rows if row.get("tenant", "") == tenant), Decimal(0))
    assert validate_split_allocation(rows, ratio_tolerance=Decimal(0), cost_tolerance=Decimal(0)) == []
    capacity = sum(record.span_us for record in pool.records if hasattr(record, "unallocated_us"))
    told = sum((Fraction(row["PricingQuantity"]) for row in rows if row["PricingQuantity"]), Fraction(0))
    assert abs(told - Fraction(capacity, HOUR_US)) <= Fraction(len(rows), 10**9)


def test_a_day_by_hand(store: Store, hour: Any) -> None:
    report = focus_of(store(hour.records), DAY, demo_plan(), issuer="Example Computing")
    assert report.columns == COLUMNS and faults(report) == []
    plain = [name for name in COLUMNS if not name.startswith("x_")]
    assert list(COLUMNS) == sorted(plain) + sorted(name for name in COLUMNS if name.startswith("x_"))
    acme = next(row for row in lines(report) if row["SubAccountId"] == "acme")
    found = {name: acme[name] for name in ("ResourceId", "ResourceName", "AllocatedResourceId", "PricingQuantity", "PricingUnit", "x_UsedDeviceHours")}  # fmt: skip
    assert found == {
        "ResourceId": "GPU-1", "ResourceName": "Sim H200", "AllocatedResourceId": "a-acme", "PricingQuantity": "0.500000000",
        "PricingUnit": "Device-Hours", "x_UsedDeviceHours": "0.250000000",
    }  # fmt: skip
    assert (acme["ChargePeriodStart"], acme["ChargePeriodEnd"]) == ("2026-09-21T00:00:00Z", "2026-09-22T00:00:00Z")
    assert (acme["BillingPeriodStart"], acme["BillingPeriodEnd"]) == ("2026-09-01T00:00:00Z", "2026-10-01T00:00:00Z")
    assert json.loads(acme["Tags"]) == {"project": "search", "workload_class": "training"} == json.loads(acme["AllocatedTags"])
    assert acme["InvoiceIssuerName"] == acme["ServiceProviderName"] == "Example Computing" and acme["BillingAccountId"] == "main"
    free = next(row for row in lines(report) if row["x_Line"] == "unallocated" and row["ResourceId"] == "GPU-2")
    assert free["SubAccountId"] == free["ConsumedQuantity"] == free["Tags"] == "" and free["AllocatedResourceId"] == "unallocated"
    beta = next(row for row in lines(report) if row["SubAccountId"] == "beta")
    assert beta["x_UsedDeviceHours"] == "" and beta["x_Completeness"] == "0.000000000"  # unknown is absent, never 0


def test_two_prices_of_a_day_are_two_rows_and_measures_are_told_once(store: Store, hour: Any) -> None:
    plan = parse_plan(TWO_PRICES.encode(), "two.toml")
    report = focus_of(store(hour.records), DAY, plan)
    assert faults(report) == []
    acme = [row for row in lines(report) if row["SubAccountId"] == "acme"]
    assert [(row["ListUnitPrice"], row["PricingQuantity"]) for row in acme] == [("1.00", "0.166666667"), ("3.01", "0.333333333")]
    assert [row["x_UsedDeviceHours"] for row in acme] == ["0.250000000", ""]
    assert len({row["SkuPriceId"] for row in acme}) == 2 and len({row["SkuId"] for row in acme}) == 1
    bill = chargeback_of(store(hour.records), DAY, plan, ("tenant",), EVERYTHING)
    (cost,) = [row["cost"] for row in bill.rows if row.get("tenant") == "acme"]
    assert sum(Decimal(row["BilledCost"]) for row in acme) == cost


def test_a_filter_leaves_rows_out_and_changes_none(store: Store, hour: Any) -> None:
    whole = lines(focus_of(store(hour.records), DAY, demo_plan()))
    assert lines(focus_of(store(hour.records), DAY, demo_plan(), filters=Filters(tenant=("acme",)))) == [
        row for row in whole if row["SubAccountId"] == "acme"
    ]


@pytest.mark.parametrize(
    ("zone", "day", "start", "end"),
    [
        ("Europe/Vienna", "2026-03-29", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"),  # 23 hours
        ("Europe/Vienna", "2026-10-25", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"),  # 25 hours
        ("Asia/Kathmandu", "2026-09-21", "2026-09-20T18:15:00Z", "2026-09-21T18:15:00Z"),
        ("America/Sao_Paulo", "2018-11-04", "2018-11-04T03:00:00Z", "2018-11-05T02:00:00Z"),  # midnight itself was skipped
    ],
)
def test_a_charge_period_is_the_local_day(zone: str, day: str, start: str, end: str) -> None:
    period = parse_period(day[:8] + "01", "2030-01-01", zone, 0)
    number = next(number for number in range(30_000) if day_text(number) == day)
    assert tuple(map(rfc3339, day_edges(number, period))) == (start, end)
    month = month_edges(number, period)
    assert month[0] == period.start_us and month[0] < day_edges(number, period)[0] < month[1]
    # A period that ends within the day cuts it.
    cut = Period(period.start_us, day_edges(number, period)[0] + HOUR_US, period.zone)
    assert day_edges(number, cut)[1] - day_edges(number, cut)[0] == HOUR_US


def test_the_command_writes_a_file_that_the_toolkit_validates(tmp_path: Path, hour: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    snapshots = [
        Snapshot(node=node, epoch=next(r.epoch for r in hour.records if r.node == node), sequence=999, taken_us=DAY.end_us, simulated=True)
        for node in ("n1", "n2")
    ]
    publish_records(CollectorData(tmp_path).store, hour.records, snapshots, now_us=DAY.end_us)
    words = ["focus", "export", "--data", str(tmp_path), "--from", "2026-09-21", "--to", "2026-09-22"]
    assert main([*words, "--output", str(tmp_path / "costs.csv")]) == 0
    said = capfdbinary.readouterr().err.decode()
    assert "warning: the pool is simulated and no price plan is given" in said
    done = subprocess.run(
        [sys.executable, "-m", "focus_data_toolkit", "validate", "--dataset", "cost-and-usage", str(tmp_path / "costs.csv")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The linter finds what it should: a file of ours that is spoiled fails.
    spoiled = (tmp_path / "costs.csv").read_text().replace("Usage-Based", "Often")
    (tmp_path / "spoiled.csv").write_text(spoiled)
    again = subprocess.run([*done.args[:-1], str(tmp_path / "spoiled.csv")], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    # The same rows in every format.
    assert main([*words, "--format", "json"]) == 0
    told = json.loads(capfdbinary.readouterr().out)
    assert told["schema"] == "poolmeter.focus/1" and told["focus_version"] == "1.4" and len(told["rows"]) == spoiled.count("Often")
    assert isinstance(told["rows"][0]["BilledCost"], str) and isinstance(told["rows"][0]["PricingQuantity"], float)
    assert main([*words, "--plan", str(tmp_path / "none.toml")]) == 2
    capfdbinary.readouterr()
    # And the collector's.
    served = routes(CollectorData(tmp_path).store)
    assert get(served, "/v1/reports/focus?from=2026-09-21&to=2026-09-22&format=csv") == (200, (tmp_path / "costs.csv").read_bytes())
    assert get(served, "/v1/reports/focus?by=tenant")[0] == 400
