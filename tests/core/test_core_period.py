"""Periods: half-open, whole minutes, days of the named zone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.period import parse_period, rfc3339

NOW = 1_793_367_045_123_456  # 2026-10-30T13:30:45.123456Z


@pytest.mark.parametrize(
    ("start", "end", "zone", "expected"),
    [
        (None, None, "UTC", ("2026-10-01T00:00:00Z", "2026-10-30T13:31:00Z")),
        ("last-month", None, "UTC", ("2026-09-01T00:00:00Z", "2026-10-01T00:00:00Z")),
        ("yesterday", None, "UTC", ("2026-10-29T00:00:00Z", "2026-10-30T00:00:00Z")),
        ("7d", None, "UTC", ("2026-10-23T13:30:00Z", "2026-10-30T13:31:00Z")),
        ("2026-10-25", "2026-10-26", "Europe/Vienna", ("2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z")),
        ("2026-10-25T00:00:00+02:00", "2026-10-25T00:00:30+02:00", "UTC", ("2026-10-24T22:00:00Z", "2026-10-24T22:01:00Z")),
        ("today", "now", "America/New_York", ("2026-10-30T04:00:00Z", "2026-10-30T13:31:00Z")),
    ],
)
def test_periods(start: str | None, end: str | None, zone: str, expected: tuple[str, str]) -> None:
    period = parse_period(start, end, zone, NOW)
    assert (period.start_text(), period.end_text()) == expected


def test_the_calendar_ends_without_an_error() -> None:
    assert parse_period(None, "9999-12-31T23:59:59.9Z", "UTC", NOW).end_text() == "9999-12-31T23:59:00Z"


@pytest.mark.parametrize(
    ("start", "end", "zone"),
    [
        ("0001-01-01", None, "Asia/Tokyo"),
        ("0001-01-01T00:00:00+14:00", None, "UTC"),
        (None, "9999-12-31T23:59", "America/New_York"),
        ("", None, "UTC"),
    ],
)
def test_times_outside_the_calendar_are_named(start: str | None, end: str | None, zone: str) -> None:
    with pytest.raises(BadInput, match=r"--from is|--to is"):
        parse_period(start, end, zone, NOW)


def test_days_with_a_clock_change_have_25_or_23_hours() -> None:
    autumn = parse_period("2026-10-25", "2026-10-26", "Europe/Vienna", NOW)
    spring = parse_period("2026-03-29", "2026-03-30", "Europe/Vienna", NOW)
    assert autumn.end_us - autumn.start_us == DAY_US + HOUR_US
    assert spring.end_us - spring.start_us == DAY_US - HOUR_US


@pytest.mark.parametrize(
    ("start", "end", "zone"),
    [
        ("soon", None, "UTC"),
        ("2026-10-02", "2026-10-01", "UTC"),
        ("2026-10-01", "2026-10-01", "UTC"),
        (None, None, "Mars/Base"),
        (None, None, "../etc"),
        ("999999w", None, "UTC"),
        ("2026-13-01", None, "UTC"),
    ],
)
def test_bad_periods_are_refused(start: str | None, end: str | None, zone: str) -> None:
    with pytest.raises(BadInput):
        parse_period(start, end, zone, NOW)


@given(st.integers(0, 4_000_000_000_000_000))
def test_edges_are_whole_minutes_around_the_instant(us: int) -> None:
    period = parse_period(rfc3339(us), rfc3339(us + 1), "UTC", NOW)
    assert period.start_us % MINUTE_US == 0 and period.end_us % MINUTE_US == 0
    assert period.start_us <= us < us + 1 <= period.end_us <= us + 1 + MINUTE_US
