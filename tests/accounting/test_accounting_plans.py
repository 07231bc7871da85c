"""Price plans: what is taken, what is refused and in which words, which price covers a minute."""

from decimal import Decimal
from pathlib import Path

import pytest

from poolmeter.accounting.plans import _File, _Policy, _Prices, demo_plan, load_plan, parse_plan
from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.errors import BadInput
from poolmeter.period import parse_period

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
    assert plan.edges_us == (us("2026-01-01", "Europe/Vienna"), us("2026-03-29", "Europe/Vienna"))


def test_packaged_and_example_plans_are_good() -> None:
    assert demo_plan().currency == "EUR" and demo_plan().price("anything", us("2026-01-01")) == 10
    example = Path(__file__).parents[2] / "deploy" / "plan.example.toml"
    assert load_plan(example).price("NVIDIA H200", us("2026-07-01", "Europe/Vienna")) == Decimal("2.70")


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
        ('currency = "EUR"', 'currency = "EUR"\npolicy.idle = "even"', "policy.idle is 'even', expected 'own-line', the only policy built"),
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


def test_the_reference_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "price-plan.md").read_text()
    keys = {field.alias or name for name, field in _File.model_fields.items()} - {"policy", "prices"}
    keys |= {f"policy.{name}" for name in _Policy.model_fields} | {
        f"prices.{field.alias or name}" for name, field in _Prices.model_fields.items()
    }
    assert {key for key in keys if f"`{key}`" not in page} == set() and len(keys) == 12
