"""What a tick saw, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.instances import InstanceUse
from poolmeter.model.usage import UsageRecord
from poolmeter.vendors.reading import DeviceReading


@dataclass(frozen=True)
class Observation:
    """What one tick saw. `devices` None: the vendor's library gave nothing that is still valid; `origin` of its integrated counters."""

    devices: Mapping[str, DeviceReading] | None
    origin: str
    allocations: Mapping[str, AllocationReading]
    unidentified: int = 0  # devices that did not say who they are
    instances: Mapping[str, list[InstanceUse]] = field(default_factory=dict)  # of cards in MIG mode that tell it, by card


@dataclass
class Outcome:
    """Records closed and oddities found by a tick."""

    records: list[UsageRecord] = field(default_factory=list)
    tampered: list[tuple[str, str | None, str]] = field(default_factory=list)  # allocation, device, reason
