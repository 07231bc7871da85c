"""What the page "Pool now" says, computed from what was read: the five figures, the parts of each bar, and texts. Pure.

A share is exact (Fraction) and knows of how many cards or slices it speaks; nothing known is None and is shown as "unknown".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from poolmeter.dashboards.reading import CardNow, PoolNow, SliceNow
from poolmeter.model.units import MICROSECONDS, format_size

UNKNOWN = "unknown"
NOT_YET = "no data yet"
# Parts of a card that belong to no tenant.
UNACCOUNTED = "(unaccounted)"
SWITCHING = "(switching)"
FREE = "(free)"
NOT_KNOWN = "(unknown)"
NOBODY = (UNACCOUNTED, SWITCHING, FREE, NOT_KNOWN)


@dataclass(frozen=True)
class Share:
    """Part of the pool, from `known` of `total` cards or slices; value None: nothing is known, `early`: because no minute was closed yet."""

    value: Fraction | None
    known: int
    total: int
    early: bool = False

    def text(self) -> str:
        """A percentage with one decimal, or "unknown", or "no data yet"."""
        if self.value is None:
            return NOT_YET if self.early else UNKNOWN
        return percent(self.value)

    def note(self, what: str) -> str | None:
        """Says of how many it speaks, when that is not all."""
        return None if self.known == self.total else f"{self.known} of {self.total} {what} known"


@dataclass(frozen=True)
class Figures:
    """The figures of the pool in the last closed minute; shares of the device time of the cards that are known."""

    cards_up: int
    cards: int
    allocated: Share
    busy: Share
    idle_allocated: Share
    unaccounted: Share


@dataclass(frozen=True)
class Part:
    """One stretch of a card's bar: whose, whether used or only promised, and its share of the card."""

    card: str
    owner: str
    kind: str  # used | promised | other
    share: Fraction


def figures(pool: PoolNow) -> Figures:
    """The figures of the pool."""
    cards = pool.cards
    return Figures(
        cards_up=sum(card.up and not card.stale for card in cards),
        cards=len(cards),
        allocated=_share(cards, "allocated_us"),
        busy=_share(cards, "busy_us"),
        idle_allocated=_idle_allocated(pool),
        unaccounted=_share(cards, "unaccounted_us"),
    )


def _share(cards: Sequence[CardNow], name: str) -> Share:
    amount = span = known = total = 0
    for card in cards:
        total += 1
        value: int | None = getattr(card, name)
        if card.stale or card.span_us is None or value is None:
            continue
        known, amount, span = known + 1, amount + value, span + card.span_us
    return Share(Fraction(amount, span) if span else None, known, total, _early(cards))


def _early(cards: Iterable[CardNow]) -> bool:
    # Nobody is to blame for what is missing: every card answers, and none has been watched for long enough.
    return all(not card.stale and card.span_us is None for card in cards)


def _idle_allocated(pool: PoolNow) -> Share:
    def known(piece: SliceNow) -> bool:
        return not piece.stale and piece.allocated_us is not None and piece.used_us is not None

    blind = {(piece.node, piece.device_uuid) for piece in pool.slices if not known(piece)}
    # A card with a slice that is not known is left out altogether: its share would pass for use.
    span = sum(card.span_us for card in pool.cards if card.span_us and not card.stale and (card.node, card.uuid) not in blind)
    counted = [piece for piece in pool.slices if (piece.node, piece.device_uuid) not in blind]
    unused = sum(max(0, (piece.allocated_us or 0) - (piece.used_us or 0)) for piece in counted)
    # Where nothing is known of any slice, the cards without one say nothing about idle promises.
    some = span > 0 and (bool(counted) or not pool.slices)
    early = _early(pool.cards) or not any(piece.stale or piece.allocated_us is not None for piece in pool.slices)
    return Share(Fraction(unused, span) if some else None, sum(map(known, pool.slices)), len(pool.slices), early)


def compute_parts(card: CardNow, slices: Iterable[SliceNow]) -> list[Part]:
    """The card's last closed minute: what each tenant used, what it was promised beyond that, unaccounted, switching, free."""
    span = card.span_us
    if card.stale or not card.up or not span:
        return [Part(card.name, NOT_KNOWN, "other", Fraction(1))]
    parts: list[Part] = []
    for piece in slices:
        if piece.allocated_us is None and piece.used_us is None:
            continue
        promised, used = piece.allocated_us or 0, piece.used_us
        if used is None:
            parts.append(Part(card.name, NOT_KNOWN, "other", Fraction(promised, span)))
            continue
        parts.append(Part(card.name, piece.tenant, "used", Fraction(used, span)))
        parts.append(Part(card.name, piece.tenant, "promised", Fraction(max(0, promised - used), span)))
    for owner, us in ((UNACCOUNTED, card.unaccounted_us), (SWITCHING, card.switch_overhead_us)):
        if us is not None:
            parts.append(Part(card.name, owner, "other", Fraction(us, span)))
    # Of what may have been used by others nobody can say that it was free.
    return _rest(card.name, parts, NOT_KNOWN if card.unaccounted_us is None or card.switch_overhead_us is None else FREE)


def memory_parts(card: CardNow, slices: Iterable[SliceNow]) -> list[Part]:
    """The card's memory now: what each tenant uses, its limit beyond that, what programs without the hook hold, free."""
    total = card.memory_total_bytes
    if card.stale or not card.up or not total:
        return [Part(card.name, NOT_KNOWN, "other", Fraction(1))]
    parts: list[Part] = []
    for piece in slices:
        used, limit = piece.memory_used_bytes, piece.memory_limit_bytes or piece.memory_promise_bytes
        if used is None:
            parts.append(Part(card.name, NOT_KNOWN, "other", Fraction(limit, total)))
            continue
        parts.append(Part(card.name, piece.tenant, "used", Fraction(used, total)))
        parts.append(Part(card.name, piece.tenant, "promised", Fraction(max(0, limit - used), total)))
    held = card.unaccounted_memory_bytes
    if held is not None:
        parts.append(Part(card.name, UNACCOUNTED, "other", Fraction(held, total)))
    return _rest(card.name, parts, NOT_KNOWN if held is None else FREE)


def _rest(card: str, parts: list[Part], what: str) -> list[Part]:
    free = 1 - sum((part.share for part in parts), Fraction(0))
    return [part for part in [*parts, Part(card, what, "other", max(Fraction(0), free))] if part.share > 0]


def percent(value: Fraction) -> str:
    """`62.5 %`, rounded half up."""
    tenths = (2000 * value.numerator + value.denominator) // (2 * value.denominator)
    return f"{tenths // 10}.{tenths % 10} %"


def percent_ppm(value: int | None) -> str | None:
    """A share in parts per million as a percentage; None stays None."""
    return None if value is None else percent(Fraction(value, MICROSECONDS))


def size(value: int | None) -> str:
    """Bytes for people, or "unknown"."""
    return UNKNOWN if value is None else format_size(value)


def ago(then_us: int | None, now_us: int) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d` before now, or "unknown"."""
    if then_us is None:
        return UNKNOWN
    seconds = max(0, (now_us - then_us) // MICROSECONDS)
    for unit, length, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds // length} {unit}"
    return f"{seconds // 86_400} d"


def plain_text(text: str) -> str:
    """Text that Streamlit shows as it is: names come from tenants and nodes, and none of them is Markdown."""
    return "".join("\\" + char if char in "\\`*_{}[]()#+!|<>~$:" else char for char in text)
