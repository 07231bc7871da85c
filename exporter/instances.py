"""MIG instances as parts of their card: what is promised, counted and held on one is put on the card, scaled by the instance's fractions.

Capacity, energy and conservation are the card's, so every record is the card's. A promise on an instance is the part of the card that its
placement occupies; device time of an instance is its compute slices' part of the card's. An instance that was once seen stays known, for an
allocation may outlive it by a tick.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.model.allocation import Allocation, AllocationState, SlicePromise
from poolmeter.pages.grant import Grant
from poolmeter.pages.meter import DeviceCounters, MeterReading, SharedTotals
from poolmeter.sharing.mig import of_the_card, placement_ppm
from poolmeter.vendors.reading import DeviceReading

_SLOTS, _COMPUTE = 8, 7  # placement slots and compute slices of a card; the A30 has four of both
_SMALL = 4


@dataclass(frozen=True)
class Instance:
    """An instance's place on its card, and its fractions."""

    card: str
    ppm: int
    compute_slices: int
    compute_of: int

    def of_the_card(self, busy: int) -> int:
        """Device time of the card, of device time of the instance."""
        return of_the_card(busy, self.compute_slices, self.compute_of)


@dataclass(frozen=True)
class InstanceUse:
    """Device time of the card that an instance used so far, by hardware activity; `allocation_id` None: it is nobody's."""

    uuid: str
    busy_us_total: int
    allocation_id: str | None


class Layout:
    """The instances seen so far and who has them."""

    def __init__(self) -> None:
        self._known: dict[str, Instance] = {}
        self._owners: dict[str, str] = {}

    @property
    def known(self) -> bool:
        """Whether any instance was ever seen."""
        return bool(self._known)

    def learn(self, devices: Iterable[DeviceReading]) -> None:
        """Take the layout of a reading; one that does not say where an instance lies tells nothing of it."""
        for device in devices:
            for item in device.hardware.instances or ():
                if item.placement_start is None or not item.placement_size or not item.compute_slices:
                    continue
                slots = _slots(device.memory_total_bytes, item.memory_total_bytes, item.placement_size)
                compute = _COMPUTE if slots == _SLOTS else _SMALL
                if item.placement_start + item.placement_size <= slots and item.compute_slices <= compute:
                    ppm = placement_ppm(item.placement_start, item.placement_size, slots)
                    self._known[item.uuid] = Instance(device.uuid, ppm, item.compute_slices, compute)

    def allocation(self, allocation: Allocation, retired: bool = False) -> Allocation:
        """The allocation with promises on cards in place of those on instances; several instances of a card are one promise.

        It has its instances from now on, unless it is released, suspended or `retired`: then they may be another's by now.
        """
        if not any(promise.device_uuid in self._known for promise in allocation.slices):
            return allocation
        merged: dict[str, SlicePromise] = {}
        for promise in allocation.slices:
            place = self._known.get(promise.device_uuid)
            if place is not None:
                if allocation.state is AllocationState.ACTIVE and not retired:
                    self._owners[promise.device_uuid] = allocation.id
                promise = replace(promise, device_uuid=place.card, promise_ppm=place.ppm)
            before = merged.get(promise.device_uuid)
            if before is not None:
                ppm, memory = before.promise_ppm + promise.promise_ppm, before.memory_bytes + promise.memory_bytes
                promise = replace(before, promise_ppm=ppm, memory_bytes=memory)
            merged[promise.device_uuid] = promise
        return replace(allocation, slices=tuple(merged.values()))

    def reading(self, reading: AllocationReading) -> AllocationReading:
        """The same of what lies in a folder: promise, limits and meter."""
        if not self._known:
            return reading
        return replace(
            reading,
            allocation=self.allocation(reading.allocation, reading.retired) if reading.allocation else None,
            grant=self._grant(reading.grant) if reading.grant else None,
            meter=self._meter(reading.meter) if reading.meter else None,
        )

    def use(self, devices: Iterable[DeviceReading]) -> dict[str, list[InstanceUse]]:
        """What instances used of each card; a card whose instances do not tell is not in it."""
        found: dict[str, list[InstanceUse]] = {}
        for device in devices:
            for item in device.hardware.instances or ():
                place = self._known.get(item.uuid)
                if place is not None and item.busy_us_total is not None:
                    use = InstanceUse(item.uuid, place.of_the_card(item.busy_us_total), self._owners.get(item.uuid))
                    found.setdefault(device.uuid, []).append(use)
        return found

    def _grant(self, grant: Grant) -> Grant:
        return replace(
            grant, devices=tuple(replace(d, uuid=self._known[d.uuid].card) if d.uuid in self._known else d for d in grant.devices)
        )

    def _meter(self, meter: MeterReading) -> MeterReading:
        if not any(uuid in self._known for uuid in meter.device_uuids):
            return meter
        slots = tuple(replace(slot, devices=self._counters(slot.devices)) for slot in meter.slots)
        shared: dict[str, SharedTotals] = {}
        for uuid, totals in meter.shared.items():
            card = self._card(uuid)
            if card in shared:
                known = shared[card]
                totals = replace(
                    known, memory_bytes=known.memory_bytes + totals.memory_bytes, memory_peak=known.memory_peak + totals.memory_peak
                )
            shared[card] = totals
        uuids = tuple(dict.fromkeys(self._card(uuid) for uuid in meter.device_uuids))
        return replace(meter, device_uuids=uuids, slots=slots, retired=self._counters(meter.retired), shared=shared)

    def _card(self, uuid: str) -> str:
        return self._known[uuid].card if uuid in self._known else uuid

    def _counters(self, counters: Mapping[str, DeviceCounters]) -> dict[str, DeviceCounters]:
        found: dict[str, DeviceCounters] = {}
        for uuid, item in counters.items():
            place = self._known.get(uuid)
            if place is not None:
                item = replace(item, busy_ns=place.of_the_card(item.busy_ns))
            card = self._card(uuid)
            found[card] = found[card] + item if card in found else item
        return found


def _slots(card_bytes: int, instance_bytes: int | None, size: int) -> int:
    """How many placement slots a card has, by the memory that a placement gives."""
    if not instance_bytes:
        return _SLOTS
    return _SMALL if card_bytes * size < instance_bytes * (_SMALL + _SLOTS) / 2 else _SLOTS
