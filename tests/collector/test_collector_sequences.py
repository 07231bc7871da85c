"""Ranges of sequences against a plain set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.collector.sequences import MAX_RANGES, Ranges


@given(st.lists(st.lists(st.integers(0, 60), max_size=20), max_size=8))
def test_ranges_know_exactly_what_was_included(groups: list[list[int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for group in groups:
        wanted = np.array(group, np.int64)
        assert ranges.known(wanted).tolist() == [value in plain for value in group]
        ranges = ranges.including(wanted)
        plain |= set(group)
    assert sorted(n for first, last in ranges.ranges for n in range(first, last + 1)) == sorted(plain)
    assert all(a[1] + 1 < b[0] for a, b in zip(ranges.ranges, ranges.ranges[1:], strict=False))
    assert ranges.last == (max(plain) if plain else None)


def test_a_spool_full_of_holes_costs_bounded_memory_and_forgets_no_known_row() -> None:
    every_other = np.arange(0, 4 * MAX_RANGES, 2, dtype=np.int64)
    ranges = Ranges().including(every_other)
    assert len(ranges.ranges) == MAX_RANGES
    assert ranges.known(every_other).all()
    assert not ranges.known(np.array([4 * MAX_RANGES - 3])).any()
