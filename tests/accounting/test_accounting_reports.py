"""Usage and chargeback of a pool whose numbers are known by hand, through the store, the commands and HTTP."""

import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accounting_http import get

from poolmeter.accounting.chargeback import chargeback_of, chargeback_report
from poolmeter.accounting.dimensions import EVERYTHING, Calendar, Filters
from poolmeter.accounting.plans import demo_plan, parse_plan
from poolmeter.accounting.routes import routes
from poolmeter.accounting.shares import read_shares
from poolmeter.accounting.usage import usage_of, usage_report
from poolmeter.books.writer import Books
from poolmeter.cli import main
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.segments import publish_records
from poolmeter.collector.store import Store as OpenStore
from poolmeter.config import AccountingSection
from poolmeter.errors import BadInput, DataError
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import MINUTE_US
from poolmeter.period import parse_period
from poolmeter.places import CollectorData
from poolmeter.report import cell, render

Store = Callable[..., duckdb.DuckDBPyConnection]
DAY = parse_period("2026-09-21", "2026-09-22", "UTC", 0)
PERIOD = ["--from", "2026-09-21", "--to", "2026-09-22"]
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture
def data(tmp_path: Path, hour: Any) -> Path:
    """A data folder whose store holds the hour, of a simulated pool."""
    snapshots = [
        Snapshot(node=node, epoch=next(r.epoch for r in hour.records if r.node == node), sequence=999, taken_us=DAY.end_us, simulated=True)
        for node in ("n1", "n2")
    ]
    publish_records(CollectorData(tmp_path).store, hour.records, snapshots, now_us=DAY.end_us)
    return tmp_path


def run(capfdbinary: pytest.CaptureFixture[bytes], *words: str) -> tuple[int, bytes, str]:
    status = main(list(words))
    out, err = capfdbinary.readouterr()
    return status, out, err.decode()


def test_usage_in_hours(store: Store, hour: Any) -> None:
    report = usage_of(store(hour.records), DAY, ("tenant", "project", "class"), EVERYTHING)
    acme, beta = report.rows
    assert acme == {
        "tenant": "acme", "project": "search", "class": "training", "allocated_device_hours": Decimal("0.500000000"),
        "used_device_hours": Decimal("0.250000000"), "used_basis": "hook", "memory_allocated_gib_hours": 40, "memory_used_gib_hours": 10,
        "memory_peak_gib": 12, "energy_kwh": Decimal("0.000100000"), "throttled_hours": Decimal("0.016666667"), "denied_allocations": 1,
        "completeness": 1,
    }  # fmt: skip
    assert beta["completeness"] == 0 and beta["used_basis"] == "allocated"
    assert "used_device_hours" not in beta and "energy_kwh" not in beta and "project" not in beta and "denied_allocations" not in beta
    assert report.totals == {
        "capacity_us": 7_200_000_000, "allocated_us": 2_700_000_000, "reserved_unused_us": 0, "unallocated_us": 4_500_000_000,
        "suspended_us": 0, "down_us": 0, "unaccounted_us": 0,
    }  # fmt: skip
    assert report.warnings == ("use without the hook is unknown for 60 of 120 device records; what is said of it is the known part",)


def test_basis_is_mixed_when_records_differ(store: Store, minutes: Any) -> None:
    for minute, basis in enumerate(("hook", "sampled")):
        minutes.device(minute, allocated_us=MINUTE_US)
        minutes.slice(minute, "acme", MINUTE_US, 1, used_basis=basis)
    assert [row["used_basis"] for row in usage_of(store(minutes.records), DAY, ("tenant",), EVERYTHING).rows] == ["mixed"]
    assert [row["used_basis"] for row in usage_of(store(minutes.records), DAY, ("hour", "tenant"), EVERYTHING).rows] == ["mixed"]


