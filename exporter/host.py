"""The node itself: CPU and memory it has, and what allocations asked for of them. Fragmentation counts cards that no CPU is left for."""

import os
from collections.abc import Iterable
from pathlib import Path

from poolmeter.model.allocation import Allocation, AllocationState
from poolmeter.model.snapshot import HostRequest, HostSnapshot

MEMINFO = Path("/proc/meminfo")


def cpu_milli() -> int | None:
    """CPUs that are online, in thousandths, whatever this process may use of them; None where the system does not say."""
    try:
        found = os.sysconf("SC_NPROCESSORS_ONLN")
    except (ValueError, OSError):
        return None
    return found * 1000 if found > 0 else None


def memory_bytes(path: Path = MEMINFO) -> int | None:
    """What the kernel has to hand out (MemTotal); None where it does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "MemTotal:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def host_of(standing: Iterable[Allocation], meminfo: Path = MEMINFO) -> HostSnapshot:
    """Capacity, and the requests of what stands. A sum is known only when each of its parts is: an unknown request is not 0."""
    requests = tuple(
        HostRequest(allocation_id=allocation.id, cpu_milli=allocation.cpu_milli, memory_bytes=allocation.host_memory_bytes)
        for allocation in standing
        if allocation.state is AllocationState.ACTIVE
    )
    return HostSnapshot(
        cpu_milli=cpu_milli(),
        memory_bytes=memory_bytes(meminfo),
        cpu_requested_milli=_sum(request.cpu_milli for request in requests),
        memory_requested_bytes=_sum(request.memory_bytes for request in requests),
        requests=requests,
    )


def _sum(parts: Iterable[int | None]) -> int | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
