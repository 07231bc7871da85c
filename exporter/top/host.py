"""What this machine's own /proc says of a process: user, command line, memory, CPU, framework, container.

Only of a process whose pid and start time are those of the snapshot; what may not be read (another user's) is None.
"""

import os
import pwd
import time
from dataclasses import dataclass
from pathlib import Path

from poolmeter.exporter.attribution.cgroup import MAX_BYTES, parse_cgroup, place_of
from poolmeter.exporter.attribution.process import parse_framework
from poolmeter.model.naming import printable
from poolmeter.vendors.proc import PROC, parse_start_ticks

_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_COMMAND = 4096
_LOOK_AGAIN_US = 10_000_000  # a program loads its framework some time after it was started
# The library that a framework cannot do without, as it stands in the process's maps.
_FRAMEWORKS = ((b"libtorch", "PyTorch"), (b"libtensorflow", "TensorFlow"), (b"jaxlib", "JAX"))


@dataclass(frozen=True)
class HostFacts:
    """One process on this machine. `cpu_ppm`: parts per million of one core since it was last looked at; None at the first look."""

    user: str | None = None
    command_line: str | None = None
    rss_bytes: int | None = None
    cpu_ppm: int | None = None
    framework: str | None = None
    where: str | None = None


@dataclass
class _Seen:
    start_ticks: int
    fixed: HostFacts
    cpu_us: int
    at_us: int
    fixed_us: int
    cpu_ppm: int | None = None
    rss_bytes: int | None = None


def parse_stat(stat: bytes) -> tuple[int, int] | None:
    """Microseconds of CPU (user and system) and resident bytes, from /proc/PID/stat; None when it is cut."""
    fields = stat[stat.rfind(b")") + 2 :].split()
    try:
        return (int(fields[11]) + int(fields[12])) * _TICK_US, int(fields[21]) * _PAGE
    except (IndexError, ValueError):
        return None


def where_in(cgroup: bytes) -> str | None:
    """`pod …`, `container …`, `job …` or a systemd service, from /proc/PID/cgroup; None when it is neither's. The outermost is believed."""
    place = place_of(parse_cgroup(cgroup))
    if place is None:
        return None
    if place.job:
        return f"job {place.job}"
    if place.pod_uid and not place.nested:
        return f"pod {place.pod_uid[:8]}"
    if container := place.outer or place.container:
        return f"container {container.id[:12]}"
    return printable(place.unit.encode("utf-8", "surrogateescape")) if place.unit and place.unit.endswith(".service") else None


def parse_maps(maps: bytes) -> str | None:
    """The framework whose library is mapped, else what it stands on as attribution names it; None when there is none."""
    return next((name for library, name in _FRAMEWORKS if library in maps), None) or parse_framework(maps)


class Host:
    """Looks at processes; keeps what does not change while a process lives."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._seen: dict[int, _Seen] = {}

    def look(self, pid: int, start_ticks: int) -> HostFacts | None:
        """What is known of the process now; None when this machine has none of that pid and start time."""
        now_us = time.monotonic_ns() // 1000
        seen = self._seen.get(pid)
        if seen is not None and seen.start_ticks == start_ticks and now_us - seen.at_us < 400_000:
            return self._facts(seen)
        try:
            stat = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            self._seen.pop(pid, None)
            return None
        numbers = parse_stat(stat)
        if parse_start_ticks(stat) != start_ticks or numbers is None:
            self._seen.pop(pid, None)
            return None
        cpu_us, rss = numbers
        if seen is None or seen.start_ticks != start_ticks:
            seen = self._seen[pid] = _Seen(start_ticks, self._fixed(pid), cpu_us, now_us, now_us)
        elif now_us > seen.at_us:
            seen.cpu_ppm = max(0, cpu_us - seen.cpu_us) * 1_000_000 // (now_us - seen.at_us)
            seen.cpu_us, seen.at_us = cpu_us, now_us
        if seen.fixed.framework not in dict(_FRAMEWORKS).values() and now_us - seen.fixed_us > _LOOK_AGAIN_US:
            seen.fixed, seen.fixed_us = self._fixed(pid), now_us
        seen.rss_bytes = rss
        return self._facts(seen)

    def forget_but(self, pids: set[int]) -> None:
        """Drop what is kept of other processes."""
        for pid in [pid for pid in self._seen if pid not in pids]:
            del self._seen[pid]

    def _facts(self, seen: _Seen) -> HostFacts:
        fixed = seen.fixed
        return HostFacts(fixed.user, fixed.command_line, seen.rss_bytes, seen.cpu_ppm, fixed.framework, fixed.where)

    def _fixed(self, pid: int) -> HostFacts:
        folder = self._proc / str(pid)
        words = (_read(folder / "cmdline", _MAX_COMMAND) or b"").decode("utf-8", "replace").rstrip("\0").split("\0")
        maps = _read(folder / "maps", 4 << 20)
        cgroup = _read(folder / "cgroup", MAX_BYTES)
        return HostFacts(
            user=_owner(folder),
            command_line=" ".join(words) or None,
            framework=parse_maps(maps) if maps else None,
            where=where_in(cgroup) if cgroup else None,
        )


def _read(path: Path, limit: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return None


def _owner(folder: Path) -> str | None:
    try:
        uid = folder.stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
