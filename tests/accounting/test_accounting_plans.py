"""Price plans: what is taken, what is refused and in which words, which price covers a minute."""

import json
import tomllib
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolmeter.accounting.parts import PARTS
from poolmeter.accounting.plan_check import calendar_period, plan_report
from poolmeter.accounting.plans import demo_plan, load_plan, parse_plan
from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.accounting.plans.file import _Band, _File, _Policy, _Prices
from poolmeter.accounting.plans.lines import Lines
from poolmeter.accounting.plans.plan import UNPRICED
from poolmeter.cli import main
from poolmeter.errors import BadInput
from poolmeter.period import parse_period

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
GOOD = """
schema = "poolmeter.plan/1"
name = "p"
version = 1
currency = "EUR"
[[prices]]
from = 2026-01-01
to = 2026-03-29
[prices.device_hour]
"NVIDIA H200" = "2.50"
"NVIDIA H*" = 2.10
"*" = 1
[[prices]]
from = 2026-03-29
[prices.device_hour]
"*" = "0.123456789"
"""


def us(text: str, zone: str = "UTC") -> int:
    return parse_period(text, "2100-01-01", zone, 0).start_us


def test_the_most_specific_pattern_wins() -> None:
    plan = parse_plan(GOOD.encode(), "p.toml")
    at = us("2026-01-01")
    assert plan.price("NVIDIA H200", at) == Decimal("2.50")
    assert plan.price("NVIDIA H100", at) == Decimal("2.10")
    assert plan.price("AMD MI300X", at) == 1
    assert plan.price("NVIDIA H200", us("2026-03-29")) == Decimal("0.123456789")
    assert plan.price("NVIDIA H200", us("2026-03-29") - 60_000_000) == Decimal("2.50")


def test_dates_are_midnights_of_the_plans_zone() -> None:
    plan = parse_plan(GOOD.replace('currency = "EUR"', 'currency = "EUR"\ntime_zone = "Europe/Vienna"').encode(), "p.toml")
    first, second = us("2026-01-01", "Europe/Vienna"), us("2026-03-29", "Europe/Vienna")
    assert plan.changes(first - 60_000_000, second + 60_000_000) == ((first - 60_000_000, UNPRICED), (first, 0), (second, 1))


def test_packaged_and_example_plans_are_good() -> None:
    assert demo_plan().currency == "EUR" and demo_plan().price("anything", us("2026-01-01")) == 10
    example = Path(__file__).parents[2] / "deploy" / "plan.example.toml"
    plan = load_plan(example)
    found = [
        str(plan.price("NVIDIA H200", us(f"2026-12-2{day}T{hour}", "Europe/Vienna")))
        for day, hour in (("3", "05:00"), ("3", "07:00"), ("3", "12:00"), ("5", "12:00"))
    ]
    assert found == ["1.60", "2.70", "3.24", "2.025"]


