"""An allocation from one state to the next: pure, the time and the admission are the caller's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import Refused
from poolmeter.model.allocation import Allocation, AllocationState, Mode, SlicePromise
from poolmeter.model.units import format_size

FIRST_GENERATION = 2  # of a grant page
STEP = 2  # what each change adds


@dataclass(frozen=True)
class Owner:
    """Who asks: the user, and the process that the allocation ends with (pid and start time None: no such process)."""

    uid: int | None = None
    pid: int | None = None
    start_ticks: int | None = None


@dataclass(frozen=True)
class Changed:
    """An allocation after a change, and what whoever asked should know."""

    allocation: Allocation
    warnings: tuple[str, ...] = ()


def granted(name: str, request: AllocationRequest, slices: tuple[SlicePromise, ...], owner: Owner, now_us: int) -> Allocation:
    """The allocation `name` that an admitted request becomes."""
    return Allocation(
        id=name,
        labels=request.labels,
        mode=request.mode,
        slices=slices,
        state=AllocationState.ACTIVE,
        generation=FIRST_GENERATION,
        created_us=now_us,
        changed_us=now_us,
        enforcement=request.enforcement,
        pinned=request.pinned,
        cpu_milli=request.cpu_milli,
        host_memory_bytes=request.host_memory_bytes,
        on_fault=request.on_fault,
        charge_copies=request.charge_copies,
        owner_pid=owner.pid,
        owner_start_ticks=owner.start_ticks,
        owner_uid=owner.uid,
    )


def resized(allocation: Allocation, compute_ppm: int | None, memory_bytes: int | None, only: str | None, now_us: int) -> Allocation:
    """The allocation with new limits on all its devices, or on `only` one; what is None stays. Raises Refused for a whole card."""
    if allocation.state is AllocationState.SUSPENDED:
        raise Refused(f"allocation {allocation.id} is suspended, expected an active one to resize (poolmeter allocation resume)")
    if allocation.mode is Mode.WHOLE:
        raise Refused(f"allocation {allocation.id} has mode whole, expected mode hook to resize")
    slices = tuple(
        item if only is not None and item.device_uuid != only else _resized_slice(item, compute_ppm, memory_bytes)
        for item in allocation.slices
    )
    return replace(allocation, slices=slices, generation=allocation.generation + STEP, changed_us=now_us, decision_id=None)


def suspended(allocation: Allocation, now_us: int) -> Allocation:
    """The allocation with its device time given back; its promise stays written, for its return. Raises Refused when it has none to give."""
    if allocation.state is not AllocationState.ACTIVE:
        raise Refused(f"allocation {allocation.id} is {allocation.state.value}, expected an active one to suspend")
    return replace(
        allocation,
        state=AllocationState.SUSPENDED,
        generation=allocation.generation + STEP,
        changed_us=now_us,
        decision_id=None,
    )


def resumed(allocation: Allocation, now_us: int) -> Allocation:
    """The allocation with all that was promised. Raises Refused when it is not suspended."""
    if allocation.state is not AllocationState.SUSPENDED:
        raise Refused(f"allocation {allocation.id} is {allocation.state.value}, expected a suspended one to resume")
    return replace(allocation, state=AllocationState.ACTIVE, generation=allocation.generation + STEP, changed_us=now_us, decision_id=None)


def claim_of(allocation: Allocation, used: Mapping[str, int]) -> Allocation:
    """What an allocation holds of its cards: suspended, no time and the memory that its programs still have there (`used`, by device
    UUID; a device that is not listed: as much as was promised).
    """
    if allocation.state is not AllocationState.SUSPENDED:
        return allocation
    slices = tuple(
        replace(item, promise_ppm=0, memory_bytes=min(item.memory_bytes, used.get(item.device_uuid, item.memory_bytes)))
        for item in allocation.slices
    )
    return replace(allocation, state=AllocationState.ACTIVE, mode=Mode.HOOK, slices=slices)


def released(allocation: Allocation, now_us: int) -> Allocation:
    """The allocation as it ends."""
    return replace(allocation, state=AllocationState.RELEASED, changed_us=now_us)


def without_memory(allocation: Allocation) -> Allocation:
    """The allocation as a closed grant shows it: whoever still runs takes no new memory."""
    return replace(allocation, slices=tuple(replace(item, memory_bytes=0) for item in allocation.slices))


def below_use(allocation: Allocation, used: Mapping[str, int]) -> tuple[str, ...]:
    """A warning for each memory limit below what is in use, by device UUID."""
    return tuple(
        f"memory limit {format_size(item.memory_bytes)} on device {item.device_uuid} is below the"
        f" {format_size(used[item.device_uuid])} in use: new memory is denied until use falls below it"
        for item in allocation.slices
        if used.get(item.device_uuid, 0) > item.memory_bytes
    )


def _resized_slice(item: SlicePromise, compute_ppm: int | None, memory_bytes: int | None) -> SlicePromise:
    if compute_ppm is not None:
        item = replace(item, promise_ppm=compute_ppm, compute_limit_ppm=compute_ppm)
    return item if memory_bytes is None else replace(item, memory_bytes=memory_bytes)
