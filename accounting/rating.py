"""From device time to money: pure, whole numbers only, the same result for the same shares in any order.

The cost of a day is its whole capacity at list prices, rounded once (half to even) to the currency's smallest unit. That amount is split
by largest remainder over the day's lines (a tenant, idle, unallocated, overhead), and a line's amount again over its parts, its allocations,
their devices, their hours, as far as the question goes. So every coarser figure is the sum of the finer ones, and a filter only leaves lines
out. Ties go to the older allocation: to the smaller allocation id, then to the smaller label, device or hour, never by tenant name.
docs/decisions/rounding.md gives the reasons.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from poolmeter.accounting.measures import Measures
from poolmeter.accounting.parts import PARTS
from poolmeter.accounting.plans import PRICE_DECIMALS, PricePlan
from poolmeter.accounting.shares import REST, Share
from poolmeter.errors import DataError
from poolmeter.model.units import EXACT, HOUR_US, split_exactly

LINES = ("usage", *REST)
Key = tuple[tuple[bool, str], ...]


@dataclass
class Charge:
    """One finest line: where it belongs, its device time, its amount in the currency's smallest unit.

    `spent` is its device time by price; a price that applied where there was none is there with 0. `allocated_weight` and `used_weight` are
    its promise and its use at list price. `shared` is what policies take from it (negative) or add to it, by the part it comes from.
    """

    share: Share
    us: int = 0
    weight: int = 0
    spent: dict[Decimal, int] = field(default_factory=dict)
    measures: Measures | None = None
    amount: int = 0
    order: str = ""
    allocated_weight: int = 0
    used_weight: int = 0
    shared: dict[str, int] = field(default_factory=dict)


def rate(shares: Iterable[Share], plan: PricePlan) -> list[Charge]:
    """The charges of all shares, day by day. Raises BadInput on a missing price, DataError on negative device time."""
    days: dict[int, dict[tuple[object, ...], Charge]] = {}
    prices: dict[tuple[str, int], Decimal] = {}
    for share in shares:
        if share.us < 0:
            raise DataError(f"device time of {share.tenant or share.line} on {share.model} is {share.us} us, expected at least 0")
        known = (share.model, share.segment)
        if known not in prices:
            prices[known] = plan.price(share.model, share.first_minute_us)
        price = prices[known]
        key = (share.line, share.part, share.tenant, share.labels, share.device, share.hour_us)
        charges = days.setdefault(share.day, {})
        charge = charges.setdefault(key, Charge(share, order=share.order))
        charge.us += share.us
        list_price = int(price.scaleb(PRICE_DECIMALS, EXACT))
        charge.weight += share.us * list_price
        charge.used_weight += share.used_us * list_price
        charge.order = min(charge.order, share.order)
        charge.spent[price] = charge.spent.get(price, 0) + share.us
        if share.measures is not None:
            charge.allocated_weight += share.measures.allocated_us * list_price
            charge.measures = share.measures if charge.measures is None else charge.measures.plus(share.measures)
    # The store gives its groups in any order; reports with a row per charge, and what they share out, must not.
    return [charge for day in sorted(days) for charge in _rate_day(sorted(days[day].values(), key=_place), plan.minor_digits)]


def day_total(weight: int, minor_digits: int) -> int:
    """A day's cost in the smallest unit: `weight` is device-microseconds x price x 10^PRICE_DECIMALS, rounded half to even."""
    divisor: int = HOUR_US * 10**PRICE_DECIMALS
    scale: int = 10**minor_digits
    whole, rest = divmod(weight * scale, divisor)
    return whole + int(2 * rest > divisor or (2 * rest == divisor and whole % 2 == 1))


def money(amount: int, minor_digits: int) -> Decimal:
    """An amount in the smallest unit as a decimal of the currency, all its places written."""
    return Decimal(amount).scaleb(-minor_digits, EXACT)


def _rate_day(charges: list[Charge], minor_digits: int) -> Iterator[Charge]:
    _deal(day_total(sum(charge.weight for charge in charges), minor_digits), charges, 0)
    yield from charges


def _deal(amount: int, charges: list[Charge], depth: int) -> None:
    if depth == len(_STEPS):
        charges[0].amount = amount
        return
    groups: dict[object, list[Charge]] = {}
    for charge in charges:
        groups.setdefault(_STEPS[depth](charge.share), []).append(charge)
    ordered = sorted(groups.values(), key=lambda group: _order(group, depth))
    for part, group in zip(split_exactly(amount, [sum(charge.weight for charge in group) for group in ordered]), ordered, strict=True):
        _deal(part, group, depth + 1)


_STEPS: tuple[Callable[[Share], object], ...] = (
    lambda share: (share.line, share.tenant),
    lambda share: share.part,
    lambda share: share.labels,
    lambda share: share.device,
    lambda share: share.hour_us,
)


def _place(charge: Charge) -> tuple[object, ...]:
    """Where a charge stands in its day: by line, tenant, labels, device and hour."""
    share = charge.share
    part = PARTS.index(share.part) if share.part in PARTS else -1
    return (LINES.index(share.line), share.tenant or "", part, text_key(share.labels), text_key(share.device or ()), share.hour_us or 0)


def _order(group: list[Charge], depth: int) -> tuple[object, ...]:
    share = group[0].share
    if depth == 0:
        # The name decides only between tenants that share their oldest allocation, which no enforcer hands out twice.
        return (LINES.index(share.line), min(charge.order for charge in group), share.tenant or "")
    if depth == 1:
        return (PARTS.index(share.part) if share.part in PARTS else -1,)
    if depth == 2:
        return (min(charge.order for charge in group), *text_key(share.labels))
    if depth == 3:
        return text_key(share.device)
    return (share.hour_us or 0,)


def text_key(texts: tuple[str | None, ...]) -> Key:
    """Order of labels and devices: as text, absent last."""
    return tuple((text is None, text or "") for text in texts)
