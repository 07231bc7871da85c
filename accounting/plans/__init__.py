"""Price plans: a TOML file to a checked, frozen `PricePlan`; docs/reference/price-plan.md is its reference.

Prices are exact: TOML numbers are taken as written, never through a float. Exactly one price covers each device-minute: a plan whose
dates overlap or leave a gap is refused when read, a minute or model without a price when rated.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cached_property
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.errors import BadInput
from poolmeter.model.units import MICROSECONDS, MINUTE_US
from poolmeter.period import rfc3339, time_zone
from poolmeter.toml import parse_toml, read_toml

SCHEMA = "poolmeter.plan/1"
PRICE_DECIMALS = 9  # a price has at most this many, so that every weight is a whole number
_PRICE = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


@dataclass(frozen=True)
class PriceSet:
    """The prices in force from `start_us` up to and without `end_us` (None: open), epoch microseconds on whole minutes."""

    start_us: int
    end_us: int | None
    device_hour: tuple[tuple[str, Decimal], ...]


@dataclass(frozen=True)
class PricePlan:
    """One version of one plan; `sha256` is that of the file's bytes, `source` what errors call it."""

    name: str
    version: int
    currency: str
    basis: str
    zone: ZoneInfo | None
    price_sets: tuple[PriceSet, ...]
    source: str
    sha256: str

    @property
    def minor_digits(self) -> int:
        """Decimals of the currency's smallest unit (EUR 2, JPY 0)."""
        return MINOR_DIGITS[self.currency]

    @cached_property
    def edges_us(self) -> tuple[int, ...]:
        """Every moment at which a price set begins or ends, ascending."""
        return tuple(sorted({edge for prices in self.price_sets for edge in (prices.start_us, prices.end_us) if edge is not None}))

    def price(self, model: str, minute_us: int) -> Decimal:
        """The one price of a device-hour of `model` in that minute. Raises BadInput naming file, model and minute."""
        for index, prices in enumerate(self.price_sets):
            if prices.start_us <= minute_us and (prices.end_us is None or minute_us < prices.end_us):
                return self._match(prices, index, model, minute_us)
        raise BadInput(
            f"price plan {self.source} has no price for {model!r} at {rfc3339(minute_us)}, expected a prices entry whose from and to cover it"
        )

    def _match(self, prices: PriceSet, index: int, model: str, minute_us: int) -> Decimal:
        best = [(pattern_rank(pattern), pattern, price) for pattern, price in prices.device_hour if matches(pattern, model)]
        if not best:
            raise BadInput(
                f"price plan {self.source}: prices[{index}].device_hour has no price for {model!r} at {rfc3339(minute_us)}, expected"
                f" one of its patterns to match ({', '.join(repr(pattern) for pattern, _ in prices.device_hour)})"
            )
        top = max(rank for rank, _, _ in best)
        winners = [(pattern, price) for rank, pattern, price in best if rank == top]
        if len(winners) > 1:
            raise BadInput(
                f"price plan {self.source}: prices[{index}].device_hour has {winners[0][0]!r} and {winners[1][0]!r}, equally specific for"
                f" {model!r} at {rfc3339(minute_us)}, expected exactly one price"
            )
        return winners[0][1]


