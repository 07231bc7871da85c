"""Holders: containers, pods, jobs, units and users on each device, from the processes of a tick and from what was assigned."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
    found: dict[tuple[str, str], HolderSnapshot] = {}
    unknown_memory: set[tuple[str, str]] = set()
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
        part = found.get(place) or _holder(who.holder, held.device_uuid, who.merged, who.source, False, origin)
        memory = part.unaccounted_memory_bytes
        if not held.hooked:
            if held.memory_bytes is None:
                unknown_memory.add(place)
            else:
                memory = (memory or 0) + held.memory_bytes
        found[place] = replace(
            part,
            processes=part.processes + 1,
            hooked_processes=part.hooked_processes + held.hooked,
            allocation_ids=tuple(sorted({*part.allocation_ids, *([who.merged.allocation_id] if who.merged.allocation_id else [])})),
            unaccounted_memory_bytes=memory,
            unaccounted_us_total=unaccounted_us.get(f"{held.device_uuid}|{who.holder}"),
        )
    for place in unknown_memory:
        found[place] = replace(found[place], unaccounted_memory_bytes=None)
    for claim in assigned:
        holder = holder_of(claim)
        for uuid in claim.device_uuids or ():
            if holder is None or uuid not in known:
                continue
            place = (holder, uuid)
            part = found.get(place) or _holder(holder, uuid, claim, claim.source if claim.tenant else None, True, origin)
            found[place] = replace(part, assigned=True)
    return tuple(found[place] for place in sorted(found) if place[0] not in waiting)


def _holder(name: str, uuid: str, claim: Claim, source: str | None, assigned: bool, origin: str) -> HolderSnapshot:
    return HolderSnapshot(
        id=name,
        device_uuid=uuid,
        origin=origin,
        source=source or claim.source,
        assigned=assigned,
        processes=0,
        hooked_processes=0,
        tenant=claim.tenant,
        namespace=claim.namespace,
        pod=claim.pod,
        pod_uid=claim.pod_uid,
        container=claim.container,
        container_id=claim.container_id,
        image=claim.image,
        job=claim.job,
        unit=claim.unit,
        user=claim.user,
    )
