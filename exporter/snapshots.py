"""The snapshot of a tick: ledger and observation joined into one immutable value that every output is made from."""

from collections import Counter
from collections.abc import Iterable, Mapping

from poolmeter.exporter.attribution import OwnAllocations, ProcessKey, Who
from poolmeter.exporter.attribution.holders import Held, holders_of
from poolmeter.exporter.closing import promise_of
from poolmeter.exporter.host import host_of
from poolmeter.exporter.integrate import Observation
from poolmeter.exporter.ledger import DeviceLedger, Ledger, SliceLedger
from poolmeter.model.allocation import Allocation, AllocationState, Mode
from poolmeter.model.snapshot import AttributionSnapshot, DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import FULL_SHARE_PPM
from poolmeter.model.usage import UsedBasis
from poolmeter.pages.grant import DeviceGrant
from poolmeter.rules.state import last_activity, slice_state
from poolmeter.sharing import UsedNumbers, sharing_of
from poolmeter.vendors.reading import DeviceReading, ProcessReading


def take_snapshot(
    ledger: Ledger,
    seen: Observation,
    attribution: OwnAllocations,
    who: Who,
    unhooked: Mapping[str, list[ProcessReading]],
    shared: Mapping[str, list[ProcessReading]],
    sources: Iterable[SourceHealth],
    *,
    node: str,
    pool: str,
    epoch: str,
    sequence: int,
    simulated: bool,
) -> Snapshot:
    """Everything known at the ledger's cursor. Totals go with the spool's epoch; a device that does not answer has no gauges."""
    standing = ledger.timeline.standing
    sharers = Counter(uuid for allocation in standing.values() for uuid in {promise.device_uuid for promise in allocation.slices})
    sizes = _nvml_sizes(seen, attribution, shared)
    slices = [
        _slice(ledger, seen, sharers[uuid], sizes, shared, allocation, uuid, epoch, pool)
        for allocation in standing.values()
        for uuid in (promise.device_uuid for promise in allocation.slices)
        if uuid in ledger.devices
    ]
    devices = [
        _device(ledger, seen, device, unhooked.get(uuid), shared, standing.values(), epoch)
        for uuid, device in sorted(ledger.devices.items(), key=lambda item: (item[1].index, item[0]))
    ]
    processes = _processes(ledger, seen)
    return Snapshot(
        node=node,
        epoch=epoch,
        sequence=sequence,
        taken_us=ledger.cursor_us,
        simulated=simulated,
        pool=pool,
        devices=tuple(devices),
        slices=tuple(slices),
        processes=tuple(processes),
        sources=tuple(sources),
        attributions=tuple(_attributions(processes, who)),
        holders=holders_of(
            [
                Held(ProcessKey(p.pid, p.start_ticks), p.device_uuid, p.hooked, p.nvml_memory_bytes)
                for p in processes
                if seen.devices is not None or p.hooked
            ],
            who.all(),
            who.assigned(),
            ledger.devices,
            {key: holder.unaccounted_us_total for key, holder in ledger.holders.items()},
            epoch,
        ),
        attribution_faults=who.faults(),
        host=host_of(standing.values()),
    )


def _device(
    ledger: Ledger,
    seen: Observation,
    device: DeviceLedger,
    unhooked: list[ProcessReading] | None,
    shared: Mapping[str, list[ProcessReading]],
    standing: Iterable[Allocation],
    epoch: str,
) -> DeviceSnapshot:
    promises = [
        promise
        for allocation in standing
        if allocation.state is AllocationState.ACTIVE
        for promise in [promise_of(allocation, device.uuid)]
        if promise is not None
    ]
    reading = (seen.devices or {}).get(device.uuid)
    up = reading is not None and reading.up
    held = [process.memory_bytes for process in unhooked] if up and unhooked is not None else None
    unaccounted = sum(m or 0 for m in held) if held is not None and None not in held else None
    hooked = _hooked_memory(ledger, seen, device)
    sizes = [m.memory_bytes for key, listed in shared.items() if key.startswith(f"{device.uuid}|") for m in listed]
    used = reading.memory_used_bytes if reading is not None and up else None
    difference = None
    if used is not None and hooked is not None and unaccounted is not None and None not in sizes:
        difference = used - hooked - unaccounted - sum(m or 0 for m in sizes)
    return DeviceSnapshot(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        vendor=device.vendor,
        up=up,
        memory_total_bytes=device.memory_total_bytes,
        origin=epoch,
        pci_bus_id=reading.pci_bus_id if reading else None,
        minor=reading.minor if reading else None,
        serial=reading.serial if reading else None,
        driver_version=reading.driver_version if reading else None,
        mig=reading.mig if reading and up else None,
        memory_used_bytes=reading.memory_used_bytes if reading and up else None,
        memory_reserved_bytes=reading.memory_reserved_bytes if reading and up else None,
        utilization_ppm=reading.utilization_ppm if reading and up else None,
        power_mw=reading.power_mw if reading and up else None,
        temperature_celsius=reading.temperature_celsius if reading and up else None,
        sm_clock_hz=reading.sm_clock_hz if reading and up else None,
        memory_clock_hz=reading.memory_clock_hz if reading and up else None,
        busy_us_total=device.busy_us_total,
        energy_uj_total=device.energy_uj_total,
        hooked_us_total=device.hooked_us_total,
        switch_overhead_us_total=device.overhead_us_total,
        unaccounted_us_total=device.unaccounted_us_total,
        unaccounted_memory_bytes=unaccounted,
        allocated_ppm=sum(promise.promise_ppm for promise in promises),
        memory_allocated_bytes=sum(promise.memory_bytes for promise in promises),
        hooked_memory_bytes=hooked,
        memory_difference_bytes=difference,
        hardware=reading.hardware if reading else None,
    )


