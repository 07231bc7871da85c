"""The half-open period of a query: `--from`, `--to` and `--time-zone` to UTC minutes.

Takes RFC 3339 times, dates (midnight in the time zone), `7d` `36h` `90m` (ago), `today`, `yesterday`, `this-month`, `last-month`,
and `now`. Edges fall on whole minutes: the start is rounded down, the end up, so that no watched minute is cut.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from poolmeter.errors import BadInput
from poolmeter.model.units import MICROSECONDS, MINUTE_US

_LAST_US = 253_402_300_740 * MICROSECONDS  # 9999-12-31T23:59:00Z, the last whole minute that a date can tell
_AGO = re.compile(r"^([0-9]{1,6})([mhdw])$")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Period:
    """From `start_us` up to and without `end_us`, epoch microseconds, whole UTC minutes; days are cut in `zone`."""

    start_us: int
    end_us: int
    zone: ZoneInfo

    def start_text(self) -> str:
        """RFC 3339 in Z."""
        return rfc3339(self.start_us)

    def end_text(self) -> str:
        """RFC 3339 in Z."""
        return rfc3339(self.end_us)


def rfc3339(us: int) -> str:
    """`2026-11-30T13:00:00Z`; a fraction only where there is one."""
    seconds, rest = divmod(us, MICROSECONDS)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{rest:06d}".rstrip("0") + "Z" if rest else f"{text}Z"


def time_zone(name: str) -> ZoneInfo:
    """A named zone. Raises BadInput."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadInput(f"time zone is {name!r}, expected a name such as UTC or Europe/Vienna") from None


def add_period_options(parser: argparse.ArgumentParser, by: Sequence[str] | None, default_by: str = "") -> None:
    """--from, --to, --by (without one where it is None), --time-zone of a query."""
    parser.add_argument("--from", dest="start", metavar="TIME", help="start, inclusive: RFC 3339, a date, 7d, last-month (this month)")
    parser.add_argument("--to", dest="end", metavar="TIME", help="end, exclusive (now)")
    if by is not None:
        parser.add_argument("--by", default=default_by, metavar="FIELDS", help=f"one or several of {', '.join(by)} ({default_by})")
    parser.add_argument("--time-zone", metavar="ZONE", help="time zone that days and dates are cut in (UTC)")


def parse_period(start: str | None, end: str | None, zone_name: str, now_us: int) -> Period:
    """The period of the flags; without them the current month up to now. Raises BadInput on an empty or backward period."""
    zone = time_zone(zone_name)
    if start == "last-month" and end is None:
        end = "this-month"
    if start == "yesterday" and end is None:
        end = "today"
    start_us = _instant("this-month" if start is None else start, zone, now_us, "--from")
    end_us = _instant("now" if end is None else end, zone, now_us, "--to")
    start_us -= start_us % MINUTE_US
    end_us = min(end_us + -end_us % MINUTE_US, _LAST_US)
    if end_us <= start_us:
        raise BadInput(f"--to is {rfc3339(end_us)}, expected a time after --from, which is {rfc3339(start_us)}")
    return Period(start_us, end_us, zone)


def _instant(text: str, zone: ZoneInfo, now_us: int, flag: str) -> int:
    now = datetime.fromtimestamp(now_us // MICROSECONDS, UTC)
    midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    if text == "now":
        return now_us
    if ago := _AGO.match(text):
        try:
            return epoch_us(now - timedelta(**{_UNITS[ago[2]]: int(ago[1])}))
        except (OverflowError, ValueError):
            raise BadInput(f"{flag} is {text!r}, expected a time after the year 1") from None
    if text == "today":
        return epoch_us(midnight)
    if text == "yesterday":
        return epoch_us((midnight - timedelta(hours=12)).replace(hour=0))
    if text == "this-month":
        return epoch_us(midnight.replace(day=1))
    if text == "last-month":
        return epoch_us((midnight.replace(day=1) - timedelta(hours=12)).replace(day=1, hour=0))
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{flag} is {text!r}, expected an RFC 3339 time, a date, 7d, today or last-month") from None
    try:
        return epoch_us(parsed.replace(tzinfo=zone) if parsed.tzinfo is None else parsed)
    except OverflowError:
        raise BadInput(f"{flag} is {text!r}, expected a time that in UTC lies in the years 1 to 9999") from None


def epoch_us(moment: datetime) -> int:
    """Microseconds since 1970 of a time with a zone. Raises OverflowError where UTC has no year for it."""
    # Integer arithmetic: a float timestamp loses microseconds.
    delta = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * MICROSECONDS + delta.microseconds
