"""What an attribution source answers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


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
    """One source of answers."""

    name: str

    def owner_of(self, process: ProcessKey) -> Owner | None:
        """Whose the process is; None when this source does not know."""
        ...
