"""Mode whole: the card belongs to one allocation; the hook meters and limits nothing."""

from collections.abc import Mapping
from pathlib import Path

from poolmeter.enforcer.actuators.hook import store
from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import Refused
from poolmeter.model.allocation import Allocation, AllocationState, Mode
from poolmeter.pages.grant import DeviceGrant


class WholeActuator:
    """A grant without limits: admission keeps everybody else away."""

    mode = Mode.WHOLE

    def check(self, request: AllocationRequest) -> None:
        """Raises Refused for a share: a whole card has none."""
        if request.compute_ppm is not None or request.memory_bytes is not None:
            raise Refused("mode is whole and a share is given, expected neither --compute nor --memory, or mode hook")

    def apply(self, folder: Path, allocation: Allocation, devices: Mapping[str, Device]) -> int:
        # Released or suspended, it must not go on taking memory that is promised to the next one.
        limit = None if allocation.state is AllocationState.ACTIVE else 0
        shown = allocation.state is not AllocationState.SUSPENDED
        entries = (DeviceGrant(uuid=item.device_uuid, memory_bytes=limit, show_memory=shown) for item in allocation.slices)
        return store(folder, allocation, tuple(entries))
