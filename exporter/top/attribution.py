"""Pod, container, job, unit, user and framework of a process as the exporter attributes it, where the snapshot says so.

A snapshot of an exporter that attributes nothing has no `attributions`; then what this machine's /proc says is all there is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Named:
    """Where a process runs, as whom, and with what; `by` is the source that is believed for its tenant."""

    where: str | None = None
    user: str | None = None
    framework: str | None = None
    tenant: str | None = None
    by: str | None = None
    disagreements: tuple[str, ...] = ()


UNNAMED = Named()


def named(snapshot: object) -> Mapping[tuple[int, int], Named]:
    """What is said of each process, by pid and start time; claims come the most trusted first."""
    found: dict[tuple[int, int], Named] = {}
    for item in getattr(snapshot, "attributions", ()):
        claims = tuple(item.claims)
        found[item.pid, item.start_ticks] = Named(
            where=_first(place_of(claim) for claim in claims),
            user=_first(claim.user for claim in claims),
            framework=item.framework,
            tenant=item.tenant,
            by=item.source,
            disagreements=tuple(
                f"{fault.field}: {fault.source} says {fault.value}, {fault.other} says {fault.other_value}" for fault in item.disagreements
            ),
        )
    return found


def place_of(claim: Any) -> str | None:
    """`namespace/pod:container`, `job 7`, a container's name, a unit; None when the claim names none of them."""
    if claim.pod:
        inside = f":{claim.container}" if claim.container else ""
        return f"{claim.namespace}/{claim.pod}{inside}" if claim.namespace else f"{claim.pod}{inside}"
    if claim.job:
        return f"job {claim.job}"
    if claim.container:
        return str(claim.container)
    if claim.container_id:
        return f"container {claim.container_id[:12]}"
    return claim.unit or None


def _first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value), None)
