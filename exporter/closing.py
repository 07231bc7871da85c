"""Closing a minute: records from the ledger, with the capacity identity, used time by the rules of the mode, and energy split exactly.

Records carry no node, epoch and sequence yet (`sequence` 0): whoever commits them numbers them.
"""

from collections.abc import Iterable
from typing import Any

from poolmeter.exporter.ledger import DeviceLedger, Ledger, ProcessLedger, SliceLedger
from poolmeter.model.allocation import Allocation, Mode, SlicePromise
from poolmeter.model.units import FULL_SHARE_PPM, MINUTE_US, split_exactly
from poolmeter.model.usage import DeviceRecord, ProcessRecord, SliceRecord, UsageRecord, UsedBasis
from poolmeter.rules.capacity import Capacity, settle
from poolmeter.rules.state import last_activity, slice_state
from poolmeter.sharing import UsedNumbers, sharing_of


def close_minute(ledger: Ledger) -> list[UsageRecord]:
    """Records of the open minute, device after device; a device that was not watched in it has none. Moves totals, resets nothing."""
    records: list[UsageRecord] = []
    for uuid, device in ledger.devices.items():
        if device.m_start_us is None or device.parts.span_us == 0:
            continue
        capacity = settle(device.parts)
        parts, measured = _measured(ledger, device, capacity)
        energy = _energy(device, capacity, [measured[part.allocation_id][0] or 0 for part in parts], parts)
        records.append(_device_record(device, capacity))
        for part, share in zip(parts, energy, strict=True):
            if share is not None:
                part.energy_uj_total = (part.energy_uj_total or 0) + share
            used, basis = measured[part.allocation_id]
            records.append(_slice_record(ledger, device, capacity, part, used, basis, share))
        records += [
            _process_record(device, process) for process in ledger.processes.values() if process.device_uuid == uuid and process.m_seen
        ]
    return records


def count_whole(ledger: Ledger, uuids: Iterable[str]) -> None:
    """Move totals of whole cards without a meter to what the open minute says so far."""
    for uuid in uuids:
        device = ledger.devices[uuid]
        if device.parts.span_us > 0:
            _measured(ledger, device, settle(device.parts))


def _measured(
    ledger: Ledger, device: DeviceLedger, capacity: Capacity
) -> tuple[list[SliceLedger], dict[str, tuple[int | None, UsedBasis]]]:
    """The device's slices in the open minute, and what each used, by allocation. Moves totals of whole cards without a meter."""
    parts = [part for part in ledger.slices.values() if part.device_uuid == device.uuid and (part.m_seen or part.m_metered)]
    parts = [part for part in parts if part.allocation_id in ledger.known and _worth(part, capacity)]
    measured = {part.allocation_id: _used(part, device, ledger.known[part.allocation_id], len(parts)) for part in parts}
    for part in parts:
        used, basis = measured[part.allocation_id]
        # A counter on the page never falls, also where others turn out to have had a part of what the card was busy.
        if basis is UsedBasis.SAMPLED and ledger.known[part.allocation_id].mode is Mode.WHOLE and (used or 0) >= part.m_whole_us:
            part.whole_us_total = (part.whole_us_total or 0) + (used or 0) - part.m_whole_us
            part.m_whole_us = used or 0
    return parts, measured


def _worth(part: SliceLedger, capacity: Capacity) -> bool:
    """Whether there is anything to say: a promise in this minute, or use (an allocation already released, read for the last time)."""
    promised = part.allocation_id in capacity.by_promised or part.allocation_id in capacity.by_suspended
    return promised or bool(part.m_used_us or part.m_shared_us or part.m_denied or part.m_launches or part.m_graph_launches)


def _used(part: SliceLedger, device: DeviceLedger, allocation: Allocation, sharers: int) -> tuple[int | None, UsedBasis]:
    rules = sharing_of(allocation.mode)
    hooked = part.m_used_us if part.m_metered else None
    if rules is None:
        return (hooked, UsedBasis.HOOK) if hooked is not None else (None, UsedBasis.ALLOCATED)
    shared_basis = part.m_shared_basis or part.shared_basis
    # What others were given of the card's busy time is not this slice's.
    others = device.handed_us - (part.m_shared_us or 0)
    busy = None if device.m_busy_us is None else max(0, min(device.m_busy_us, device.parts.span_us - others))
    return rules.used(UsedNumbers(hooked, busy, sharers, part.m_shared_us, UsedBasis(shared_basis) if shared_basis is not None else None))


def _energy(device: DeviceLedger, capacity: Capacity, used: list[int], parts: list[SliceLedger]) -> list[int | None]:
    """Each slice's part of the board's energy: the busy part of the time by use, the rest by allocation; what is nobody's stays out."""
    if device.m_energy_uj is None or device.parts.span_us == 0:
        return [None] * len(parts)
    total, span = device.m_energy_uj - device.m_energy_before_uj, device.parts.span_us
    busy = min(span, max(sum(used), device.m_busy_us or 0))
    active, idle = split_exactly(total, [busy, span - busy])
    others = max(0, (device.m_busy_us or 0) - sum(used))
    by_use = split_exactly(active, [*used, others])
    allocated = [capacity.by_allocated.get(part.allocation_id, 0) for part in parts]
    by_share = split_exactly(idle, [*allocated, span - sum(allocated)])
    return [by_use[index] + by_share[index] for index in range(len(parts))]