@pytest.mark.parametrize("bases", [("hook", "sampled"), ("sampled", "hook")])
def test_basis_is_mixed_across_days_too(store: Store, minutes: Any, bases: tuple[str, str]) -> None:
    for minute, basis in zip((0, 24 * 60), bases, strict=True):
        minutes.device(minute, allocated_us=MINUTE_US)
        minutes.slice(minute, "acme", MINUTE_US, 1, used_basis=basis)
    period = parse_period("2026-09-21", "2026-09-23", "UTC", 0)
    (row,) = chargeback_of(store(minutes.records), period, demo_plan(), ("tenant",), EVERYTHING).rows
    assert row["used_basis"] == "mixed"


def test_an_odd_cent_goes_to_the_older_allocation_whatever_tenants_are_called(store: Store, minutes: Any) -> None:
    minutes.device(0, allocated_us=MINUTE_US)
    plan = parse_plan(
        b'schema="poolmeter.plan/1"\nname="p"\nversion=1\ncurrency="EUR"\n[[prices]]\nfrom=2000-01-01\ndevice_hour={"*"="0.6"}', "p"
    )
    minutes.slice(0, "zeta", 30_000_000, 0, allocation_id="a1")
    minutes.slice(0, "acme", 30_000_000, 0, allocation_id="a2")
    rows = chargeback_of(store(minutes.records), DAY, plan, ("tenant",), EVERYTHING).rows
    assert [(row["tenant"], row["cost"]) for row in rows] == [("acme", Decimal("0.00")), ("zeta", Decimal("0.01"))]


def test_a_crowded_minute_is_dealt_out_to_the_last_microsecond(store: Store, minutes: Any) -> None:
    minutes.device(0, allocated_us=MINUTE_US, down_us=0)
    for tenant, used_us in (("a", 30_000_000), ("b", 30_000_000), ("c", 30_000_001)):
        minutes.slice(0, tenant, 20_000_000, used_us)
    with store(minutes.records) as connection:
        found = read_shares(connection, Calendar.of(DAY), "used", (), 1)
    # 60 s x 30 / 90.000001: floors leave one or two microseconds, dealt to the largest remainders.
    exact = {name: MINUTE_US * used / Fraction(90_000_001) for name, used in (("a", 30_000_000), ("b", 30_000_000), ("c", 30_000_001))}
    paid = {share.tenant: share.us for share in found.shares if share.line == "usage"}
    assert sum(paid.values()) == MINUTE_US and found.scaled_minutes == 1
    assert all(abs(paid[name] - exact[name]) < 1 for name in exact)


def test_allocated_basis_by_hand(store: Store, hour: Any) -> None:
    report = chargeback_of(store(hour.records), DAY, demo_plan(), ("tenant",), EVERYTHING)
    found = [(row.get("tenant"), row["line"], row["quantity"], row["cost"], row.get("unit_price")) for row in report.rows]
    assert found == [
        ("acme", "usage", Decimal("0.500000000"), Decimal("18.00"), Decimal("36.00")),
        ("beta", "usage", Decimal("0.250000000"), Decimal("9.00"), Decimal("36.00")),
        (None, "unallocated", Decimal("1.250000000"), Decimal("27.00"), None),
    ]
    assert report.totals == {
        "cost": Decimal("54.00"), "currency": "EUR", "tenants": Decimal("27.00"), "idle": Decimal("0.00"), "unallocated": Decimal("27.00"),
        "overhead": Decimal("0.00"), "adjustments": Decimal("0.00"),
    }  # fmt: skip


def test_used_basis_by_hand(store: Store, hour: Any) -> None:
    report = chargeback_of(store(hour.records), DAY, demo_plan(), ("tenant",), EVERYTHING, "used")
    found = {(row.get("tenant"), row["line"]): (row["quantity"], row["cost"]) for row in report.rows}
    # beta's use is unknown: it pays its promise, and nothing of it counts as idle.
    assert found == {
        ("acme", "usage"): (Decimal("0.25"), Decimal("9.00")),
        ("beta", "usage"): (Decimal("0.25"), Decimal("9.00")),
        (None, "idle"): (Decimal("0.25"), Decimal("9.00")),
        (None, "unallocated"): (Decimal("1.25"), Decimal("27.00")),
    }
    assert report.rows[1]["completeness"] == 0 and "use is unknown for 1 lines" in report.warnings[0]


