"""The state of a slice, by one pure function, so that no two components call the same slice idle and busy."""

from poolmeter.model.allocation import AllocationState, SliceState
from poolmeter.model.units import MINUTE_US

ACTIVITY_WINDOW_US = MINUTE_US  # a slice whose last kernel is younger is active


def last_activity(*, metered: bool, hook_us: int | None = None, utilised_us: int | None = None, gpm_us: int | None = None) -> int | None:
    """When a slice last worked, by the best source there is: the hook's last kernel where the slice has a meter (whose silence means that
    nothing ran), else the last utilisation sample above zero (the maximum of a window, for a mean hides what ran once in it), else the
    last hardware activity above zero. None: never, or not known."""
    if metered:
        return hook_us
    return next((known for known in (utilised_us, gpm_us, hook_us) if known is not None), None)


def slice_state(
    allocation: AllocationState | None,
    *,
    measured: bool,
    processes: int | None = None,
    memory_used_bytes: int | None = None,
    last_activity_us: int | None = None,
    now_us: int,
    window_us: int = ACTIVITY_WINDOW_US,
) -> SliceState:
    """The state at `now_us`.

    `allocation` None or released: nothing is promised. `measured` False: the meter could not be read, so nothing is known of an
    allocation that is not suspended; unknown is neither idle nor active. `processes` counts live ones.
    """
    if allocation is None or allocation is AllocationState.RELEASED:
        return SliceState.UNALLOCATED
    if allocation is AllocationState.SUSPENDED:
        return SliceState.SUSPENDED
    if not measured:
        return SliceState.UNKNOWN
    if last_activity_us is not None and now_us - last_activity_us < window_us:
        return SliceState.ACTIVE
    if processes is None and memory_used_bytes is None:
        return SliceState.UNKNOWN
    return SliceState.HELD if processes or memory_used_bytes else SliceState.ALLOCATED
