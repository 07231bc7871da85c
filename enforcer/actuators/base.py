"""What an actuator provides, and the one that stands for a mode this version does not carry out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import Refused
from poolmeter.model.allocation import Allocation, Mode


class Actuator(Protocol):
    """Makes the promises of one mode come true."""

    @property
    def mode(self) -> Mode:
        """The mode it carries out."""
        ...

    def check(self, request: AllocationRequest) -> None:
        """Raises Refused for what this mode cannot do."""
        ...

    def apply(self, folder: Path, allocation: Allocation, devices: Mapping[str, Device]) -> int:
        """Puts the allocation's limits in force and returns their generation; `devices` are the node's by UUID.

        Doing it again changes nothing but the generation.
        """
        ...


class Refusing:
    """A mode that is known and not carried out."""

    def __init__(self, mode: Mode, lacks: str) -> None:
        self.mode = mode
        self._lacks = lacks

    def check(self, request: AllocationRequest) -> None:
        raise Refused(f"mode is {self.mode.value}, expected hook or whole: {self._lacks} is not supported by this version")

    def apply(self, folder: Path, allocation: Allocation, devices: Mapping[str, Device]) -> int:
        raise Refused(f"allocation {allocation.id} has mode {self.mode.value}, expected hook or whole")