def test_minor_digits_follow_iso_4217() -> None:
    assert (MINOR_DIGITS["EUR"], MINOR_DIGITS["JPY"], MINOR_DIGITS["KWD"]) == (2, 0, 3)
    assert all(len(code) == 3 and code.isupper() for code in MINOR_DIGITS) and len(MINOR_DIGITS) > 150


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"2.50"', '"-2.50"', "prices[0].device_hour.'NVIDIA H200' is '-2.50', expected a price of at least 0"),
        ('"2.50"', "nan", "device_hour.'NVIDIA H200' is 'nan', expected a price"),
        ('"2.50"', "inf", "is 'inf', expected a price"),
        ('"2.50"', "2.5e0", "is '2.5e0', expected a price of at least 0, written in plain decimals"),
        ('"2.50"', "-0.0", "is '-0.0', expected a price"),
        ('"2.50"', '"2.5000000001"', "expected a price"),
        ('"2.50"', '"2,50"', "is '2,50', expected a price"),
        ('"2.50"', '"2.50\\n"', "expected a price"),
        ('"2.50"', "true", "is True"),
        ('"2.50"', "[1]", "is [1]"),
        ('currency = "EUR"', 'currency = "EUX"', "currency is 'EUX', expected an ISO 4217 code"),
        ('currency = "EUR"', "", "currency is missing"),
        ('currency = "EUR"', 'currency = "EUR"\ncurency = "x"', "curency is not a known key"),
        ('currency = "EUR"', 'currency = "EUR"\nbasis = "blend"', "basis is 'blend'"),
        ('currency = "EUR"', 'currency = "EUR"\ntime_zone = "Mars/Base"', "time zone is 'Mars/Base'"),
        ('currency = "EUR"', 'currency = "EUR"\npolicy.idle = "evenly"', "policy.idle is 'evenly', expected: Input should be 'own-line', 'even'"),
        ("version = 1", "version = 0", "version is 0"),
        ("version = 1", "version = 1.5", "version is '1.5'"),
        ('schema = "poolmeter.plan/1"', 'schema = "poolmeter.plan/2"', "schema is 'poolmeter.plan/2'"),
        ("to = 2026-03-29", "to = 2026-03-30", "prices[0].to is 2026-03-30T00:00:00Z and prices[1].from is 2026-03-29T00:00:00Z: they overlap"),
        ("to = 2026-03-29", "", "prices[0].to is open and prices[1].from is 2026-03-29T00:00:00Z: they overlap"),
        ("to = 2026-03-29", "to = 2026-03-28", "they leave a gap"),
        ("to = 2026-03-29", "to = 2025-03-28", "prices[0].to is 2025-03-28, expected a time after its from"),
        ("from = 2026-01-01", "from = 2026-01-01T00:00:00", "prices[0].from is 2026-01-01T00:00:00, expected an offset such as Z"),
        ("from = 2026-01-01", "from = 2026-01-01T00:00:30Z", "expected a whole minute"),
        ("from = 2026-01-01", 'from = "2026-01-01"', "prices[0].from"),
        ("from = 2026-01-01", "from = 7", "prices[0].from"),
        ('"*" = 1\n', '"*" = 1\n"*" = 2\n', "is not TOML: "),
    ],
)  # fmt: skip
def test_a_bad_plan_is_one_sentence_naming_file_and_key(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(BadInput) as caught:
        parse_plan(GOOD.replace(old, new, 1).encode(), "p.toml")
    assert str(caught.value).startswith("price plan p.toml") and words in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 6000])
def test_toml_that_no_parser_survives(text: str) -> None:
    with pytest.raises(BadInput, match=r"price plan p\.toml is not TOML"):
        parse_plan(text.encode(), "p.toml")


def test_a_date_outside_the_calendar_is_named() -> None:
    text = GOOD.replace('currency = "EUR"', 'currency = "EUR"\ntime_zone = "Asia/Tokyo"')
    first = text.index("from = ")
    with pytest.raises(BadInput, match="years 1 to 9999"):
        parse_plan((text[:first] + "from = 0001-01-01\n" + text[text.index("\n", first) + 1 :]).encode(), "p.toml")


def test_a_minute_without_a_price_is_an_error() -> None:
    plan = parse_plan(GOOD.encode(), "p.toml")
    with pytest.raises(BadInput, match=r"p\.toml has no price for 'NVIDIA H200' at 2025-12-31T23:59:00Z"):
        plan.price("NVIDIA H200", us("2026-01-01") - 60_000_000)
    only = parse_plan(GOOD.replace('"*" = 1\n', "").encode(), "p.toml")
    with pytest.raises(BadInput, match=r"prices\[0\]\.device_hour has no price for 'AMD MI300X' at 2026-01-01T00:00:00Z"):
        only.price("AMD MI300X", us("2026-01-01"))


def test_equally_specific_patterns_are_refused() -> None:
    plan = parse_plan(GOOD.replace('"NVIDIA H*" = 2.10', '"NVIDIA H1*" = 2.10\n"*IA H100" = 3\n"*DIA H100"=3.5').encode(), "p.toml")
    with pytest.raises(BadInput, match="equally specific for 'NVIDIA H100'"):
        parse_plan(GOOD.replace('"NVIDIA H*" = 2.10', '"NVIDIA H*" = 2.10\n"?VIDIA H1*" = 3').encode(), "p.toml").price(
            "NVIDIA H100", us("2026-01-01")
        )
    assert plan.price("NVIDIA H100", us("2026-01-01")) == Decimal("2.10")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file or directory, expected a TOML file"):
        load_plan(tmp_path / "none.toml")


