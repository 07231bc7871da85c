"""What the hook counted since the last tick: device time within the card's room, launches, refusals, memory peaks, and each process's part."""

from collections.abc import Mapping

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.attribution import OwnAllocations, ProcessKey
from poolmeter.exporter.baseline import rebase, reset
from poolmeter.exporter.ledger import DeviceLedger, Ledger, ProcessLedger, SliceLedger
from poolmeter.exporter.observation import Observation, Outcome
from poolmeter.exporter.room import Rank, Room, within
from poolmeter.exporter.spread import Gains, spread
from poolmeter.model.allocation import Allocation, Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.pages.meter import DeviceCounters, MeterReading, SlotReading

BACKLOG_US = MINUTE_US  # device time ahead of the clock by more than this was never used
CROWD_US = BACKLOG_US // 2  # what a card that others use as well has no room for waits this long at most
_SANE = 1 << 62
_Fault = tuple[str, str | None, str]


class HookedTime:
    """Counts meters into a ledger."""

    def __init__(self, ledger: Ledger, attribution: OwnAllocations) -> None:
        self.ledger = ledger
        self._attribution = attribution

    def slice(self, uuid: str, allocation_id: str) -> SliceLedger:
        """The slice, made when there is none yet."""
        return self.ledger.slices.setdefault(f"{uuid}|{allocation_id}", SliceLedger(uuid, allocation_id))

    def baseline(self, seen: Observation) -> None:
        """Without history, what meters already say was used before anybody watched."""
        for reading in seen.allocations.values():
            for uuid in reading.meter.device_uuids if reading.meter else ():
                assert reading.meter is not None
                rebase(self.slice(uuid, reading.id), reading.meter, uuid)
                for slot in reading.meter.slots:
                    host = self._attribution.host_of(reading.id, slot)
                    if uuid in slot.devices and host is not None:
                        process = self._process(uuid, reading, reading.meter, slot, host)
                        process.base_busy_us = process.counted_us = slot.devices[uuid].busy_ns // 1000
                        process.base_launches = slot.devices[uuid].launches

    def count(self, seen: Observation, gains: Gains, rooms: Mapping[str, Room], outcome: Outcome) -> set[str]:
        """Claim the gains of every meter; the keys of the slices whose meter was read. The rooms are settled by the caller."""
        metered: set[str] = set()
        marked = set(self.ledger.tampered)
        for reading in seen.allocations.values():
            if reading.allocation is not None:
                self.ledger.known[reading.id] = reading.allocation
            self._limits(reading)
            if reading.meter is None:
                if reading.tampered and reading.id not in marked:
                    marked.add(reading.id)
                    outcome.tampered.append((reading.id, None, reading.tampered))
                for uuid, device in self.ledger.devices.items():
                    if reading.tampered and f"{uuid}|{reading.id}" in self.ledger.slices:
                        device.m_hooked_known = False
                continue
            faults: list[_Fault] = []
            promised = {promise.device_uuid for promise in reading.allocation.slices} if reading.allocation else None
            for uuid in reading.meter.device_uuids:
                if promised is not None and uuid not in promised:
                    faults.append((reading.id, uuid, f"meter of {reading.id} lists {uuid:.80}, expected only devices of the allocation"))
                elif uuid in self.ledger.devices:
                    metered.add(f"{uuid}|{reading.id}")
                    self._slice_gain(uuid, reading, reading.meter, gains, rooms[uuid], faults)
            if faults and reading.id not in marked:
                marked.add(reading.id)
                outcome.tampered.extend(faults[:1])
            elif not faults:
                marked.discard(reading.id)
        self.ledger.tampered = sorted(marked & seen.allocations.keys())
        return metered

    def _limits(self, reading: AllocationReading) -> None:
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

    def _slice_gain(
        self, uuid: str, reading: AllocationReading, meter: MeterReading, gains: Gains, room: Room, faults: list[_Fault]
    ) -> None:
        part, device, total = self.slice(uuid, reading.id), self.ledger.devices[uuid], meter.total(uuid)
        if part.page != meter.created_ns:
            # Another page under the same name: its counters began at zero with it.
            for process in [key for key, p in self.ledger.processes.items() if p.hooked and p.allocation_id == reading.id]:
                del self.ledger.processes[process]
            reset(part, meter.created_ns)
        self._claim(uuid, reading, meter, gains, room, faults, part, device, total.busy_ns // 1000)
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
            if gained:
                setattr(part, f"base_{name}", now)
                gains.of(part, f"m_{name}", spread(gained, gains.lengths))
        peak = min(meter.shared[uuid].memory_peak, device.memory_total_bytes)
        if peak > part.base_memory_peak:
            part.m_memory_peak = max(part.m_memory_peak or 0, peak)
            part.base_memory_peak = peak
        if total.last_activity_ns is not None:
            part.last_activity_us = min(total.last_activity_ns // 1000, self.ledger.cursor_us + sum(gains.lengths))

    def _claim(
        self,
        uuid: str,
        reading: AllocationReading,
        meter: MeterReading,
        gains: Gains,
        room: Room,
        faults: list[_Fault],
        part: SliceLedger,
        device: DeviceLedger,
        busy: int,
    ) -> None:
        """Ask for the device time that the meter gained. More than the time that passed is carried on (a long kernel is charged at its
        end), up to a bound beyond which the page was written by somebody else. What the card has no room for, because others were
        counted in the same time, is carried on for a while as well; under MPS, where kernels do run at the same time, it is not:
        there the time is divided by what each was promised."""
        delta = busy - part.base_busy_us
        if delta < 0 or busy >= _SANE:
            faults.append((reading.id, uuid, f"meter of {reading.id} says {busy} us on {uuid}, expected at least {part.base_busy_us}"))
            delta = 0
        wanted = min(delta, sum(gains.lengths) + max(0, device.parts.span_us - part.m_used_us))
        ahead = delta - wanted
        if ahead > BACKLOG_US:
            faults.append((reading.id, uuid, f"meter of {reading.id} gained {delta} us on {uuid}, expected at most {sum(gains.lengths)}"))
        concurrent = reading.allocation is not None and reading.allocation.mode is Mode.MPS

        def take(parts: list[int]) -> None:
            counted = sum(parts)
            if ahead > BACKLOG_US:
                given_up = delta - counted
            elif concurrent:
                given_up = wanted - counted
            else:
                given_up = min(wanted - counted, max(0, delta - counted - CROWD_US))
            part.base_busy_us += counted + given_up
            part.given_up_us += given_up
            part.backlog_us = delta - counted - given_up
            gains.of(part, "m_used_us", parts)
            gains.of(device, "m_hooked_us", parts)
            gains.of(device, "hooked_us_total", parts)
            self._slot_gains(uuid, reading, meter, part, gains, parts)

        room.claim(Rank.HOOK, wanted, take, _weight(reading.allocation, uuid) if concurrent else 1)

    def _process(self, uuid: str, reading: AllocationReading, meter: MeterReading, slot: SlotReading, host: ProcessKey) -> ProcessLedger:
        tenant = reading.allocation.labels.tenant if reading.allocation else None
        process = ProcessLedger(
            uuid, host.pid, host.start_ticks, slot.comm or None, True, f"{reading.id}:{meter.created_ns}", reading.id, tenant
        )
        return self.ledger.processes.setdefault(f"{uuid}|{reading.id}|{slot.index}|{slot.generation}", process)

    def _slot_gains(
        self, uuid: str, reading: AllocationReading, meter: MeterReading, part: SliceLedger, gains: Gains, pieces: list[int]
    ) -> None:
        """Each process's part of what the slice was granted."""
        prefix = f"{uuid}|{reading.id}|"
        gained: dict[str, DeviceCounters] = {}
        for slot in meter.slots:
            counters = slot.devices.get(uuid)
            host = self._attribution.host_of(reading.id, slot)
            if counters is None or host is None:
                continue
            process = self._process(uuid, reading, meter, slot, host)
            process.present, process.ended = True, slot.locked is False
            process.m_seen = True
            gained[f"{prefix}{slot.index}|{slot.generation}"] = counters
        gone = [key for key, p in self.ledger.processes.items() if key.startswith(prefix) and p.present and key not in gained]
        retired = meter.retired[uuid]
        for key in gone:
            process = self.ledger.processes[key]
            process.present, process.ended, process.m_seen = False, True, True
            if len(gone) == 1:
                # Alone to leave, so what `retired` gained is all it ever counted; several together are only known as a sum.
                gained[key] = DeviceCounters(
                    busy_ns=retired.busy_ns - part.base_retired_busy_us * 1000, launches=retired.launches - part.base_retired_launches
                )
        part.base_retired_busy_us, part.base_retired_launches = retired.busy_ns // 1000, retired.launches
        processes = [(self.ledger.processes[key], counters) for key, counters in gained.items()]
        wants = [min(_SANE, max(0, counters.busy_ns // 1000 - process.base_busy_us)) for process, counters in processes]
        for (process, counters), want, parts in zip(processes, wants, within(pieces, wants), strict=True):
            # With nothing left of the slice, what is left of a process is what the card had no room for.
            process.base_busy_us += sum(parts) if part.backlog_us else want
            process.counted_us += sum(parts)
            gains.of(process, "m_used_us", parts)
            launches = min(_SANE, max(0, counters.launches - process.base_launches))
            process.base_launches += launches
            gains.of(process, "m_launches", spread(launches, gains.lengths))


def _weight(allocation: Allocation | None, uuid: str) -> int:
    """The active-thread share of a client: its limit, else its promise."""
    promise = next((item for item in allocation.slices if item.device_uuid == uuid), None) if allocation else None
    return (promise.compute_limit_ppm or promise.promise_ppm) if promise else 1