def test_who_used_nothing_still_sees_the_price(store: Store, minutes: Any) -> None:
    minutes.device(0, allocated_us=MINUTE_US)
    minutes.slice(0, "acme", MINUTE_US, 0)
    (acme, idle) = chargeback_of(store(minutes.records), DAY, demo_plan(), ("tenant",), EVERYTHING, "used").rows
    assert (acme["quantity"], acme["unit_price"], acme["cost"]) == (0, Decimal("36.00"), Decimal("0.00"))
    assert (idle["line"], idle["cost"]) == ("idle", Decimal("0.60"))


def test_used_basis_parts_of_a_crowded_minute(store: Store, minutes: Any) -> None:
    """Down and switching first come out, claims beyond the card shrink in proportion, the rest keeps its order."""
    minutes.device(0, allocated_us=40_000_000, down_us=10_000_000, suspended_us=5_000_000, switch_overhead_us=4_000_000)
    minutes.slice(0, "acme", 20_000_000, 40_000_000)
    minutes.slice(0, "beta", 20_000_000, 3_000_000)
    report = chargeback_of(store(minutes.records), DAY, demo_plan(), ("tenant",), EVERYTHING, "used")
    hours = {(row.get("tenant"), row["line"]): round(Decimal(str(row["quantity"])) * 3600 * 1000) for row in report.rows}
    # 50 s left by down: 43 used, 4 switching, 3 of beta's 17 idle; nothing is left for suspended or unallocated.
    assert hours == {("acme", "usage"): 40_000, ("beta", "usage"): 3_000, (None, "idle"): 3_000, (None, "overhead"): 14_000}
    minutes.slice(0, "gamma", 0, 50_000_000)
    report = chargeback_of(store(minutes.records), DAY, demo_plan(), ("tenant",), EVERYTHING, "used")
    assert sum(Decimal(str(row["quantity"])) for row in report.rows if row["line"] == "usage") == pytest.approx(
        Decimal(50) / 3600, abs=Decimal("1e-8")
    )
    assert "in 1 device-minutes the claims exceed the device's time and are scaled to it" in report.warnings


def test_a_promise_without_slice_records_and_a_slice_without_a_device(store: Store, minutes: Any) -> None:
    minutes.device(0, allocated_us=MINUTE_US)
    minutes.slice(1, "acme", MINUTE_US, MINUTE_US)
    for basis in ("allocated", "used"):
        report = chargeback_of(store(minutes.records), DAY, demo_plan(), ("tenant",), EVERYTHING, basis)
        assert [(row["line"], row["cost"]) for row in report.rows] == [("usage", Decimal("0.00")), ("overhead", Decimal("0.60"))]
        assert report.warnings == (
            "60000000 us are promised without a slice record that tells to whom: they are in the overhead",
            "in 1 device-minutes slices have no device record: shown as usage, not charged",
            "use without the hook is unknown for 1 of 1 device records; what is said of it is the known part",
        )


def test_broken_identity_is_refused(store: Store, minutes: Any) -> None:
    minutes.device(0, allocated_us=MINUTE_US + 1)
    for ask in (lambda c: usage_of(c, DAY, ("tenant",), EVERYTHING), lambda c: chargeback_of(c, DAY, demo_plan(), ("tenant",), EVERYTHING)):
        with pytest.raises(DataError, match=r"device record n1/GPU-1 of 2026-09-21T00:00:00Z: .* sum to its span of 60000000 us"):
            ask(store(minutes.records))


def test_days_of_a_clock_change_have_23_and_25_hours(store: Store, minutes: Any) -> None:
    zone_days = {"2026-03-29": 23, "2026-10-25": 25, "2026-10-26": 24}
    watched = set()
    for day, hours in zone_days.items():
        period = parse_period(day, "2026-11-01", "Europe/Vienna", 0)
        first = (period.start_us - DAY.start_us) // MINUTE_US
        watched |= {first + quarter * 15 for quarter in range(-8, hours * 4 + 8)}  # two hours more on both sides
    for minute in sorted(watched):
        minutes.device(minute)
    plan = parse_plan(
        b'schema="poolmeter.plan/1"\nname="p"\nversion=1\ncurrency="EUR"\n[[prices]]\nfrom=2000-01-01\ndevice_hour={"*"=60}', "p"
    )
    with store(minutes.records) as connection:
        for day, hours in zone_days.items():
            until = str(int(day[-2:]) + 1)
            period = parse_period(day, day[:-2] + until, "Europe/Vienna", 0)
            assert (period.end_us - period.start_us) == hours * 3_600_000_000
            report = chargeback_of(connection, period, plan, ("day",), EVERYTHING)
            # One minute in fifteen is watched, at 60 EUR an hour: 4 EUR an hour.
            assert [(row["day"], row["cost"]) for row in report.rows if row["day"] == day] == [(day, Decimal(hours * 4))], day
            assert len(chargeback_of(connection, period, plan, ("hour",), EVERYTHING).rows) == hours


