"""Snapshots with pods and containers, as attribution makes them."""

import dataclasses

from poolmeter.exporter.collectors.family import Page
from poolmeter.model.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """A container on a device."""

    device_uuid: str
    allocation_ids: tuple[str, ...]
    namespace: str | None
    pod: str | None
    container: str | None
    container_id: str | None
    pod_uid: str | None = None
    image: str | None = None
    job: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldSnapshot(Snapshot):
    """A snapshot that says who holds what."""

    holders: tuple[Holder, ...] = ()


def with_holders(page: Page, *holders: tuple[str | None, str, str, str, str]) -> Page:
    """The page with containers: allocation, device, namespace, pod, container of each."""
    values = {field.name: getattr(page.snapshot, field.name) for field in dataclasses.fields(page.snapshot) if field.name != "holders"}
    made = tuple(
        Holder(
            allocation_ids=(allocation,) if allocation else (),
            device_uuid=uuid,
            namespace=namespace,
            pod=pod,
            container=container,
            container_id=f"c-{allocation}",
        )
        for allocation, uuid, namespace, pod, container in holders
    )
    return dataclasses.replace(page, snapshot=HeldSnapshot(**values, holders=made))
