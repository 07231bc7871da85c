"""The meter page: what the processes of one allocation count, read without trusting them.

Read by pread only: a tenant may truncate its page at any time, which kills a reader that has it mapped.
"""

import ctypes
import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from poolmeter.errors import Unavailable
from poolmeter.pages import layout
from poolmeter.pages.access import check_magic, encoded, open_page, read_exactly, text
from poolmeter.pages.errors import PageError, TamperedPage
from poolmeter.pages.native import pages_library

MEMORY_KINDS = ("device", "pool", "managed", "vmm", "array", "module", "graph", "overhead")

_ATTEMPTS = 20
_COUNTERS = struct.Struct(f"<{ctypes.sizeof(layout.Counters) // 8}Q")
_LEFT = struct.Struct("<QQI4x")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_SUMMED = (
    "launches",
    "graph_launches",
    "busy_ns",
    "throttled_ns",
    "throttle_waits",
    "timed_samples",
    "burst_samples",
    "dropped_samples",
    "copies",
    "copy_h2d_bytes",
    "copy_d2h_bytes",
    "copy_d2d_bytes",
    "copy_p2p_bytes",
    "denied_limit",
    "denied_limit_bytes",
    "denied_card",
    "denied_card_bytes",
    "internal_faults",
    "pending_ns",
    "copy_busy_ns",
    "denied_device",
)
_LARGEST = ("last_activity_ns", "memory_peak")
_PLACES = {name: getattr(layout.Counters, name).offset // 8 for name in (*_SUMMED, *_LARGEST, "memory")}


@dataclass(frozen=True)
class DeviceCounters:
    """Counters of one or several processes on one device. Times in ns, sizes in bytes; all since each process began.

    `pending_ns` (part of `busy_ns` still an estimate) and `memory` (held now, by kind of MEMORY_KINDS) are gauges. `last_activity_ns` is
    CLOCK_REALTIME, None when there was none. `a + b` adds, and keeps the larger peak and the later activity.
    """

    launches: int = 0
    graph_launches: int = 0
    busy_ns: int = 0
    throttled_ns: int = 0
    throttle_waits: int = 0
    timed_samples: int = 0
    burst_samples: int = 0
    dropped_samples: int = 0
    copies: int = 0
    copy_h2d_bytes: int = 0
    copy_d2h_bytes: int = 0
    copy_d2d_bytes: int = 0
    copy_p2p_bytes: int = 0
    denied_limit: int = 0
    denied_limit_bytes: int = 0
    denied_card: int = 0
    denied_card_bytes: int = 0
    internal_faults: int = 0
    pending_ns: int = 0
    copy_busy_ns: int = 0
    denied_device: int = 0
    memory_peak: int = 0
    last_activity_ns: int | None = None
    memory: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))

    def __add__(self, other: "DeviceCounters") -> "DeviceCounters":
        return DeviceCounters(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED},
            memory_peak=max(self.memory_peak, other.memory_peak),
            last_activity_ns=max(self.last_activity_ns or 0, other.last_activity_ns or 0) or None,
            memory={kind: self.memory[kind] + other.memory[kind] for kind in MEMORY_KINDS},
        )

    @property
    def memory_bytes(self) -> int:
        """Device memory held now, of all kinds."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class SharedTotals:
    """Memory of one device over all processes of the allocation, bytes. `memory_bytes` is what the limit is compared with."""

    memory_bytes: int
    memory_peak: int
    memory: Mapping[str, int]


@dataclass(frozen=True)
class SlotReading:
    """One process: how to find it, and its counters per device uuid (only devices it touched).

    `pid` is what the process itself sees, in the pid namespace with inode `pid_namespace`; `start_time_ticks` is field 22 of its stat.
    `locked`: whether somebody holds its lock (None: not to be found out); a slot with `locked` False belongs to a process that is gone.
    """

    index: int
    generation: int
    state: str
    pid: int
    pid_namespace: int
    start_time_ticks: int
    attached_ns: int
    comm: str
    uid: int
    locked: bool | None
    devices: Mapping[str, DeviceCounters]
    on_behalf_allocation: str | None = None
    on_behalf_node: str | None = None
    on_behalf_bytes_in: int = 0
    on_behalf_bytes_out: int = 0


class Left(NamedTuple):
    """A process whose slot was folded, as SlotReading names it."""

    pid: int
    pid_namespace: int
    start_time_ticks: int


@dataclass(frozen=True)
class MeterReading:
    """A meter of one instant: `slots` plus `retired` is everything the allocation's processes ever counted.

    `left` are those that were folded last, the newest last; none of a hook older than ABI 1.1.
    """

    device_uuids: tuple[str, ...]
    slots: tuple[SlotReading, ...]
    retired: Mapping[str, DeviceCounters]
    shared: Mapping[str, SharedTotals]
    created_ns: int
    faults: int
    left: tuple[Left, ...] = ()

    def total(self, uuid: str) -> DeviceCounters:
        """Counters of the device over all slots and retired processes; every summed one but the gauges only grows from reading to reading."""
        return sum((slot.devices[uuid] for slot in self.slots if uuid in slot.devices), self.retired[uuid])

    def hook_faults(self, uuid: str) -> int:
        """Faults of the hook itself on the device; those that belong to no device are the first one's."""
        return self.total(uuid).internal_faults + (self.faults if uuid == self.device_uuids[0] else 0)


