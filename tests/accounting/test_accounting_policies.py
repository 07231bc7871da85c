"""Shared cost of pools whose numbers are known by hand, through the store, the commands and HTTP."""

import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accounting_http import get
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import EVERYTHING, Filters
from poolmeter.accounting.parts import METHODS, PARTS
from poolmeter.accounting.plans import PricePlan, parse_plan
from poolmeter.accounting.policies import _deal, _spread
from poolmeter.accounting.routes import routes
from poolmeter.cli import main
from poolmeter.collector.segments import publish_records
from poolmeter.config import AccountingSection
from poolmeter.errors import BadInput
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import MINUTE_US, split_exactly
from poolmeter.period import parse_period
from poolmeter.places import CollectorData
from poolmeter.report import MONEY, Report, cell

Store = Callable[..., duckdb.DuckDBPyConnection]
DAY = parse_period("2026-09-21", "2026-09-22", "UTC", 0)
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PRICES = resources.files("poolmeter.accounting.plans").joinpath("demo.toml").read_text()  # H200 36.00, A100 18.00


def plan(**policy: str) -> PricePlan:
    return parse_plan(text(**policy).encode(), "p.toml")


def text(**policy: str) -> str:
    return PRICES + "[policy]\n" + "".join(f'{part} = "{method}"\n' for part, method in policy.items())


def bill(store: Store, minutes: Any, plan: PricePlan, by: tuple[str, ...] = ("tenant",), **options: Any) -> Report:
    return chargeback_of(store(minutes.records), DAY, plan, by, options.get("filters", EVERYTHING), options.get("basis"))


def amounts(report: Report, *columns: str) -> list[tuple[str, ...]]:
    return [tuple(cell(row.get(column)) for column in columns) for row in report.rows]


@pytest.mark.parametrize(
    ("method", "acme", "beta"),
    # 27.00 stand free. acme holds 30 s of each minute, beta 15; acme uses 15, what beta uses is unknown and counts as its promise.
    [("even", "13.50", "13.50"), ("by-allocation", "18.00", "9.00"), ("by-use", "13.50", "13.50")],
)
@pytest.mark.parametrize("basis", ["allocated", "used"])
def test_who_is_given_what(store: Store, hour: Any, method: str, acme: str, beta: str, basis: str) -> None:
    report = bill(store, hour, plan(unallocated=method), basis=basis)
    own = {"allocated": ("18.00", "9.00"), "used": ("9.00", "9.00")}[basis]
    found = amounts(report, "tenant", "line", "cost", "shared_cost", "shared_unallocated", "total_cost", "allocated_method")
    total = [str(Decimal(one) + Decimal(other)) for one, other in zip(own, (acme, beta), strict=True)]
    assert found[:2] == [("acme", "usage", own[0], acme, acme, total[0], method), ("beta", "usage", own[1], beta, beta, total[1], method)]
    assert found[-1] == ("", "unallocated", "27.00", "-27.00", "-27.00", "0.00", method)
    idle = [("", "idle", "9.00", "0.00", "", "9.00", "")]
    assert found[2:-1] == (idle if basis == "used" else [])
    assert {name: cell(report.totals[name]) for name in ("cost", "unallocated", "shared", "shared_unallocated", "total_cost")} == {
        "cost": "54.00", "unallocated": "27.00", "shared": "27.00", "shared_unallocated": "27.00", "total_cost": "54.00",
    }  # fmt: skip


def test_shared_cost_stands_where_it_came_from(store: Store, hour: Any) -> None:
    """n1 has 9.00 free and n2 18.00: a tenant's part of each, also where it had nothing itself."""
    by = ("tenant", "node")
    report = bill(store, hour, plan(unallocated="by-allocation"), by)
    assert amounts(report, "tenant", "node", "cost", "shared_cost", "quantity") == [
        ("acme", "n1", "18.00", "6.00", "0.500000000"),
        ("acme", "n2", "0.00", "12.00", "0.000000000"),
        ("beta", "n1", "9.00", "3.00", "0.250000000"),
        ("beta", "n2", "0.00", "6.00", "0.000000000"),
        ("", "n1", "9.00", "-9.00", "0.250000000"),
        ("", "n2", "18.00", "-18.00", "1.000000000"),
    ]
    only = bill(store, hour, plan(unallocated="by-allocation"), by, filters=Filters(node=("n2",)))
    assert amounts(only, "tenant", "total_cost") == [("acme", "12.00"), ("beta", "6.00"), ("", "0.00")]
    own = bill(store, hour, plan(unallocated="by-allocation"), by, filters=Filters(tenant=("beta",)))
    assert [own.totals[name] for name in ("cost", "shared", "total_cost")] == [Decimal("9.00"), Decimal("9.00"), Decimal("18.00")]
    # Of a project as well: what its allocation of the tenant's has.
    rows = amounts(bill(store, hour, plan(unallocated="even"), ("project",)), "project", "shared_cost")
    assert rows == [("search", "13.50"), ("", "13.50"), ("", "-27.00")]


