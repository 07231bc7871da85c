"""OpenCost's allocation API: the bill's own amounts, by OpenCost's words for windows, aggregates and filters."""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from accounting_http import get
from accounting_pools import PERIOD, QUICK, Pool, Stores, pools
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import EVERYTHING, Filters
from poolmeter.accounting.opencost import Question, allocation_sets, parse_aggregate, parse_filters, parse_question, parse_window
from poolmeter.accounting.plans import demo_plan
from poolmeter.accounting.routes import routes
from poolmeter.clock import ManualClock
from poolmeter.collector.segments import publish_records
from poolmeter.errors import BadInput
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import HOUR_US
from poolmeter.period import Period, parse_period, time_zone
from poolmeter.places import CollectorData

Store = Callable[..., duckdb.DuckDBPyConnection]
DAY = parse_period("2026-09-21", "2026-09-22", "UTC", 0)
VIENNA = time_zone("Europe/Vienna")
# A Wednesday, 2026-09-23 10:17:30 UTC: 12:17:30 in Vienna.
NOW = DAY.start_us + 58 * HOUR_US + 17 * 60_000_000 + 30_000_000


def asked(aggregate: str = "namespace", idle: bool = True, filters: Filters = EVERYTHING, *periods: Period) -> Question:
    return Question(periods or (DAY,), parse_aggregate(aggregate), filters, idle)


@QUICK
@given(pool=pools(), aggregate=st.sampled_from(["all", "namespace", "cluster,node", "pod", "label:project,label:model", "controller", ""]))
def test_costs_are_the_bills(stores: Stores, pool: Pool, aggregate: str) -> None:
    with stores(pool.records) as connection:
        bill = chargeback_of(connection, PERIOD, pool.plan, ("tenant",), EVERYTHING)
        (whole,) = allocation_sets(connection, asked(aggregate, True, EVERYTHING, PERIOD), pool.plan)
        (tenants,) = allocation_sets(connection, asked(aggregate, False, EVERYTHING, PERIOD), pool.plan)
    assert sum((item["totalCost"] for item in whole.values()), Decimal(0)) == bill.totals["cost"]  # type: ignore[index, misc]
    assert sum((item["gpuCost"] for item in tenants.values()), Decimal(0)) == bill.totals["tenants"]  # type: ignore[index, misc]
    assert not any("__idle__" in name for name in tenants) and all(item["name"] == name for name, item in whole.items())  # type: ignore[index]
    if aggregate == "namespace":
        for column, field in (
            ("cost", "gpuCost"),
            *((("shared_cost", "sharedCost"), ("total_cost", "totalCost")) if pool.plan.policies else ()),
        ):
            rows = {row["tenant"]: row[column] for row in bill.rows if row["line"] == "usage"}
            assert {name: item[field] for name, item in tenants.items()} == rows  # type: ignore[index]


def test_an_hour_by_hand(store: Store, hour: Any) -> None:
    first = Period(DAY.start_us, DAY.start_us + HOUR_US, DAY.zone)
    (found,) = allocation_sets(store(hour.records), asked("namespace", True, EVERYTHING, first), demo_plan())
    assert sorted(found) == ["__idle__", "acme", "beta"]
    acme: Any = found["acme"]
    assert (acme["start"], acme["end"], acme["minutes"]) == ("2026-09-21T00:00:00Z", "2026-09-21T01:00:00Z", 60)
    assert (acme["gpuCount"], acme["gpuHours"], acme["gpuEfficiency"]) == (Decimal("0.5"), Decimal("0.5"), Decimal("0.5"))
    assert acme["properties"] == {
        "namespace": "acme", "pod": "a-acme", "container": "a-acme", "labels": {"project": "search", "class": "training", "mode": "hook"},
    }  # fmt: skip
    beta: Any = found["beta"]  # whose use is unknown: no efficiency, rather than a wrong one
    assert "gpuEfficiency" not in beta and "gpuAllocation" not in beta
    assert acme["cpuCost"] == acme["ramCost"] == 0 and "cpuCores" not in acme and "ramBytes" not in acme
    (nodes,) = allocation_sets(store(hour.records), asked("node,namespace", True, EVERYTHING, first), demo_plan())
    assert sorted(nodes) == ["n1/__idle__", "n1/acme", "n1/beta", "n2/__idle__"]
    assert nodes["n1/acme"]["gpuAllocation"] == {  # type: ignore[index]
        "isGPUShared": True, "gpuModel": "Sim H200", "gpuUUID": "GPU-1",
        "gpuRequestAverage": Decimal("0.5"), "gpuUsageAverage": Decimal("0.25"),
    }  # fmt: skip
    (one,) = allocation_sets(store(hour.records), asked("", False, Filters(tenant=("acme",)), first), demo_plan())
    assert list(one) == ["main/n1/acme/a-acme/a-acme"]


