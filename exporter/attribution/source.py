"""What an attribution source answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from poolmeter.model.snapshot import AttributionFault, Claim, SourceHealth

if TYPE_CHECKING:
    from poolmeter.exporter.attribution.devices import DeviceNames
    from poolmeter.exporter.attribution.process import Facts


class ProcessKey(NamedTuple):
    """A process of this node: pid in the host namespace and start time in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Owner:
    """The allocation that a process belongs to; `hooked` when its use is in the allocation's meter."""

    allocation_id: str
    tenant: str | None
    hooked: bool


class Attribution(Protocol):
    """One source of claims. Nothing here waits: what takes time is done by a thread of the source's own, and taken over by `refresh`."""

    name: str

    def version(self) -> object:
        """Changes when the claims about a process whose facts are the same may have changed; None: ask every time."""
        ...

    def refresh(self, processes: "Mapping[ProcessKey, Facts]", devices: "DeviceNames") -> None:
        """Take the processes of this tick and the newest answers."""
        ...

    def claim(self, facts: "Facts") -> Claim | None:
        """What the source says of a process; None when it knows nothing."""
        ...

    def pending(self, facts: "Facts") -> bool:
        """Whether it may soon say more."""
        ...

    def assigned(self) -> tuple[Claim, ...]:
        """What holds devices by assignment, with `device_uuids`, whether or not a process is there."""
        ...

    def health(self) -> SourceHealth | None:
        """How the source does; None while it is not in use."""
        ...

    def faults(self) -> tuple[AttributionFault, ...]:
        """What could not be used at the last look."""
        ...

    def close(self) -> None: ...


class Quiet:
    """A source that has no answers of its own to wait for, nothing assigned, and cannot fail."""

    name = ""

    def version(self) -> object:
        """Claims follow from facts alone."""
        return 0

    def refresh(self, processes: "Mapping[ProcessKey, Facts]", devices: "DeviceNames") -> None:
        """Nothing to take."""

    def pending(self, facts: "Facts") -> bool:
        return False

    def assigned(self) -> tuple[Claim, ...]:
        return ()

    def health(self) -> SourceHealth | None:
        return None

    def faults(self) -> tuple[AttributionFault, ...]:
        return ()

    def close(self) -> None:
        """Nothing to let go of."""
