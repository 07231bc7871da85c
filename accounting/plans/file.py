"""Reading a price plan: TOML to a checked `PricePlan`, or one sentence that names the file, the line, the key and what was expected.

TOML numbers are taken as written, never through a float. A plan whose dates overlap or leave a gap, or whose bands meet, is refused.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from poolmeter.accounting.parts import OWN_LINE, PARTS
from poolmeter.accounting.plans.bands import DAY_MINUTES, DAYS, Band, kind_of_day, meetings
from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.accounting.plans.lines import Lines
from poolmeter.accounting.plans.plan import PRICE_DECIMALS, PricePlan, PriceSet
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, EXACT, MINUTE_US
from poolmeter.period import epoch_us, rfc3339, time_zone
from poolmeter.toml import parse_toml, read_toml

_PRICE = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)", re.ASCII)
_DAY_WORDS = {
    **{name: frozenset({index}) for index, name in enumerate(DAYS)},
    "weekdays": frozenset(range(5)),
    "weekend": frozenset({5, 6}),
    "every-day": frozenset(range(len(DAYS))),
}
_Date = Annotated[date, Field(strict=True)]
_Datetime = Annotated[datetime, Field(strict=True)]
_Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
_Table = Annotated[dict[str, StrictStr | StrictInt], Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


_Method = Literal["own-line", "even", "by-allocation", "by-use"]


class _Policy(_Part):
    idle: _Method = "own-line"
    unallocated: _Method = "own-line"
    overhead: _Method = "own-line"
    reserved: _Method | None = None
    suspended: _Method | None = None
    down: _Method | None = None
    switching: _Method | None = None
    unattributed: _Method | None = None


class _Band(_Part):
    name: _Name
    days: StrictStr | list[StrictStr] = "every-day"
    hours: StrictStr | list[StrictStr] = "00:00-24:00"
    factor: StrictStr | StrictInt | None = None
    device_hour: _Table | None = None


class _Prices(_Part):
    start: Annotated[_Datetime | _Date, Field(alias="from")]
    end: Annotated[_Datetime | _Date | None, Field(alias="to")] = None
    device_hour: _Table
    bands: tuple[_Band, ...] = ()


class _File(_Part):
    schema_name: Annotated[Literal["poolmeter.plan/1"], Field(alias="schema")]
    name: _Name
    version: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
    currency: str
    basis: Literal["allocated", "used"] = "allocated"
    time_zone: str | None = None
    holidays: tuple[_Date, ...] = ()
    policy: _Policy = Field(default_factory=_Policy)
    prices: Annotated[tuple[_Prices, ...], Field(min_length=1)]


@dataclass(frozen=True)
class _Source:
    """What the text is called, and where its keys stand."""

    name: str
    lines: Lines

    def key(self, *path: str | int) -> str:
        """`price plan p.toml line 12: prices[0].from`, to begin a sentence with."""
        line = self.lines.of(path)
        return f"price plan {self.name}{'' if line is None else f' line {line}'}: {_key(path)}"


def load_plan(path: Path) -> PricePlan:
    """The plan of a file. Raises BadInput naming the file, the line, the key, the value found and the value expected."""
    body = read_toml(path, f"price plan {path}")
    return parse_plan(body, str(path))


def demo_plan() -> PricePlan:
    """The plan packaged for simulated pools."""
    return parse_plan(resources.files("poolmeter.accounting.plans").joinpath("demo.toml").read_bytes(), "demo.toml (packaged)")


def parse_plan(body: bytes, source: str) -> PricePlan:
    """A plan from TOML bytes. Raises BadInput as `load_plan`."""
    values = parse_toml(body, f"price plan {source}", parse_float=str)
    text = _Source(source, Lines(body.decode("utf-8")))
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = first["loc"] if first["type"] == "missing" else _written(first["loc"], values)
        if first["type"] == "extra_forbidden":
            raise BadInput(f"{text.key(*path)} is not a known key") from None
        if first["type"] == "missing":
            raise BadInput(f"{text.key(*path)} is missing") from None
        raise BadInput(f"{text.key(*path)} is {first['input']!r:.80}, expected: {first['msg']}") from None
    if file.currency not in MINOR_DIGITS:
        raise BadInput(f"{text.key('currency')} is {file.currency!r}, expected an ISO 4217 code such as EUR, USD or JPY")
    try:
        zone = time_zone(file.time_zone) if file.time_zone is not None else None
    except BadInput as error:
        raise BadInput(f"price plan {source}{_line(text, 'time_zone')}: {error}") from None
    holidays = _holidays(file, text)
    sets = tuple(_price_set(prices, index, zone, text) for index, prices in enumerate(file.prices))
    _check_dates(sets, text)
    plan = PricePlan(
        file.name,
        file.version,
        file.currency,
        file.basis,
        zone,
        sets,
        source,
        hashlib.sha256(body).hexdigest(),
        holidays,
        tuple((part, method) for part in PARTS if (method := getattr(file.policy, part) or file.policy.overhead) != OWN_LINE),
    )
    _check_bands(plan, text)
    return plan


def _key(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _line(text: _Source, *path: str | int) -> str:
    line = text.lines.of(path)
    return "" if line is None else f" line {line}"


def _written(location: tuple[int | str, ...], values: Any) -> tuple[int | str, ...]:
    """The part of an error's location that is in the file; pydantic adds which member of a union it tried."""
    for length, part in enumerate(location):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return location[:length]
    return location