BANDED = """schema = "poolmeter.plan/1"
name = "p"
version = 1
currency = "EUR"
time_zone = "Europe/Vienna"
holidays = [2026-12-25, 2026-12-26]

[[prices]]
from = 2026-01-01
[prices.device_hour]
"NVIDIA H200" = "2.5"  # the entry's own
"*" = "1.00"

[[prices.bands]]
name = "peak"
days = "weekdays"
hours = ["08:00-12:00",
         "13:00-20:00"]
factor = "1.5"

[[prices.bands]]
name = "night"
days = ["weekdays", "weekend"]
hours = "22:00-06:00"
[prices.bands.device_hour]
"NVIDIA H*" = "0.5"
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('factor = "1.5"', "", "line 14: prices[0].bands[0] ('peak') has no price, expected a factor, a device_hour table, or both"),
        ('factor = "1.5"', "factor = -1", "line 19: prices[0].bands[0].factor is '-1', expected a factor of at least 0"),
        ('factor = "1.5"', "factor = 1e3", "line 19: prices[0].bands[0].factor is '1e3', expected a factor"),
        ('factor = "1.5"', "factor = 0.123456789", "line 19: prices[0].bands[0].factor is 0.123456789, and 2.5 for 'NVIDIA H200' times it is"),
        ('days = "weekdays"', 'days = "weekday"', "line 16: prices[0].bands[0].days has 'weekday', expected one or several of mon, tue"),
        ('days = "weekdays"', "days = []", "line 16: prices[0].bands[0].days is empty"),
        ('days = "weekdays"', "days = [1]", "line 16: prices[0].bands[0].days"),
        ('"13:00-20:00"', '"13:00-13:00"', "line 17: prices[0].bands[0].hours is '13:00-13:00', expected clock times that differ"),
        ('"13:00-20:00"', '"13:00-24:01"', "is '13:00-24:01', expected clock times"),
        ('"13:00-20:00"', '"13-20"', "is '13-20', expected clock times"),
        ('"13:00-20:00"', '"13:00:30-20:00"', "is '13:00:30-20:00', expected clock times"),
        ('"13:00-20:00"', '"24:00-20:00"', "is '24:00-20:00', expected clock times"),
        ('"13:00-20:00"', '"13:00-23:00"', "line 21: prices[0].bands[1] ('night') and bands[0] ('peak') meet on thu 2026-01-01 at 22:00 (2026-01-01T21:00:00Z)"),
        ('"22:00-06:00"', '"20:00-08:01"', "('night') and bands[0] ('peak') meet on thu 2026-01-01 at 08:00 (2026-01-01T07:00:00Z)"),
        ('"night"', '"peak"', "line 22: prices[0].bands[1].name is 'peak' for a second time"),
        ('name = "night"\n', "", "line 21: prices[0].bands[1].name is missing"),
        ('"NVIDIA H*" = "0.5"', '"NVIDIA H*" = "0,5"', "line 26: prices[0].bands[1].device_hour.'NVIDIA H*' is '0,5', expected a price"),
        ('"NVIDIA H*" = "0.5"', '"" = "0.5"', "line 26: prices[0].bands[1].device_hour.'' is an empty pattern"),
        ('time_zone = "Europe/Vienna"', "", "line 14: prices[0].bands[0] is a band, expected a time_zone in the plan"),
        ("2026-12-26]", "2026-12-25]", "line 6: holidays[1] is 2026-12-25, which is there twice"),
        ("2026-12-26]", '"2026-12-26"]', "line 6: holidays[1] is '2026-12-26', expected: Input should be a valid date"),
        ("2026-12-26]", "2026-12-26T12:00:00]", "line 6: holidays[1] is"),
        ("[2026-12-25, 2026-12-26]", "[]\nx = 1", "line 7: x is not a known key"),
        ('days = "weekdays"', 'days = "weekdays"\nprice = 3', "line 17: prices[0].bands[0].price is not a known key"),
        ('"2.5"', '"-2.5"', "line 11: prices[0].device_hour.'NVIDIA H200' is '-2.5', expected a price"),
        ("from = 2026-01-01", "from = 2026-01-01T00:00:01Z", "line 9: prices[0].from is"),
        ('currency = "EUR"', 'currency = "EUX"', "line 4: currency is 'EUX'"),
        ('time_zone = "Europe/Vienna"', 'time_zone = "Mars"', "line 5: time zone is 'Mars'"),
    ],
)  # fmt: skip
def test_a_bad_band_is_one_sentence_naming_line_and_key(old: str, new: str, words: str) -> None:
    assert old in BANDED
    with pytest.raises(BadInput) as caught:
        parse_plan(BANDED.replace(old, new, 1).encode(), "p.toml")
    assert str(caught.value).startswith("price plan p.toml line ") and words in str(caught.value), str(caught.value)


def test_a_band_of_holidays_needs_a_list_of_them() -> None:
    text = BANDED.replace("holidays = [2026-12-25, 2026-12-26]", "").replace('days = "weekdays"', 'days = "holidays"')
    with pytest.raises(BadInput, match=r"prices\[0\]\.bands\[0\]\.days is 'holidays', and the plan has none, expected dates in holidays"):
        parse_plan(text.encode(), "p.toml")


def test_bands_that_would_meet_only_where_the_entry_is_not_are_taken() -> None:
    """Saturday's night would meet Sunday's morning; the entry is in force on a Wednesday alone."""
    text = BANDED.replace("from = 2026-01-01", "from = 2026-01-07\nto = 2026-01-08").replace(
        'days = "weekdays"\nhours = ["08:00-12:00",', 'days = "sun"\nhours = ["05:00-12:00",'
    )
    assert parse_plan(text.encode(), "p.toml").price("NVIDIA H200", us("2026-01-07T05:00", "Europe/Vienna")) == Decimal("0.5")
    with pytest.raises(BadInput, match="meet on sun 2026-01-11 at 05:00"):
        parse_plan(text.replace("to = 2026-01-08", "to = 2026-01-12").encode(), "p.toml")


def test_bands_that_would_meet_only_in_a_skipped_hour_are_taken() -> None:
    """From 02:00 to 03:00 on the one day of the entry there is no clock."""
    text = BANDED.replace("from = 2026-01-01", "from = 2026-03-29\nto = 2026-03-30").replace('days = "weekdays"', 'days = "sun"')
    text = text.replace('"08:00-12:00"', '"02:00-04:00"').replace('"22:00-06:00"', '"01:00-03:00"')
    plan = parse_plan(text.encode(), "p.toml")
    assert [str(plan.price("NVIDIA H200", us(f"2026-03-29T0{hour}:00:00Z"))) for hour in (0, 1)] == ["0.5", "3.75"]


def test_a_model_without_a_price_in_a_band_is_an_error_there_and_only_there() -> None:
    plan = parse_plan(BANDED.encode(), "p.toml")
    at = us("2026-12-23T21:59", "Europe/Vienna")
    assert plan.price("AMD MI300X", at) == 1
    with pytest.raises(BadInput) as caught:
        plan.price("AMD MI300X", at + 60_000_000)
    assert "p.toml line 21: prices[0].bands[1] ('night').device_hour has no price for 'AMD MI300X' at 2026-12-23T21:00:00Z" in str(
        caught.value
    )
    plan = parse_plan((BANDED.replace('hours = "22:00-06:00"', 'hours = "22:00-06:00"\nfactor = 1')).encode(), "p.toml")
    assert plan.price("AMD MI300X", at + 60_000_000) == 1 and plan.price("NVIDIA H1", at + 60_000_000) == Decimal("0.5")


def test_one_value_is_written_in_one_way() -> None:
    """`unit_price` must not depend on which of 2.5 and 2.50 came first."""
    text = BANDED.replace('"NVIDIA H*" = "0.5"', '"NVIDIA H*" = "2.500"')
    plan = parse_plan(text.encode(), "p.toml")
    found = [str(plan.price("NVIDIA H200", us(f"2026-12-2{day}", "Europe/Vienna"))) for day in ("3T07:00", "3T23:00", "3T09:00")]
    assert found == ["2.500", "2.500", "3.75"]


@given(st.text(), st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_lines_of_any_text_end(text: str, at: int) -> None:
    """Whatever the text is, there is a line or none; of one that tomllib takes, the line is in it."""
    mixed = BANDED[:at] + text + BANDED[at:]
    line = Lines(mixed).of(("prices", 0, "bands", 1, "device_hour", "NVIDIA H*"))
    assert line is None or 1 <= line <= mixed.count("\n") + 1


def test_lines_are_those_of_the_keys() -> None:
    text = '# c\na.b = 1\n\'x y\' = {k = [1,\n 2, {"q=" = 3}], m = 2026-01-01 00:00:00}\n[[t]]\n[t.u]\nv = \'\'\'\n[no]\nw = 1\n\'\'\'\n[[t]]\nz = """\\"""""\n[[t.s]]\ne = 1 # [x]\n'
    tomllib.loads(text)
    lines = Lines(text)
    paths: dict[tuple[str | int, ...], int] = {
        ("a", "b"): 2, ("x y", "k", 0): 3, ("x y", "k", 1): 4, ("x y", "k", 2, "q="): 4, ("x y", "m"): 4, ("t", 0): 5, ("t", 0, "u"): 6,
        ("t", 0, "u", "v"): 7, ("t", 1): 11, ("t", 1, "z"): 12, ("t", 1, "s", 0): 13, ("t", 1, "s", 0, "e"): 14, ("t", 1, "none", 3): 11,
    }  # fmt: skip
    assert {path: lines.of(path) for path in paths} == paths and lines.of(("nothing",)) is None


def test_the_calendar_of_a_plan(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    file = tmp_path / "p.toml"
    file.write_text(BANDED + '[policy]\ndown = "by-use"\n')
    words = ["plan", "check", str(file), "--from", "2026-12-24", "--to", "2026-12-26"]
    assert main(words) == 0
    out = capfdbinary.readouterr().out.decode()
    assert out.splitlines()[:7] == [
        "day         kind     clock        band   NVIDIA H200  *     NVIDIA H*",
        "2026-12-24  thu      00:00-06:00  night  0.5                0.5",
        "2026-12-24  thu      06:00-08:00         2.5          1.00  1.00",
        "2026-12-24  thu      08:00-12:00  peak   3.75         1.50  1.50",
        "2026-12-24  thu      12:00-13:00         2.5          1.00  1.00",
        "2026-12-24  thu      13:00-20:00  peak   3.75         1.50  1.50",
        "2026-12-24  thu      20:00-22:00         2.5          1.00  1.00",
    ]
    assert "2026-12-25  holiday  06:00-24:00         2.5          1.00  1.00" in out
    assert "warning: '*' has no price in the band 'night' of prices[0]: a device of it cannot be rated then" in out
    assert main([*words, "--format", "json", "--model", "NVIDIA H200"]) == 0
    body = json.loads(capfdbinary.readouterr().out)
    jsonschema.validate(body, json.loads((REFERENCE / "plan-check.schema.json").read_text()), format_checker=jsonschema.FormatChecker())
    assert body["rows"][3] == {
        "day": "2026-12-24", "kind": "thu", "clock": "12:00-13:00", "from": "2026-12-24T11:00:00Z", "to": "2026-12-24T12:00:00Z", "hours": 1.0,
        "model": "NVIDIA H200", "device_hour": "2.5", "currency": "EUR",
    }  # fmt: skip
    assert body["rows"][2]["band"] == "peak" and body["warnings"] == []
    assert body["policy"] == dict.fromkeys(PARTS, "own-line") | {"down": "by-use"}
    assert main([*words, "--model", "AMD MI300X"]) == 2
    assert "has no price for 'AMD MI300X' at 2026-12-23T23:00:00Z" in capfdbinary.readouterr().err.decode()
    file.write_text(BANDED.replace('"13:00-20:00"', '"13:00-23:00"'))
    assert main(words) == 2
    assert f"price plan {file} line 21: prices[0].bands[1] ('night') and bands[0] ('peak') meet" in capfdbinary.readouterr().err.decode()


def test_the_calendar_of_a_clock_change_and_of_minutes_without_a_price() -> None:
    plan = parse_plan(BANDED.replace("from = 2026-01-01", "from = 2026-10-24").encode(), "p.toml")
    report = plan_report(plan, calendar_period(plan, "2026-10-23", "2026-10-26", 0), ["NVIDIA H200"])
    sunday = [(row["clock"], row["hours"]) for row in report.rows if row["day"] == "2026-10-25"]
    assert sum(Decimal(str(hours)) for _, hours in sunday) == 25
    assert sunday[:3] == [("00:00-03:00", 3), ("02:00-06:00", 4), ("06:00-22:00", 16)]
    first = report.rows[0]
    assert (first["day"], first["hours"], "device_hour" in first, "model" in first) == ("2026-10-23", 24, False, False)
    assert report.warnings == ("no prices entry covers 2026-10-22T22:00:00Z: what is used then cannot be rated",)
    # Without a period: this week; a plan that is not in force yet, its first week.
    assert calendar_period(plan, None, None, us("2026-12-24T12:00")).start_us == us("2026-12-21", "Europe/Vienna")
    early = calendar_period(plan, None, None, us("2026-01-01"))
    assert (early.start_text(), early.end_text()) == ("2026-10-23T22:00:00Z", "2026-10-30T23:00:00Z")
    after = parse_plan(BANDED.replace('days = "weekdays"', 'days = "holidays"').encode(), "p.toml")
    assert plan_report(after, calendar_period(after, "2027-01-01", None, 0), ["NVIDIA H200"]).warnings == (
        "holidays has no date of 2027, and bands name holidays",
    )


def test_the_reference_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "price-plan.md").read_text()
    keys = {field.alias or name for name, field in _File.model_fields.items()} - {"policy", "prices"}
    keys |= {f"policy.{name}" for name in _Policy.model_fields} | {f"prices.bands.{name}" for name in _Band.model_fields}
    keys |= {f"prices.{field.alias or name}" for name, field in _Prices.model_fields.items()}
    assert {key for key in keys if f"`{key}`" not in page} == set() and len(keys) == 24
