"""Snapshots with pods and containers, as attribution makes them."""

import dataclasses

from poolmeter.exporter.collectors.family import Page
from poolmeter.model.snapshot import AttributionFault, AttributionSnapshot, Disagreement, HolderSnapshot


def with_holders(page: Page, *holders: tuple[str | None, str, str, str, str]) -> Page:
    """The page with containers: allocation, device, namespace, pod, container of each."""
    made = tuple(
        HolderSnapshot(
            id=f"c-{allocation}",
            device_uuid=uuid,
            origin="epoch",
            source="kubernetes",
            assigned=True,
            processes=2,
            hooked_processes=1,
            tenant=namespace,
            allocation_ids=(allocation,) if allocation else (),
            namespace=namespace,
            pod=pod,
            container=container,
            container_id=f"c-{allocation}",
            unaccounted_memory_bytes=1 << 20,
            unaccounted_us_total=1_500_000,
        )
        for allocation, uuid, namespace, pod, container in holders
    )
    return dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, holders=made))


def with_attributions(page: Page) -> Page:
    """The page with an attribution of each of its processes that another source disagrees with, and a fault of a source."""
    said = tuple(
        AttributionSnapshot(
            pid=process.pid,
            start_ticks=process.start_ticks,
            tenant="vision",
            source="kubernetes",
            framework="cuda",
            disagreements=(Disagreement(field="tenant", source="kubernetes", value="vision", other="docker", other_value="speech"),),
        )
        for process in page.snapshot.processes
    )
    faults = (AttributionFault(source="slurm", kind="half-written", count=1),)
    return dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, attributions=said, attribution_faults=faults))