def _hooked_memory(ledger: Ledger, seen: Observation, device: DeviceLedger) -> int | None:
    """What all meters say is held on the device; None when one of them cannot be read or believed."""
    held = 0
    for part in seen.allocations.values():
        if part.unread or part.id in ledger.tampered:
            allocation = part.allocation or ledger.known.get(part.id)
            if allocation is None or promise_of(allocation, device.uuid) is not None:
                return None
        elif part.meter is not None and device.uuid in part.meter.device_uuids:
            held += min(part.meter.shared[device.uuid].memory_bytes, device.memory_total_bytes)
    return held


def _slice(
    ledger: Ledger,
    seen: Observation,
    sharers: int,
    sizes: Mapping[str, list[int | None]],
    shared: Mapping[str, list[ProcessReading]],
    allocation: Allocation,
    uuid: str,
    epoch: str,
    pool: str,
) -> SliceSnapshot:
    reading = seen.allocations.get(allocation.id)
    meter = reading.meter if reading and uuid in (reading.meter.device_uuids if reading.meter else ()) else None
    limits: DeviceGrant | None = next((d for d in reading.grant.devices if d.uuid == uuid), None) if reading and reading.grant else None
    part = ledger.slices.get(f"{uuid}|{allocation.id}") or SliceLedger(uuid, allocation.id)
    promise = promise_of(allocation, uuid)
    assert promise is not None
    memory = min(meter.shared[uuid].memory_bytes, ledger.devices[uuid].memory_total_bytes) if meter else None
    processes = sum(uuid in slot.devices and slot.locked is not False for slot in meter.slots) if meter else None
    rules = sharing_of(allocation.mode)
    device = (seen.devices or {}).get(uuid)
    busy = device.busy_us_total if device else None
    shared_basis = UsedBasis(part.shared_basis) if part.shared_basis is not None else None
    hooked = part.base_busy_us - part.given_up_us if meter else None
    busy = busy if part.whole_us_total is not None else None
    numbers = UsedNumbers(hooked, busy, sharers, part.shared_us_total, shared_basis)
    used, basis = rules.used(numbers) if rules else (None, UsedBasis.ALLOCATED)
    if meter is None and part.whole_us_total is not None and basis is UsedBasis.SAMPLED:
        used = part.whole_us_total  # since the slice began, which the card's own counter is not
    listed = shared.get(f"{uuid}|{allocation.id}")
    by_nvml = _nvml_memory(device, sizes.get(f"{uuid}|{allocation.id}", []))
    if meter is None and listed is not None:
        memory, processes = by_nvml, len(listed)
    activity = last_activity(metered=meter is not None, hook_us=part.last_activity_us, utilised_us=part.utilised_us, gpm_us=part.gpm_us)
    state = slice_state(
        allocation.state,
        measured=meter is not None or used is not None,
        processes=processes,
        memory_used_bytes=memory,
        last_activity_us=activity,
        now_us=ledger.cursor_us,
    )
    labels = allocation.labels
    return SliceSnapshot(
        allocation_id=allocation.id,
        device_uuid=uuid,
        tenant=labels.tenant,
        mode=allocation.mode.value,
        state=state.value,
        used_basis=basis.value,
        # The hook's page counts by twos (odd: a write under way); the allocation's own generation is what decisions name.
        generation=allocation.generation,
        enforcement=allocation.enforcement,
        promise_ppm=promise.promise_ppm,
        memory_promise_bytes=promise.memory_bytes,
        created_us=allocation.created_us,
        origin=f"{epoch}:{part.page}",
        project=labels.project,
        user=labels.user,
        workload=labels.workload,
        workload_class=labels.workload_class,
        environment=labels.environment,
        pool=labels.pool or pool,
        decision_id=(reading.grant.decision_id if reading and reading.grant else None) or allocation.decision_id,
        compute_limit_ppm=limits.compute_ppm if limits else None,
        memory_limit_bytes=limits.memory_bytes if limits else None,
        memory_used_bytes=memory,
        memory_peak_bytes=min(meter.shared[uuid].memory_peak, ledger.devices[uuid].memory_total_bytes) if meter else None,
        busy_us_total=used,
        launches_total=part.base_launches if meter else None,
        graph_launches_total=part.base_graph_launches if meter else None,
        throttled_us_total=part.base_throttled_us if meter else None,
        denied_allocations_total=part.base_denied if meter else None,
        energy_uj_total=part.energy_uj_total,
        energy_divided=None if part.energy_uj_total is None else allocation.mode is not Mode.WHOLE,
        last_activity_us=activity,
        hook_faults_total=part.base_faults if meter else None,
        processes=processes,
        nvml_memory_bytes=by_nvml,
        memory_difference_bytes=by_nvml - memory if meter and by_nvml is not None and memory is not None else None,
    )