def test_amounts_past_64_bits_are_shared_to_the_last_unit(store: Store, hour: Any) -> None:
    prices = (
        text(unallocated="by-allocation").replace('"EUR"', '"KWD"').replace("36.00", "999999999.999999999").replace("18.00", "999999999")
    )
    report = bill(store, hour, parse_plan(prices.encode(), "p.toml"), ("tenant", "project", "node", "hour"))
    shared = [Decimal(str(row["shared_cost"])) for row in report.rows]
    assert sum(shared) == 0 and report.totals["shared"] == sum(amount for amount in shared if amount > 0) == report.totals["unallocated"]
    assert report.totals["unallocated"] == Decimal("1249999999.000") and min(abs(amount) for amount in shared) > 10**7


def test_the_parts_of_overhead(store: Store, minutes: Any) -> None:
    minutes.device(
        0, allocated_us=20_000_000, reserved_unused_us=6_000_000, suspended_us=9_000_000, down_us=15_000_000, switch_overhead_us=3_000_000
    )
    minutes.slice(0, "acme", 10_000_000, 10_000_000)
    minutes.slice(0, "beta", 5_000_000, 2_000_000)
    by = ("part",)
    found = amounts(bill(store, minutes, plan(), by), "part", "line", "cost")
    assert found == [
        ("down", "overhead", "0.15"), ("own", "usage", "0.15"), ("reserved", "overhead", "0.06"), ("suspended", "overhead", "0.09"),
        ("unallocated", "unallocated", "0.10"), ("unattributed", "overhead", "0.05"),
    ]  # fmt: skip
    used = bill(store, minutes, plan(), by, basis="used")
    assert amounts(used, "part", "line", "cost") == [
        ("down", "overhead", "0.15"), ("idle", "idle", "0.03"), ("own", "usage", "0.12"), ("reserved", "overhead", "0.06"),
        ("suspended", "overhead", "0.09"), ("switching", "overhead", "0.03"), ("unallocated", "unallocated", "0.07"),
        ("unattributed", "overhead", "0.05"),
    ]  # fmt: skip
    # A policy for all of overhead, another for one part of it, and one that stays.
    chosen = plan(overhead="even", suspended="by-allocation", down="own-line")
    assert chosen.policies == (("reserved", "even"), ("suspended", "by-allocation"), ("switching", "even"), ("unattributed", "even"))
    report = bill(store, minutes, chosen)
    assert [name for name in report.columns if name.startswith("shared")] == [
        "shared_cost", "shared_reserved", "shared_suspended", "shared_switching", "shared_unattributed",
    ]  # fmt: skip
    columns = ("tenant", "line", "cost", "shared_reserved", "shared_suspended", "shared_unattributed", "shared_cost", "total_cost")
    assert amounts(report, *columns) == [
        # The odd cent of the unattributed five goes to the older allocation.
        ("acme", "usage", "0.10", "0.03", "0.06", "0.03", "0.12", "0.22"),
        ("beta", "usage", "0.05", "0.03", "0.03", "0.02", "0.08", "0.13"),
        ("", "unallocated", "0.10", "", "", "", "0.00", "0.10"),
        ("", "overhead", "0.35", "-0.06", "-0.09", "-0.05", "-0.20", "0.15"),
    ]
    methods = "reserved: even, suspended: by-allocation, unattributed: even"
    assert [row.get("allocated_method") for row in report.rows] == [methods, methods, None, methods]


def test_with_nobody_to_share_among_it_stays_its_own_line(store: Store, minutes: Any) -> None:
    minutes.device(0)
    minutes.device(24 * 60 - 1, down_us=MINUTE_US)
    for method in METHODS:
        report = bill(store, minutes, plan(unallocated=method, down=method))
        assert amounts(report, "line", "cost", "shared_cost", "total_cost") == [
            ("unallocated", "0.60", "0.00", "0.60"), ("overhead", "0.60", "0.00", "0.60"),
        ]  # fmt: skip
        assert report.totals["shared"] == 0 and report.totals["total_cost"] == report.totals["cost"] == Decimal("1.20")
        assert any(
            warning.startswith("on 1 day there is no tenant") and f"share down among ({method})" in warning for warning in report.warnings
        )
    # Zero use: nobody by use, the tenant by its promise.
    minutes.device(1, allocated_us=MINUTE_US)
    minutes.slice(1, "acme", MINUTE_US, 0)
    for method, received in (("by-use", "0.00"), ("by-allocation", "0.60"), ("even", "0.60")):
        report = bill(store, minutes, plan(unallocated=method), basis="used")
        assert amounts(report, "tenant", "shared_cost")[0] == ("acme", received)
        assert any("no tenant with use at a price to share unallocated" in warning for warning in report.warnings) == (method == "by-use")


