"""A price plan that has been read: which prices are in force when, and the one price of a model in a minute.

Prices are exact decimals. Exactly one price covers each device-minute: the set of that minute gives it, or the band of the set that the
local clock is in.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from zoneinfo import ZoneInfo

from poolmeter.accounting.dimensions import Calendar
from poolmeter.accounting.plans.bands import Band, cuts
from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, EXACT, MINUTE_US
from poolmeter.period import Period, rfc3339

PRICE_DECIMALS = 9  # a price has at most this many, so that every weight is a whole number
UNPRICED = -1


@dataclass(frozen=True)
class PriceSet:
    """The prices in force from `start_us` up to and without `end_us` (None: open), epoch microseconds on whole minutes.

    `device_hour` is in force where none of `bands` is. `line` is that of the entry in its file, where known.
    """

    start_us: int
    end_us: int | None
    device_hour: tuple[tuple[str, Decimal], ...]
    bands: tuple[Band, ...] = ()
    line: int | None = None


@dataclass(frozen=True)
class Tariff:
    """Prices that may be in force: a set, by its place in the plan, and one of its bands; None: outside all of them."""

    entry: int
    band: int | None


@dataclass(frozen=True)
class PricePlan:
    """One version of one plan; `sha256` is that of the file's bytes, `source` what errors call it.

    `holidays` are days since 1970-01-01 by the zone's calendar. A plan with bands has a zone. `policies` are (part, method) of the parts of
    the pool's cost that are shared among tenants; what is not in it stays its own line.
    """

    name: str
    version: int
    currency: str
    basis: str
    zone: ZoneInfo | None
    price_sets: tuple[PriceSet, ...]
    source: str
    sha256: str
    holidays: frozenset[int] = frozenset()
    policies: tuple[tuple[str, str], ...] = ()

    @property
    def minor_digits(self) -> int:
        """Decimals of the currency's smallest unit (EUR 2, JPY 0)."""
        return MINOR_DIGITS[self.currency]

    @cached_property
    def tariffs(self) -> tuple[Tariff, ...]:
        """All tariffs of the plan; `changes` gives their places in this tuple."""
        return tuple(Tariff(entry, band) for entry, prices in enumerate(self.price_sets) for band in (None, *range(len(prices.bands))))

    def changes(self, start_us: int, end_us: int) -> tuple[tuple[int, int], ...]:
        """What is in force in a period of whole minutes: (from this moment on, place of the tariff or `UNPRICED`), ascending.

        The first moment is `start_us`; neighbours differ.
        """
        places = {tariff: place for place, tariff in enumerate(self.tariffs)}
        found: list[tuple[int, int]] = [(start_us, UNPRICED)]
        for entry, prices in enumerate(self.price_sets):
            low_us, high_us = max(start_us, prices.start_us), end_us if prices.end_us is None else min(end_us, prices.end_us)
            if low_us < high_us:
                found += [(at_us, places[Tariff(entry, band)]) for at_us, band in self._bands(prices, low_us, high_us)]
                found.append((high_us, UNPRICED))
        found.sort(key=lambda change: (change[0], change[1] != UNPRICED))  # what ends at a moment before what begins there
        merged: list[tuple[int, int]] = []
        for at_us, place in found:
            if merged and merged[-1][0] == at_us:
                merged.pop()
            if at_us < end_us and (not merged or merged[-1][1] != place):
                merged.append((at_us, place))
        return tuple(merged)

    def _bands(self, prices: PriceSet, start_us: int, end_us: int) -> list[tuple[int, int | None]]:
        if not prices.bands or self.zone is None:
            return [(start_us, None)]
        found: list[tuple[int, int | None]] = []
        offsets = Calendar.of(Period(start_us, end_us, self.zone)).offsets
        for (from_us, offset), until_us in zip(offsets, [*(at for at, _ in offsets[1:]), end_us], strict=True):
            for day in range((from_us + offset) // DAY_US, (until_us + offset - 1) // DAY_US + 1):
                midnight_us = day * DAY_US - offset
                for start, end, band in cuts(prices.bands, day, self.holidays):
                    if midnight_us + end * MINUTE_US > from_us and midnight_us + start * MINUTE_US < until_us:
                        found.append((max(from_us, midnight_us + start * MINUTE_US), band))
        return found

    def tariff_at(self, minute_us: int) -> Tariff | None:
        """What is in force in a minute; None where no price set covers it."""
        ((_, place),) = self.changes(minute_us, minute_us + MINUTE_US)
        return None if place == UNPRICED else self.tariffs[place]

    def price(self, model: str, minute_us: int) -> Decimal:
        """The one price of a device-hour of `model` in that minute. Raises BadInput naming file, line, model and minute."""
        tariff = self.tariff_at(minute_us)
        if tariff is None:
            raise BadInput(
                f"price plan {self.source} has no price for {model!r} at {rfc3339(minute_us)}, expected a prices entry whose from and to cover it"
            )
        return self.price_in(tariff, model, rfc3339(minute_us))

    def price_in(self, tariff: Tariff, model: str, when: str) -> Decimal:
        """The one price of a model in a tariff. Raises BadInput naming file, line, model and `when`."""
        price = self._price_in(tariff, model, when)
        return self._written.get(price, price)

    @cached_property
    def _written(self) -> dict[Decimal, Decimal]:
        # A price that is written in several ways ("2.5", "2.50") is shown in one, whichever was found first: the longest.
        tables = [prices.device_hour for prices in self.price_sets]
        tables += [band.device_hour for prices in self.price_sets for band in prices.bands]
        found = sorted((price for table in tables for _, price in table), key=lambda price: -int(price.as_tuple().exponent))
        return {price: price for price in found}

    def _price_in(self, tariff: Tariff, model: str, when: str) -> Decimal:
        prices = self.price_sets[tariff.entry]
        key = f"prices[{tariff.entry}]"
        if tariff.band is None:
            return self._match(prices.device_hour, key, prices.line, model, when)
        band = prices.bands[tariff.band]
        own = f"{key}.bands[{tariff.band}]"
        if band.factor is None or any(matches(pattern, model) for pattern, _ in band.device_hour):
            return self._match(band.device_hour, f"{own} ({band.name!r})", band.line, model, when)
        product = EXACT.multiply(self._match(prices.device_hour, key, prices.line, model, when), band.factor).normalize(EXACT)
        # As many places as the currency has, more only where they say something: one value is written in one way.
        places = max(self.minor_digits, -int(product.as_tuple().exponent))
        return product.quantize(Decimal(1).scaleb(-places), context=EXACT)

    def _match(self, table: tuple[tuple[str, Decimal], ...], key: str, line: int | None, model: str, when: str) -> Decimal:
        where = f"price plan {self.source}{'' if line is None else f' line {line}'}: {key}.device_hour"
        best = [(pattern_rank(pattern), pattern, price) for pattern, price in table if matches(pattern, model)]
        if not best:
            raise BadInput(
                f"{where} has no price for {model!r} at {when}, expected one of its patterns to match"
                f" ({', '.join(repr(pattern) for pattern, _ in table)})"
            )
        top = max(rank for rank, _, _ in best)
        winners = [(pattern, price) for rank, pattern, price in best if rank == top]
        if len(winners) > 1:
            raise BadInput(
                f"{where} has {winners[0][0]!r} and {winners[1][0]!r}, equally specific for {model!r} at {when}, expected exactly one price"
            )
        return winners[0][1]


def matches(pattern: str, model: str) -> bool:
    """Whether a pattern covers a model: `*` any text, `?` one character, everything else itself, case and all."""
    return re.fullmatch("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), model, re.DOTALL) is not None


def pattern_rank(pattern: str) -> tuple[bool, int]:
    """How specific a pattern is: an exact name before any pattern, then the one with more literal characters."""
    literal = sum(char not in "*?" for char in pattern)
    return (literal == len(pattern), literal)