def test_prices_change_at_their_minute(store: Store, hour: Any) -> None:
    plan = """schema="poolmeter.plan/1"\nname="p"\nversion=1\ncurrency="EUR"
    [[prices]]\nfrom=2026-09-21\nto=2026-09-21T00:30:00Z\ndevice_hour={"*"="10"}
    [[prices]]\nfrom=2026-09-21T00:30:00Z\ndevice_hour={"*"="20"}"""
    rows = chargeback_of(store(hour.records), DAY, parse_plan(plan.encode(), "p"), ("tenant",), EVERYTHING).rows
    assert rows[0]["cost"] == Decimal("7.50") and "unit_price" not in rows[0]
    with pytest.raises(BadInput, match="has no price for 'Sim H200' at 2026-09-21T00:30:00Z"):
        chargeback_of(store(hour.records), DAY, parse_plan(plan.replace("from=2026-09-21T00:30:00Z", "from=2026-09-21T00:30:00Z\nto=2026-09-21T00:30:00Z").split("[[prices]]\nfrom=2026-09-21T00:30")[0].encode(), "p"), ("tenant",), EVERYTHING)  # fmt: skip


def test_filters(store: Store, hour: Any) -> None:
    with store(hour.records) as connection:
        only = chargeback_of(connection, DAY, demo_plan(), ("tenant",), Filters(tenant=("beta",)))
        assert [(row["tenant"], row["cost"]) for row in only.rows] == [("beta", Decimal("9.00"))] and only.totals["cost"] == Decimal("9.00")
        node = chargeback_of(connection, DAY, demo_plan(), ("node",), Filters(node=("n2",)))
        assert [(row["node"], row["line"], row["cost"]) for row in node.rows] == [("n2", "unallocated", Decimal("18.00"))]
        assert usage_of(connection, DAY, ("tenant",), Filters(node=("n2",))).totals["capacity_us"] == 3_600_000_000
        with pytest.raises(BadInput, match="tenant is 'x', expected one of acme, beta"):
            usage_of(connection, DAY, ("tenant",), Filters(tenant=("x",)))
        with pytest.raises(BadInput, match="pool is 'x', expected one of main"):
            chargeback_of(connection, DAY, demo_plan(), ("tenant",), Filters(pool=("x",)))


def test_how_records_arrived_changes_no_byte(tmp_path: Path, hour: Any) -> None:
    """Pulled often or seldom, twice, or with overlaps: the same bytes."""
    found = set()
    for name, batches in {
        "once": [hour.records],
        "twice": [hour.records, hour.records],
        "often": [hour.records[start : start + 40] for start in range(0, len(hour.records), 40)],
        "overlapping": [hour.records[: start + 90] for start in range(0, len(hour.records), 90)],
    }.items():
        root = CollectorData(tmp_path / name).store
        for batch in batches:
            publish_records(root, batch, now_us=DAY.end_us)
        reports = (
            usage_report(root, DAY, ("device", "tenant")),
            chargeback_report(root, DAY, demo_plan(), ("tenant", "hour"), basis="used"),
        )
        found.add(tuple(render(report, fmt) for report in reports for fmt in ("json", "csv", "parquet")))
    assert len(found) == 1 and b"acme" in next(iter(found))[0]


