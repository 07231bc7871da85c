"""The integrator: takes an observation a tick, counts what was gained since the last one, closes minutes into records.

Counters integrate at their source, so a tick that comes late (or an exporter that was down) bridges exactly: what was gained lies in
the minutes between, pro rata. Gauges are integrated only over ticks in time; elsewhere they are unknown and completeness says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.attribution import OwnAllocations, ProcessKey, Who
from poolmeter.exporter.baseline import rebase, reset
from poolmeter.exporter.closing import close_minute
from poolmeter.exporter.ledger import DeviceLedger, HolderLedger, Ledger, ProcessLedger, SliceLedger
from poolmeter.exporter.spread import Gains, minutes_between, spread, spread_time
from poolmeter.model.allocation import AllocationState
from poolmeter.model.naming import printable
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import UsageRecord
from poolmeter.pages.meter import DeviceCounters, MeterReading, SlotReading
from poolmeter.rules.capacity import Claim, gather
from poolmeter.vendors.reading import DeviceReading, ProcessReading

BACKLOG_US = MINUTE_US  # device time ahead of the clock by more than this was never used
HOLDER_US = MINUTE_US  # what is counted of a holder outlives its last process by this, so that the next one goes on
_SANE = 1 << 62
_ENERGY_UJ_PER_US = 10_000  # 10 kW: no board draws more


@dataclass(frozen=True)
class Observation:
    """What one tick saw. `devices` None: the vendor's library gave nothing that is still valid; `origin` of its integrated counters."""

    devices: Mapping[str, DeviceReading] | None
    origin: str
    allocations: Mapping[str, AllocationReading]
    unidentified: int = 0  # devices that did not say who they are


@dataclass
class Outcome:
    """Records closed and oddities found by a tick."""

    records: list[UsageRecord] = field(default_factory=list)
    tampered: list[tuple[str, str | None, str]] = field(default_factory=list)  # allocation, device, reason


