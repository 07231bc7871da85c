"""Whose a slice, a device or a process is, from what a snapshot says."""

from dataclasses import dataclass

from poolmeter.model.allocation import Mode
from poolmeter.model.snapshot import HolderSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot
from poolmeter.model.usage import UsedBasis


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Names as the orchestrator gave them; empty: not known."""

    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    container_id: str = ""
    image: str = ""
    job: str = ""


NOBODY = Owner()


def _owner(holder: HolderSnapshot) -> Owner:
    return Owner(
        namespace=holder.namespace or "",
        pod=holder.pod or "",
        pod_uid=holder.pod_uid or "",
        container=holder.container or "",
        container_id=holder.container_id or "",
        image=holder.image or "",
        job=holder.job or "",
    )


def slice_owners(snapshot: Snapshot) -> dict[tuple[str, str], Owner]:
    """By allocation and device: its one owner. A slice with several has none of their names."""
    found: dict[tuple[str, str], set[Owner]] = {}
    for holder in snapshot.holders:
        for allocation in holder.allocation_ids:
            found.setdefault((allocation, holder.device_uuid), set()).add(_owner(holder))
    return {key: next(iter(owners)) for key, owners in found.items() if len(owners) == 1}


def device_owners(snapshot: Snapshot) -> dict[str, Owner]:
    """By device: whoever alone is on it. A shared device has no owner: its values are not any one sharer's."""
    found: dict[str, set[Owner]] = {}
    for holder in snapshot.holders:
        found.setdefault(holder.device_uuid, set()).add(_owner(holder))
    sharers: dict[str, set[str]] = {}
    for part in snapshot.slices:
        sharers.setdefault(part.device_uuid, set()).add(part.allocation_id)
    return {uuid: next(iter(owners)) for uuid, owners in found.items() if len(owners) == 1 and len(sharers.get(uuid, ())) <= 1}


def process_key(process: ProcessSnapshot) -> tuple[str, int, int]:
    """What names a process on a device."""
    return process.device_uuid, process.pid, process.start_ticks


def unbilled(snapshot: Snapshot) -> frozenset[tuple[str, int, int]]:
    """Processes that nobody is billed for. A slice with a meter is billed by that alone, one without for its processes, a whole card for all."""
    standing: dict[str, list[SliceSnapshot]] = {}
    for part in snapshot.slices:
        if part.state != "suspended":
            standing.setdefault(part.device_uuid, []).append(part)

    def billed(process: ProcessSnapshot) -> bool:
        parts = standing.get(process.device_uuid, [])
        if process.allocation_id is None:
            parts = [part for part in parts if part.mode == Mode.WHOLE.value] if len(parts) == 1 else []
        else:
            parts = [part for part in parts if part.allocation_id == process.allocation_id]
        return any(part.used_basis != UsedBasis.HOOK.value for part in parts)

    return frozenset(process_key(process) for process in snapshot.processes if not process.hooked and not billed(process))
