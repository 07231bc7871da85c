"""Fakes of what an exporter looks at: a sampler that says what it is told, and pages written as the hook writes them."""

import ctypes
import dataclasses
import fcntl
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

from poolmeter.clock import ManualClock
from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.attribution import Who
from poolmeter.exporter.spool import Spool
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode, SlicePromise
from poolmeter.model.decision import JournalEvent
from poolmeter.model.hardware import Activity, Hardware, MigInstance, Vgpu, XidCount
from poolmeter.model.plain import canonical_json
from poolmeter.model.units import GIB
from poolmeter.model.usage import DeviceRecord, UsageRecord
from poolmeter.pages import layout
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter
from poolmeter.places import NodeData, NodeRun
from poolmeter.vendors.proc import pid_namespace_of, start_ticks_of
from poolmeter.vendors.reading import DeviceReading, ProcessReading, VendorReading

T0 = 1_764_500_000_000_000 - 1_764_500_000_000_000 % 60_000_000  # a whole minute
SECOND = 1_000_000
CARD = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "GPU-00000000-0000-0000-0000-000000000002"


class FakeSampler:
    """Devices whose values the test sets; `reading` None: it does not answer."""

    name = "nvidia"

    def __init__(self, clock: ManualClock, *uuids: str) -> None:
        self.clock = clock
        self.origin = "origin-1"
        self.devices = {uuid: device(uuid, index) for index, uuid in enumerate(uuids)}
        self.trouble: str | None = None
        self.answers = True
        self.stuck = False
        self.closed = 0
        self.polls = 0

    def change(self, uuid: str, **values: object) -> None:
        """Set values of a device."""
        self.devices[uuid] = dataclasses.replace(self.devices[uuid], **values)  # type: ignore[arg-type]

    def poll(self, budget_s: float) -> VendorReading | None:
        self.polls += 1
        if not self.answers:
            return None
        return VendorReading(
            vendor="nvidia", origin=self.origin, at_us=self.clock.wall_us(), duration_us=10, devices=tuple(self.devices.values())
        )

    def close(self) -> None:
        self.closed += 1


def device(uuid: str, index: int = 0, **values: object) -> DeviceReading:
    """A card in good health that nobody uses."""
    base: dict[str, object] = {
        "model": "Simulated H200",
        "vendor": "nvidia",
        "up": True,
        "memory_total_bytes": 100 * GIB,
        "memory_used_bytes": GIB,
        "memory_reserved_bytes": GIB // 2,
        "utilization_ppm": 0,
        "busy_us_total": 0,
        "energy_uj_total": 0,
        "power_mw": 80_000,
        "temperature_celsius": 40,
        "sm_clock_hz": 1_900_000_000,
        "memory_clock_hz": 3_000_000_000,
        "mig": False,
        "pci_bus_id": f"00000000:{index:02X}:00.0",
        "minor": index,
        "driver_version": "580.1",
        "processes_known": True,
    }
    return DeviceReading(uuid=uuid, index=index, **{**base, **values})  # type: ignore[arg-type]


def process(pid: int, start: int, busy_us: int | None = None, memory: int | None = None, listed: bool = True) -> ProcessReading:
    """A process as NVML lists it."""
    return ProcessReading(pid=pid, start_ticks=start, command="cuda", memory_bytes=memory, busy_us_total=busy_us, listed=listed)