def _nvml_sizes(seen: Observation, attribution: OwnAllocations, shared: Mapping[str, list[ProcessReading]]) -> dict[str, list[int | None]]:
    """What the cards say that each process of a slice holds, by `uuid|allocation`; None: a card does not say."""
    sizes = {key: [process.memory_bytes for process in listed] for key, listed in shared.items()}
    for uuid, device in (seen.devices or {}).items():
        for process in device.processes:
            owner = attribution.owner_of(ProcessKey(process.pid, process.start_ticks)) if process.start_ticks is not None else None
            if process.listed and owner is not None and owner.hooked:
                sizes.setdefault(f"{uuid}|{owner.allocation_id}", []).append(process.memory_bytes)
    return sizes


def _nvml_memory(device: DeviceReading | None, sizes: list[int | None]) -> int | None:
    """What the card says that the slice's processes hold, contexts and all; None when it does not list them, or not what they hold."""
    if device is None or not device.up or not device.processes_known or None in sizes:
        return None
    return sum(size or 0 for size in sizes)


def _attributions(processes: Iterable[ProcessSnapshot], who: Who) -> Iterable[AttributionSnapshot]:
    """One a process, however many devices it is on."""
    for key in dict.fromkeys(ProcessKey(process.pid, process.start_ticks) for process in processes):
        belonging = who.of(key)
        if belonging is not None:
            yield AttributionSnapshot(
                pid=key.pid,
                start_ticks=key.start_ticks,
                tenant=belonging.tenant,
                source=belonging.source,
                holder=belonging.holder,
                framework=belonging.framework,
                namespace_pid=belonging.namespace_pid,
                claims=belonging.claims,
                disagreements=belonging.disagreements,
            )


def _processes(ledger: Ledger, seen: Observation) -> list[ProcessSnapshot]:
    nvml = {
        (uuid, ProcessKey(process.pid, process.start_ticks or 0)): process.memory_bytes
        for uuid, device in (seen.devices or {}).items()
        for process in device.processes
        if process.listed
    }
    held: dict[str, int] = {}
    for allocation in seen.allocations.values():
        for slot in allocation.meter.slots if allocation.meter else ():
            for uuid, counters in slot.devices.items():
                held[f"{uuid}|{allocation.id}|{slot.index}|{slot.generation}"] = sum(counters.memory.values())
    found = []
    for key, process in ledger.processes.items():
        if not process.present or process.ended or (not process.hooked and seen.devices is None):
            continue
        if process.device_uuid not in ledger.devices:
            continue  # taken out while the exporter was down; the program's slot lives on
        own = nvml.get((process.device_uuid, ProcessKey(process.pid, process.start_ticks)))
        used: int | None = held.get(key) if process.hooked else own
        measured = process.hooked or process.basis is not None
        found.append(
            ProcessSnapshot(
                pid=process.pid,
                start_ticks=process.start_ticks,
                device_uuid=process.device_uuid,
                hooked=process.hooked,
                command=process.command,
                allocation_id=process.allocation_id,
                tenant=process.tenant,
                used_basis=UsedBasis.HOOK.value if process.hooked else process.basis,
                busy_us_total=process.counted_us if measured else None,
                memory_used_bytes=min(used, ledger.devices[process.device_uuid].memory_total_bytes) if used is not None else None,
                nvml_memory_bytes=own,
            )
        )
    return found


def allocated_ppm(device: DeviceSnapshot) -> int:
    """What the device has promised, as far as it can deliver it."""
    return min(FULL_SHARE_PPM, device.allocated_ppm or 0)
