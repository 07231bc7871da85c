"""Whose pod, container and job a slice or a device belongs to, from what attribution put into a snapshot."""

from dataclasses import dataclass

from poolmeter.model.snapshot import HolderSnapshot, Snapshot


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