@pytest.mark.parametrize("name", ["usage", "chargeback"])
@pytest.mark.parametrize("by", ["tenant", "tenant,project,user,class,environment,model,pool,node,device,mode,workload,day,hour"])
def test_every_format_and_http_give_one_number(
    data: Path, capfdbinary: pytest.CaptureFixture[bytes], name: str, by: str, tmp_path: Path
) -> None:
    words = [name, "--data", str(data), *PERIOD, "--by", by]
    found: dict[str, bytes] = {}
    for fmt in ("json", "csv", "parquet", "arrow", "table"):
        status, found[fmt], _ = run(capfdbinary, *words, "--format", fmt)
        assert status == 0
    body = json.loads(found["json"])
    jsonschema.validate(body, json.loads((REFERENCE / f"{name}.schema.json").read_text()), format_checker=jsonschema.FormatChecker())
    as_text = json.loads(found["json"], parse_float=str, parse_int=str)["rows"]
    read = [{key: value for key, value in row.items() if value} for row in csv.DictReader(io.StringIO(found["csv"].decode(), newline=""))]
    assert read == as_text and len(read) >= 2
    for table in (pq.read_table(io.BytesIO(found["parquet"])), pa.ipc.open_file(found["arrow"]).read_all()):
        rows = [{key: cell(value) for key, value in row.items() if value is not None} for row in table.to_pylist()]
        assert rows == as_text
        assert json.loads(table.schema.metadata[b"poolmeter.totals"]) == body["totals"]
    served = routes(CollectorData(data).store)
    query = f"/v1/reports/{name}?from=2026-09-21&to=2026-09-22&by={by}"
    assert get(served, query) == (200, found["json"])
    assert get(served, query + "&format=csv") == (200, found["csv"])


def test_http_refuses_in_one_sentence(data: Path) -> None:
    served = routes(CollectorData(data).store, AccountingSection(plan=data / "none.toml"))
    for query, words in (
        ("by=colour", "--by is 'colour', expected one or several of tenant, project"),
        ("tenant=x", "tenant is 'x', expected one of acme, beta"),
        ("format=xml", "format is 'xml', expected one of json, csv"),
        ("frm=7d", "query parameter is 'frm', expected one of by, format, from"),
        ("from=2026-09-22&to=2026-09-21", "expected a time after --from"),
    ):
        status, body = get(served, f"/v1/reports/usage?{query}")
        assert status == 400 and words in json.loads(body)["error"]
    assert "none.toml cannot be read" in json.loads(get(served, "/v1/reports/chargeback")[1])["error"]
    assert get(routes(data / "nothing"), "/v1/reports/usage")[0] == 503


def test_the_collector_serves_and_documents_them(tmp_path: Path, hour: Any) -> None:
    data = CollectorData(tmp_path)
    publish_records(data.store, hour.records, now_us=DAY.end_us)
    with OpenStore(data.store) as opened, Books(data.books) as books:
        app = create_app(ApiState(opened, books, "token"), routes(data.store))
        status, body = get(app, "/openapi.json")
        paths = json.loads(body)["paths"]
        assert status == 200 and paths["/v1/reports/usage"]["get"]["summary"] == "Who used what."
        assert paths["/v1/reports/chargeback"]["get"]["summary"] == "What it cost, and whose it is."
        status, body = get(app, "/v1/reports/usage?from=2026-09-21&to=2026-09-22")
        assert status == 200 and [row["tenant"] for row in json.loads(body)["rows"]] == ["acme", "beta"]


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["usage", "--by", "tenant,colour"], 2, "--by is 'colour', expected one or several of tenant, project, user, class"),
        (["usage", "--by", "tenant,tenant"], 2, "--by names 'tenant' twice"),
        (["usage", "--by", ""], 2, "--by is ''"),
        (["usage", "--tenant", "x"], 2, "tenant is 'x', expected one of acme, beta"),
        (["chargeback", "--node", "x"], 2, "node is 'x', expected one of n1, n2"),
        (["chargeback", "--plan", "none.toml"], 2, "price plan none.toml cannot be read"),
        (["usage", "--time-zone", "Mars"], 2, "time zone is 'Mars'"),
        (["usage", "--data", "/nonexistent/folder"], 3, "is not there"),
    ],
)
def test_bad_input_is_one_sentence(
    data: Path, capfdbinary: pytest.CaptureFixture[bytes], words: list[str], status: int, sentence: str
) -> None:
    found, out, err = run(capfdbinary, words[0], "--data", str(data), *words[1:])
    assert (found, out) == (status, b"") and sentence in err and err.count("\n") == 1


