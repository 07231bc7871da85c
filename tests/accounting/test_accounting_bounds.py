"""Reports over HTTP are bounded in rows and in time, whatever is asked and whatever nodes say; the answers stay the same."""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from accounting_http import get

from poolmeter.accounting.chargeback import chargeback_report
from poolmeter.accounting.dimensions import Calendar
from poolmeter.accounting.plans import demo_plan, parse_plan
from poolmeter.accounting.routes import routes
from poolmeter.accounting.usage import usage_report
from poolmeter.collector.segments import publish_records
from poolmeter.config import AccountingSection
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import SliceRecord
from poolmeter.period import parse_period
from poolmeter.places import CollectorData

DAY = parse_period("2026-09-21", "2026-09-22", "UTC", 0)
PLAN = """
schema = "poolmeter.plan/1"
name = "pool"
version = 1
currency = "EUR"
basis = "allocated"
time_zone = "Europe/Vienna"
[policy]
idle = "own-line"
unallocated = "own-line"
overhead = "own-line"
[[prices]]
from = 2026-01-01
[prices.device_hour]
"*" = "3.33"
[[prices.bands]]
name = "night"
hours = "22:00-06:00"
factor = "0.5"
"""


@pytest.mark.parametrize("basis", ["allocated", "used"])
@pytest.mark.parametrize("by", ["tenant", "workload,project", "device,hour"])
def test_an_allocation_that_two_claim_in_one_overfull_minute_still_makes_a_bill(tmp_path: Path, hour: Any, basis: str, by: str) -> None:
    """A lying node: its own card's bill is scaled to the card's time, and nobody's report fails."""
    slices = [record for record in hour.records if isinstance(record, SliceRecord) and record.node == "n1"]
    last = max(record.sequence for record in hour.records if record.node == "n1")
    lies = [
        replace(record, sequence=last + 1 + index, tenant="aaa", project=None, workload="zz", allocated_us=MINUTE_US, used_us=MINUTE_US)
        for index, record in enumerate(slices)
    ]
    publish_records(CollectorData(tmp_path).store, [*hour.records, *lies], now_us=DAY.end_us)
    report = chargeback_report(CollectorData(tmp_path).store, DAY, demo_plan(), tuple(by.split(",")), basis=basis)
    totals = report.totals
    assert totals["cost"] == sum(Decimal(str(totals[name])) for name in ("tenants", "idle", "unallocated", "overhead"))
    assert any("exceed the device's time" in text for text in report.warnings)


def test_ten_thousand_years_are_looked_up_where_there_are_rows(tmp_path: Path, hour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone's changes and a price's bands are those of stored minutes: else one question keeps a server busy for minutes."""
    root, plan = CollectorData(tmp_path).store, parse_plan(PLAN.encode(), "plan.toml")
    publish_records(root, hour.records, now_us=DAY.end_us)
    asked: list[int] = []
    plain = Calendar.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Calendar], period: Any, needed: Any = None) -> Calendar:
        asked.append((needed or period).end_us - (needed or period).start_us)
        return plain(cls, period, needed)  # type: ignore[no-any-return]

    monkeypatch.setattr(Calendar, "of", classmethod(of))
    wide = parse_period("0001-01-03", "9999-12-30", "Europe/Vienna", 0)
    day = replace(DAY, zone=wide.zone)
    for by in (("day", "hour"), ("tenant",)):
        assert usage_report(root, wide, by).rows == usage_report(root, day, by).rows != ()
        bills = [chargeback_report(root, period, plan, by) for period in (wide, day)]
        assert bills[0].rows == bills[1].rows != () and bills[0].totals == bills[1].totals
    assert asked and max(asked) <= 2 * (DAY.end_us - DAY.start_us)
    empty = parse_period("9000-01-01", "9999-12-30", "Europe/Vienna", 0)
    assert usage_report(root, empty, ("day",)).rows == ()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/reports/usage?by=device",
        "/v1/reports/chargeback?by=device",
        "/v1/reports/focus?",
        "/allocation/compute?window=2026-09-21T00:00:00Z,2026-09-22T00:00:00Z",
    ],
)
def test_a_report_of_more_rows_than_may_be_is_refused_and_its_neighbour_is_not(
    tmp_path: Path, hour: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    root, plan = CollectorData(tmp_path).store, tmp_path / "plan.toml"
    plan.write_text(PLAN)
    publish_records(root, hour.records, now_us=DAY.end_us)
    target = path if "window" in path else f"{path}&from=2026-09-21&to=2026-09-22"
    answers = []
    for most in (500_000, 1, 500_000):
        monkeypatch.setattr("poolmeter.accounting.routes.ROWS_MOST", most)
        answers.append(get(routes(root, AccountingSection(plan=plan)), target))
    assert answers[0][0] == answers[2][0] == 200 and answers[0][1] == answers[2][1]
    assert answers[1][0] == 400 and "more than 1 rows, expected fewer" in answers[1][1].decode()


def test_parameters_are_given_once_or_so_often(tmp_path: Path, hour: Any) -> None:
    root = CollectorData(tmp_path).store
    publish_records(root, hour.records, now_us=DAY.end_us)
    for query, words in (
        ("by=tenant&by=node", "by is given 2 times, expected once"),
        ("&".join(["node=n1"] * 101), "node is given 101 times, expected at most 100"),
    ):
        status, body = get(routes(root), f"/v1/reports/usage?from=2026-09-21&to=2026-09-22&{query}")
        assert status == 400 and words in json.loads(body)["error"]


def test_a_torn_store_is_no_fault_of_the_question(tmp_path: Path, hour: Any) -> None:
    root = CollectorData(tmp_path).store
    publish_records(root, hour.records, now_us=DAY.end_us)
    for segment in root.rglob("*.parquet"):
        segment.write_bytes(b"torn")
    status, body = get(routes(root), "/v1/reports/usage?from=2026-09-21&to=2026-09-22")
    assert status == 503 and json.loads(body)["error"]
