"""The integrator: takes an observation a tick, counts what was gained since the last one, closes minutes into records.

Counters integrate at their source, so a tick that comes late (or an exporter that was down) bridges exactly: what was gained lies in
the minutes between, pro rata. Gauges are integrated only over ticks in time; elsewhere they are unknown and completeness says so.
"""

from collections.abc import Iterable

from poolmeter.exporter.attribution import OwnAllocations, Who
from poolmeter.exporter.closing import close_minute, count_whole
from poolmeter.exporter.hooked import HookedTime
from poolmeter.exporter.ledger import DeviceLedger, Ledger
from poolmeter.exporter.observation import Observation, Outcome
from poolmeter.exporter.room import Rank, Room
from poolmeter.exporter.spread import Gains, minutes_between, spread, spread_time
from poolmeter.exporter.strangers import WAIT_US, Strangers
from poolmeter.model.allocation import AllocationState
from poolmeter.model.units import MINUTE_US
from poolmeter.pages.meter import MeterReading
from poolmeter.rules.capacity import Claim, gather
from poolmeter.vendors.reading import DeviceReading, ProcessReading

__all__ = ["Integrator", "Observation", "Outcome"]
_ENERGY_UJ_PER_US = 10_000  # 10 kW: no board draws more
_LATE_US = 15_000_000  # the counter is read every five seconds, and a slow card's reading comes late: that much back it counts as drawn now