@pytest.mark.parametrize(
    ("window", "start", "end"),
    [
        ("today", "2026-09-22T22:00:00Z", "2026-09-23T22:00:00Z"),
        ("yesterday", "2026-09-21T22:00:00Z", "2026-09-22T22:00:00Z"),
        ("week", "2026-09-19T22:00:00Z", "2026-09-26T22:00:00Z"),
        ("lastweek", "2026-09-12T22:00:00Z", "2026-09-19T22:00:00Z"),
        ("month", "2026-08-31T22:00:00Z", "2026-09-30T22:00:00Z"),
        ("lastmonth", "2026-07-31T22:00:00Z", "2026-08-31T22:00:00Z"),
        ("7d", "2026-09-16T22:00:00Z", "2026-09-23T22:00:00Z"),
        ("1w", "2026-09-16T22:00:00Z", "2026-09-23T22:00:00Z"),
        ("24h", "2026-09-22T10:18:00Z", "2026-09-23T10:18:00Z"),
        ("90m", "2026-09-23T08:48:00Z", "2026-09-23T10:18:00Z"),
        ("1789948800,1790035200", "2026-09-21T00:00:00Z", "2026-09-22T00:00:00Z"),
        ("1789948800-1790035200", "2026-09-21T00:00:00Z", "2026-09-22T00:00:00Z"),
        ("2026-09-21T00:00:00Z,2026-09-22T00:00:00Z", "2026-09-21T00:00:00Z", "2026-09-22T00:00:00Z"),
        ("2026-09-21,2026-09-22", "2026-09-20T22:00:00Z", "2026-09-21T22:00:00Z"),
    ],
)
def test_windows_are_opencosts(window: str, start: str, end: str) -> None:
    found = parse_window(window, VIENNA, NOW)
    assert (found.start_text(), found.end_text()) == (start, end)


def test_steps_of_days_are_days_of_the_zone() -> None:
    question = parse_question({"window": "2026-10-24,2026-10-27", "step": "1d", "aggregate": "namespace"}, VIENNA, NOW)
    hours = [(period.end_us - period.start_us) // HOUR_US for period in question.periods]
    assert hours == [24, 25, 24]
    assert len(parse_question({"window": "7d", "accumulate": "true", "step": "1h"}, VIENNA, NOW).periods) == 1
    assert len(parse_question({"window": "24h", "step": "1h"}, VIENNA, NOW).periods) == 24
    cut = parse_question({"window": "90m", "step": "1h"}, VIENNA, NOW).periods
    assert [period.end_us - period.start_us for period in cut] == [HOUR_US, HOUR_US // 2]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "window is '', expected one such as today"),
        ({"window": "soon"}, "window is 'soon', expected one such as today"),
        ({"window": "0d"}, "window is '0d', expected an end after its start"),
        ({"window": "2026-09-22,2026-09-21"}, "expected an end after its start"),
        ({"window": "99999999999,1"}, "expected an end after its start"),
        ({"window": "999999w"}, "expected one that begins after the year 1"),
        ({"window": "0001-01-01,2026-01-01"}, "in the years 1 to 9999"),
        ({"window": "7d", "step": "0h"}, "step is '0h', expected a length such as 1h"),
        ({"window": "lastmonth", "step": "1m"}, "step makes more than 800 answers"),
        ({"window": "7d", "aggregate": "colour"}, "aggregate names 'colour', expected of all or cluster, node, namespace"),
        ({"window": "7d", "aggregate": "label:app"}, "aggregate names 'label:app'"),
        ({"window": "7d", "accumulate": "maybe"}, "accumulate is 'maybe', expected true, false, hour, day or week"),
        ({"window": "7d", "includeIdle": "often"}, "includeIdle is 'often', expected true or false"),
        ({"window": "7d", "shareIdle": "true"}, "shareIdle is true, expected false"),
        ({"window": "7d", "filter": "namespace=acme"}, "filter has the term 'namespace=acme', expected such as namespace"),
        ({"window": "7d", "filter": 'namespace:"a"+namespace:"b"'}, "filter names namespace twice"),
    ],
)
def test_bad_questions_are_one_sentence(values: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse_question(values, VIENNA, NOW)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_filters_of_both_kinds() -> None:
    assert parse_filters({"filter": 'namespace:"acme","beta"+node: "n1"'}) == Filters(tenant=("acme", "beta"), node=("n1",))
    assert parse_filters({"filterNamespaces": "acme, beta", "filterClusters": "main"}) == Filters(tenant=("acme", "beta"), pool=("main",))


def test_over_http_numbers_are_numbers(tmp_path: Path, hour: Any) -> None:
    snapshots = [
        Snapshot(node=node, epoch=next(r.epoch for r in hour.records if r.node == node), sequence=999, taken_us=DAY.end_us, simulated=True)
        for node in ("n1", "n2")
    ]
    publish_records(CollectorData(tmp_path).store, hour.records, snapshots, now_us=DAY.end_us)
    served = routes(CollectorData(tmp_path).store, clock=ManualClock(NOW))
    status, body = get(served, "/allocation/compute?window=2026-09-21,2026-09-22&aggregate=namespace&includeIdle=true")
    told = json.loads(body)
    assert status == 200 == told["code"] and told["currency"] == "EUR"
    assert {name: item["totalCost"] for name, item in told["data"][0].items()}["acme"] == 18.0
    assert all(isinstance(item["gpuHours"], float) and item["pvs"] == {} for item in told["data"][0].values())
    assert get(served, "/allocation?window=2026-09-21,2026-09-22&aggregate=namespace&includeIdle=true") == (status, body)
    status, body = get(served, "/allocation/compute?window=2026-09-21,2026-09-22&filterNamespaces=x")
    told = json.loads(body)
    assert status == 400 == told["code"] and "data" not in told and "tenant is 'x', expected one of acme, beta" in told["message"]
    assert get(routes(tmp_path / "nothing"), "/allocation/compute?window=7d")[0] == 503
