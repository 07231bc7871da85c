"""Identity of a process from /proc: start time, command name, pids in its namespaces."""

import os
import time
from pathlib import Path

from poolmeter.model.naming import printable

PROC = Path("/proc")


def parse_start_ticks(stat: bytes) -> int | None:
    """Field 22 of /proc/PID/stat, in clock ticks since boot; the command name may hold spaces and parentheses."""
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def start_ticks_of(pid: int, proc: Path = PROC) -> int | None:
    """When the process started; None when there is none (or it may not be read)."""
    try:
        return parse_start_ticks((proc / str(pid) / "stat").read_bytes())
    except OSError:
        return None


def age_us_of(start_ticks: int) -> int | None:
    """How long ago a process started that started at this; None for one that lies ahead, as of another boot."""
    age_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 - start_ticks * 1_000_000 // os.sysconf("SC_CLK_TCK")
    return age_us if age_us >= 0 else None


def command_of(pid: int, proc: Path = PROC) -> str | None:
    """The command's name as the kernel keeps it (at most 15 bytes), made safe to show: a program may call itself anything."""
    try:
        return printable((proc / str(pid) / "comm").read_bytes().removesuffix(b"\n")) or None
    except OSError:
        return None


def namespace_pids(status: bytes) -> tuple[int, ...]:
    """The process's pid in each nested pid namespace, outermost first (NSpid of /proc/PID/status); empty when there is no such line."""
    for line in status.splitlines():
        if line.startswith(b"NSpid:"):
            return tuple(int(word) for word in line.split()[1:])
    return ()


def pid_namespace_of(pid: int | str, proc: Path = PROC) -> int | None:
    """Inode of the process's pid namespace; None when it may not be asked (another user's process, without privilege)."""
    try:
        return os.stat(proc / str(pid) / "ns" / "pid").st_ino
    except OSError:
        return None