class Integrator:
    """Counts into a ledger. `live_us`: a tick within this time of the last one is in time."""

    def __init__(self, ledger: Ledger, attribution: OwnAllocations, who: Who, live_us: int, fresh: bool) -> None:
        self.ledger = ledger
        self._live_us = live_us
        # Without history, what counters already say was used before anybody watched.
        self._fresh = fresh
        self._hooked = HookedTime(ledger, attribution)
        self._strangers = Strangers(ledger, attribution, who, fresh)
        self._gone: set[str] = set()
        self._new: set[str] = set()
        self._listed = False

    @property
    def unhooked(self) -> dict[str, list[ProcessReading]]:
        """Programs of the last tick that nobody is billed for, by device."""
        return self._strangers.unhooked

    @property
    def shared(self) -> dict[str, list[ProcessReading]]:
        """Programs without the hook of the last tick that belong to a slice without a meter, by `uuid|allocation`."""
        return self._strangers.shared

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
        rooms = {uuid: Room(gains.lengths, device.parts.span_us - device.handed_us) for uuid, device in ledger.devices.items()}
        metered = self._hooked.count(seen, gains, rooms, outcome)
        for room in rooms.values():
            room.settle(Rank.HOOK)
        holes = self._devices(seen, gains, live)
        self._strangers.count(seen, gains, rooms, metered, holes, live=live)
        for room in rooms.values():
            room.settle(Rank.ACCOUNTING)
            room.settle(Rank.SAMPLED)
        for index, (start, end) in enumerate(pieces):
            self._promise(start, end, live, metered | self._strangers.measured)
            for key in metered:
                ledger.slices[key].m_metered = ledger.slices[key].m_seen = True
            self._gauge(seen, end - start, live)
            before = {uuid: (device.m_busy_us or 0) - device.handed_us for uuid, device in ledger.devices.items()}
            for add in gains.add[index]:
                add()
            for uuid, device in ledger.devices.items():
                measured = live and device.m_busy_us is not None and device.m_unaccounted_us is not None
                if measured and uuid not in self._strangers.whole:  # a whole card's busy time is its only user's
                    device.overhead_difference_us += (device.m_busy_us or 0) - device.handed_us - before[uuid]
            ledger.cursor_us = end
            if end % MINUTE_US == 0:
                self.close(outcome)
        count_whole(ledger, self._strangers.whole)
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
        ledger.processes = {
            key: process
            for key, process in ledger.processes.items()
            if process.present or (process.waiting_us and process.device_uuid in ledger.devices)
        }
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
            self.ledger.devices[uuid].energy_at_us = self.ledger.cursor_us
        self._hooked.baseline(seen)

    # ---- promises ----------------------------------------------------------------------------------------------------------------

    def _promise(self, start: int, end: int, live: bool, measured: set[str]) -> None:
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
                    part = self._hooked.slice(promise.device_uuid, allocation.id)
                    part.m_seen = True
                    if not suspended:
                        part.m_memory_allocated_bus += promise.memory_bytes * length
                        ledger.devices[promise.device_uuid].m_memory_allocated_bus += promise.memory_bytes * length
                    if not live or (f"{promise.device_uuid}|{allocation.id}" not in measured and not suspended):
                        part.m_unmeasured_us += length
            for uuid, standing in claims.items():
                device = ledger.devices[uuid]
                if device.m_start_us is None:
                    device.m_start_us = segment.start_us
                gather(device.parts, length, standing, down=not device.up)

    # ---- the card's own numbers --------------------------------------------------------------------------------------------------

    def _devices(self, seen: Observation, gains: Gains, live: bool) -> dict[str, list[int]]:
        """Count what the cards say; returns the time, piece by piece, of which a card does not know how much of it was busy."""
        holes: dict[str, list[int]] = {}
        for uuid, reading in (seen.devices or {}).items():
            device = self.ledger.devices[uuid]
            if reading.busy_us_total is not None:
                if device.busy_origin != seen.origin:
                    device.busy_origin, device.busy_raw, device.unmeasured_raw = seen.origin, 0, 0
                spare = device.parts.span_us - (device.m_busy_us or 0)
                wanted = max(0, reading.busy_us_total - device.busy_raw)
                parts = spread_time(wanted, gains.lengths, spare)
                # Samples run a little ahead of the clock; what is far ahead of it was never used.
                device.busy_raw += sum(parts) + max(0, wanted - sum(parts) - WAIT_US)
                # A hole from before this tick is that of ticks that said so themselves.
                hole = min(sum(gains.lengths), reading.unmeasured_us_total - device.unmeasured_raw)
                device.unmeasured_raw = reading.unmeasured_us_total
                if live and hole > 0:
                    holes[uuid] = spread(hole, gains.lengths)
                    gains.of(device, "m_measured_us", [-part for part in holes[uuid]])
                if live or any(parts):
                    gains.of(device, "m_busy_us", parts)
                    gains.of(device, "busy_us_total", parts)
            self._energy(device, reading, gains)
        return holes

    def _energy(self, device: DeviceLedger, reading: DeviceReading, gains: Gains) -> None:
        """What the board's counter gained since it last moved, also when that was some ticks ago.

        After an outage it is spread over all of it: what was drawn before the open minute is nobody's, whoever has the card now.
        """
        now = reading.energy_uj_total
        if now is None:
            return
        cursor = self.ledger.cursor_us
        until = cursor + sum(gains.lengths)
        if device.energy_raw is not None:
            # A counter that fell began anew with the driver.
            gained = now - device.energy_raw if now >= device.energy_raw else now
            since = min(cursor, device.energy_at_us) if device.energy_at_us is not None else cursor
            if gained <= _ENERGY_UJ_PER_US * (until - since):
                begun = cursor if device.m_start_us is None else device.m_start_us
                before_us = max(0, begun - since) if until - since > _LATE_US else 0
                before, first, *rest = spread(
                    gained, [before_us, gains.lengths[0] + cursor - max(since, min(begun, cursor)), *gains.lengths[1:]]
                )
                gains.of(device, "m_energy_before_uj", [before])
                gains.of(device, "m_energy_uj", [before + first, *rest])
                gains.of(device, "energy_uj_total", [before + first, *rest])
        if now != device.energy_raw:
            device.energy_raw, device.energy_at_us = now, until

    def jump(self, us: int) -> None:
        """The clock was set forward by so much, in which no time passed."""
        for device in self.ledger.devices.values():
            if device.energy_at_us is not None:
                device.energy_at_us += us

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
            self._gauge_processes(uuid, self.unhooked.get(uuid, ()), length)
        for key, processes in self.shared.items():
            part = ledger.slices[key]
            self._gauge_processes(part.device_uuid, processes, length)
            sizes = [process.memory_bytes for process in processes]
            if None not in sizes:
                size = min(sum(m or 0 for m in sizes), ledger.devices[part.device_uuid].memory_total_bytes)
                part.m_memory_used_bus = (part.m_memory_used_bus or 0) + size * length
                part.m_memory_peak = max(part.m_memory_peak or 0, size)
        for allocation in seen.allocations.values():
            if allocation.meter is not None:
                self._gauge_meter(allocation.id, allocation.meter, length)

    def _gauge_processes(self, uuid: str, processes: Iterable[ProcessReading], length: int) -> None:
        for found in processes:
            process = self.ledger.processes[f"{uuid}|{found.pid}|{found.start_ticks}"]
            process.m_seen = True
            if found.memory_bytes is not None:
                process.m_memory_used_bus = (process.m_memory_used_bus or 0) + found.memory_bytes * length

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
