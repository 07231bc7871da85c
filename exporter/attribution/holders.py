"""Holders: containers, pods, jobs, units and users on each device, from the processes of a tick and from what was assigned."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.who import Belonging, holder_of
from poolmeter.model.snapshot import Claim, HolderSnapshot


@dataclass(frozen=True)
class Held:
    """A process on a device. `memory_bytes` and `hooked` of that device; None is what is not known."""

    key: ProcessKey
    device_uuid: str
    hooked: bool
    memory_bytes: int | None


def holders_of(
    processes: Iterable[Held],
    belongings: Mapping[ProcessKey, Belonging],
    assigned: Iterable[Claim],
    devices: Iterable[str],
    unaccounted_us: Mapping[str, int],
    origin: str,
) -> tuple[HolderSnapshot, ...]:
    """Holders by device and name. `unaccounted_us`: device time of processes without the hook by `uuid|holder`.

    A holder is told once its sources have said all they will, so that its labels do not change. A hooked process of which nothing but a
    unit or a user is known has none: its slice says more.
    """
    known = set(devices)
    found: dict[tuple[str, str], _Sum] = {}
    waiting: set[str] = set()
    for held in processes:
        who = belongings.get(held.key)
        if who is None or who.holder is None:
            continue
        if not who.settled:
            waiting.add(who.holder)
        if held.hooked and who.holder.startswith(("unit/", "user/")):
            continue
        place = (who.holder, held.device_uuid)
        part = found.get(place)
        if part is None:
            part = found[place] = _Sum(who.merged, who.source or who.merged.source)
        part.processes += 1
        part.hooked += held.hooked
        if who.merged.allocation_id is not None:
            part.allocations.add(who.merged.allocation_id)
        if not held.hooked:
            part.memory.append(held.memory_bytes)
    for claim in assigned:
        holder = holder_of(claim)
        for uuid in claim.device_uuids or ():
            if holder is not None and uuid in known:
                found.setdefault((holder, uuid), _Sum(claim, claim.source)).assigned = True
    return tuple(
        _holder(name, uuid, part, unaccounted_us.get(f"{uuid}|{name}"), origin)
        for (name, uuid), part in sorted(found.items(), key=lambda item: item[0])
        if name not in waiting
    )


@dataclass
class _Sum:
    claim: Claim
    source: str
    assigned: bool = False
    processes: int = 0
    hooked: int = 0
    allocations: set[str] = field(default_factory=set)
    memory: list[int | None] = field(default_factory=list)  # of processes without the hook


def _holder(name: str, uuid: str, part: _Sum, unaccounted_us: int | None, origin: str) -> HolderSnapshot:
    claim = part.claim
    known = [memory for memory in part.memory if memory is not None]
    return HolderSnapshot(
        id=name,
        device_uuid=uuid,
        origin=origin,
        source=part.source,
        assigned=part.assigned,
        processes=part.processes,
        hooked_processes=part.hooked,
        tenant=claim.tenant,
        allocation_ids=tuple(sorted(part.allocations)),
        namespace=claim.namespace,
        pod=claim.pod,
        pod_uid=claim.pod_uid,
        container=claim.container,
        container_id=claim.container_id,
        image=claim.image,
        job=claim.job,
        unit=claim.unit,
        user=claim.user,
        unaccounted_memory_bytes=sum(known) if part.memory and len(known) == len(part.memory) else None,
        unaccounted_us_total=unaccounted_us if part.processes else None,
    )
