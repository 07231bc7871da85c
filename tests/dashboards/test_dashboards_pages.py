"""The Streamlit pages, run by AppTest on a real store: their numbers are the command line's, and the unknown is never 0."""

import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from poolmeter.clock import SystemClock
from poolmeter.collector.segments import publish_records
from poolmeter.dashboards import bill
from poolmeter.places import CollectorData
from poolmeter.report import Report

TIMEOUT = 60


def page(module: str) -> AppTest:
    return AppTest.from_string(f"from poolmeter.dashboards import {module}\n{module}.show()\n", default_timeout=TIMEOUT).run()


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def cli(data: Path, *words: str) -> dict[str, object]:
    command = [sys.executable, "-m", "poolmeter.cli", *words, "--data", str(data), "--format", "json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    body: dict[str, object] = json.loads(result.stdout, parse_float=str)
    return body


def test_now_shows_the_figures(data: Path) -> None:
    app = page("now")
    assert not app.exception
    # By hand from conftest: 0.75 + 1 + 0.5 of 4 cards; (0.45 + 0.9) of 2 known; (0.1 + 0.25 + 0.1 + 0) of 3 cards without unknown
    # slices, the lost one among them; 0.05 of 2 known.
    assert metrics(app) == {"Cards": "3 of 4", "Allocated": "56.3 %", "Busy": "67.5 %", "Idle allocated": "15.0 %", "Unaccounted": "2.5 %"}
    assert {metric.label: metric.delta for metric in app.metric if metric.delta} == {
        "Busy": "2 of 4 cards known",
        "Idle allocated": "3 of 4 slices known",
        "Unaccounted": "2 of 4 cards known",
    }
    assert any("source nvml fails: a call hangs for 12 s" in warning.value for warning in app.warning)


def test_now_lists_the_slices_and_says_unknown(data: Path) -> None:
    rows = page("now").dataframe[0].value.set_index("allocation").to_dict("index")
    assert rows["ada-node-a-0"]["used, last minute"] == "40.0 %"
    assert rows["ada-node-a-0"]["memory used"] == "60.0 GiB"
    assert rows["bob-node-a-0"]["used, last minute"] == "0.0 %"
    assert rows["bob-node-a-0"]["last activity"] == "2 h"
    hidden = rows["ada-node-b-0"]
    assert (hidden["state"], hidden["used, last minute"], hidden["memory used"], hidden["last activity"]) == ("unknown",) * 4


def test_now_when_the_data_is_old(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = SystemClock().wall_us() + 3600 * 1_000_000
    monkeypatch.setattr(SystemClock, "wall_us", lambda _: later)
    app = page("now")
    assert metrics(app) == dict.fromkeys(("Allocated", "Busy", "Idle allocated", "Unaccounted"), "unknown") | {"Cards": "0 of 4"}
    assert sum("no snapshot for 60 min" in warning.value for warning in app.warning) == 2
    assert {row["state"] for row in app.dataframe[0].value.to_dict("records")} == {"unknown"}


def test_pages_without_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLMETER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for module in ("now", "bill"):
        app = page(module)
        assert not app.exception
        assert len(app.error) == 1 and "is not there" in app.error[0].value.replace("\\", "")


def test_pages_with_a_configuration_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("[dashboard]\nprot = 1\n")
    monkeypatch.setenv("POOLMETER_CONFIG", str(tmp_path / "config.toml"))
    for module in ("now", "bill"):
        app = page(module)
        assert not app.exception
        assert "prot is not a known key" in app.error[0].value.replace("\\", "")


def test_pages_with_an_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLMETER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    publish_records(CollectorData(tmp_path).store, [])
    app = page("now")
    assert not app.exception
    assert {metrics(app)[name] for name in ("Allocated", "Busy", "Idle allocated", "Unaccounted")} == {"no data yet"}


def test_the_first_seconds_of_a_pool_are_no_data_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_minute: Callable[[Path, int], None]
) -> None:
    """A minute that was watched for seven seconds, in which nothing ran, does not say that the pool stands idle."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shown = {}
    for span_us in (7_000_000, 31_000_000):
        monkeypatch.setenv("POOLMETER_DATA", str(tmp_path / str(span_us)))
        short_minute(tmp_path / str(span_us), span_us)
        shown[span_us] = {name: metrics(page("now"))[name] for name in ("Allocated", "Busy", "Unaccounted")}
    assert shown[7_000_000] == dict.fromkeys(("Allocated", "Busy", "Unaccounted"), "no data yet")
    assert shown[31_000_000] == {"Allocated": "50.0 %", "Busy": "0.0 %", "Unaccounted": "0.0 %"}


@pytest.mark.parametrize(
    ("by", "basis", "flag"),
    [
        (("tenant",), "As the plan says", []),
        (("tenant", "node"), "Used", ["--basis", "used"]),
        (("day", "tenant"), "Allocated", ["--basis", "allocated"]),
    ],
)
def test_bill_is_the_command_lines(data: Path, by: tuple[str, ...], basis: str, flag: list[str]) -> None:
    app = page("bill")
    app.selectbox[0].set_value("Last 7 days")
    app.multiselect[0].set_value(list(by))
    app.selectbox[1].set_value(basis)
    app.run()
    assert not app.exception and not app.error
    said = cli(data, "chargeback", "--from", "7d", "--by", ",".join(by), *flag)
    totals = said["totals"]
    assert isinstance(totals, dict)
    shown = metrics(app)
    for label, key in (
        ("Pool cost", "cost"),
        ("Tenants", "tenants"),
        ("Idle", "idle"),
        ("Unallocated", "unallocated"),
        ("Overhead", "overhead"),
    ):
        assert shown[label] == f"{totals[key]} {totals['currency']}"
    assert Decimal(str(totals["cost"])) > 0
    table = app.dataframe[0].value.to_dict("records")
    rows = said["rows"]
    assert isinstance(rows, list) and len(table) == len(rows)
    for drawn, row in zip(table, rows, strict=True):
        for name, text in drawn.items():
            assert text == ("" if name not in row else str(row[name])), name
        assert not [name for name in row if name not in drawn]


def test_bill_of_an_empty_period_and_a_bad_one(data: Path) -> None:
    app = page("bill")
    app.selectbox[0].set_value("From … to …").run()
    app.text_input[0].set_value("2020-01-01")
    app.text_input[1].set_value("2020-02-01").run()
    assert not app.exception and "nothing to bill" in app.info[0].value
    app.text_input[1].set_value("whenever").run()
    assert not app.exception and "whenever" in app.error[0].value


def test_names_are_no_markdown_and_no_html() -> None:
    from poolmeter.dashboards.charts import colours_of, legend
    from poolmeter.dashboards.figures import plain_text

    assert "<script" not in legend(colours_of(["<script>alert(1)</script>"]))
    assert plain_text("[a](http://b)") == "\\[a\\]\\(http\\://b\\)"


PLAN = """schema = "poolmeter.plan/1"
name = "trial *plan*"
version = 3
currency = "JPY"
[[prices]]
from = 2000-01-01
[prices.device_hour]
"*" = "900"
"""


def test_bill_by_an_uploaded_plan_is_the_command_lines_by_that_file(data: Path, tmp_path: Path) -> None:
    app = page("bill")
    app.selectbox[0].set_value("Last 7 days")
    app.file_uploader[0].set_value(("trial.toml", PLAN.encode(), "application/toml")).run()
    assert not app.exception and not app.error
    file = tmp_path / "trial.toml"
    file.write_text(PLAN)
    totals = cli(data, "chargeback", "--from", "7d", "--plan", str(file))["totals"]
    assert isinstance(totals, dict) and totals["currency"] == "JPY"
    assert metrics(app)["Pool cost"] == f"{totals['cost']} JPY"
    assert "trial \\*plan\\* version 3" in app.caption[0].value


def test_bill_with_shared_cost_is_the_command_lines(data: Path, tmp_path: Path) -> None:
    text = PLAN + '[policy]\nidle = "by-use"\nunallocated = "even"\noverhead = "by-allocation"\n'
    app = page("bill")
    app.selectbox[0].set_value("Last 7 days")
    app.file_uploader[0].set_value(("trial.toml", text.encode(), "application/toml"))
    app.multiselect[0].set_value(["tenant", "part"])
    app.run()
    assert not app.exception and not app.error
    file = tmp_path / "trial.toml"
    file.write_text(text)
    said = cli(data, "chargeback", "--from", "7d", "--plan", str(file), "--by", "tenant,part")
    totals, rows = said["totals"], said["rows"]
    assert isinstance(totals, dict) and isinstance(rows, list) and Decimal(str(totals["shared"])) > 0
    assert metrics(app)["Of these shared"] == f"{totals['shared']} JPY" and metrics(app)["Pool cost"] == f"{totals['cost']} JPY"
    table = app.dataframe[0].value.to_dict("records")
    for drawn, row in zip(table, rows, strict=True):
        assert {name for name, shown in drawn.items() if shown} == set(row)
        assert all(drawn[name] == row[name] for name in row if name.endswith("cost") or name.startswith("shared"))
    assert {"shared_cost", "total_cost", "allocated_method", "shared_unallocated"} <= table[0].keys()


def test_bars_are_as_long_as_what_their_owners_bear() -> None:
    rows = (
        {"tenant": "acme", "line": "usage", "cost": Decimal("10.00"), "shared_cost": Decimal("4.00"), "total_cost": Decimal("14.00")},
        {"tenant": "beta", "line": "usage", "cost": Decimal("3.00"), "shared_cost": Decimal("0.00"), "total_cost": Decimal("3.00")},
        {"line": "idle", "cost": Decimal("5.00"), "shared_cost": Decimal("-4.00"), "total_cost": Decimal("1.00")},
    )
    chart = bill._chart(Report("chargeback", ("tenant", "line", "cost"), rows, totals={"currency": "EUR"}), ("tenant",), {}).to_dict()
    (drawn,) = chart["datasets"].values()
    assert [(row["owner"], row["line"], row["cost"]) for row in drawn] == [
        ("acme", "usage", "10.00 EUR"),
        ("acme", "shared", "4.00 EUR"),
        ("beta", "usage", "3.00 EUR"),
        ("(idle)", "idle", "1.00 EUR"),
    ]


def test_bill_by_a_plan_that_is_none(data: Path) -> None:
    app = page("bill")
    app.file_uploader[0].set_value(("broken.toml", b"name = 7", "application/toml")).run()
    assert not app.exception and "broken.toml" in app.error[0].value.replace("\\", "")
    assert not app.dataframe


def test_bill_by_a_configured_plan_and_zone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    config = tmp_path / "config.toml"
    config.write_text(f'[accounting]\nplan = "{tmp_path / "plan.toml"}"\ntime_zone = "Asia/Tokyo"\n')
    monkeypatch.setenv("POOLMETER_CONFIG", str(config))
    app = page("bill")
    app.selectbox[0].set_value("Last 7 days").run()
    totals = cli(data, "chargeback", "--from", "7d", "--config", str(config))["totals"]
    assert isinstance(totals, dict)
    assert metrics(app)["Pool cost"] == f"{totals['cost']} JPY"
    assert app.text_input[0].value == "Asia/Tokyo"
    assert not [warning.value for warning in app.warning if "without the hook" not in warning.value]
