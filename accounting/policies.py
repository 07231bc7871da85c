"""Sharing the cost of idle, unallocated and overhead time among tenants, by the plan's policies: pure, whole numbers only.

Nothing is moved: each line keeps its cost. Beside it stands what a policy takes from a line (negative) and adds to tenants (positive), so
that the sums of a report are what they were, for every device and hour too. What there is nobody to share among stays where it is.
A tenant's part of a day is dealt once, by largest remainder; deeper levels only divide it. docs/decisions/shared-cost.md gives the reasons.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, TypeAlias

from poolmeter.accounting.dimensions import COLUMNS, LABEL_FIELDS
from poolmeter.accounting.parts import OWN
from poolmeter.accounting.rating import Charge, text_key
from poolmeter.accounting.shares import DEVICE, LABELS
from poolmeter.model.units import split_exactly

if TYPE_CHECKING:
    from numpy.typing import NDArray

Device = tuple[str | None, ...]
Table: TypeAlias = "NDArray[Any]"  # whole amounts, of 64 bits or Python's
_SAFE = 3_000_000_000  # products of two such amounts fit into 64 bits


@dataclass(frozen=True)
class SharedOut:
    """The charges, with what was shared noted on them and added for its receivers; `left` is (part, method, days without a receiver)."""

    charges: tuple[Charge, ...]
    left: tuple[tuple[str, str, int], ...] = ()


def share_out(charges: Sequence[Charge], policies: Iterable[tuple[str, str]], fields: frozenset[str]) -> SharedOut:
    """The charges of whole days after the policies: (part, method), each part at most once.

    `charges` come day by day, as `rate` gives them; their `shared` is set. What receivers are given is told apart by `fields` (of --by and
    filters); what is not asked for is summed.
    """
    policies = tuple(policies)
    found, left = list(charges), dict.fromkeys(policies, 0)
    for _, group in groupby(charges, key=lambda charge: charge.share.day) if policies else ():
        day = list(group)
        tenants = _grouped((charge for charge in day if charge.share.part == OWN), lambda charge: charge.share.tenant)
        for part, method in policies:
            sources = [charge for charge in day if charge.share.part == part and charge.amount]
            amount = sum(charge.amount for charge in sources)
            weights = [_weight(tenant, method) for tenant in tenants]
            if not amount:
                continue
            if not sum(weights):
                left[part, method] += 1
                continue
            found += _received(sources, tenants, split_exactly(amount, weights), method, fields)
            for charge in sources:
                charge.shared[part] = -charge.amount
    return SharedOut(tuple(found), tuple((part, method, days) for (part, method), days in left.items() if days))


def _grouped(charges: Iterable[Charge], key: Callable[[Charge], object]) -> list[list[Charge]]:
    groups: dict[object, list[Charge]] = {}
    for charge in charges:
        groups.setdefault(key(charge), []).append(charge)
    # As in rating: the older allocation first; names decide only between those that share their oldest.
    return sorted(
        groups.values(), key=lambda group: (min(c.order for c in group), group[0].share.tenant or "", text_key(group[0].share.labels))
    )


def _weight(charges: Iterable[Charge], method: str) -> int:
    """What a tenant, or one of its allocations, counts: time at its list price, so that cards of different prices can be added."""
    if method == "even":
        return 1
    return sum(charge.used_weight if method == "by-use" else charge.allocated_weight for charge in charges)


def _received(
    sources: list[Charge], tenants: list[list[Charge]], amounts: list[int], method: str, fields: frozenset[str]
) -> Iterator[Charge]:
    import numpy as np

    cells: dict[Device, dict[int | None, int]] = {}
    for charge in sources:
        hours = cells.setdefault(charge.share.device, {})
        hours[charge.share.hour_us] = hours.get(charge.share.hour_us, 0) + charge.amount
    devices = sorted(cells, key=text_key)
    moments = sorted({hour for hours in cells.values() for hour in hours}, key=lambda hour: hour or 0)
    table = np.array([[cells[device].get(hour, 0) for hour in moments] for device in devices], np.int64 if sum(amounts) < _SAFE else object)
    shown = tuple(COLUMNS.get(name, name) for name in fields)
    seen = [tuple(text if name in shown else None for name, text in zip(DEVICE, device, strict=False)) for device in devices]
    when = [hour if "hour" in fields else None for hour in moments]
    # What is not asked for is summed: places of the cells in a smaller table.
    kinds = {device: place for place, device in enumerate(dict.fromkeys(seen))}
    times = {hour: place for place, hour in enumerate(dict.fromkeys(when))}
    across = np.array([kinds[device] for device in seen])[:, None], np.array([times[hour] for hour in when])[None, :]
    for tenant, taken in zip(tenants, _spread(amounts, table), strict=True):
        rows: Iterable[tuple[Charge, Table]] = [(tenant[0], taken)]
        if not LABEL_FIELDS.isdisjoint(fields):
            groups = _grouped(tenant, lambda charge: charge.share.labels)
            # Among a tenant's allocations evenness says nothing: what they hold decides, and only where that is nothing all count alike.
            weights = [_weight(group, "by-use" if method == "by-use" else "by-allocation") for group in groups]
            split = split_exactly(int(taken.sum()), weights if sum(weights) else [1] * len(groups))
            rows = zip((group[0] for group in groups), _spread(split, taken), strict=True)
        gathered: dict[tuple[str | None, ...], Table] = {}
        for receiver, part in rows:
            labels = tuple(text if name in shown else None for name, text in zip(LABELS, receiver.share.labels, strict=False))
            np.add.at(gathered.setdefault(labels, np.zeros((len(kinds), len(times)), table.dtype)), across, part)
        for labels, sums in gathered.items():
            for (device, row), (hour_us, column) in product(kinds.items(), times.items()):
                if amount := int(sums[row, column]):
                    yield _added(tenant[0], sources[0], labels, device, hour_us, amount)


def _added(tenant: Charge, source: Charge, labels: tuple[str | None, ...], device: Device, hour_us: int | None, amount: int) -> Charge:
    share = replace(
        tenant.share,
        part=source.share.part,
        labels=labels,
        device=device,
        hour_us=hour_us,
        model=source.share.model,
        us=0,
        used_us=0,
        measures=None,
    )
    return Charge(share, order=tenant.order, shared={source.share.part: amount})


def _spread(rows: Sequence[int], cells: Table) -> Iterator[Table]:
    """Amounts of rows over cells, devices by hours: every row sums to its amount, all rows together give the cells.

    Each row in turn takes of what is left, in proportion, over devices and then each device's over hours; largest remainder never takes more
    than there is.
    """
    import numpy as np

    left = cells.copy()
    for amount in rows:
        taken = left * 0
        if amount:
            by_device = _deal(np.array([amount], cells.dtype), left.sum(axis=1)[None, :])[0]
            taken = _deal(by_device, left)
            left -= taken
        yield taken


def _deal(amounts: Table, weights: Table) -> Table:
    """`split_exactly` of each amount over its row of weights, all rows at once."""
    import numpy as np

    scale = weights.sum(axis=1)[:, None]
    scale = scale + (scale == 0)
    products = amounts[:, None] * weights
    parts, rests = products // scale, products % scale
    places = np.empty(weights.shape, np.int64)
    np.put_along_axis(places, np.argsort(-rests, axis=1, kind="stable"), np.arange(weights.shape[1])[None, :], axis=1)
    dealt: Table = parts + (places < (amounts - parts.sum(axis=1))[:, None])
    return dealt