def _completeness(measured_us: int, span_us: int) -> int:
    return max(0, min(FULL_SHARE_PPM, FULL_SHARE_PPM * measured_us // span_us)) if span_us else 0


def _kib(byte_us: int | None) -> int | None:
    return None if byte_us is None else byte_us // 1024


def _key(device: DeviceLedger, span_us: int, measured_us: int) -> dict[str, Any]:
    """What the records of one device-minute have in common; node, epoch and sequence are given when they are spooled."""
    assert device.m_start_us is not None
    return {
        "node": "",
        "epoch": "",
        "sequence": 0,
        "minute_us": device.m_start_us - device.m_start_us % MINUTE_US,
        "start_us": device.m_start_us,
        "span_us": span_us,
        "completeness_ppm": _completeness(measured_us, span_us),
        "device_uuid": device.uuid,
        "device_model": device.model,
    }


def _device_record(device: DeviceLedger, capacity: Capacity) -> DeviceRecord:
    overhead = None
    if device.m_busy_us is not None and device.m_unaccounted_us is not None and device.m_hooked_known and device.m_measured_us:
        # A running maximum: samples that run ahead of the hook in one minute and behind it in the next add up to nothing.
        total = max(device.overhead_us_total or 0, device.overhead_difference_us)
        overhead = total - (device.overhead_us_total or 0)
        device.overhead_us_total = total
    return DeviceRecord(
        **_key(device, capacity.span_us, device.m_measured_us),
        allocated_us=capacity.allocated_us,
        reserved_unused_us=capacity.reserved_unused_us,
        unallocated_us=capacity.unallocated_us,
        suspended_us=capacity.suspended_us,
        down_us=capacity.down_us,
        memory_total_bytes=device.memory_total_bytes,
        busy_us=device.m_busy_us,
        hooked_us=device.m_hooked_us if device.m_hooked_known else None,
        switch_overhead_us=overhead,
        unaccounted_us=device.m_unaccounted_us,
        memory_allocated_kib_us=_kib(device.m_memory_allocated_bus),
        memory_used_kib_us=_kib(device.m_memory_used_bus),
        memory_peak_bytes=device.m_memory_peak,
        unaccounted_memory_kib_us=_kib(device.m_unaccounted_memory_bus),
        energy_uj=device.m_energy_uj,
    )


def promise_of(allocation: Allocation, device_uuid: str) -> SlicePromise | None:
    """What the device owes the allocation; None when it is not listed."""
    return next((promise for promise in allocation.slices if promise.device_uuid == device_uuid), None)


def _slice_record(
    ledger: Ledger, device: DeviceLedger, capacity: Capacity, part: SliceLedger, used: int | None, basis: UsedBasis, energy_uj: int | None
) -> SliceRecord:
    assert device.m_start_us is not None
    standing = ledger.timeline.standing.get(part.allocation_id)
    allocation = standing or ledger.known[part.allocation_id]
    promise = promise_of(allocation, device.uuid)
    metered = part.m_metered
    activity = last_activity(metered=metered, hook_us=part.last_activity_us, utilised_us=part.utilised_us, gpm_us=part.gpm_us)
    state = slice_state(
        standing.state if standing else None,
        measured=metered or used is not None,
        processes=None,
        memory_used_bytes=0 if metered and not part.m_memory_used_bus else part.m_memory_used_bus,
        last_activity_us=activity,
        now_us=device.m_start_us + capacity.span_us,
    )
    labels = allocation.labels
    return SliceRecord(
        **_key(device, capacity.span_us, capacity.span_us - part.m_unmeasured_us),
        pool=labels.pool,
        allocation_id=part.allocation_id,
        tenant=labels.tenant,
        mode=allocation.mode.value,
        state=state.value,
        used_basis=basis.value,
        generation=allocation.generation,
        promised_us=capacity.by_promised.get(part.allocation_id, 0),
        allocated_us=capacity.by_allocated.get(part.allocation_id, 0),
        suspended_us=capacity.by_suspended.get(part.allocation_id, 0),
        memory_allocated_kib_us=part.m_memory_allocated_bus // 1024,
        project=labels.project,
        user=labels.user,
        workload=labels.workload,
        workload_class=labels.workload_class,
        environment=labels.environment,
        promise_ppm=promise.promise_ppm if promise else None,
        compute_limit_ppm=part.limit_ppm,
        memory_limit_bytes=part.limit_bytes,
        decision_id=allocation.decision_id,
        used_us=used,
        memory_used_kib_us=_kib(part.m_memory_used_bus),
        memory_peak_bytes=part.m_memory_peak,
        energy_uj=energy_uj,
        launches=part.m_launches if metered else None,
        graph_launches=part.m_graph_launches if metered else None,
        throttled_us=part.m_throttled_us if metered else None,
        denied_allocations=part.m_denied if metered else None,
        denied_bytes=part.m_denied_bytes if metered else None,
        last_activity_us=activity,
        hook_faults=part.m_faults if metered else None,
    )


def _process_record(device: DeviceLedger, process: ProcessLedger) -> ProcessRecord:
    return ProcessRecord(
        **_key(device, device.parts.span_us, device.m_measured_us),
        pid=process.pid,
        start_ticks=process.start_ticks,
        command=process.command,
        hooked=process.hooked,
        used_basis=UsedBasis.HOOK.value if process.hooked else (process.m_basis if process.m_used_us is not None else None),
        allocation_id=process.allocation_id,
        tenant=process.tenant,
        used_us=process.m_used_us,
        memory_used_kib_us=_kib(process.m_memory_used_bus),
        memory_peak_bytes=process.m_memory_peak,
        launches=process.m_launches,
        ended=process.ended,
    )
