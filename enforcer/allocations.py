"""Allocations on the disk: a folder each, holding `grant`, `meter` and `allocation.json`; whole or not there at all."""

import contextlib
import ctypes
import json
import logging
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from poolmeter.enforcer.journal import sync_folder
from poolmeter.errors import DataError, Unavailable
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import canonical_json, from_plain
from poolmeter.pages import layout
from poolmeter.pages.errors import PageError
from poolmeter.pages.meter import SlotReading, read_meter
from poolmeter.places import NodeRun

log = logging.getLogger(__name__)

_NEW = ".new-"  # a folder that nobody has been told of yet
_BROKEN = ".broken-"  # one that cannot be read, kept for a person to look at
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id(at_us: int) -> str:
    """An id that sorts by time and that nobody can guess: `a-<microseconds, base 36>-<48 random bits>`."""
    digits, rest = "", at_us
    while rest:
        rest, digit = divmod(rest, 36)
        digits = _DIGITS[digit] + digits
    return f"a-{digits.rjust(10, '0')}-{secrets.token_hex(6)}"


def folder_of(run: NodeRun, allocation_id: str) -> Path:
    """Where the allocation lives."""
    return run.allocations / allocation_id


def staging(run: NodeRun, allocation_id: str) -> Path:
    """An empty folder to build an allocation in."""
    folder = run.allocations / f"{_NEW}{allocation_id}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)  # whatever the umask: the tenant's programs must get through
    return folder


def staged(run: NodeRun) -> dict[str, Path]:
    """Folders that a dead enforcer left unfinished, by allocation id."""
    return {folder.name.removeprefix(_NEW): folder for folder in run.allocations.glob(f"{_NEW}*")}


def publish(run: NodeRun, allocation_id: str) -> None:
    """Makes a built folder the allocation's own, for everybody at once."""
    for file in (folder := run.allocations / f"{_NEW}{allocation_id}").iterdir():
        _sync_file(file)
    sync_folder(folder)
    os.rename(folder, folder_of(run, allocation_id))
    sync_folder(run.allocations)


def discard(run: NodeRun, allocation_id: str) -> None:
    """Removes a folder that was never published."""
    shutil.rmtree(run.allocations / f"{_NEW}{allocation_id}", ignore_errors=True)


def save(folder: Path, allocation: Allocation) -> None:
    """Replaces allocation.json, whole and on the disk."""
    temporary = folder / ".allocation.json"
    with temporary.open("wb") as file:
        file.write(canonical_json(allocation).encode() + b"\n")
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    os.replace(temporary, folder / "allocation.json")
    sync_folder(folder)


def load(folder: Path) -> Allocation:
    """The allocation of a folder. Raises DataError when its file is missing or broken."""
    path = folder / "allocation.json"
    try:
        return from_plain(Allocation, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}), expected an allocation") from None


def published(run: NodeRun) -> dict[str, Path]:
    """The folders of allocations that are there, by id."""
    return {folder.name: folder for folder in sorted(run.allocations.iterdir()) if not folder.name.startswith(".") and folder.is_dir()}


def retire(run: NodeRun, allocation_id: str) -> None:
    """Moves an ended allocation to retired/, where its meter waits for its last usage to be acknowledged."""
    os.rename(folder_of(run, allocation_id), run.retired / allocation_id)
    sync_folder(run.retired)
    sync_folder(run.allocations)


def set_aside(run: NodeRun, folder: Path) -> Path:
    """Renames a folder that cannot be read out of everybody's way; its new place."""
    place = run.allocations / f"{_BROKEN}{folder.name}"
    os.rename(folder, place)
    return place


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command may hold spaces and parentheses; the fields begin after the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def slot_lives(slot: SlotReading) -> bool:
    """Whether the slot's process is there: its lock is held and, where its pid can be looked up from here, the pid is its own."""
    if slot.state in ("free", "dead") or slot.locked is False:
        return False
    if slot.pid_namespace == _own_namespace():
        return start_ticks(slot.pid) == slot.start_time_ticks
    return slot.locked is True


def live_slots(folder: Path) -> tuple[SlotReading, ...]:
    """The processes that use the allocation now. A meter that a tenant has spoiled shows none: it must not hold a promise for ever."""
    try:
        return tuple(slot for slot in read_meter(folder / "meter").slots if slot_lives(slot))
    except (PageError, Unavailable) as error:
        log.warning("%s", error)
        return ()


def has_dead_slot(folder: Path) -> bool:
    """Whether a process that is gone still has a slot there. A meter that cannot be read has none to fold."""
    try:
        return any(slot.state != "free" and not slot_lives(slot) for slot in read_meter(folder / "meter").slots)
    except (PageError, Unavailable):
        return False


def memory_in_use(folder: Path) -> dict[str, int]:
    """Bytes that the allocation's processes hold per device UUID; a device is left out when it is not known."""
    try:
        return {uuid: total.memory_bytes for uuid, total in read_meter(folder / "meter").shared.items()}
    except (PageError, Unavailable) as error:
        log.warning("%s", error)
        return {}


@dataclass(frozen=True)
class MeterState:
    """What an allocation's meter tells of itself: memory in use by device UUID, faults of the hook (None: not known), what is wrong."""

    memory_used_bytes: dict[str, int]
    hook_faults: int | None = None
    trouble: str | None = None


def meter_state(folder: Path) -> MeterState:
    """The state of an allocation's meter, also of one that cannot be read."""
    try:
        reading = read_meter(folder / "meter")
    except (PageError, Unavailable) as error:
        return MeterState({}, trouble=str(error))
    used = {uuid: total.memory_bytes for uuid, total in reading.shared.items()}
    return MeterState(used, sum(reading.hook_faults(uuid) for uuid in reading.device_uuids))


def remove_torn_boards(run: NodeRun) -> None:
    """Removes boards that somebody truncated or put something else in the place of; the next hook makes a new one."""
    try:
        entries = list(os.scandir(run.devices))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            whole = entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size == ctypes.sizeof(layout.Board)
            if "." not in entry.name and not whole and not entry.is_dir(follow_symlinks=False):  # with a dot: one that is being made
                os.unlink(entry.path)


def _own_namespace() -> int | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
