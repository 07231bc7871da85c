"""One number in every format; files whole or not at all."""

import csv
import io
import json
import os
import stat
from decimal import Decimal
from pathlib import Path

import pytest

from poolmeter.errors import Unavailable
from poolmeter.report import FORMATS, Report, render, write

REPORT = Report(
    name="usage",
    columns=("tenant", "hours", "energy_kwh", "cost"),
    rows=(
        {"tenant": "=evil()", "hours": Decimal("0.100000001"), "cost": Decimal("12.30")},
        {"tenant": "b\x1b[31m", "hours": Decimal("3"), "energy_kwh": Decimal("0.5"), "cost": Decimal("-0.10")},
    ),
    start="2026-01-01T00:00:00Z",
    end="2026-02-01T00:00:00Z",
    totals={"cost": Decimal("12.20"), "nothing": None},
    warnings=("one",),
)


def test_json_follows_the_contract() -> None:
    body = json.loads(render(REPORT, "json"))
    assert list(body) == ["schema", "from", "to", "rows", "totals", "warnings"]
    assert body["schema"] == "poolmeter.usage/1"
    assert body["rows"][0] == {"tenant": "=evil()", "hours": 0.100000001, "cost": "12.30"}
    assert body["totals"] == {"cost": "12.20"}


def test_numbers_keep_their_digits() -> None:
    exact = Decimal("1234567890123456.123456789")
    report = Report("usage", ("hours",), ({"hours": exact},))
    assert json.loads(render(report, "json"), parse_float=Decimal)["rows"] == [{"hours": exact}]
    assert render(report, "csv").decode().splitlines()[1] == str(exact)


def test_text_cannot_pass_for_a_number() -> None:
    report = Report("usage", ("tenant",), ({"tenant": "\x001\x00"},))
    assert json.loads(render(report, "json"))["rows"] == [{"tenant": "\ufffd1\ufffd"}]


def test_all_formats_hold_the_same_numbers() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = [row.get("cost") for row in json.loads(render(REPORT, "json"))["rows"]]
    assert [row["cost"] for row in csv.DictReader(io.StringIO(render(REPORT, "csv").decode(), newline=""))] == expected
    assert pq.read_table(io.BytesIO(render(REPORT, "parquet"))).column("cost").to_pylist() == expected
    assert pa.ipc.open_file(render(REPORT, "arrow")).read_all().column("energy_kwh").to_pylist() == [None, Decimal("0.5")]
    table = render(REPORT, "table").decode()
    assert all(number in table for number in expected)


def test_no_format_lets_text_act() -> None:
    assert "'=evil()" in render(REPORT, "csv").decode()
    assert "-0.10" in render(REPORT, "csv").decode()  # a number is no formula
    assert "\x1b" not in render(REPORT, "table").decode()


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_reports_render(fmt: str) -> None:
    assert render(Report("usage", ("tenant",), ()), fmt)


def test_output_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    write(REPORT, "json", str(target))
    assert json.loads(target.read_text())["totals"] == {"cost": "12.20"}
    assert stat.S_IMODE(target.stat().st_mode) & 0o111 == 0
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_unwritable_output_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot write"):
        write(REPORT, "json", str(tmp_path / "missing" / "out.json"))
    assert os.listdir(tmp_path) == []


def test_devices_can_be_written() -> None:
    write(REPORT, "json", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_table_wider_than_the_terminal_goes_on_below_itself() -> None:
    columns = ("tenant", "line", *(f"quantity_number_{i}" for i in range(12)))
    rows = tuple(
        {"tenant": f"tenant-{n}", "line": "usage", **{c: Decimal(n * 100 + i) for i, c in enumerate(columns[2:])}} for n in range(3)
    )
    wide = render(Report("usage", columns, rows), "table").decode()
    assert len(wide.splitlines()) == 4 and max(map(len, wide.splitlines())) > 200
    for width in (60, 80, 100, 120):
        text = render(Report("usage", columns, rows), "table", width).decode()
        parts = [part.splitlines() for part in text.rstrip("\n").split("\n\n")]
        assert len(parts) > 1 and max(len(line) for part in parts for line in part) <= width
        assert [line.split()[:2] for line in parts[-1]] == [["tenant", "line"], *([f"tenant-{n}", "usage"] for n in range(3))]
        for line in range(4):
            assert [word for part in parts for word in part[line].split()[2:]] == wide.splitlines()[line].split()[2:]
    assert render(Report("usage", columns, rows), "table", 1000).decode() == wide


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_column_wider_than_the_terminal_is_whole(width: int) -> None:
    text = render(REPORT, "table", width).decode()
    assert "0.100000001" in text and "energy_kwh" in text and "12.20" in text


def test_a_table_of_text_alone_fits_a_terminal() -> None:
    row = {name: name[0] * 30 for name in ("node", "allocation", "device", "tenant", "project")}
    text = render(Report("allocations", tuple(row), (row,)), "table", 100).decode()
    assert max(map(len, text.splitlines())) <= 100
    assert [word for line in text.splitlines() for word in line.split() if len(word) == 30] == [
        "n" * 30,
        "a" * 30,
        "d" * 30,
        "n" * 30,
        "t" * 30,
        "p" * 30,
    ]