def _holidays(file: _File, text: _Source) -> frozenset[int]:
    found: set[int] = set()
    for index, day in enumerate(file.holidays):
        number = (day - date(1970, 1, 1)).days
        if number in found:
            raise BadInput(f"{text.key('holidays', index)} is {day}, which is there twice, expected each date once")
        found.add(number)
    return frozenset(found)


def _price_set(prices: _Prices, index: int, zone: ZoneInfo | None, text: _Source) -> PriceSet:
    here: tuple[str | int, ...] = ("prices", index)
    start_us = _moment(prices.start, zone, text.key(*here, "from"))
    end_us = None if prices.end is None else _moment(prices.end, zone, text.key(*here, "to"))
    if end_us is not None and end_us <= start_us:
        raise BadInput(f"{text.key(*here, 'to')} is {prices.end}, expected a time after its from, {prices.start}")
    table = _table(prices.device_hour, text, *here, "device_hour")
    bands = tuple(_band(band, table, text, *here, "bands", number) for number, band in enumerate(prices.bands))
    for number, band in enumerate(bands):
        if zone is None:
            raise BadInput(f"{text.key(*here, 'bands', number)} is a band, expected a time_zone in the plan, by whose clock it is told")
        if band.name in (other.name for other in bands[:number]):
            raise BadInput(f"{text.key(*here, 'bands', number, 'name')} is {band.name!r} for a second time, expected a name for each band")
    return PriceSet(start_us, end_us, table, bands, text.lines.of((*here, "device_hour")))


def _table(values: dict[str, str | int], text: _Source, *path: str | int) -> tuple[tuple[str, Decimal], ...]:
    table = []
    for pattern, value in values.items():
        key = f"price plan {text.name}{_line(text, *path, pattern)}: {_key(path)}.{pattern!r}"
        if not pattern:
            raise BadInput(f"{key} is an empty pattern, expected a model name or a pattern such as 'NVIDIA H*'")
        table.append((pattern, _price(value, key, "price")))
    return tuple(table)


def _band(band: _Band, base: tuple[tuple[str, Decimal], ...], text: _Source, *path: str | int) -> Band:
    words = [band.days] if isinstance(band.days, str) else band.days
    days: frozenset[int] = frozenset()
    for word in words:
        if word not in _DAY_WORDS:
            raise BadInput(f"{text.key(*path, 'days')} has {word!r}, expected one or several of {', '.join(_DAY_WORDS)}")
        days |= _DAY_WORDS[word]
    if not days:
        raise BadInput(f"{text.key(*path, 'days')} is empty, expected one or several of {', '.join(_DAY_WORDS)}")
    hours = tuple(_hours(word, text.key(*path, "hours")) for word in ([band.hours] if isinstance(band.hours, str) else band.hours))
    if not hours:
        raise BadInput(f"{text.key(*path, 'hours')} is empty, expected one or several such as '08:00-20:00'")
    if band.factor is None and band.device_hour is None:
        raise BadInput(f"{text.key(*path)} ({band.name!r}) has no price, expected a factor, a device_hour table, or both")
    factor = None if band.factor is None else _price(band.factor, text.key(*path, "factor"), "factor")
    if factor is not None:
        for pattern, price in base:
            product = EXACT.multiply(price, factor).normalize(EXACT)
            if -int(product.as_tuple().exponent) > PRICE_DECIMALS:
                raise BadInput(
                    f"{text.key(*path, 'factor')} is {factor}, and {price} for {pattern!r} times it is {product:f}, expected a price with at"
                    f" most {PRICE_DECIMALS} digits after the point"
                )
    table = () if band.device_hour is None else _table(band.device_hour, text, *path, "device_hour")
    return Band(band.name, days, hours, table, factor, text.lines.of(path))