class Meter:
    """A meter page written as the hook does; slots belong to this process and its lock is held while `alive`."""

    def __init__(self, path: Path, *uuids: str, allocation_id: str = "") -> None:
        self.path = path
        create_meter(path, list(uuids), slots=16, allocation_id=allocation_id)
        self._uuids = uuids
        self._fd = os.open(path, os.O_RDWR)
        self._slot_size = ctypes.sizeof(layout.Slot) + len(uuids) * ctypes.sizeof(layout.Counters)
        self._slots = ctypes.sizeof(layout.Meter) + len(uuids) * ctypes.sizeof(layout.MeterDevice)
        self._locks: dict[int, int] = {}

    def moved(self, path: Path) -> None:
        """The folder was moved; the file is the same."""
        self.path = path

    def attach(self, index: int = 0, pid: int | None = None, start: int | None = None, generation: int = 1) -> None:
        """Take a slot and its lock."""
        pid = os.getpid() if pid is None else pid
        slot = layout.Slot(
            state=layout.SLOT_LIVE,
            pid=pid,
            generation=generation,
            pid_namespace=pid_namespace_of("self") or 0,
            start_time_ticks=(start_ticks_of(pid) or 0) if start is None else start,
            comm=b"tenant",
        )
        os.pwrite(self._fd, bytes(slot), self._slots + index * self._slot_size)
        used = max(index + 1, int.from_bytes(os.pread(self._fd, 4, layout.Meter.slots_used.offset), "little"))
        os.pwrite(self._fd, used.to_bytes(4, "little"), layout.Meter.slots_used.offset)
        lock = os.open(self.path, os.O_RDWR)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_SLOTS + index, 1, 0))
        self._locks[index] = lock

    def count(self, uuid: str, index: int = 0, memory: int | None = None, **values: int) -> None:
        """Set counters of a slot on a device."""
        place = self._slots + index * self._slot_size + ctypes.sizeof(layout.Slot)
        place += self._uuids.index(uuid) * ctypes.sizeof(layout.Counters)
        counters = layout.Counters.from_buffer_copy(os.pread(self._fd, ctypes.sizeof(layout.Counters), place))
        for name, value in values.items():
            setattr(counters, name, value)
        if memory is not None:
            counters.memory[layout.MEMORY_DEVICE] = memory
            line = ctypes.sizeof(layout.Meter) + self._uuids.index(uuid) * ctypes.sizeof(layout.MeterDevice)
            word = line + layout.MeterDevice.memory_word.offset
            os.pwrite(self._fd, (memory // layout.MEMORY_UNIT).to_bytes(8, "little"), word)
            peak = int.from_bytes(os.pread(self._fd, 8, line + layout.MeterDevice.memory_peak.offset), "little")
            os.pwrite(self._fd, max(peak, memory).to_bytes(8, "little"), line + layout.MeterDevice.memory_peak.offset)
        os.pwrite(self._fd, bytes(counters), place)

    def die(self, index: int = 0) -> None:
        """Lose the lock, as a kill -9 does; the counters stay."""
        os.close(self._locks.pop(index))

    def fold(self, index: int = 0) -> None:
        """What a survivor does with a dead slot: add its counters to `retired`, free the slot."""
        word = int.from_bytes(os.pread(self._fd, 8, layout.Meter.fold.offset), "little")
        copy = word & 1
        slot = layout.Slot.from_buffer_copy(os.pread(self._fd, ctypes.sizeof(layout.Slot), self._slots + index * self._slot_size))
        count = int.from_bytes(os.pread(self._fd, 8, layout.Meter.left_count.offset), "little")
        left = layout.Left(pid_namespace=slot.pid_namespace, start_time_ticks=slot.start_time_ticks, pid=slot.pid)
        os.pwrite(self._fd, bytes(left), layout.Meter.left.offset + count % layout.LEFT * ctypes.sizeof(layout.Left))
        os.pwrite(self._fd, (count + 1).to_bytes(8, "little"), layout.Meter.left_count.offset)
        for number in range(len(self._uuids)):
            size = ctypes.sizeof(layout.Counters)
            line = ctypes.sizeof(layout.Meter) + number * ctypes.sizeof(layout.MeterDevice) + layout.MeterDevice.retired.offset
            place = self._slots + index * self._slot_size + ctypes.sizeof(layout.Slot) + number * size
            count = struct.Struct(f"<{size // 8}Q")
            old = count.unpack(os.pread(self._fd, size, line + copy * size))
            mine = count.unpack(os.pread(self._fd, size, place))
            os.pwrite(self._fd, count.pack(*(a + b for a, b in zip(old, mine, strict=True))), line + (1 - copy) * size)
        os.pwrite(self._fd, (((word >> 17) + 1) << 17 | (index + 1) << 1 | (1 - copy)).to_bytes(8, "little"), layout.Meter.fold.offset)
        os.pwrite(self._fd, bytes(self._slot_size), self._slots + index * self._slot_size)
        os.pwrite(self._fd, (((word >> 17) + 2) << 17 | (1 - copy)).to_bytes(8, "little"), layout.Meter.fold.offset)

    def close(self) -> None:
        for lock in self._locks.values():
            os.close(lock)
        self._locks = {}
        os.close(self._fd)


class Node:
    """A node's folders, clock, fake sampler and enforcer, and an agent that can be killed and started again."""

    def __init__(self, root: Path, *uuids: str, consumers: tuple[str, ...] = ("collector",), who: Callable[[], Who] | None = None) -> None:
        self.who = who
        self.run, self.data = NodeRun(root / "run"), NodeData(root / "data")
        for folder in (self.run.allocations, self.run.retired, self.data.root):
            folder.mkdir(parents=True)
        self.clock = ManualClock(T0, 1_000_000)
        self.sampler = FakeSampler(self.clock, *(uuids or (CARD,)))
        self.consumers = consumers
        self.sequence = 0
        self.meters: dict[str, Meter] = {}
        self.agent: Agent
        self.start()

    def start(self) -> Agent:
        """Start an exporter; its first turn is done."""
        self.spool = Spool(self.data.spool, "node-a", self.consumers)
        self.agent = Agent(
            Settings(node="node-a", pool="lab"),
            self.run,
            self.data,
            self.spool,
            self.sampler,
            self.clock,
            boot=lambda: "boot-1",
            who=self.who() if self.who else None,
        )
        self.agent.turn(0)
        return self.agent

    def kill(self) -> None:
        """End the exporter without a word."""
        self.spool.close()

    def tick(self, us: int = SECOND, turns: int = 1) -> None:
        """Let time pass and take a turn, `turns` times."""
        for _ in range(turns):
            self.clock.advance(us)
            self.agent.turn(0)

    def records(self) -> tuple[UsageRecord, ...]:
        """Everything in the spool."""
        return self.spool.read(None, 0).records

    def journal(self, kind: str, allocation: Allocation | None, at_us: int | None = None, **values: object) -> None:
        """Append an event."""
        self.sequence += 1
        event = JournalEvent(
            sequence=self.sequence,
            at_us=self.clock.wall if at_us is None else at_us,
            kind=kind,
            allocation_id=allocation.id if allocation else None,
            allocation=json.loads(canonical_json(allocation)) if allocation else None,
            tenant=allocation.labels.tenant if allocation else None,
            **values,  # type: ignore[arg-type]
        )
        with self.data.journal.open("a") as file:
            file.write(canonical_json(event) + "\n")

    def create(
        self, name: str, ppm: int = 500_000, memory: int = 10 * GIB, uuids: tuple[str, ...] = (CARD,), meter: bool = True, **values: object
    ) -> Allocation:
        """Allocate as the enforcer does: journal, then a folder."""
        allocation = Allocation(
            id=name,
            labels=Labels(tenant=f"tenant-{name}", project="p"),
            mode=Mode.HOOK,
            slices=tuple(SlicePromise(uuid, ppm, memory) for uuid in uuids),
            state=AllocationState.ACTIVE,
            generation=1,
            created_us=self.clock.wall,
            changed_us=self.clock.wall,
        )
        allocation = dataclasses.replace(allocation, **values)  # type: ignore[arg-type]
        self.journal("created", allocation)
        folder = self.run.allocations / name
        folder.mkdir()
        (folder / "allocation.json").write_text(canonical_json(allocation))
        if meter:
            write_grant(folder / "grant", Grant(name, tuple(DeviceGrant(uuid, None, memory) for uuid in uuids)))
            self.meters[name] = Meter(folder / "meter", *uuids, allocation_id=name)
        return allocation

    def change(self, allocation: Allocation, kind: str = "resized", **values: object) -> Allocation:
        """Change as the enforcer does: journal, then allocation.json."""
        after = dataclasses.replace(
            allocation,
            generation=allocation.generation + 1,
            changed_us=self.clock.wall,
            **values,  # type: ignore[arg-type]
        )
        self.journal(kind, after)
        folder = self.run.allocations / allocation.id
        (folder / "allocation.json").write_text(canonical_json(after))
        return after

    def release(self, allocation: Allocation) -> None:
        """End as the enforcer does: journal, allocation.json, the grant closed to new memory, then the folder moves."""
        self.change(allocation, "released", state=AllocationState.RELEASED)
        if allocation.id in self.meters:
            closed = tuple(DeviceGrant(item.device_uuid, item.compute_limit_ppm, 0) for item in allocation.slices)
            write_grant(self.run.allocations / allocation.id / "grant", Grant(allocation.id, closed))
        (self.run.allocations / allocation.id).rename(self.run.retired / allocation.id)
        if allocation.id in self.meters:
            self.meters[allocation.id].moved(self.run.retired / allocation.id / "meter")

    def close_meters(self) -> None:
        """Let go of the pages."""
        for meter in self.meters.values():
            meter.close()

    def close(self) -> None:
        """Let go of everything."""
        self.close_meters()
        self.spool.close()


def of(records: tuple[UsageRecord, ...], kind: type) -> list:
    """The records of one kind."""
    return [record for record in records if isinstance(record, kind)]


def identity(record: DeviceRecord) -> int:
    """The parts of a device record, added up."""
    return record.allocated_us + record.reserved_unused_us + record.unallocated_us + record.suspended_us + record.down_us


def everything() -> Hardware:
    """A card that tells all there is to tell."""
    activity = Activity(window_us=1, graphics_ppm=1, sm_active_ppm=2, sm_occupancy_ppm=3, tensor_ppm=4, dram_ppm=5)
    instance = MigInstance(
        uuid="MIG-1",
        gpu_instance_id=1,
        compute_instance_id=0,
        memory_total_bytes=9,
        memory_used_bytes=5,
        processes=1,
        activity=activity,
        busy_us_total=7,
    )
    vgpu = Vgpu(uuid="v-1", framebuffer_total_bytes=8, framebuffer_used_bytes=4, licensed=True, utilization_ppm=250_000, busy_us_total=3)
    return Hardware(
        at_us=1,
        compute_mode="default",
        licensed=True,
        power_limit_mw=700_000,
        throttle_us_total={"sw_power_cap": 1},
        ecc_errors_total={"corrected": 3},
        remapped_rows_total={"correctable": 1},
        row_remap_pending=False,
        row_remap_failed=False,
        xids=(XidCount(xid=79, count=1, last_us=5),),
        pcie_tx_bytes_total=1,
        pcie_rx_bytes_total=2,
        nvlink_tx_bytes_total=3,
        nvlink_rx_bytes_total=4,
        activity=activity,
        instances=(instance,),
        vgpus=(vgpu,),
        mps_server_pid=7,
    )
