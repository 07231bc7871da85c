"""Allocations as they lie on this node: allocation.json, grant and meter of every folder, one bad folder never hiding another."""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from poolmeter.errors import PoolmeterError
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import from_plain
from poolmeter.pages.errors import PageError
from poolmeter.pages.grant import Grant, read_grant
from poolmeter.pages.meter import MeterReading, read_meter, reclaim
from poolmeter.places import NodeRun

_LOG = logging.getLogger("poolmeter.exporter")
_GONE = ".gone-"
_RESTED_NS = 2_000_000_000

_Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class AllocationReading:
    """One folder. A part that is absent or cannot be read is None; `faults` says why, `tampered` that its page was interfered with.

    `unread`: there is a meter, and what it says is not known.
    """

    id: str
    folder: Path
    retired: bool
    allocation: Allocation | None = None
    grant: Grant | None = None
    meter: MeterReading | None = None
    faults: tuple[str, ...] = ()
    tampered: str | None = None
    unread: bool = False

    @property
    def alive(self) -> bool:
        """Whether a process may still count: some slot's owner holds its lock (or that cannot be found out)."""
        return self.meter is not None and any(slot.locked is not False for slot in self.meter.slots)


class AllocationFolders:
    """The folders of a node, read again and again. Only what is there is kept from one reading to the next."""

    def __init__(self, run: NodeRun) -> None:
        self._run = run
        self._rested: dict[str, tuple[_Stamp, Allocation]] = {}

    def read(self) -> tuple[Mapping[str, AllocationReading], str | None]:
        """Every allocation, running and retired, and why a folder as a whole could not be listed (None: all could)."""
        found: dict[str, AllocationReading] = {}
        rested: dict[str, tuple[_Stamp, Allocation]] = {}
        trouble = None
        # Running ones first: a folder that moves in between is then seen in its new place, or in both.
        for parent, retired in ((self._run.allocations, False), (self._run.retired, True)):
            try:
                names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                continue
            except OSError as error:
                trouble = f"folder {parent} cannot be listed: {error.strerror}"
                continue
            for name in names:
                if name.startswith("."):
                    continue
                reading = self._one(parent / name, name, retired, rested)
                if reading is not None:
                    found[name] = reading
        self._rested = rested
        return found, trouble

    def _one(self, folder: Path, name: str, retired: bool, rested: dict[str, tuple[_Stamp, Allocation]]) -> AllocationReading | None:
        """One folder; None when it vanished meanwhile or holds nothing yet."""
        # Paths are joined as text: taking them apart for every file at every turn would be a tenth of what a turn costs.
        place = str(folder)
        faults: list[str] = []
        tampered = None
        allocation = grant = meter = None
        try:
            allocation = self._allocation(f"{place}/allocation.json", rested)
            if allocation.id != name:
                faults.append(f"{place}/allocation.json has id {allocation.id!r}, expected {name!r}")
                allocation = None
        except FileNotFoundError:
            faults.append(f"{place}/allocation.json is absent")
        except (OSError, ValueError, PoolmeterError) as error:
            faults.append(str(error))
        if os.path.lexists(f"{place}/grant"):
            try:
                grant = read_grant(f"{place}/grant")
            except (PoolmeterError, OSError, ValueError) as error:
                faults.append(str(error))
        there = os.path.lexists(f"{place}/meter")
        if there:
            try:
                meter = read_meter(f"{place}/meter")
            except PageError as error:
                tampered = str(error)
                faults.append(tampered)
            except (PoolmeterError, OSError, ValueError) as error:
                faults.append(str(error))
        if allocation is None and meter is None and grant is None and (not faults or not folder.is_dir()):
            return None
        return AllocationReading(name, folder, retired, allocation, grant, meter, tuple(faults), tampered, there and meter is None)

    def _allocation(self, path: str, rested: dict[str, tuple[_Stamp, Allocation]]) -> Allocation:
        """What the file says. One that was at rest for a while is decoded once, not at every turn; its stamp says whether it changed."""
        found = os.stat(path)
        stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
        known = self._rested.get(path)
        if known is not None and known[0] == stamp:
            rested[path] = known
            return known[1]
        with open(path, "rb") as file:
            allocation = from_plain(Allocation, json.loads(file.read()), path)
        if time.time_ns() - found.st_mtime_ns >= _RESTED_NS:  # two writes of one moment may have one stamp
            rested[path] = (stamp, allocation)
        return allocation


def reclaim_dead(reading: AllocationReading) -> int:
    """Fold the slots of processes that are gone, where permitted, so that nothing stays reserved after the last one was killed.

    The caller has taken the slots' counters already: afterwards only their sum is left. Returns how many were folded.
    """
    if reading.meter is None or all(slot.locked is not False for slot in reading.meter.slots):
        return 0
    try:
        return reclaim(reading.folder / "meter")
    except (PoolmeterError, OSError) as error:
        _LOG.debug("slots of %s stay as they are: %s", reading.id, error)
        return 0


def delete_retired(reading: AllocationReading) -> bool:
    """Remove a retired folder whose usage everybody has; False when this process may not."""
    gone = reading.folder.with_name(_GONE + reading.id)
    try:
        os.rename(reading.folder, gone)  # at once or not at all: half a folder must not look like a fresh one
    except OSError as error:
        _LOG.warning("retired allocation %s stays: %s", reading.folder, error.strerror)
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def sweep_retired(run: NodeRun) -> None:
    """Finish deletions that a kill interrupted."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(run.retired)):
            if entry.name.startswith(_GONE):
                shutil.rmtree(entry.path, ignore_errors=True)
