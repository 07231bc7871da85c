"""The capacity identity, over generated claims and cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.model.units import FULL_SHARE_PPM
from poolmeter.rules.capacity import Claim, Parts, gather, settle

PPM = st.integers(0, FULL_SHARE_PPM)


@st.composite
def segments(draw: st.DrawFn) -> list[tuple[int, list[Claim], int, bool]]:
    """Segments of a minute: length, claims, reserved ppm, down."""
    keys = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8))
    out = []
    for _ in range(draw(st.integers(1, 6))):
        claims = [Claim(key, draw(PPM), draw(st.booleans())) for key in keys if draw(st.booleans())]
        out.append((draw(st.integers(0, 20_000_000)), claims, draw(PPM), draw(st.integers(0, 5)) == 0))
    return out


def total(capacity: object) -> int:
    names = ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us")
    values = [getattr(capacity, name) for name in names]
    assert all(type(value) is int and value >= 0 for value in values)
    return sum(values)


@given(segments())
def test_the_parts_add_up_to_the_span_exactly(parts_of: list[tuple[int, list[Claim], int, bool]]) -> None:
    parts = Parts()
    for length, claims, reserved, down in parts_of:
        gather(parts, length, claims, reserved_ppm=reserved, down=down)
    capacity = settle(parts)
    assert total(capacity) == capacity.span_us == sum(length for length, *_ in parts_of)
    assert sum(capacity.by_allocated.values()) == capacity.allocated_us
    assert sum(capacity.by_suspended.values()) == capacity.suspended_us
    for key, allocated in capacity.by_allocated.items():
        assert 0 <= allocated <= capacity.by_promised[key] <= capacity.span_us


@given(segments(), st.data())
def test_cutting_a_segment_changes_no_part_by_more_than_its_rounding(
    parts_of: list[tuple[int, list[Claim], int, bool]], data: st.DataObject
) -> None:
    whole, cut = Parts(), Parts()
    for length, claims, reserved, down in parts_of:
        gather(whole, length, claims, reserved_ppm=reserved, down=down)
        first = data.draw(st.integers(0, length))
        for piece in (first, length - first):
            gather(cut, piece, claims, reserved_ppm=reserved, down=down)
    one, two = settle(whole), settle(cut)
    for name in ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us"):
        assert abs(getattr(one, name) - getattr(two, name)) <= 1 + len(parts_of)


@given(segments())
def test_down_leaves_nothing_to_others(parts_of: list[tuple[int, list[Claim], int, bool]]) -> None:
    parts = Parts()
    for length, claims, reserved, _ in parts_of:
        gather(parts, length, claims, reserved_ppm=reserved, down=True)
    capacity = settle(parts)
    assert capacity.down_us == capacity.span_us and capacity.allocated_us == capacity.suspended_us == 0


def test_over_commitment_is_scaled_down_pro_rata() -> None:
    parts = Parts()
    gather(parts, 60_000_000, [Claim("a", 900_000), Claim("b", 600_000), Claim("c", 500_000, suspended=True)])
    capacity = settle(parts)
    assert dict(capacity.by_allocated) == {"a": 36_000_000, "b": 24_000_000}
    assert dict(capacity.by_promised) == {"a": 54_000_000, "b": 36_000_000, "c": 0}
    assert capacity.suspended_us == capacity.unallocated_us == 0


def test_suspended_gets_what_is_left_after_reservations() -> None:
    parts = Parts()
    gather(parts, 1_000_000, [Claim("a", 500_000), Claim("s", 400_000, suspended=True)], reserved_ppm=300_000)
    capacity = settle(parts)
    assert (capacity.allocated_us, capacity.reserved_unused_us, capacity.suspended_us) == (500_000, 300_000, 200_000)


@pytest.mark.parametrize("claims", [[Claim("a", -1)], [Claim("a", 1), Claim("a", 2)]])
def test_nonsense_is_refused(claims: list[Claim]) -> None:
    with pytest.raises(ValueError, match=r"negative|twice"):
        gather(Parts(), 1, claims)