def test_demo_plan_only_for_a_simulated_pool(tmp_path: Path, hour: Any, data: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    status, out, _ = run(capfdbinary, "chargeback", "--data", str(data), *PERIOD, "--format", "json")
    body = json.loads(out)
    assert status == 0 and body["plan"]["name"] == "demo" and "packaged demo plan" in body["warnings"][0]
    real = tmp_path / "real"
    snapshot = Snapshot(node="n1", epoch=hour.records[0].epoch, sequence=999, taken_us=DAY.end_us, simulated=False)
    publish_records(CollectorData(real).store, hour.records, [snapshot], now_us=DAY.end_us)
    status, out, err = run(capfdbinary, "chargeback", "--data", str(real), *PERIOD)
    assert (status, out) == (2, b"") and "no price plan is given, expected --plan FILE or accounting.plan" in err
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'schema="poolmeter.plan/1"\nname="p"\nversion=1\ncurrency="JPY"\ntime_zone="Asia/Tokyo"\n[[prices]]\nfrom=2000-01-01\ndevice_hour={"*"=100}'
    )
    config = tmp_path / "config.toml"
    config.write_text(f'[accounting]\nplan = "{plan}"\n')
    status, out, _ = run(
        capfdbinary, "chargeback", "--data", str(real), *PERIOD, "--config", str(config), "--by", "day", "--format", "json"
    )
    body = json.loads(out)
    assert (
        status == 0
        and body["from"] == "2026-09-20T15:00:00Z"
        and body["totals"]["cost"] == "200"
        and body["warnings"][0].startswith("use is")
    )


def test_use_without_the_hook_is_named_on_both_reports(store: Store, minutes: Any) -> None:
    minutes.device(0, unaccounted_us=1_800_000)
    minutes.device(1, unaccounted_us=1_800_000)
    minutes.device(0, "GPU-2", node="n2", unaccounted_us=30_000_000, allocated_us=60_000_000)
    minutes.slice(0, "acme", 60_000_000, 10_000_000, uuid="GPU-2", node="n2")
    minutes.device(0, "GPU-3", node="n2", unaccounted_us=0)
    expected = (
        "device GPU-2 of node n2: 0.008333333 device-hours were used by programs without the hook (unaccounted); nobody is billed for them",
        "device GPU-1 of node n1: 0.001000000 device-hours were used by programs without the hook (unaccounted); nobody is billed for them",
    )
    with store(minutes.records) as connection:
        usage = usage_of(connection, DAY, ("tenant",), EVERYTHING)
        assert usage.warnings == expected and usage.totals["unaccounted_us"] == 33_600_000
        assert chargeback_of(connection, DAY, demo_plan(), ("tenant",), EVERYTHING).warnings == expected
        for question in (
            usage_of(connection, DAY, ("day",), Filters(node=("n1",))),
            chargeback_of(connection, DAY, demo_plan(), ("day",), Filters(node=("n1",))),
        ):
            assert question.warnings == expected[1:]
        # It is no tenant's business what others ran.
        assert usage_of(connection, DAY, ("tenant",), Filters(tenant=("acme",))).warnings == ()
        assert "without the hook" in render(usage, "table").decode() and "without the hook" in render(usage, "json").decode()


def test_many_cards_used_without_the_hook_are_summed(store: Store, minutes: Any) -> None:
    for number in range(23):
        minutes.device(0, f"GPU-{number:02}", unaccounted_us=3_600_000)
    with store(minutes.records) as connection:
        warnings = usage_of(connection, DAY, ("tenant",), EVERYTHING).warnings
    assert len(warnings) == 21 and warnings[0].startswith("device GPU-00 of node n1: 0.001000000 device-hours")
    assert warnings[-1] == "3 more devices: 0.003000000 device-hours unaccounted; see usage --by device and --node"
