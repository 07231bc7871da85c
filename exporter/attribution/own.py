"""Attribution by our own allocations: a live slot names its process as that process sees itself; /proc says who that is on the host."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.attribution.source import Owner, ProcessKey
from poolmeter.pages.meter import Left, SlotReading
from poolmeter.vendors.proc import PROC, namespace_pids, pid_namespace_of, start_ticks_of

_REMEMBER_US = 300_000_000  # NVML may list a process, and its samples, for a while after its slot is gone


class OwnAllocations:
    """Maps slots to host processes, tick by tick."""

    name = "allocations"

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._own_namespace = pid_namespace_of("self", proc)
        self._known: dict[tuple[int, int, int], int] = {}  # (namespace inode, pid there, start) -> host pid
        self._owners: dict[ProcessKey, tuple[Owner, int]] = {}
        self._hosts: dict[tuple[str, int, int], ProcessKey] = {}
        self._unplaced: dict[int, Owner] = {}  # live slots whose process /proc does not show us, by start time
        self._started: dict[ProcessKey, Owner] = {}  # the programs that allocations were made for
        self._left: dict[str, tuple[Left, ...]] = {}  # processes whose slots were folded, by allocation
        self._left_elsewhere: dict[int, tuple[Owner, int]] = {}  # of them those in other pid namespaces, by start time

    def refresh(self, readings: Mapping[str, AllocationReading], now_us: int) -> None:
        """Take the slots of this tick."""
        self._hosts = {}
        self._started = {
            ProcessKey(made.owner_pid, made.owner_start_ticks): Owner(made.id, made.labels.tenant, hooked=False)
            for made in (reading.allocation for reading in readings.values())
            if made is not None and made.owner_pid is not None and made.owner_start_ticks is not None
        }
        missing: list[tuple[AllocationReading, SlotReading]] = []
        for reading in readings.values():
            for slot in reading.meter.slots if reading.meter else ():
                if not self._place(reading, slot, now_us):
                    missing.append((reading, slot))
        if any(slot.locked is not False for _, slot in missing):
            self._search()
            missing = [(reading, slot) for reading, slot in missing if not self._place(reading, slot, now_us)]
        self._unplaced = {slot.start_time_ticks: _owner(reading) for reading, slot in missing if slot.locked is not False}
        self._leave(readings, now_us)
        self._owners = {key: value for key, value in self._owners.items() if now_us - value[1] <= _REMEMBER_US}
        standing = {(slot.pid_namespace, slot.pid, slot.start_time_ticks) for r in readings.values() if r.meter for slot in r.meter.slots}
        self._known = {key: pid for key, pid in self._known.items() if key in standing}

    def _leave(self, readings: Mapping[str, AllocationReading], now_us: int) -> None:
        """Take those whose slots were folded: one that began and ended since the last tick was never seen in its own."""
        before, self._left = self._left, {}
        for reading in readings.values():
            if reading.meter is None:
                self._left[reading.id] = before.get(reading.id, ())
                continue
            known, self._left[reading.id] = before.get(reading.id, ()), reading.meter.left
            for left in reading.meter.left if reading.meter.left != known else ():
                if left in known:
                    continue
                if left.pid_namespace == self._own_namespace:
                    self._owners.setdefault(ProcessKey(left.pid, left.start_time_ticks), (_owner(reading), now_us))
                else:
                    self._left_elsewhere[left.start_time_ticks] = (_owner(reading), now_us)
        self._left_elsewhere = {key: value for key, value in self._left_elsewhere.items() if now_us - value[1] <= _REMEMBER_US}

    def _place(self, reading: AllocationReading, slot: SlotReading, now_us: int) -> bool:
        key = (slot.pid_namespace, slot.pid, slot.start_time_ticks)
        host = self._known.get(key)
        # In our own namespace the slot's pid is the host's pid, also when the process is already gone: its start time makes it unique.
        if (
            host is None
            and slot.pid_namespace == self._own_namespace
            and start_ticks_of(slot.pid, self._proc) in (None, slot.start_time_ticks)
        ):
            host = slot.pid
        if host is None:
            return False
        self._known[key] = host
        process = ProcessKey(host, slot.start_time_ticks)
        self._hosts[(reading.id, slot.index, slot.generation)] = process
        self._owners[process] = (_owner(reading), now_us)
        return True

    def _search(self) -> None:
        """Look through /proc for processes in other pid namespaces: NSpid's last entry is the pid that the process itself sees."""
        try:
            names = [name for name in os.listdir(self._proc) if name.isdigit()]
        except OSError:
            return
        for name in names:
            try:
                pids = namespace_pids((self._proc / name / "status").read_bytes())
            except OSError:
                continue
            start = start_ticks_of(int(name), self._proc)
            if len(pids) < 2 or start is None:
                continue
            namespace = pid_namespace_of(name, self._proc)
            if namespace is not None:
                self._known[(namespace, pids[-1], start)] = int(name)

    def host_of(self, allocation_id: str, slot: SlotReading) -> ProcessKey | None:
        """The host process behind a slot; None when /proc does not show it."""
        return self._hosts.get((allocation_id, slot.index, slot.generation))

    def owner_of(self, process: ProcessKey) -> Owner | None:
        known = self._owners.get(process)
        # Namespaces of other users' processes may be closed to us; a start time is the same in all of them, and hardly ever shared.
        if known or process.start_ticks in self._unplaced:
            return known[0] if known else self._unplaced[process.start_ticks]
        left = self._left_elsewhere.get(process.start_ticks)
        # One that is still there is another that began at the same time.
        return left[0] if left is not None and start_ticks_of(process.pid, self._proc) != process.start_ticks else None

    def started_by(self, ancestors: Iterable[ProcessKey]) -> Owner | None:
        """The allocation whose program one of these processes is: what it starts belongs to it, under the hook or not."""
        return next((self._started[key] for key in ancestors if key in self._started), None)


def _owner(reading: AllocationReading) -> Owner:
    return Owner(reading.id, reading.allocation.labels.tenant if reading.allocation else None, hooked=True)
