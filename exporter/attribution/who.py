"""Joining the sources: whose a process is by the most trusted one that says so, what the others say, and where they disagree.

The order of trust and its reasons: docs/reference/attribution.md.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from poolmeter.exporter.attribution.devices import names_of
from poolmeter.exporter.attribution.own import OwnAllocations
from poolmeter.exporter.attribution.process import Facts, Processes
from poolmeter.exporter.attribution.source import Attribution, ProcessKey, Quiet
from poolmeter.model.naming import printable
from poolmeter.model.snapshot import AttributionFault, Claim, Disagreement, SourceHealth
from poolmeter.vendors.proc import PROC
from poolmeter.vendors.reading import DeviceReading

T = TypeVar("T")
_LOG = logging.getLogger("poolmeter.exporter")
SETTLE_US = 10_000_000  # a source that has not answered by then is not waited for
_BROKEN: object = "broken"
_NO_CLAIMS: tuple[Claim, ...] = ()
_NO_FAULTS: tuple[AttributionFault, ...] = ()
_COMPARED = ("allocation_id", "namespace", "pod", "container_id", "job", "user")
_KINDS = ("allocation_id", "namespace", "pod", "pod_uid", "container", "container_id", "image", "job", "unit", "user")


@dataclass(frozen=True)
class Belonging:
    """Whose a process is. `holder`: its container, pod, job, unit or user. `settled` False: a source may still say more."""

    tenant: str | None
    source: str | None
    holder: str | None
    merged: Claim
    claims: tuple[Claim, ...]
    disagreements: tuple[Disagreement, ...]
    framework: str | None
    namespace_pid: int | None
    settled: bool


class Allocations(Quiet):
    """Our own allocations as one source among the others."""

    name = "allocations"

    def __init__(self, own: OwnAllocations) -> None:
        self._own = own

    def version(self) -> object:
        return None  # a process takes a slot from one tick to the next

    def claim(self, facts: Facts) -> Claim | None:
        owner = self._own.owner_of(facts.key) or self._own.started_by((facts.key, *facts.ancestors))
        return None if owner is None else Claim(source=self.name, tenant=owner.tenant, allocation_id=owner.allocation_id)


class Who:
    """All sources, the most trusted first. One that fails is logged and left out; it never stops a tick."""

    def __init__(self, sources: Sequence[Attribution], proc: Path = PROC) -> None:
        self._sources = tuple(sources)
        # Also those that were asked before: what they said last stands in the agent's list of sources.
        self.names = frozenset(source.name for source in sources)
        self._processes = Processes(proc)
        self._known: dict[ProcessKey, Belonging] = {}
        self._joined: dict[ProcessKey, tuple[Facts, object, tuple[Claim | None, ...]]] = {}
        self._broken: dict[str, str] = {}
        self._taken_us: int | None = None
        self._anew = False
        # What the sources of before said, until those of now have: whose processes are, and by source what devices were given to.
        self._kept: dict[ProcessKey, Belonging] = {}
        self._given: dict[str, tuple[Claim, ...]] = {}

    def take(self, other: "Who") -> None:
        """Go on with the sources of `other`, between two ticks. What they still have to find out is waited for as for a new process, and
        meanwhile what the sources of before said stands."""
        self._given = {
            source.name: self._ask(source, source.assigned, _NO_CLAIMS) or self._given.get(source.name, ()) for source in self._sources
        }
        for source in self._sources:
            source.close()
        self._sources, self.names = other._sources, self.names | other.names
        self._joined, self._anew = {}, True
        self._kept = {key: belonging for key, belonging in self._known.items() if belonging.settled}

    def refresh(self, devices: Mapping[str, DeviceReading] | None, hooked: Iterable[ProcessKey], now_us: int) -> None:
        """Take the processes of this tick: those that cards list and those behind live slots. One that has ended before anybody could say
        whose it was is asked for as long as a live one would be."""
        on: dict[ProcessKey, set[str]] = {key: set() for key in hooked}
        for uuid, device in (devices or {}).items():
            for process in device.processes:
                if process.start_ticks is not None:
                    on.setdefault(ProcessKey(process.pid, process.start_ticks), set()).add(uuid)
        for key, belonging in self._known.items():
            if not belonging.settled and key not in on and (left := self._processes.of(key)) is not None:
                on[key] = set(left.devices)
        facts = self._processes.refresh(((key, frozenset(uuids)) for key, uuids in on.items()), now_us)
        names = names_of((devices or {}).values())
        self._broken = {}
        if self._anew:
            self._taken_us, self._anew = now_us, False
        if self._taken_us is not None and now_us - self._taken_us >= SETTLE_US:
            self._given = {}
        for source in self._sources:
            self._ask(source, partial(source.refresh, facts, names), None)
        versions = tuple(self._ask(source, source.version, _BROKEN) for source in self._sources)
        known, joined = {}, {}
        for key, fact in facts.items():
            before = self._joined.get(key)
            fresh = tuple(self._claim(s, fact) if v is None else None for s, v in zip(self._sources, versions, strict=True))
            # Most ticks change nothing, and there may be hundreds of processes.
            if before is not None and before[0] is fact and before[1:] == (versions, fresh) and self._known[key].settled:
                known[key], joined[key] = self._known[key], before
                continue
            said = self._join(fact, versions, fresh, now_us)
            if said.settled or key not in self._kept:
                known[key], joined[key] = said, (fact, versions, fresh)
            else:
                known[key] = self._kept[key]
        self._known, self._joined = known, joined
        self._kept = {key: kept for key, kept in self._kept.items() if known.get(key) is kept}

    def of(self, key: ProcessKey) -> Belonging | None:
        """Whose a process of this tick is."""
        return self._known.get(key)

    def all(self) -> Mapping[ProcessKey, Belonging]:
        """Every process of this tick."""
        return self._known

    def assigned(self) -> tuple[Claim, ...]:
        """What devices were given to, whether or not a process is there."""
        return tuple(claim for source in self._sources for claim in self._assigned(source))

    def _assigned(self, source: Attribution) -> tuple[Claim, ...]:
        if source.name in self._given:
            health = self._ask(source, source.health, None)
            if health is not None and health.at_us is None:
                return self._given[source.name]  # it is in use, and has not answered once
            del self._given[source.name]
        return self._ask(source, source.assigned, _NO_CLAIMS)

    def health(self) -> tuple[SourceHealth, ...]:
        """Every source in use, and one that broke."""
        found = []
        for source in self._sources:
            health = self._ask(source, source.health, None)
            if source.name in self._broken:
                # Our own allocations have a row of their own, which says how their folders are.
                name = "attribution" if source.name == "allocations" else source.name
                reason = self._broken[source.name]
                found.append(SourceHealth(source=name, ok=False, at_us=None, duration_us=None, reason=reason))
            elif health is not None:
                found.append(health)
        return tuple(found)

    def faults(self) -> tuple[AttributionFault, ...]:
        """What sources could not use."""
        return tuple(fault for source in self._sources for fault in self._ask(source, source.faults, _NO_FAULTS))

    def close(self) -> None:
        """End the threads."""
        self._processes.close()
        for source in self._sources:
            source.close()

    def _ask(self, source: Attribution, call: Callable[[], T], default: T) -> T:
        """What the source answers; `default` from one that has broken in this tick, or does so now."""
        if source.name in self._broken:
            return default
        try:
            return call()
        except Exception as error:
            _LOG.error("attribution by %s failed", source.name, exc_info=error)
            self._broken[source.name] = f"{source.name} failed: {type(error).__name__}: {error!s:.160}"
            return default

    def _claim(self, source: Attribution, facts: Facts) -> Claim | None:
        return self._ask(source, partial(source.claim, facts), None)

    def _join(self, facts: Facts, versions: tuple[object, ...], fresh: tuple[Claim | None, ...], now_us: int) -> Belonging:
        claims = [
            claim
            for source, version, taken in zip(self._sources, versions, fresh, strict=True)
            if (claim := taken if version is None else self._claim(source, facts)) is not None
        ]
        waiting = any(self._ask(source, partial(source.pending, facts), False) for source in self._sources)
        merged = merge(claims)
        first = next((claim for claim in claims if claim.tenant is not None), None)
        return Belonging(
            first.tenant if first else None,
            first.source if first else None,
            holder_of(merged),
            merged,
            tuple(claims),
            disagreements(claims, facts.devices, nested=facts.place.nested if facts.place else False),
            facts.framework,
            facts.namespace_pid,
            not waiting or now_us - max(facts.first_us, self._taken_us or facts.first_us) >= SETTLE_US,
        )


def merge(claims: Sequence[Claim]) -> Claim:
    """One claim of all: each field from the most trusted source that has it. `source` is the first, of the one that named the holder."""
    values: dict[str, str] = {}
    for claim in claims:
        for kind in _KINDS:
            value = getattr(claim, kind)
            if value is not None and kind not in values and not _foreign(kind, claim, values):
                values[kind] = value
    tenant = next((claim.tenant for claim in claims if claim.tenant is not None), None)
    return Claim(source=claims[0].source if claims else "", tenant=tenant, **values)  # type: ignore[arg-type]  # keys are _KINDS


def _foreign(kind: str, claim: Claim, values: Mapping[str, str]) -> bool:
    """Whether a claim speaks of another container than the one that is believed: its name and image are not ours."""
    return (
        kind in ("container", "image")
        and claim.container_id is not None
        and values.get("container_id", claim.container_id) != claim.container_id
    )


def holder_of(claim: Claim) -> str | None:
    """A name for what the process belongs to, the most particular thing that is known; it names the same thing as long as that lives."""
    if claim.pod is not None and claim.namespace is not None:
        parts = ["pod", claim.namespace, claim.pod, *([claim.container] if claim.container else [])]
        return printable("/".join(parts), 512)
    if claim.pod_uid is not None:
        return f"pod/{claim.pod_uid}"
    if claim.job is not None:
        return f"job/{claim.job}"
    if claim.container_id is not None:
        # Of a user's own containers alone the user is known, and the id is what he says it is.
        return f"container/{claim.container_id[:12]}" + (f"/{claim.user}" if claim.user else "")
    if claim.unit is not None:
        return f"unit/{claim.unit}" + (f"/{claim.user}" if claim.user and claim.user != "root" else "")
    return f"user/{claim.user}" if claim.user is not None else None


def disagreements(claims: Sequence[Claim], devices: frozenset[str], nested: bool = False) -> tuple[Disagreement, ...]:
    """Where later claims say something else than earlier ones, and where a process is on a device that its holder was not given.

    A tenant that stands in for none (`firm` False) is no contradiction; neither are the two containers of a pod inside a container.
    """
    found = []
    for index, claim in enumerate(claims):
        for other in claims[index + 1 :]:
            if claim.tenant and other.tenant and claim.firm and other.firm and claim.tenant != other.tenant:
                found.append(
                    Disagreement(field="tenant", source=claim.source, value=claim.tenant, other=other.source, other_value=other.tenant)
                )
            for kind in _COMPARED:
                mine, theirs = getattr(claim, kind), getattr(other, kind)
                if mine is None or theirs is None or mine == theirs or (nested and kind == "container_id"):
                    continue
                found.append(Disagreement(field=kind, source=claim.source, value=mine, other=other.source, other_value=theirs))
        # An instance that no card here tells of may be a part of any of them.
        if claim.device_uuids is not None and not any(uuid.startswith("MIG-") and uuid not in devices for uuid in claim.device_uuids):
            beyond = sorted(devices - set(claim.device_uuids))
            if beyond:
                given = ", ".join(claim.device_uuids) or "none"
                found.append(
                    Disagreement(
                        field="device",
                        source="nvml",
                        value=printable(", ".join(beyond), 512),
                        other=claim.source,
                        other_value=printable(given, 512),
                    )
                )
    return tuple(found)
