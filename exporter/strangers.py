"""Programs without the hook: listed by the card, with no live slot behind them. Whose their device time is, and where the number comes from.

The driver's accounting is believed before sampled utilisation. A slice that has no meter gets the time of the programs that attribution
gives to it, a whole card that of everybody on it; the rest is unaccounted. What was divided among the clients of an MPS server, not measured,
is marked so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from poolmeter.exporter.attribution import OwnAllocations, ProcessKey, Who
from poolmeter.exporter.instances import InstanceUse
from poolmeter.exporter.ledger import DeviceLedger, HolderLedger, Ledger, ProcessLedger, SliceLedger
from poolmeter.exporter.observation import Observation
from poolmeter.exporter.room import Rank, Room
from poolmeter.exporter.spread import Gains
from poolmeter.model.allocation import Allocation, AllocationState, Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import UsedBasis
from poolmeter.vendors.reading import DeviceReading, ProcessReading

HOLDER_US = MINUTE_US  # what is counted of a holder outlives its last process by this, so that the next one goes on
INSTANCES = 512  # more of them than any node has at a time: those that are gone are forgotten
WAIT_US = MINUTE_US // 2  # what a card has no room for waits this long at most


@dataclass
class _Tick:
    """What one tick has to do with everywhere."""

    seen: Observation
    gains: Gains
    rooms: Mapping[str, Room]
    metered: set[str]
    fresh: bool
    holes: Mapping[str, list[int]]
    standing: dict[str, list[Allocation]] = field(default_factory=dict)


class Strangers:
    """Counts programs without the hook into a ledger.

    After `count`: `unhooked` lists those that nobody is billed for, `shared` those of slices without a meter (keys `uuid|allocation`),
    `whole` the devices that one allocation has for itself, without a meter, and `measured` the slices without a meter whose use is known.
    """

    def __init__(self, ledger: Ledger, attribution: OwnAllocations, who: Who, fresh: bool) -> None:
        self.ledger = ledger
        self._attribution = attribution
        self._who = who
        # At the first look ever, what accounting says was used before anybody watched.
        self._fresh = fresh
        self.unhooked: dict[str, list[ProcessReading]] = {}
        self.shared: dict[str, list[ProcessReading]] = {}
        self.whole: set[str] = set()
        self.measured: set[str] = set()

    def count(
        self,
        seen: Observation,
        gains: Gains,
        rooms: Mapping[str, Room],
        metered: set[str],
        holes: Mapping[str, list[int]],
        *,
        live: bool,
    ) -> None:
        """Claim what every program gained. `holes`: time of which a card does not know how much of it was busy, piece by piece."""
        self.unhooked, self.shared, self.whole, self.measured = {}, {}, set(), set()
        tick = _Tick(seen, gains, rooms, metered, self._fresh, holes, self._standing())
        self._fresh = self._fresh and seen.devices is None
        for process in self.ledger.processes.values():
            if not process.hooked and seen.devices is not None:
                process.present = False
                process.ended = True
        for uuid, uses in seen.instances.items():
            for use in uses:
                self._claim_instance(self.ledger.devices[uuid], use, tick)
        if len(self.ledger.instances) > INSTANCES:
            there = {use.uuid for uses in seen.instances.values() for use in uses}
            self.ledger.instances = {uuid: counted for uuid, counted in self.ledger.instances.items() if uuid in there}
        for uuid, reading in (seen.devices or {}).items():
            device = self.ledger.devices[uuid]
            if not reading.up or not reading.processes_known:
                continue
            self.unhooked[uuid] = []
            if (alone := self._alone(uuid, tick)) is not None:
                self.whole.add(uuid)
                if reading.busy_us_total is not None:
                    self._whole(device, alone, reading, tick)
            if live:
                gains.of(device, "m_unaccounted_us", [0] * len(gains.lengths))
                gains.of(device, "unaccounted_us_total", [0] * len(gains.lengths))
            for found in reading.processes:
                if found.start_ticks is None:
                    continue
                owner = self._attribution.owner_of(ProcessKey(found.pid, found.start_ticks))
                if owner is not None and owner.hooked:
                    continue
                stranger = self._process(device, found, tick)
                if stranger is not None:
                    self._claim(device, stranger, found, tick)
        self._settle_ended()
        cursor = self.ledger.cursor_us
        self.ledger.holders = {key: held for key, held in self.ledger.holders.items() if cursor - held.seen_us <= HOLDER_US}

    # ---- whose -------------------------------------------------------------------------------------------------------------------

    def _standing(self) -> dict[str, list[Allocation]]:
        found: dict[str, list[Allocation]] = {}
        for allocation in self.ledger.timeline.standing.values():
            if allocation.state is AllocationState.ACTIVE:
                for promise in allocation.slices:
                    found.setdefault(promise.device_uuid, []).append(allocation)
        return found

    def _alone(self, uuid: str, tick: _Tick) -> Allocation | None:
        """The allocation that has the whole device, without a meter of its own."""
        standing = tick.standing.get(uuid, [])
        if len(standing) == 1 and standing[0].mode is Mode.WHOLE and f"{uuid}|{standing[0].id}" not in tick.metered:
            return standing[0]
        return None

    def _whole(self, device: DeviceLedger, allocation: Allocation, reading: DeviceReading, tick: _Tick) -> None:
        key = f"{device.uuid}|{allocation.id}"
        part = self.ledger.slices.setdefault(key, SliceLedger(device.uuid, allocation.id))
        self.measured.add(key)
        part.whole_us_total = part.whole_us_total or 0
        if device.uuid in tick.holes:
            tick.gains.of(part, "m_unmeasured_us", tick.holes[device.uuid])
        if reading.utilization_ppm:
            part.utilised_us = self.ledger.cursor_us + sum(tick.gains.lengths)

    def _slice_of(self, device: DeviceLedger, process: ProcessLedger, tick: _Tick) -> SliceLedger | None:
        """The slice that a program's time belongs to; None: it is unaccounted. A slice with a meter is billed by its meter alone."""
        standing = tick.standing.get(device.uuid, [])
        allocation = next((item for item in standing if item.id == process.allocation_id), None)
        if allocation is None and process.allocation_id is None:
            allocation = self._alone(device.uuid, tick)
        if allocation is None or f"{device.uuid}|{allocation.id}" in tick.metered:
            return None
        return self.ledger.slices.setdefault(f"{device.uuid}|{allocation.id}", SliceLedger(device.uuid, allocation.id))

    def _holder(self, process: ProcessLedger) -> tuple[object, str]:
        """Whose a process without the hook is: tenant and allocation go with it, its device time to the holder once that is settled.

        Returns where that time is counted: with the holder; with the device, where there is none; with the process until that is known.
        """
        who = self._who.of(ProcessKey(process.pid, process.start_ticks))
        if who is None:
            return process, "waiting_us"
        process.tenant, process.allocation_id = who.tenant, who.merged.allocation_id
        if not who.settled:
            return process, "waiting_us"
        return self._settle(process, who.holder)

    def _settle(self, process: ProcessLedger, name: str | None) -> tuple[object, str]:
        """Give what waited to the holder of that name, to nobody without one."""
        waited, process.waiting_us = process.waiting_us, 0
        if name is None:
            device = self.ledger.devices[process.device_uuid]
            device.unattributed_us_total += waited
            return device, "unattributed_us_total"
        holder = self.ledger.holders.setdefault(f"{process.device_uuid}|{name}", HolderLedger())
        holder.seen_us = self.ledger.cursor_us
        holder.unaccounted_us_total += waited
        return holder, "unaccounted_us_total"

    def _settle_ended(self) -> None:
        """What a process used that has left the card before it was known whose it is: its holder's as soon as that is known, else nobody's."""
        for process in self.ledger.processes.values():
            if process.present or not process.waiting_us or process.device_uuid not in self.ledger.devices:
                continue
            who = self._who.of(ProcessKey(process.pid, process.start_ticks))
            if who is None or who.settled:
                self._settle(process, who.holder if who is not None else None)

    # ---- how much ----------------------------------------------------------------------------------------------------------------

    def _process(self, device: DeviceLedger, found: ProcessReading, tick: _Tick) -> ProcessLedger | None:
        assert found.start_ticks is not None
        key = f"{device.uuid}|{found.pid}|{found.start_ticks}"
        process = self.ledger.processes.get(key)
        if process is None:
            if not found.listed and not found.busy_us_total and not found.accounted_us_total:
                return None
            process = ProcessLedger(device.uuid, found.pid, found.start_ticks, found.command, False, tick.seen.origin)
            # One that is there at the first look ever may have worked before; any other began while somebody watched.
            process.accounted_base_us = None if tick.fresh else 0
            self.ledger.processes[key] = process
        if process.origin != tick.seen.origin:
            process.origin, process.base_busy_us = tick.seen.origin, 0
        process.present = process.m_seen = True
        process.ended = not found.listed
        if found.listed and found.memory_bytes is not None:
            process.m_memory_peak = max(process.m_memory_peak or 0, found.memory_bytes)
        return process

    def _claim(self, device: DeviceLedger, process: ProcessLedger, found: ProcessReading, tick: _Tick) -> None:
        waits, counter = self._holder(process)
        part = self._slice_of(device, process, tick)
        if found.listed:
            where = self.unhooked[device.uuid] if part is None else self.shared.setdefault(f"{device.uuid}|{part.allocation_id}", [])
            where.append(found)
        gained = _gained(process, found)
        if gained is None:
            return
        basis, wanted = gained
        process.basis = join(process.basis, basis, process.counted_us, wanted)
        process.m_basis = join(process.m_basis, basis, process.m_used_us, wanted)
        if part is not None:
            if (
                basis is not UsedBasis.ACCOUNTING
                and device.uuid in tick.holes
                and f"{device.uuid}|{part.allocation_id}" not in self.measured
            ):
                tick.gains.of(part, "m_unmeasured_us", tick.holes[device.uuid])
            self._mark(part, basis, wanted)

        def take(parts: list[int]) -> None:
            counted = sum(parts)
            given_up = max(0, wanted - counted - WAIT_US)
            process.counted_us += counted
            if basis is UsedBasis.ACCOUNTING:
                process.accounted_base_us = (process.accounted_base_us or 0) + given_up
                process.base_busy_us = found.busy_us_total or 0  # should accounting be switched off, sampling goes on from here
            else:
                process.base_busy_us += counted + given_up
            tick.gains.of(process, "m_used_us", parts)
            self._give(device, part, parts, tick.gains)
            if part is None:
                tick.gains.of(waits, counter, parts)
            elif any(parts):
                part.utilised_us = self.ledger.cursor_us + sum(tick.gains.lengths)

        tick.rooms[device.uuid].claim(Rank.ACCOUNTING if basis is UsedBasis.ACCOUNTING else Rank.SAMPLED, wanted, take)

    def _claim_instance(self, device: DeviceLedger, use: InstanceUse, tick: _Tick) -> None:
        """Hardware activity of a MIG instance: its slice's where it has no meter, unaccounted where it is nobody's."""
        counted = self.ledger.instances.setdefault(use.uuid, use.busy_us_total)
        if use.busy_us_total < counted:
            counted = self.ledger.instances[use.uuid] = 0  # an instance made anew under its old name begins at nothing
        wanted = use.busy_us_total - counted
        key = f"{device.uuid}|{use.allocation_id}"
        if key in tick.metered:
            self.ledger.instances[use.uuid] = use.busy_us_total
            return
        standing = any(item.id == use.allocation_id for item in tick.standing.get(device.uuid, []))
        part = self.ledger.slices.setdefault(key, SliceLedger(device.uuid, use.allocation_id or "")) if standing else None
        if part is not None:
            self._mark(part, UsedBasis.SAMPLED, wanted)

        def take(parts: list[int]) -> None:
            self.ledger.instances[use.uuid] += sum(parts) + max(0, wanted - sum(parts) - WAIT_US)
            self._give(device, part, parts, tick.gains)
            if part is not None and any(parts):
                part.gpm_us = self.ledger.cursor_us + sum(tick.gains.lengths)

        tick.rooms[device.uuid].claim(Rank.SAMPLED, wanted, take)

    def _mark(self, part: SliceLedger, basis: UsedBasis, wanted: int) -> None:
        part.shared_basis = join(part.shared_basis, basis, part.shared_us_total, wanted)
        part.m_shared_basis = join(part.m_shared_basis, basis, part.m_shared_us, wanted)
        self.measured.add(f"{part.device_uuid}|{part.allocation_id}")
        part.shared_us_total = part.shared_us_total or 0
        part.m_shared_us = part.m_shared_us or 0

    def _give(self, device: DeviceLedger, part: SliceLedger | None, parts: list[int], gains: Gains) -> None:
        if part is None:
            gains.of(device, "m_unaccounted_us", parts)
            gains.of(device, "unaccounted_us_total", parts)
            return
        gains.of(part, "m_shared_us", parts)
        gains.of(part, "shared_us_total", parts)
        gains.of(device, "m_shared_us", parts)


def join(known: str | None, basis: UsedBasis, before: int | None, gained: int) -> str:
    """The basis of a sum that was `before` by `known` and gains `gained` by another: where either is nothing, the other's."""
    if known is None or not before:
        return basis.value
    return known if not gained or known == basis.value else UsedBasis.MIXED.value


def _gained(process: ProcessLedger, found: ProcessReading) -> tuple[UsedBasis, int] | None:
    """By which basis, and how much since the last look; None when no source knows."""
    said = found.accounted_us_total
    if said is not None and process.accounted_base_us is None:
        process.accounted_base_us = said - process.counted_us
    if said is not None and process.accounted_base_us is not None:
        return UsedBasis.ACCOUNTING, max(0, said - process.accounted_base_us - process.counted_us)
    if found.busy_us_total is None:
        return None
    basis = UsedBasis.MIXED if found.divided else UsedBasis.SAMPLED
    return basis, max(0, found.busy_us_total - process.base_busy_us)
