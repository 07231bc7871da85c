"""Names under which others know devices: identifiers of device plug-ins, replicas of time slicing, CDI and DRA names, indices."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from poolmeter.vendors.reading import DeviceReading

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
# `::3` a replica of NVIDIA's device plug-in, `-3` or `_3` one of HAMi and of Volcano.
_CARD = re.compile(rf"^((?:GPU|MIG)-{_UUID})(?:::[0-9]+|[-_][0-9]{{1,4}})?$")
_OLD_MIG = re.compile(rf"^MIG-(GPU-{_UUID})/[0-9]+/[0-9]+(?:::[0-9]+)?$")
_INDEX = re.compile(r"^([0-9]{1,4})(?:[:.][0-9]{1,4})?(?:::[0-9]+)?$")  # 0, and 0:1 or 0.1 for an instance of card 0
_DRA = re.compile(r"^gpu-([0-9]{1,4})(?:-mig-[A-Za-z0-9._-]+)?$")
_NODE = re.compile(r"^nvidia([0-9]{1,4})(?:/gi[0-9]+)?(?:/vgpu[0-9]+)?$")  # GKE: the device file, an instance of it, a replica
_CDI = re.compile(r"^[A-Za-z0-9.-]+/[A-Za-z0-9._-]+=(.+)$")


@dataclass(frozen=True)
class DeviceNames:
    """The devices of this node by every name that others use."""

    uuids: frozenset[str] = frozenset()
    by_index: tuple[tuple[int, str], ...] = ()
    by_minor: tuple[tuple[int, str], ...] = ()
    by_instance: tuple[tuple[str, str], ...] = ()  # MIG instance -> its card

    def resolve(self, name: str) -> tuple[str, ...]:
        """UUIDs of the devices that `name` means; of an instance that is not listed by itself, its card's; empty for a name nobody here has.

        A UUID that is well-formed and unknown is given back as it is: the device may be down.
        """
        if match := _CDI.match(name):
            name = match[1]
            if name == "all":
                return tuple(sorted(self.uuids))
        if match := _OLD_MIG.match(name):
            return (match[1],)
        if match := _CARD.match(name):
            uuid = match[1]
            return (uuid if uuid in self.uuids else next((card for instance, card in self.by_instance if instance == uuid), uuid),)
        if match := _DRA.match(name):
            # The DRA driver counts by minor number.
            return tuple(uuid for minor, uuid in self.by_minor or self.by_index if minor == int(match[1]))
        if match := _NODE.match(name):
            return tuple(uuid for minor, uuid in self.by_minor if minor == int(match[1]))
        if match := _INDEX.match(name):
            return tuple(uuid for index, uuid in self.by_index if index == int(match[1]))
        return ()


def names_of(devices: Iterable[DeviceReading]) -> DeviceNames:
    """The names of these devices."""
    known = tuple(devices)
    return DeviceNames(
        frozenset(device.uuid for device in known),
        tuple((device.index, device.uuid) for device in known),
        tuple((device.minor, device.uuid) for device in known if device.minor is not None),
        tuple((instance.uuid, device.uuid) for device in known for instance in device.hardware.instances or ()),
    )