@dataclass(frozen=True)
class _Shape:
    devices: int
    capacity: int
    slots: int
    used: int

    @property
    def slot_size(self) -> int:
        return ctypes.sizeof(layout.Slot) + self.capacity * ctypes.sizeof(layout.Counters)

    @property
    def devices_offset(self) -> int:
        return ctypes.sizeof(layout.Meter)

    @property
    def slots_offset(self) -> int:
        return self.devices_offset + self.capacity * ctypes.sizeof(layout.MeterDevice)

    @property
    def size(self) -> int:
        return self.slots_offset + self.slots * self.slot_size


def create_meter(path: Path, device_uuids: Sequence[str], slots: int = layout.MAX_SLOTS, allocation_id: str = "") -> None:
    """Creates the meter of an allocation with these devices, mode 0666 (its processes may have any uid; the folder guards it).

    Raises ValueError for values that do not fit and FileExistsError when there is one: counters are never thrown away.
    """
    if not 0 < len(device_uuids) <= layout.MAX_DEVICES or len(set(device_uuids)) != len(device_uuids):
        raise ValueError(f"meter {path} is to have devices {list(device_uuids)}, expected 1 to {layout.MAX_DEVICES} different ones")
    if not 0 < slots <= layout.MAX_SLOTS:
        raise ValueError(f"meter {path} is to have {slots} slots, expected 1 to {layout.MAX_SLOTS}")
    shape = _Shape(len(device_uuids), len(device_uuids), slots, 0)
    page = layout.Meter(
        magic=layout.METER_MAGIC,
        abi_major=layout.ABI_MAJOR,
        abi_minor=layout.ABI_MINOR,
        header_size=ctypes.sizeof(layout.Meter),
        device_size=ctypes.sizeof(layout.MeterDevice),
        slot_size=shape.slot_size,
        slot_header_size=ctypes.sizeof(layout.Slot),
        counters_size=ctypes.sizeof(layout.Counters),
        device_count=shape.devices,
        device_capacity=shape.capacity,
        slot_count=shape.slots,
        devices_offset=shape.devices_offset,
        slots_offset=shape.slots_offset,
        total_size=shape.size,
        created_ns=time.time_ns(),
        allocation_id=encoded(allocation_id, layout.ID_BYTES, "allocation id"),
    )
    lines = b"".join(bytes(layout.MeterDevice(uuid=encoded(uuid, layout.UUID_BYTES, "device uuid"))) for uuid in device_uuids)
    descriptor, name = tempfile.mkstemp(prefix=".meter-", dir=Path(path).parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            # Zeros are written, not left as holes: a full tmpfs must fail here and not as a SIGBUS in the tenant's program.
            file.write(bytes(page) + lines + bytes(shape.slots * shape.slot_size))
            file.flush()
            if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < shape.size:
                page.flags = layout.METER_HOLES
                os.pwrite(file.fileno(), bytes(page), 0)
            os.fchmod(file.fileno(), 0o666)
        os.link(name, path)
    finally:
        os.unlink(name)


def read_meter(path: str | Path) -> MeterReading:
    """What the page says at one instant: no process is counted in a slot and in `retired` at once, and none is left out.

    Raises TamperedPage, PageVersionError, Unavailable (absent, not permitted) or PageError (never at rest).
    """
    with open_page(path) as descriptor:
        for attempt in range(_ATTEMPTS):
            header, shape = _header(descriptor, path)
            if attempt == 0 and not header.flags & layout.METER_HOLES and os.lseek(descriptor, 0, os.SEEK_HOLE) < shape.size:
                raise TamperedPage(f"meter {path} has a hole at byte {os.lseek(descriptor, 0, os.SEEK_HOLE)}, expected none")
            data = read_exactly(
                descriptor, path, shape.devices_offset, shape.slots_offset + shape.used * shape.slot_size - shape.devices_offset
            )
            locks = {index: _locked(descriptor, index) for index in range(shape.used) if _state(data, shape, index) != layout.SLOT_FREE}
            again, shape_again = _header(descriptor, path)
            if again.fold == header.fold and shape_again == shape:
                return _reading(path, header, shape, data, locks)
            time.sleep(0.0002 * attempt)
    raise PageError(f"meter {path} changed its fold word in each of {_ATTEMPTS} readings, expected it to rest")


def reclaim(path: Path) -> int:
    """Folds the slots of processes that are gone into `retired` and gives their memory back; returns how many.

    Survivors do so themselves; this is for when there are none. Raises Unavailable when the page cannot be written.
    """
    path = Path(path)
    with open_page(path, os.O_RDWR) as descriptor:
        _header(descriptor, path)
        outcome = int(pages_library().pm_pages_reclaim(descriptor, 1000))
    if outcome < 0:
        raise Unavailable(f"meter {path} cannot be reclaimed ({os.strerror(-outcome)}), expected a writable meter page")
    return outcome


def _header(descriptor: int, path: str | Path) -> tuple[layout.Meter, _Shape]:
    page = layout.Meter.from_buffer_copy(read_exactly(descriptor, path, 0, ctypes.sizeof(layout.Meter)))
    check_magic(path, page.magic, page.abi_major, page.abi_minor, layout.METER_MAGIC)
    shape = _Shape(page.device_count, page.device_capacity, page.slot_count, min(page.slots_used, page.slot_count))
    if not 0 < shape.devices <= shape.capacity <= layout.MAX_DEVICES or not 0 < shape.slots <= layout.MAX_SLOTS:
        raise TamperedPage(
            f"meter {path} states {shape.devices} of {shape.capacity} devices and {shape.slots} slots, expected 1 to 64 and 1 to 256"
        )
    expected = (
        ctypes.sizeof(layout.Meter),
        ctypes.sizeof(layout.MeterDevice),
        shape.slot_size,
        ctypes.sizeof(layout.Slot),
        ctypes.sizeof(layout.Counters),
        shape.devices_offset,
        shape.slots_offset,
        shape.size,
    )
    found = (
        page.header_size,
        page.device_size,
        page.slot_size,
        page.slot_header_size,
        page.counters_size,
        page.devices_offset,
        page.slots_offset,
        page.total_size,
    )
    if found != expected:
        raise TamperedPage(f"meter {path} states sizes {found}, expected {expected}")
    size = os.fstat(descriptor).st_size
    if size != shape.size:
        raise TamperedPage(f"meter {path} has {size} bytes, expected {shape.size}")
    return page, shape


def _state(data: bytes, shape: _Shape, index: int) -> int:
    offset = shape.slots_offset - shape.devices_offset + index * shape.slot_size + layout.Slot.state.offset
    return int.from_bytes(data[offset : offset + 4], "little")


def _locked(descriptor: int, index: int) -> bool | None:
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_SLOTS + index, 1, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    except OSError:
        return None
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _reading(path: str | Path, header: layout.Meter, shape: _Shape, data: bytes, locks: Mapping[int, bool | None]) -> MeterReading:
    lines = [layout.MeterDevice.from_buffer_copy(data, index * ctypes.sizeof(layout.MeterDevice)) for index in range(shape.devices)]
    uuids = tuple(text(line.uuid, path, "device uuid") for line in lines)
    if len(set(uuids)) != len(uuids) or not all(uuids):
        raise TamperedPage(f"meter {path} lists devices {uuids}, expected different ones")
    copy = header.fold & 1
    folded = (header.fold >> 1 & 0xFFFF) - 1
    slots = tuple(
        _slot(path, shape, data, index, uuids, locks.get(index)) for index in range(shape.used) if index in locks and index != folded
    )
    retired = {
        uuid: _counters(data, index * ctypes.sizeof(layout.MeterDevice) + layout.MeterDevice.retired.offset + copy * _COUNTERS.size)
        for index, uuid in enumerate(uuids)
    }
    shared = {
        uuid: SharedTotals(
            memory_bytes=(line.memory_word & 0xFFFFFFFFF) * layout.MEMORY_UNIT,
            memory_peak=line.memory_peak,
            memory={kind: sum(slot.devices[uuid].memory[kind] for slot in slots if uuid in slot.devices) for kind in MEMORY_KINDS},
        )
        for uuid, line in zip(uuids, lines, strict=True)
    }
    return MeterReading(uuids, slots, retired, shared, header.created_ns, header.faults, _left(header))


def _left(header: layout.Meter) -> tuple[Left, ...]:
    # The oldest may be the one that is written just now.
    last = header.left_count
    if not last:
        return ()
    found = list(_LEFT.iter_unpack(bytes(header.left)))
    newest = (found[number % layout.LEFT] for number in range(max(0, last - layout.LEFT + 1), last))
    return tuple(Left(pid, namespace, start) for namespace, start, pid in newest if pid)


def _slot(path: str | Path, shape: _Shape, data: bytes, index: int, uuids: tuple[str, ...], locked: bool | None) -> SlotReading:
    start = shape.slots_offset - shape.devices_offset + index * shape.slot_size
    slot = layout.Slot.from_buffer_copy(data, start)
    first = start + ctypes.sizeof(layout.Slot)
    idle = bytes(_COUNTERS.size)
    return SlotReading(
        index=index,
        generation=slot.generation,
        state=("free", "claimed", "live", "dead")[slot.state] if slot.state < 4 else "unknown",
        pid=slot.pid,
        pid_namespace=slot.pid_namespace,
        start_time_ticks=slot.start_time_ticks,
        attached_ns=slot.attached_ns,
        comm=slot.comm.split(b"\0", 1)[0].decode(errors="replace"),
        uid=slot.uid,
        locked=locked,
        devices={
            uuid: _counters(data, first + place * _COUNTERS.size)
            for place, uuid in enumerate(uuids)
            if data[first + place * _COUNTERS.size : first + (place + 1) * _COUNTERS.size] != idle
        },
        on_behalf_allocation=text(slot.on_behalf_allocation, path, "on-behalf allocation") or None,
        on_behalf_node=text(slot.on_behalf_node, path, "on-behalf node") or None,
        on_behalf_bytes_in=slot.on_behalf_bytes_in,
        on_behalf_bytes_out=slot.on_behalf_bytes_out,
    )


def _counters(data: bytes, offset: int) -> DeviceCounters:
    words = _COUNTERS.unpack_from(data, offset)
    place = _PLACES["memory"]
    return DeviceCounters(
        **{name: words[_PLACES[name]] for name in _SUMMED},
        memory_peak=words[_PLACES["memory_peak"]],
        last_activity_ns=words[_PLACES["last_activity_ns"]] or None,
        memory=dict(zip(MEMORY_KINDS, words[place : place + len(MEMORY_KINDS)], strict=True)),
    )


assert {f.name for f in fields(DeviceCounters)} == {*_SUMMED, *_LARGEST, "memory"}
