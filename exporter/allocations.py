"""Allocations as they lie on this node: allocation.json, grant and meter of every folder, one bad folder never hiding another."""

import contextlib
import functools
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


def read_allocations(run: NodeRun) -> tuple[Mapping[str, AllocationReading], str | None]:
    """Every allocation, running and retired, and why the folder as a whole could not be listed (None: it could)."""
    found: dict[str, AllocationReading] = {}
    trouble = None
    # Running ones first: a folder that moves in between is then seen in its new place, or in both.
    for parent, retired in ((run.allocations, False), (run.retired, True)):
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
            reading = read_allocation(_folder(parent, name), name, retired)
            if reading is not None:
                found[name] = reading
    return found, trouble


@functools.lru_cache(maxsize=4096)
def _folder(parent: Path, name: str) -> Path:
    # Paths are made anew by taking them apart, which at every turn and for every file would be a tenth of what a turn costs.
    return parent / name


@functools.lru_cache(maxsize=8192)
def _file(folder: Path, name: str) -> Path:
    return folder / name


def read_allocation(folder: Path, name: str, retired: bool) -> AllocationReading | None:
    """One folder; None when it vanished meanwhile or holds nothing yet."""
    faults: list[str] = []
    tampered = None
    allocation = grant = meter = None
    try:
        allocation = _allocation_of(f"{folder}/allocation.json")
        if allocation.id != name:
            faults.append(f"{folder}/allocation.json has id {allocation.id!r}, expected {name!r}")
            allocation = None
    except FileNotFoundError:
        faults.append(f"{folder}/allocation.json is absent")
    except (OSError, ValueError, PoolmeterError) as error:
        faults.append(str(error))
    page = _file(folder, "grant")
    if os.path.lexists(page):
        try:
            grant = read_grant(page)
        except (PoolmeterError, OSError, ValueError) as error:
            faults.append(str(error))
    page = _file(folder, "meter")
    there = os.path.lexists(page)
    if there:
        try:
            meter = read_meter(page)
        except PageError as error:
            tampered = str(error)
            faults.append(tampered)
        except (PoolmeterError, OSError, ValueError) as error:
            faults.append(str(error))
    if allocation is None and meter is None and grant is None and (not faults or not folder.is_dir()):
        return None
    return AllocationReading(name, folder, retired, allocation, grant, meter, tuple(faults), tampered, there and meter is None)


def _allocation_of(path: str) -> Allocation:
    """What the file says. One that was at rest for a while is decoded once, not at every tick; its stamp says whether it changed."""
    found = os.stat(path)
    if time.time_ns() - found.st_mtime_ns < _RESTED_NS:  # two writes of one moment may have one stamp
        return _decoded(path)
    return _rested(path, (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino))


def _decoded(path: str) -> Allocation:
    with open(path, "rb") as file:
        return from_plain(Allocation, json.loads(file.read()), path)


@functools.lru_cache(maxsize=512)
def _rested(path: str, stamp: tuple[int, ...]) -> Allocation:
    return _decoded(path)


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
