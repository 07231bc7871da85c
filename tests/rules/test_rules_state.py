"""The state of a slice, case by case."""

import pytest

from poolmeter.model.allocation import AllocationState, SliceState
from poolmeter.rules.state import slice_state

NOW = 1_000_000_000


@pytest.mark.parametrize(
    ("expected", "allocation", "values"),
    [
        (SliceState.UNALLOCATED, None, {"measured": True, "processes": 1}),
        (SliceState.UNALLOCATED, AllocationState.RELEASED, {"measured": True, "last_activity_us": NOW}),
        (SliceState.SUSPENDED, AllocationState.SUSPENDED, {"measured": False}),
        (SliceState.UNKNOWN, AllocationState.ACTIVE, {"measured": False, "last_activity_us": NOW}),
        (SliceState.UNKNOWN, AllocationState.ACTIVE, {"measured": True}),
        (SliceState.ACTIVE, AllocationState.ACTIVE, {"measured": True, "processes": 1, "last_activity_us": NOW - 59_999_999}),
        (SliceState.HELD, AllocationState.ACTIVE, {"measured": True, "processes": 1, "last_activity_us": NOW - 60_000_000}),
        (SliceState.HELD, AllocationState.ACTIVE, {"measured": True, "processes": 0, "memory_used_bytes": 1}),
        (SliceState.ALLOCATED, AllocationState.ACTIVE, {"measured": True, "processes": 0, "memory_used_bytes": 0}),
    ],
)
def test_states(expected: SliceState, allocation: AllocationState | None, values: dict[str, int]) -> None:
    assert slice_state(allocation, now_us=NOW, **values) is expected  # type: ignore[arg-type]