class Integrator:
    """Counts into a ledger. `live_us`: a tick within this time of the last one is in time."""

    def __init__(self, ledger: Ledger, attribution: OwnAllocations, who: Who, live_us: int, fresh: bool) -> None:
        self.ledger = ledger
        self._attribution = attribution
        self._who = who
        self._live_us = live_us
        # Without history, what counters already say was used before anybody watched.
        self._fresh = fresh
        self._gone: set[str] = set()
        self._new: set[str] = set()
        self._listed = False
        self.unhooked: dict[str, list[ProcessReading]] = {}

    def advance(self, seen: Observation, until_us: int) -> Outcome:
        """Count everything between the cursor and `until_us`."""
        outcome = Outcome()
        ledger = self.ledger
        pieces = minutes_between(ledger.cursor_us, until_us)
        self._meet(seen)
        if self._fresh:
            self._baseline(seen)
        if not pieces:
            return outcome
        gains = Gains(pieces)
        live = until_us - ledger.cursor_us <= self._live_us
        metered = self._slices(seen, gains, outcome)
        self._devices(seen, gains, live)
        self._unhooked(seen, gains, live)
        for index, (start, end) in enumerate(pieces):
            self._promise(start, end, live, metered)
            for key in metered:
                ledger.slices[key].m_metered = ledger.slices[key].m_seen = True
            self._gauge(seen, end - start, live)
            before = {uuid: (d.m_busy_us or 0, d.m_hooked_us, d.m_unaccounted_us or 0) for uuid, d in ledger.devices.items()}
            for add in gains.add[index]:
                add()
            for uuid, device in ledger.devices.items():
                if live and device.m_busy_us is not None and device.m_unaccounted_us is not None:
                    busy, hooked, unaccounted = before[uuid]
                    device.overhead_difference_us += (
                        device.m_busy_us - busy - (device.m_hooked_us - hooked) - (device.m_unaccounted_us - unaccounted)
                    )
            ledger.cursor_us = end
            if end % MINUTE_US == 0:
                self.close(outcome)
        return outcome

    def close(self, outcome: Outcome) -> None:
        """Close the open minute, whole or not, into records."""
        outcome.records.extend(close_minute(self.ledger))
        ledger = self.ledger
        for device in ledger.devices.values():
            device.new_minute()
        for part in ledger.slices.values():
            part.new_minute()
        for process in ledger.processes.values():
            process.new_minute()
        ledger.processes = {key: process for key, process in ledger.processes.items() if process.present}
        for uuid in self._gone:
            ledger.devices.pop(uuid, None)
        self._gone.clear()

    def _meet(self, seen: Observation) -> None:
        self._new = set()
        if seen.devices is None:
            return
        self._gone -= seen.devices.keys()
        for uuid, reading in seen.devices.items():
            device = self.ledger.devices.get(uuid)
            if device is None:
                device = DeviceLedger(uuid, reading.index, reading.model, reading.vendor, reading.memory_total_bytes)
                self.ledger.devices[uuid] = device
                self._new.add(uuid)
            device.index, device.model, device.memory_total_bytes = reading.index, reading.model, reading.memory_total_bytes
            device.up = reading.up
        missing = self.ledger.devices.keys() - seen.devices.keys()
        for uuid in missing:
            self.ledger.devices[uuid].up = False  # the library answers and no longer lists the card
        if not self._listed and not seen.unidentified:
            # A card that is not there when the exporter starts was taken out; one that vanishes while it runs is down.
            self._gone = set(missing)
        self._listed = True

    def _baseline(self, seen: Observation) -> None:
        self._fresh = False
        for uuid, board in (seen.devices or {}).items():
            self.ledger.devices[uuid].energy_raw = board.energy_uj_total
        for reading in seen.allocations.values():
            for uuid in reading.meter.device_uuids if reading.meter else ():
                assert reading.meter is not None
                rebase(self._slice(uuid, reading.id), reading.meter, uuid)
                for slot in reading.meter.slots:
                    host = self._attribution.host_of(reading.id, slot)
                    if uuid in slot.devices and host is not None:
                        process = self._process(uuid, reading, reading.meter, slot, host)
                        process.base_busy_us = slot.devices[uuid].busy_ns // 1000
                        process.base_launches = slot.devices[uuid].launches

    def _process(self, uuid: str, reading: AllocationReading, meter: MeterReading, slot: SlotReading, host: ProcessKey) -> ProcessLedger:
        tenant = reading.allocation.labels.tenant if reading.allocation else None
        process = ProcessLedger(
            uuid, host.pid, host.start_ticks, printable(slot.comm) or None, True, f"{reading.id}:{meter.created_ns}", reading.id, tenant
        )
        return self.ledger.processes.setdefault(f"{uuid}|{reading.id}|{slot.index}|{slot.generation}", process)

    def _slice(self, uuid: str, allocation_id: str) -> SliceLedger:
        return self.ledger.slices.setdefault(f"{uuid}|{allocation_id}", SliceLedger(uuid, allocation_id))

    # ---- promises ----------------------------------------------------------------------------------------------------------------

    def _promise(self, start: int, end: int, live: bool, metered: set[str]) -> None:
        ledger = self.ledger
        for segment in ledger.timeline.advance(start, end):
            length = segment.end_us - segment.start_us
            # A card first seen after a gap was not there in it, for all that is known.
            claims: dict[str, list[Claim]] = {uuid: [] for uuid in ledger.devices if live or uuid not in self._new}
            for allocation in segment.allocations:
                ledger.known[allocation.id] = allocation
                for promise in allocation.slices:
                    if promise.device_uuid not in claims:
                        continue
                    suspended = allocation.state is AllocationState.SUSPENDED
                    claims[promise.device_uuid].append(Claim(allocation.id, promise.promise_ppm, suspended))
                    part = self._slice(promise.device_uuid, allocation.id)
                    part.m_seen = True
                    if not suspended:
                        part.m_memory_allocated_bus += promise.memory_bytes * length
                        ledger.devices[promise.device_uuid].m_memory_allocated_bus += promise.memory_bytes * length
                    if not live or (f"{promise.device_uuid}|{allocation.id}" not in metered and not suspended):
                        part.m_unmeasured_us += length
            for uuid, standing in claims.items():
                device = ledger.devices[uuid]
                if device.m_start_us is None:
                    device.m_start_us = segment.start_us
                gather(device.parts, length, standing, down=not device.up)

    # ---- hook counters -----------------------------------------------------------------------------------------------------------

    def _slices(self, seen: Observation, gains: Gains, outcome: Outcome) -> set[str]:
        """Gains of every meter; the keys of the slices whose meter was read."""
        metered: set[str] = set()
        marked = set(self.ledger.tampered)
        for reading in seen.allocations.values():
            if reading.allocation is not None:
                self.ledger.known[reading.id] = reading.allocation
            # The grant of an ended allocation is closed: its limits are no longer those its programs ran under.
            ended = {item.device_uuid: item for item in reading.allocation.slices} if reading.retired and reading.allocation else {}
            for limits in reading.grant.devices if reading.grant else ():
                part = self.ledger.slices.get(f"{limits.uuid}|{reading.id}")
                if part is None:
                    continue
                if last := ended.get(limits.uuid):
                    part.limit_ppm, part.limit_bytes = last.compute_limit_ppm, last.memory_bytes
                else:
                    part.limit_ppm, part.limit_bytes = limits.compute_ppm, limits.memory_bytes
            if reading.meter is None:
                if reading.tampered and reading.id not in marked:
                    marked.add(reading.id)
                    outcome.tampered.append((reading.id, None, reading.tampered))
                for uuid, device in self.ledger.devices.items():
                    if reading.tampered and f"{uuid}|{reading.id}" in self.ledger.slices:
                        device.m_hooked_known = False
                continue
            faults: list[tuple[str, str | None, str]] = []
            promised = {promise.device_uuid for promise in reading.allocation.slices} if reading.allocation else None
            for uuid in reading.meter.device_uuids:
                if promised is not None and uuid not in promised:
                    faults.append((reading.id, uuid, f"meter of {reading.id} lists {uuid:.80}, expected only devices of the allocation"))
                elif uuid in self.ledger.devices:
                    metered.add(f"{uuid}|{reading.id}")
                    self._slice_gain(uuid, reading, reading.meter, gains, faults)
            if faults and reading.id not in marked:
                marked.add(reading.id)
                outcome.tampered.extend(faults[:1])
            elif not faults:
                marked.discard(reading.id)
        self.ledger.tampered = sorted(marked & seen.allocations.keys())
        return metered

    def _slice_gain(
        self, uuid: str, reading: AllocationReading, meter: MeterReading, gains: Gains, faults: list[tuple[str, str | None, str]]
    ) -> None:
        part, device, total = self._slice(uuid, reading.id), self.ledger.devices[uuid], meter.total(uuid)
        if part.page != meter.created_ns:
            # Another page under the same name: its counters began at zero with it.
            for process in [key for key, p in self.ledger.processes.items() if p.hooked and p.allocation_id == reading.id]:
                del self.ledger.processes[process]
            reset(part, meter.created_ns)
        busy = total.busy_ns // 1000
        spare = device.parts.span_us - part.m_used_us
        delta = busy - part.base_busy_us
        if delta < 0 or busy >= _SANE:
            faults.append((reading.id, uuid, f"meter of {reading.id} says {busy} us on {uuid}, expected at least {part.base_busy_us}"))
            delta = 0
        parts = spread_time(delta, gains.lengths, spare)
        counted = sum(parts)
        part.base_busy_us += counted
        part.backlog_us = delta - counted
        if part.backlog_us > BACKLOG_US:
            faults.append((reading.id, uuid, f"meter of {reading.id} gained {delta} us on {uuid}, expected at most {sum(gains.lengths)}"))
            part.base_busy_us, part.backlog_us = busy, 0
        gains.of(part, "m_used_us", parts)
        gains.of(device, "m_hooked_us", parts)
        gains.of(device, "hooked_us_total", parts)
        for name, now in (
            ("launches", total.launches),
            ("graph_launches", total.graph_launches),
            ("throttled_us", total.throttled_ns // 1000),
            ("denied", total.denied_limit + total.denied_card + total.denied_device),
            ("denied_bytes", total.denied_limit_bytes + total.denied_card_bytes),
            ("faults", meter.hook_faults(uuid)),
        ):
            gained = now - getattr(part, f"base_{name}")
            if gained < 0 or now >= _SANE:
                faults.append((reading.id, uuid, f"meter of {reading.id} says {name} {now} on {uuid}, expected at least {now - gained}"))
                continue
            setattr(part, f"base_{name}", now)
            gains.of(part, f"m_{name}", spread(gained, gains.lengths))
        self._memory(part, device, meter, uuid)
        if total.last_activity_ns is not None:
            part.last_activity_us = min(total.last_activity_ns // 1000, self.ledger.cursor_us + sum(gains.lengths))
        self._slot_gains(uuid, reading, meter, part, gains)

    def _memory(self, part: SliceLedger, device: DeviceLedger, meter: MeterReading, uuid: str) -> None:
        peak = min(meter.shared[uuid].memory_peak, device.memory_total_bytes)
        if peak > part.base_memory_peak:
            part.m_memory_peak = max(part.m_memory_peak or 0, peak)
            part.base_memory_peak = peak

    def _slot_gains(self, uuid: str, reading: AllocationReading, meter: MeterReading, part: SliceLedger, gains: Gains) -> None:
        prefix = f"{uuid}|{reading.id}|"
        present = set()
        for slot in meter.slots:
            counters = slot.devices.get(uuid)
            host = self._attribution.host_of(reading.id, slot)
            if counters is None or host is None:
                continue
            key = f"{prefix}{slot.index}|{slot.generation}"
            present.add(key)
            process = self._process(uuid, reading, meter, slot, host)
            process.present, process.ended = True, slot.locked is False
            process.m_seen = True
            self._process_gain(process, counters, gains)
        gone = [key for key, p in self.ledger.processes.items() if key.startswith(prefix) and p.present and key not in present]
        retired = meter.retired[uuid]
        for key in gone:
            process = self.ledger.processes[key]
            process.present, process.ended, process.m_seen = False, True, True
            if len(gone) == 1:
                # Alone to leave, so what `retired` gained is all it ever counted; several together are only known as a sum.
                final = DeviceCounters(
                    busy_ns=retired.busy_ns - part.base_retired_busy_us * 1000, launches=retired.launches - part.base_retired_launches
                )
                self._process_gain(process, final, gains)
        part.base_retired_busy_us, part.base_retired_launches = retired.busy_ns // 1000, retired.launches

    def _process_gain(self, process: ProcessLedger, counters: DeviceCounters, gains: Gains) -> None:
        device = self.ledger.devices[process.device_uuid]
        gained = max(0, counters.busy_ns // 1000 - process.base_busy_us)
        parts = spread_time(min(gained, _SANE), gains.lengths, device.parts.span_us - (process.m_used_us or 0))
        process.base_busy_us += sum(parts)
        gains.of(process, "m_used_us", parts)
        launches = max(0, counters.launches - process.base_launches)
        process.base_launches += launches
        gains.of(process, "m_launches", spread(min(launches, _SANE), gains.lengths))

    # ---- the card's own numbers --------------------------------------------------------------------------------------------------

    def _devices(self, seen: Observation, gains: Gains, live: bool) -> None:
        for uuid, reading in (seen.devices or {}).items():
            device = self.ledger.devices[uuid]
            if reading.busy_us_total is not None:
                if device.busy_origin != seen.origin:
                    device.busy_origin, device.busy_raw = seen.origin, 0
                spare = device.parts.span_us - (device.m_busy_us or 0)
                parts = spread_time(max(0, reading.busy_us_total - device.busy_raw), gains.lengths, spare)
                device.busy_raw += sum(parts)
                if live or any(parts):
                    gains.of(device, "m_busy_us", parts)
                    gains.of(device, "busy_us_total", parts)
            if reading.energy_uj_total is not None:
                if device.energy_raw is not None:
                    gained = reading.energy_uj_total - device.energy_raw
                    if gained < 0:  # the driver was loaded anew, and the counter with it
                        gained = reading.energy_uj_total
                    if gained <= _ENERGY_UJ_PER_US * sum(gains.lengths):
                        parts = spread(gained, gains.lengths)
                        gains.of(device, "m_energy_uj", parts)
                        gains.of(device, "energy_uj_total", parts)
                device.energy_raw = reading.energy_uj_total

    def _unhooked(self, seen: Observation, gains: Gains, live: bool) -> None:
        """Programs without the hook: listed by the card, with no live slot behind them."""
        self.unhooked = {}
        for process in self.ledger.processes.values():
            if not process.hooked and seen.devices is not None:
                process.present = False
                process.ended = True
        for uuid, reading in (seen.devices or {}).items():
            device = self.ledger.devices[uuid]
            if not reading.up or not reading.processes_known:
                continue
            self.unhooked[uuid] = []
            if live:
                gains.of(device, "m_unaccounted_us", [0] * len(gains.lengths))
                gains.of(device, "unaccounted_us_total", [0] * len(gains.lengths))
            for found in reading.processes:
                if found.start_ticks is None or self._attribution.owner_of(ProcessKey(found.pid, found.start_ticks)) is not None:
                    continue
                self._unhooked_process(device, found, seen.origin, gains)
        cursor = self.ledger.cursor_us
        self.ledger.holders = {key: held for key, held in self.ledger.holders.items() if cursor - held.seen_us <= HOLDER_US}

    def _unhooked_process(self, device: DeviceLedger, found: ProcessReading, origin: str, gains: Gains) -> None:
        assert found.start_ticks is not None
        key = f"{device.uuid}|{found.pid}|{found.start_ticks}"
        process = self.ledger.processes.get(key)
        if process is None:
            if not found.listed and not found.busy_us_total:
                return
            process = ProcessLedger(device.uuid, found.pid, found.start_ticks, found.command, False, origin)
            self.ledger.processes[key] = process
        if process.origin != origin:
            process.origin, process.base_busy_us = origin, 0
        process.present = process.m_seen = True
        process.ended = not found.listed
        holder = self._holder(process)
        if found.listed:
            self.unhooked[device.uuid].append(found)
            if found.memory_bytes is not None:
                process.m_memory_peak = max(process.m_memory_peak or 0, found.memory_bytes)
        if found.busy_us_total is None:
            return
        parts = spread_time(
            max(0, found.busy_us_total - process.base_busy_us), gains.lengths, device.parts.span_us - (process.m_used_us or 0)
        )
        process.base_busy_us += sum(parts)
        gains.of(process, "m_used_us", parts)
        gains.of(device, "m_unaccounted_us", parts)
        gains.of(device, "unaccounted_us_total", parts)
        if holder is None:
            gains.of(process, "waiting_us", parts)
        else:
            gains.of(holder, "unaccounted_us_total", parts)

    def _holder(self, process: ProcessLedger) -> HolderLedger | None:
        """Whose a process without the hook is: tenant and allocation go with it, its device time to the holder once that is settled."""
        who = self._who.of(ProcessKey(process.pid, process.start_ticks))
        if who is None:
            return None
        process.tenant, process.allocation_id = who.tenant, who.merged.allocation_id
        if who.holder is None or not who.settled:
            return None
        holder = self.ledger.holders.setdefault(f"{process.device_uuid}|{who.holder}", HolderLedger())
        holder.seen_us = self.ledger.cursor_us
        holder.unaccounted_us_total += process.waiting_us
        process.waiting_us = 0
        return holder

    # ---- gauges ------------------------------------------------------------------------------------------------------------------

    def _gauge(self, seen: Observation, length: int, live: bool) -> None:
        """Integrate what is held now over a piece; not over one that nobody watched."""
        if not live:
            return
        ledger = self.ledger
        for uuid, reading in (seen.devices or {}).items():
            device = ledger.devices[uuid]
            device.m_measured_us += length  # also while it is down: it delivers nothing, and that is known
            if not reading.up:
                continue
            if reading.memory_used_bytes is not None:
                device.m_memory_used_bus = (device.m_memory_used_bus or 0) + reading.memory_used_bytes * length
                device.m_memory_peak = max(device.m_memory_peak or 0, reading.memory_used_bytes)
            held = [process.memory_bytes for process in self.unhooked.get(uuid, ())]
            if uuid in self.unhooked and None not in held:
                device.m_unaccounted_memory_bus = (device.m_unaccounted_memory_bus or 0) + sum(m or 0 for m in held) * length
            for found in self.unhooked.get(uuid, ()):
                process = ledger.processes[f"{uuid}|{found.pid}|{found.start_ticks}"]
                process.m_seen = True
                if found.memory_bytes is not None:
                    process.m_memory_used_bus = (process.m_memory_used_bus or 0) + found.memory_bytes * length
        for allocation in seen.allocations.values():
            if allocation.meter is not None:
                self._gauge_meter(allocation.id, allocation.meter, length)

    def _gauge_meter(self, allocation_id: str, meter: MeterReading, length: int) -> None:
        for uuid in meter.device_uuids:
            part, device = self.ledger.slices.get(f"{uuid}|{allocation_id}"), self.ledger.devices.get(uuid)
            if part is None or device is None:
                continue
            held = min(meter.shared[uuid].memory_bytes, device.memory_total_bytes)
            part.m_memory_used_bus = (part.m_memory_used_bus or 0) + held * length
            part.m_memory_peak = max(part.m_memory_peak or 0, held)
            for slot in meter.slots:
                process = self.ledger.processes.get(f"{uuid}|{allocation_id}|{slot.index}|{slot.generation}")
                if process is None or uuid not in slot.devices:
                    continue
                process.m_seen = True
                held = min(sum(slot.devices[uuid].memory.values()), device.memory_total_bytes)
                process.m_memory_used_bus = (process.m_memory_used_bus or 0) + held * length
                process.m_memory_peak = max(process.m_memory_peak or 0, held)
