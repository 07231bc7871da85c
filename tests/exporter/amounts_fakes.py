"""A pool without files: an integrator fed with readings that a test makes up, tick by tick."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from exporter_fakes import CARD, GIB, SECOND, T0, device

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.attribution import OwnAllocations, Owner, ProcessKey, Who
from poolmeter.exporter.attribution.process import Facts
from poolmeter.exporter.attribution.source import Quiet
from poolmeter.exporter.instances import InstanceUse
from poolmeter.exporter.integrate import Integrator, Observation, Outcome
from poolmeter.exporter.ledger import Ledger, ledger_from
from poolmeter.exporter.snapshots import take_snapshot
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode, SlicePromise
from poolmeter.model.snapshot import Claim, Snapshot
from poolmeter.model.usage import UsageRecord
from poolmeter.pages.meter import MEMORY_KINDS, DeviceCounters, MeterReading, SharedTotals, SlotReading
from poolmeter.vendors.reading import DeviceReading, ProcessReading


class Named(Quiet):
    """A source that knows whose some processes are."""

    name = "named"

    def __init__(self, owners: dict[int, str]) -> None:
        self.owners = owners

    def version(self) -> object:
        return None

    def claim(self, facts: Facts) -> Claim | None:
        owner = self.owners.get(facts.key.pid)
        return None if owner is None else Claim(source=self.name, tenant=f"tenant-{owner}", allocation_id=owner)


class Slots(OwnAllocations):
    """Slots whose pid is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked: dict[int, str] = {}

    def host_of(self, allocation_id: str, slot: SlotReading) -> ProcessKey | None:
        return ProcessKey(slot.pid, slot.start_time_ticks)

    def owner_of(self, process: ProcessKey) -> Owner | None:
        owner = self.hooked.get(process.pid)
        return None if owner is None else Owner(owner, f"tenant-{owner}", hooked=True)


@dataclass
class Hooked:
    """A process under the hook, since it began."""

    pid: int
    busy_us: int = 0
    memory: int = 0


@dataclass
class Pool:
    """One card by default. `step` shows the integrator what stands, and lets time pass."""

    uuids: tuple[str, ...] = (CARD,)
    readings: dict[str, DeviceReading] = field(default_factory=dict)
    allocations: dict[str, Allocation] = field(default_factory=dict)
    slots: dict[str, dict[int, Hooked]] = field(default_factory=dict)  # by allocation; absent: it has no meter
    retired: dict[str, int] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    records: list[UsageRecord] = field(default_factory=list)
    tampered: list[tuple[str, str | None, str]] = field(default_factory=list)
    answers: bool = True
    seen_instances: Callable[[Iterable[DeviceReading]], dict[str, list[InstanceUse]]] | None = None

    def __post_init__(self) -> None:
        self.now = T0
        self.readings = {uuid: device(uuid, index) for index, uuid in enumerate(self.uuids)}
        self.attribution = Slots()
        self.who = Who([Named(self.owners)], Path("/nonexistent"))
        self.ledger = Ledger(T0, 0, "boot")
        self.start(fresh=True)

    def start(self, fresh: bool = False) -> None:
        """An exporter on the ledger, as after a restart."""
        self.integrator = Integrator(self.ledger, self.attribution, self.who, 5 * SECOND, fresh)
        self.seen = Observation(None, "", {})
        self.step(0)

    def restart(self) -> None:
        """Through the text of the ledger, as the spool keeps it."""
        import json

        self.ledger = ledger_from(json.loads(self.ledger.to_json()))
        self.start()

    def allocate(self, name: str, mode: Mode = Mode.HOOK, ppm: int = 100_000, meter: bool = True, **values: object) -> None:
        """A promise that stands from now on."""
        slices = tuple(SlicePromise(uuid, ppm, GIB) for uuid in self.uuids[:1])
        base: dict[str, object] = {"labels": Labels(f"tenant-{name}"), "mode": mode, "slices": slices, "state": AllocationState.ACTIVE}
        made = Allocation(id=name, generation=2, created_us=self.now, changed_us=self.now, **{**base, **values})  # type: ignore[arg-type]
        self.allocations[name] = made
        self.ledger.timeline.standing[name] = made
        if meter:
            self.slots[name] = {}

    def release(self, name: str) -> None:
        """No longer there."""
        self.allocations.pop(name)
        self.slots.pop(name, None)
        self.ledger.timeline.standing.pop(name, None)

    def change(self, **values: object) -> None:
        """Set values of the first card."""
        import dataclasses

        uuid = self.uuids[0]
        self.readings[uuid] = dataclasses.replace(self.readings[uuid], **values)  # type: ignore[arg-type]

    def processes(self, *found: ProcessReading) -> None:
        """What the first card lists."""
        self.change(processes=found)

    def observe(self) -> Observation:
        """What a tick sees now."""
        self.attribution.hooked = {slot.pid: name for name, slots in self.slots.items() for slot in slots.values()}
        readings = {
            name: AllocationReading(name, Path("/nonexistent"), False, allocation, None, self._meter(name))
            for name, allocation in self.allocations.items()
        }
        instances = self.seen_instances(self.readings.values()) if self.seen_instances else {}
        return Observation(dict(self.readings) if self.answers else None, "origin", readings, instances=instances)

    def _meter(self, name: str) -> MeterReading | None:
        if name not in self.slots:
            return None
        uuid = self.uuids[0]
        slots = tuple(
            SlotReading(
                index, 1, "live", slot.pid, 0, slot.pid, 0, "cuda", 0, True,
                {uuid: DeviceCounters(busy_ns=slot.busy_us * 1000, launches=1, memory={**dict.fromkeys(MEMORY_KINDS, 0), "device": slot.memory})},
            )
            for index, slot in sorted(self.slots[name].items())
        )  # fmt: skip
        held = sum(slot.memory for slot in self.slots[name].values())
        shared = {uuid: SharedTotals(held, held, {})}
        return MeterReading((uuid,), slots, {uuid: DeviceCounters(busy_ns=self.retired.get(name, 0) * 1000)}, shared, 1, 0)

    def step(self, us: int = SECOND) -> Outcome:
        """A tick after `us`."""
        self.now += us
        self.seen = self.observe()
        hooked = [ProcessKey(slot.pid, slot.pid) for slots in self.slots.values() for slot in slots.values()]
        self.who.refresh(self.seen.devices, hooked, self.now)
        outcome = self.integrator.advance(self.seen, self.now)
        self.records += outcome.records
        self.tampered += outcome.tampered
        return outcome

    def snapshot(self) -> Snapshot:
        """What would be published."""
        integrator = self.integrator
        return take_snapshot(
            self.ledger, self.seen, self.attribution, self.who, integrator.unhooked, integrator.shared, [],
            node="n", pool="p", epoch="e", sequence=0, simulated=True,
        )  # fmt: skip
