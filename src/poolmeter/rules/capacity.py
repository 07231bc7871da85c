"""The capacity identity: whose a device's time was, in whole microseconds that add up to the time exactly.

Time is first counted in parts (parts per million x microseconds), where a promise that stood for a while is a whole number; it is
rounded once, when a minute closes, by largest remainder. So cutting the minute anywhere changes nothing but a part.

Precedence: a device that is down delivers nothing, so `down` takes all of the time; then the promises of running allocations (scaled
down pro rata when they exceed the card), then reservations, then suspended promises as far as the card still has room.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from poolmeter.model.units import FULL_SHARE_PPM, split_exactly


@dataclass(frozen=True)
class Claim:
    """A promise on one device: `key` names the allocation, `ppm` the share of device time."""

    key: str
    ppm: int
    suspended: bool = False


@dataclass
class Parts:
    """Parts (ppm x us) of one device gathered over segments in which nothing changed. `promised` is the promise unscaled."""

    span_us: int = 0
    reserved_unused: int = 0
    unallocated: int = 0
    down: int = 0
    allocated: dict[str, int] = field(default_factory=dict)
    suspended: dict[str, int] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """The identity of one device over `span_us`: the five parts sum to it, `by_allocated` to allocated, `by_suspended` to suspended."""

    span_us: int
    allocated_us: int
    reserved_unused_us: int
    unallocated_us: int
    suspended_us: int
    down_us: int
    by_allocated: Mapping[str, int]
    by_suspended: Mapping[str, int]
    by_promised: Mapping[str, int]


def gather(parts: Parts, span_us: int, claims: Iterable[Claim], *, reserved_ppm: int = 0, down: bool = False) -> None:
    """Add a segment of `span_us` in which the claims stood. Raises ValueError on negative numbers or a key that is claimed twice."""
    standing = list(claims)
    if span_us < 0 or reserved_ppm < 0 or any(claim.ppm < 0 for claim in standing):
        raise ValueError("capacity takes no negative numbers")
    if len({claim.key for claim in standing}) != len(standing):
        raise ValueError("an allocation claims a device twice")
    parts.span_us += span_us
    for claim in standing:
        _add(parts.promised, claim.key, 0 if claim.suspended else claim.ppm * span_us)
    whole = FULL_SHARE_PPM * span_us
    running = [claim for claim in standing if not claim.suspended]
    waiting = [claim for claim in standing if claim.suspended]
    if down:
        parts.down += whole
        room, running_parts = 0, [0] * len(running)
    else:
        wanted = [claim.ppm * span_us for claim in running]
        running_parts = wanted if sum(wanted) <= whole else split_exactly(whole, [claim.ppm for claim in running])
        room = whole - sum(running_parts)
    for claim, part in zip(running, running_parts, strict=True):
        _add(parts.allocated, claim.key, part)
    reserved = min(room, reserved_ppm * span_us)
    room -= reserved
    held = min(room, sum(claim.ppm for claim in waiting) * span_us)
    for claim, part in zip(waiting, split_exactly(held, [claim.ppm for claim in waiting]), strict=True):
        _add(parts.suspended, claim.key, part)
    parts.reserved_unused += reserved
    parts.unallocated += room - held


def _add(where: dict[str, int], key: str, amount: int) -> None:
    where[key] = where.get(key, 0) + amount


def settle(parts: Parts) -> Capacity:
    """Parts rounded to whole microseconds. A promise that was neither scaled nor lost to a card that was down equals its allocated time."""
    allocated, suspended = list(parts.allocated), list(parts.suspended)
    weights = [parts.allocated[key] for key in allocated] + [parts.suspended[key] for key in suspended]
    weights += [parts.reserved_unused, parts.unallocated, parts.down]
    shares = split_exactly(parts.span_us, weights)
    by_allocated = dict(zip(allocated, shares[: len(allocated)], strict=True))
    by_suspended = dict(zip(suspended, shares[len(allocated) : -3], strict=True))
    promised = {}
    for key, amount in parts.promised.items():
        delivered = amount == parts.allocated.get(key, 0)
        promised[key] = by_allocated.get(key, 0) if delivered else max(by_allocated.get(key, 0), amount // FULL_SHARE_PPM)
    return Capacity(
        span_us=parts.span_us,
        allocated_us=sum(by_allocated.values()),
        reserved_unused_us=shares[-3],
        unallocated_us=shares[-2],
        suspended_us=sum(by_suspended.values()),
        down_us=shares[-1],
        by_allocated=by_allocated,
        by_suspended=by_suspended,
        by_promised=promised,
    )
