"""Figures and bars of the pool, for generated pools: parts fill the card, and what is not known never counts as 0."""

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from poolmeter.dashboards.figures import FREE, NOT_KNOWN, NOT_YET, UNKNOWN, Part, ago, compute_parts, figures, memory_parts, percent, size
from poolmeter.dashboards.reading import CardNow, PoolNow, SliceNow
from poolmeter.model.units import MINUTE_US

TOTAL = 1 << 30
maybe_us = st.none() | st.integers(0, MINUTE_US)
maybe_bytes = st.none() | st.integers(0, TOTAL)


@st.composite
def cards(draw: st.DrawFn, index: int = 0) -> CardNow:
    allocated = draw(st.integers(0, MINUTE_US))
    minute = draw(st.booleans())
    return CardNow(
        node="n",
        uuid=f"GPU-{index}",
        index=index,
        model="m",
        up=draw(st.booleans()),
        stale=draw(st.booleans()),
        memory_total_bytes=TOTAL,
        minute_us=0 if minute else None,
        span_us=MINUTE_US if minute else None,
        allocated_us=allocated if minute else None,
        busy_us=draw(maybe_us) if minute else None,
        unaccounted_us=draw(maybe_us) if minute else None,
        switch_overhead_us=draw(maybe_us) if minute else None,
        unaccounted_memory_bytes=draw(maybe_bytes),
    )


@st.composite
def slices(draw: st.DrawFn, index: int = 0) -> SliceNow:
    return SliceNow(
        node="n",
        allocation_id=draw(st.uuids()).hex,
        device_uuid=f"GPU-{index}",
        tenant=draw(st.sampled_from(["ada", "bob"])),
        state="active",
        mode="hook",
        stale=draw(st.booleans()),
        promise_ppm=0,
        memory_promise_bytes=draw(st.integers(0, TOTAL)),
        memory_limit_bytes=draw(maybe_bytes),
        memory_used_bytes=draw(maybe_bytes),
        allocated_us=draw(maybe_us),
        used_us=draw(maybe_us),
    )


pools = st.integers(0, 3).flatmap(
    lambda count: st.tuples(
        st.tuples(*(cards(index) for index in range(count))),
        st.lists(st.integers(0, max(0, count - 1)).flatmap(slices), max_size=4) if count else st.just([]),
    )
)


def pool_of(drawn: tuple[tuple[CardNow, ...], list[SliceNow]]) -> PoolNow:
    return PoolNow(0, (), drawn[0], tuple(drawn[1]), (), ())


@given(cards(), st.lists(slices(), max_size=4))
def test_parts_fill_the_bar_and_free_is_what_is_left(card: CardNow, pieces: list[SliceNow]) -> None:
    for parts in (compute_parts(card, pieces), memory_parts(card, pieces)):
        assert all(part.share > 0 and part.card == card.name for part in parts)
        total = sum((part.share for part in parts), Fraction(0))
        assert total >= 1 and (total == 1 or not any(part.owner == FREE for part in parts))


@given(cards(), st.lists(slices(), max_size=4))
def test_a_card_that_is_not_known_is_all_unknown(card: CardNow, pieces: list[SliceNow]) -> None:
    for hidden in (replace(card, stale=True), replace(card, up=False)):
        unknown = [Part(card.name, NOT_KNOWN, "other", Fraction(1))]
        assert compute_parts(hidden, pieces) == memory_parts(hidden, pieces) == unknown


@given(pools)
def test_shares_speak_of_what_is_known_alone(drawn: tuple[tuple[CardNow, ...], list[SliceNow]]) -> None:
    pool = pool_of(drawn)
    now = figures(pool)
    for share in (now.allocated, now.busy, now.idle_allocated, now.unaccounted):
        assert 0 <= share.known <= share.total
        assert share.value is None or share.value >= 0
    known = [card for card in pool.cards if not card.stale and card.span_us and card.busy_us is not None]
    assert now.busy.known == len(known)
    if not known:
        early = all(not card.stale and card.span_us is None for card in pool.cards)
        assert now.busy.value is None and now.busy.text() == (NOT_YET if early else UNKNOWN)
    else:
        assert now.busy.value == Fraction(sum(card.busy_us or 0 for card in known), MINUTE_US * len(known))


@given(pools)
def test_hiding_a_value_never_reads_as_idle_or_free(drawn: tuple[tuple[CardNow, ...], list[SliceNow]]) -> None:
    """A slice whose use becomes unknown adds nothing to the idle share: the card leaves the sum with it; with no slice left, none is known."""
    pool = pool_of(drawn)
    hidden = replace(pool, slices=tuple(replace(piece, used_us=None) for piece in pool.slices))
    if pool.slices:
        assert figures(hidden).idle_allocated.value is None


@given(cards(), st.lists(slices(), max_size=4))
def test_what_others_may_have_used_is_not_free(card: CardNow, pieces: list[SliceNow]) -> None:
    owners = [part.owner for part in compute_parts(card, pieces)]
    assert FREE not in owners or None not in (card.unaccounted_us, card.switch_overhead_us)
    assert FREE not in [part.owner for part in memory_parts(card, pieces)] or card.unaccounted_memory_bytes is not None


@given(st.fractions(0, 2))
def test_percent_is_the_nearest_tenth(value: Fraction) -> None:
    shown = Fraction(percent(value).removesuffix(" %")) / 100
    assert abs(shown - value) <= Fraction(1, 2000)


def test_texts() -> None:
    assert size(None) == ago(None, 0) == UNKNOWN
    second = 1_000_000
    assert [ago(0, s * second) for s in (0, 119, 120, 7199, 7200, 172_800)] == ["0 s", "119 s", "2 min", "119 min", "2 h", "2 d"]
    assert ago(5 * second, 0) == "0 s"  # a node's clock ahead of ours
