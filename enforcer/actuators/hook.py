"""Mode hook: limits in a grant page that the hook in the programs obeys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.model.allocation import Allocation, AllocationState, Mode
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant


class HookActuator:
    """Device time and memory limits by the hook."""

    mode = Mode.HOOK

    def check(self, request: AllocationRequest) -> None:
        """Every checked request can be carried out."""

    def apply(self, folder: Path, allocation: Allocation, devices: Mapping[str, Device]) -> int:
        # Suspended, it takes no new memory; showing that as a card of no size would be news that no program expects.
        rests = allocation.state is AllocationState.SUSPENDED
        entries = tuple(
            DeviceGrant(
                uuid=item.device_uuid,
                compute_ppm=item.compute_limit_ppm,
                memory_bytes=0 if rests else item.memory_bytes,
                show_memory=not rests,
                weight=item.weight,
                soft=item.soft,
                device_memory=devices[item.device_uuid].memory_bytes if item.device_uuid in devices else None,
            )
            for item in allocation.slices
        )
        return store(folder, allocation, entries)


def store(folder: Path, allocation: Allocation, entries: tuple[DeviceGrant, ...]) -> int:
    """Writes the grant page of an allocation; its new generation. A released allocation's page takes no new memory."""
    on_fault: Literal["run", "refuse"] = "run" if allocation.on_fault == "run" else "refuse"
    return write_grant(
        folder / "grant",
        Grant(
            allocation_id=allocation.id,
            devices=entries,
            decision_id=allocation.decision_id,
            on_fault=on_fault,
            suspended=allocation.state is not AllocationState.ACTIVE,
            charge_copies=allocation.charge_copies,
        ),
    )
