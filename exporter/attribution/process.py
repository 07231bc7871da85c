"""What /proc says of a process: cgroup, user, pids, ancestors, framework. Read for (pid, start time), and never of another process.

/proc/PID/environ is not read here, though it would name Slurm accounts and more: it holds the secrets of every program, reading it takes
the right to trace them, and what it says is the program's own to change. (Of MPS clients `poolmeter.vendors.mps` reads it, for their limit.)
"""

import os
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from poolmeter.exporter.attribution.cgroup import MAX_BYTES, Place, parse_cgroup, place_of
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.worker import Worker
from poolmeter.vendors.proc import PROC, namespace_pids, start_ticks_of

AGAIN_US = 30_000_000  # a process may be moved to another cgroup
KEPT_US = 60_000_000  # samples of a process may come after its end
MAPS_BYTES = 16 << 20
MAX_ANCESTORS = 32
MAX_UNREAD = 4096

# By the names of the libraries alone. Hygon's DTK is a branch of ROCm and has its library names: where they lie tells the two apart.
_LIBRARY = re.compile(
    rb"(/(?:[^\n]*/)?)(libcuda\.so|libascendcl\.so|libgalaxyhip\.so|libamdhip64\.so|libhsa-runtime64\.so)[.\d]*(?: \(deleted\))?(?:\n|$)"
)
_DTK = re.compile(rb"/dtk[-/.\d]")


@dataclass(frozen=True)
class Facts:
    """A process as /proc shows it; None is what could not be read. `devices` are those that the card lists it on."""

    key: ProcessKey
    place: Place | None = None
    uid: int | None = None
    namespace_pid: int | None = None
    ancestors: tuple[ProcessKey, ...] = ()
    framework: str | None = None
    devices: frozenset[str] = frozenset()
    first_us: int = 0


def parse_framework(maps: bytes) -> str | None:
    """cuda, cann, dtk or rocm by the libraries that a process has mapped; None for none of them."""
    found = None
    for match in _LIBRARY.finditer(maps):
        name = match[2]
        if name == b"libascendcl.so":
            return "cann"
        if name == b"libgalaxyhip.so" or (name != b"libcuda.so" and _DTK.search(match[1])):
            return "dtk"
        found = "rocm" if name != b"libcuda.so" else found or "cuda"
    return found


def parse_parent(stat: bytes) -> int | None:
    """Field 4 of /proc/PID/stat; None for none (0) or nonsense."""
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[1]) or None if len(fields) > 1 and fields[1].isdigit() else None


def parse_uid(status: bytes) -> int | None:
    """The effective user of /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            words = line.split()
            return int(words[2]) if len(words) > 2 and words[2].isdigit() else None
    return None


class Processes:
    """Facts by process, kept while it is seen and a while longer. Framework and ancestors are read once.

    Maps take the memory lock of the program, which one that is stuck in a driver may hold: a thread reads them, and until it has the
    framework is not known.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[ProcessKey, Facts] = {}
        self._read_us: dict[ProcessKey, int] = {}
        self._seen_us: dict[ProcessKey, int] = {}
        self._unread: deque[ProcessKey] = deque(maxlen=MAX_UNREAD)
        self._told: deque[tuple[ProcessKey, str]] = deque(maxlen=MAX_UNREAD)
        self._maps = self._reader()

    def refresh(self, seen: Iterable[tuple[ProcessKey, frozenset[str]]], now_us: int) -> dict[ProcessKey, Facts]:
        """Facts of the processes that are seen now."""
        while self._told:
            key, framework = self._told.popleft()
            if key in self._known:
                self._known[key] = replace(self._known[key], framework=framework)
        out: dict[ProcessKey, Facts] = {}
        for key, devices in seen:
            self._seen_us[key] = now_us
            known = self._known.get(key)
            if known is None or now_us - self._read_us[key] >= AGAIN_US:
                if known is None:
                    self._unread.append(key)
                known = self._read(key, known, now_us)
                self._read_us[key] = now_us
            if known.devices != devices:
                known = replace(known, devices=devices)
            self._known[key] = out[key] = known
        for key in [key for key, at in self._seen_us.items() if now_us - at > KEPT_US]:
            del self._seen_us[key], self._known[key], self._read_us[key]
        if self._unread:
            self._maps.wake()
        return out

    def of(self, key: ProcessKey) -> Facts | None:
        """What was read of a process; None when it was not seen for a while."""
        return self._known.get(key)

    def close(self) -> None:
        """End the thread; the next process that is new starts another."""
        self._maps.close()
        self._maps = self._reader()

    def _reader(self) -> Worker[None]:
        return Worker("maps", self._look, 60.0, 10.0)

    def _look(self) -> None:
        while True:
            try:
                key = self._unread.popleft()
            except IndexError:  # also where a thread that was stuck comes back beside its successor
                return
            if start_ticks_of(key.pid, self._proc) != key.start_ticks:
                continue
            maps = _head(self._proc / str(key.pid) / "maps", MAPS_BYTES)
            framework = parse_framework(maps) if maps else None
            if framework is not None and start_ticks_of(key.pid, self._proc) == key.start_ticks:
                self._told.append((key, framework))

    def _read(self, key: ProcessKey, known: Facts | None, now_us: int) -> Facts:
        folder = self._proc / str(key.pid)
        first = known or Facts(key, first_us=now_us)
        if start_ticks_of(key.pid, self._proc) != key.start_ticks:
            return first
        cgroup, status = _head(folder / "cgroup", MAX_BYTES), _head(folder / "status", MAX_BYTES)
        place = place_of(parse_cgroup(cgroup)) if cgroup else None
        pids = namespace_pids(status) if status else ()
        fresh = replace(
            first,
            place=place or first.place,
            uid=parse_uid(status) if status else first.uid,
            namespace_pid=pids[-1] if len(pids) > 1 else first.namespace_pid,
        )
        if known is None:
            fresh = replace(fresh, ancestors=self._ancestors(key))
        # The pid may have got another process meanwhile: then nothing of this is about ours.
        return fresh if start_ticks_of(key.pid, self._proc) == key.start_ticks else first

    def _ancestors(self, key: ProcessKey) -> tuple[ProcessKey, ...]:
        chain: list[ProcessKey] = []
        pid = key.pid
        while len(chain) < MAX_ANCESTORS:
            stat = _head(self._proc / str(pid) / "stat", 4096)
            parent = parse_parent(stat) if stat else None
            start = start_ticks_of(parent, self._proc) if parent else None
            # A parent is older than its child, unless the pid is another's by now.
            if parent is None or start is None or start > (chain[-1].start_ticks if chain else key.start_ticks):
                break
            chain.append(ProcessKey(parent, start))
            pid = parent
        return tuple(chain)


def _head(path: Path, limit: int) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        parts = []
        while limit > 0:
            part = os.read(handle, min(limit, 1 << 16))
            if not part:
                break
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(handle)