def matches(pattern: str, model: str) -> bool:
    """Whether a pattern covers a model: `*` any text, `?` one character, everything else itself, case and all."""
    return re.fullmatch("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), model, re.DOTALL) is not None


def pattern_rank(pattern: str) -> tuple[bool, int]:
    """How specific a pattern is: an exact name before any pattern, then the one with more literal characters."""
    literal = sum(char not in "*?" for char in pattern)
    return (literal == len(pattern), literal)


_Date = Annotated[date, Field(strict=True)]
_Datetime = Annotated[datetime, Field(strict=True)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class _Policy(_Part):
    idle: str = "own-line"
    unallocated: str = "own-line"
    overhead: str = "own-line"


class _Prices(_Part):
    start: Annotated[_Datetime | _Date, Field(alias="from")]
    end: Annotated[_Datetime | _Date | None, Field(alias="to")] = None
    device_hour: Annotated[dict[str, StrictStr | StrictInt], Field(min_length=1)]


class _File(_Part):
    schema_name: Annotated[Literal["poolmeter.plan/1"], Field(alias="schema")]
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
    version: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
    currency: str
    basis: Literal["allocated", "used"] = "allocated"
    time_zone: str | None = None
    policy: _Policy = Field(default_factory=_Policy)
    prices: Annotated[tuple[_Prices, ...], Field(min_length=1)]


def load_plan(path: Path) -> PricePlan:
    """The plan of a file. Raises BadInput naming the file, the key, the value found and the value expected."""
    body = read_toml(path, f"price plan {path}")
    return parse_plan(body, str(path))


def demo_plan() -> PricePlan:
    """The plan packaged for simulated pools."""
    return parse_plan(resources.files(__name__).joinpath("demo.toml").read_bytes(), "demo.toml (packaged)")


def parse_plan(body: bytes, source: str) -> PricePlan:
    """A plan from TOML bytes. Raises BadInput as `load_plan`."""
    values = parse_toml(body, f"price plan {source}", parse_float=str)
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = _key(first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadInput(f"price plan {source}: {key} is not a known key") from None
        if first["type"] == "missing":
            raise BadInput(f"price plan {source}: {key} is missing") from None
        raise BadInput(f"price plan {source}: {key} is {first['input']!r:.80}, expected: {first['msg']}") from None
    if file.currency not in MINOR_DIGITS:
        raise BadInput(f"price plan {source}: currency is {file.currency!r}, expected an ISO 4217 code such as EUR, USD or JPY")
    for line in ("idle", "unallocated", "overhead"):
        if (policy := getattr(file.policy, line)) != "own-line":
            raise BadInput(f"price plan {source}: policy.{line} is {policy!r}, expected 'own-line', the only policy built in this version")
    try:
        zone = time_zone(file.time_zone) if file.time_zone is not None else None
    except BadInput as error:
        raise BadInput(f"price plan {source}: {error}") from None
    sets = tuple(_price_set(prices, index, zone, source) for index, prices in enumerate(file.prices))
    _check_dates(sets, source)
    return PricePlan(file.name, file.version, file.currency, file.basis, zone, sets, source, hashlib.sha256(body).hexdigest())


def _key(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _price_set(prices: _Prices, index: int, zone: ZoneInfo | None, source: str) -> PriceSet:
    where = f"price plan {source}: prices[{index}]"
    start_us = _moment(prices.start, zone, f"{where}.from")
    end_us = None if prices.end is None else _moment(prices.end, zone, f"{where}.to")
    if end_us is not None and end_us <= start_us:
        raise BadInput(f"{where}.to is {prices.end}, expected a time after its from, {prices.start}")
    table = []
    for pattern, value in prices.device_hour.items():
        key = f"{where}.device_hour.{pattern!r}"
        if not pattern:
            raise BadInput(f"{key} is an empty pattern, expected a model name or a pattern such as 'NVIDIA H*'")
        table.append((pattern, _price(value, key)))
    return PriceSet(start_us, end_us, tuple(table))


def _price(value: str | int, key: str) -> Decimal:
    text = str(value)
    if not _PRICE.fullmatch(text):
        raise BadInput(
            f"{key} is {text!r}, expected a price of at least 0, written in plain decimals, with at most 9 digits before and {PRICE_DECIMALS} after the point"
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
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    us = (delta.days * 86_400 + delta.seconds) * MICROSECONDS + delta.microseconds
    if us % MINUTE_US:
        raise BadInput(f"{key} is {value.isoformat()}, expected a whole minute")
    return us


def _check_dates(sets: tuple[PriceSet, ...], source: str) -> None:
    order = sorted(range(len(sets)), key=lambda index: sets[index].start_us)
    for before, after in pairwise(order):
        end_us, start_us = sets[before].end_us, sets[after].start_us
        if end_us is None or end_us > start_us:
            found = "open" if end_us is None else rfc3339(end_us)
            raise BadInput(
                f"price plan {source}: prices[{before}].to is {found} and prices[{after}].from is {rfc3339(start_us)}: they overlap,"
                " expected the one to end where the other begins"
            )
        if end_us < start_us:
            raise BadInput(
                f"price plan {source}: prices[{before}].to is {rfc3339(end_us)} and prices[{after}].from is {rfc3339(start_us)}: they"
                " leave a gap, expected the one to end where the other begins"
            )