def test_days_are_shared_by_themselves(store: Store, minutes: Any) -> None:
    """Who was there on Tuesday has no part in Monday's idle cards."""
    period = parse_period("2026-09-21", "2026-09-24", "UTC", 0)
    for day in range(3):
        minutes.device(day * 24 * 60)
    minutes.slice(24 * 60, "acme", 0, 0)
    for tenant in ("acme", "beta"):
        minutes.slice(48 * 60, tenant, 0, 0)
    report = chargeback_of(store(minutes.records), period, plan(unallocated="even"), ("tenant", "day"), EVERYTHING)
    assert amounts(report, "tenant", "day", "shared_cost") == [
        ("acme", "2026-09-22", "0.60"), ("acme", "2026-09-23", "0.30"), ("beta", "2026-09-23", "0.30"), ("", "2026-09-21", "0.00"),
        ("", "2026-09-22", "-0.60"), ("", "2026-09-23", "-0.60"),
    ]  # fmt: skip


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        plan(idle="fairly")
    assert "p.toml line 17: policy.idle is 'fairly', expected: Input should be 'own-line', 'even', 'by-allocation' or 'by-use'" in str(
        caught.value
    )
    with pytest.raises(BadInput, match=r"line 17: policy\.tenant is not a known key"):
        plan(tenant="even")


@given(
    weights=st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=4),
    amounts=st.lists(st.integers(0, 100), min_size=4, max_size=4),
    large=st.sampled_from((1, 10**30)),
)
def test_rows_are_dealt_as_one_is(weights: list[list[int]], amounts: list[int], large: int) -> None:
    """Numbers past 64 bits too; a table whose rows and columns have their sums to the last unit."""
    kind = np.int64 if large == 1 else object
    table = np.array(weights, kind) * large
    # Where nothing is left nothing is taken.
    given_out = [amount * large + amount % 2 if sum(row) else 0 for amount, row in zip(amounts, weights, strict=False)]
    rows = [split_exactly(amount, [int(n) for n in row]) for amount, row in zip(given_out, table, strict=True)]
    assert _deal(np.array(given_out, kind), table).tolist() == rows
    total = int(table.sum())
    shares = split_exactly(total, amounts) if sum(amounts) else [0, total]
    spread = list(_spread(shares, table))
    assert [int(part.sum()) for part in spread] == shares and sum(spread).tolist() == table.tolist()  # type: ignore[union-attr]
    assert all((part >= 0).all() for part in spread)


def test_what_holds_money_is_written_as_money() -> None:
    assert {f"shared_{part}" for part in PARTS} <= MONEY


def test_every_format_and_http_give_one_number(tmp_path: Path, hour: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    data, file = CollectorData(tmp_path / "data"), tmp_path / "plan.toml"
    file.write_text(text(idle="by-use", unallocated="even", overhead="by-allocation"))
    snapshot = Snapshot(node="n1", epoch=hour.records[0].epoch, sequence=999, taken_us=DAY.end_us, simulated=True)
    publish_records(data.store, hour.records, [snapshot], now_us=DAY.end_us)
    by = "tenant,node,part,hour"
    words = ["chargeback", "--data", str(tmp_path / "data"), "--plan", str(file), "--from", "2026-09-21", "--to", "2026-09-22", "--by", by]
    found: dict[str, bytes] = {}
    for fmt in ("json", "csv", "parquet", "arrow", "table"):
        assert main([*words, "--basis", "used", "--format", fmt]) == 0
        found[fmt] = capfdbinary.readouterr().out
    body = json.loads(found["json"])
    jsonschema.validate(body, json.loads((REFERENCE / "chargeback.schema.json").read_text()), format_checker=jsonschema.FormatChecker())
    assert body["totals"]["shared"] == "36.00" and body["totals"]["total_cost"] == body["totals"]["cost"] == "54.00"
    as_text = json.loads(found["json"], parse_float=str, parse_int=str)["rows"]
    read = [{key: value for key, value in row.items() if value} for row in csv.DictReader(io.StringIO(found["csv"].decode(), newline=""))]
    # What would run as a formula has an apostrophe before it in CSV; an amount is no formula.
    assert read == as_text and any(row.get("shared_cost", "").startswith("-") for row in read)
    for table in (pq.read_table(io.BytesIO(found["parquet"])), pa.ipc.open_file(found["arrow"]).read_all()):
        assert [{key: cell(value) for key, value in row.items() if value is not None} for row in table.to_pylist()] == as_text
    assert "allocated_method" in found["table"].decode()
    served = routes(data.store, AccountingSection(plan=file))
    assert get(served, f"/v1/reports/chargeback?from=2026-09-21&to=2026-09-22&by={by}&basis=used") == (200, found["json"])
    assert get(served, "/v1/reports/usage?by=part")[0] == 400