def _hours(word: str, key: str) -> tuple[int, int]:
    match = _HOURS.fullmatch(word)
    if match:
        start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
        if end <= DAY_MINUTES and start != end:
            return start, end if end > start else end + DAY_MINUTES
    raise BadInput(
        f"{key} is {word!r}, expected clock times that differ, such as '08:00-20:00', '22:00-06:00' past midnight, or '00:00-24:00'"
    )


def _price(value: str | int, key: str, what: str) -> Decimal:
    text = str(value)
    if not _PRICE.fullmatch(text):
        raise BadInput(
            f"{key} is {text!r}, expected a {what} of at least 0, written in plain decimals, with at most 9 digits before and {PRICE_DECIMALS} after the point"
        )
    return Decimal(text)


def _moment(value: date | datetime, zone: ZoneInfo | None, key: str) -> int:
    if isinstance(value, datetime):
        if value.tzinfo is None and zone is None:
            raise BadInput(f"{key} is {value.isoformat()}, expected an offset such as Z, or a time_zone in the plan")
        moment = value if value.tzinfo is not None else value.replace(tzinfo=zone)
    else:
        moment = datetime(value.year, value.month, value.day, tzinfo=zone or UTC)
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise BadInput(f"{key} is {value.isoformat()}, expected a time that in UTC lies in the years 1 to 9999") from None
    us = epoch_us(moment)
    if us % MINUTE_US:
        raise BadInput(f"{key} is {value.isoformat()}, expected a whole minute")
    return us


def _check_dates(sets: tuple[PriceSet, ...], text: _Source) -> None:
    order = sorted(range(len(sets)), key=lambda index: sets[index].start_us)
    for before, after in pairwise(order):
        end_us, start_us = sets[before].end_us, sets[after].start_us
        key = text.key("prices", before, "to")
        if end_us is None or end_us > start_us:
            found = "open" if end_us is None else rfc3339(end_us)
            raise BadInput(
                f"{key} is {found} and prices[{after}].from is {rfc3339(start_us)}: they overlap, expected the one to end where the other begins"
            )
        if end_us < start_us:
            raise BadInput(
                f"{key} is {rfc3339(end_us)} and prices[{after}].from is {rfc3339(start_us)}: they leave a gap, expected the one to end"
                " where the other begins"
            )


def _check_bands(plan: PricePlan, text: _Source) -> None:
    """Refuse bands of one entry that meet in a minute of the entry, and bands of holidays without a list of them."""
    for index, prices in enumerate(plan.price_sets):
        for number, band in enumerate(prices.bands):
            if band.days == _DAY_WORDS["holidays"] and not plan.holidays:
                raise BadInput(
                    f"{text.key('prices', index, 'bands', number, 'days')} is 'holidays', and the plan has none, expected dates in holidays"
                )
        # Days that the entry surely has and the days around holidays: after eight days without one, no other neighbours come.
        first, last = prices.start_us // DAY_US - 1, None if prices.end_us is None else prices.end_us // DAY_US + 1
        days = {day for near in (first + 8, *plan.holidays) for day in range(near - 9, near + 10)}
        seen: set[tuple[int, int]] = set()
        for day in sorted(day for day in days if day >= first and (last is None or day <= last)):
            kinds = kind_of_day(day, plan.holidays), kind_of_day(day - 1, plan.holidays)
            if kinds in seen:
                continue
            met = False
            for minute, one, other in meetings(prices.bands, day, plan.holidays):
                met = True
                if (at_us := _real(plan, prices, day, minute)) is not None:
                    names = [f"bands[{place}] ({prices.bands[place].name!r})" for place in (one, other)]
                    moment = datetime(1970, 1, 1) + timedelta(days=day, minutes=minute)
                    raise BadInput(
                        f"{text.key('prices', index, 'bands', other)} ({prices.bands[other].name!r}) and {names[0]} meet on {DAYS[kinds[0]]}"
                        f" {moment:%Y-%m-%d} at {moment:%H:%M} ({rfc3339(at_us)}), expected one price for each minute"
                    )
            if not met:
                seen.add(kinds)


def _real(plan: PricePlan, prices: PriceSet, day: int, minute: int) -> int | None:
    """The UTC minute that a clock time of the zone stands for, if there is one and the entry has it."""
    assert plan.zone is not None
    try:
        local = datetime(1970, 1, 1, tzinfo=plan.zone) + timedelta(days=day, minutes=minute)
        moment = local.astimezone(UTC)
    except OverflowError:
        return None
    if moment.astimezone(plan.zone).replace(tzinfo=None) != local.replace(tzinfo=None):
        return None  # skipped by a clock change
    at_us = epoch_us(moment)
    return at_us if prices.start_us <= at_us and (prices.end_us is None or at_us < prices.end_us) else None
