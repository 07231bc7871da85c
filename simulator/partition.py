"""How a simulated card is partitioned: MIG devices by profile, vGPUs by type, and the calls of libpoolmeter_sim that lay them out."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from poolmeter.errors import BadInput
from poolmeter.model.units import GIB

MAX_INSTANCES, MAX_VGPUS, SLICES = 7, 16, 7
_PROFILE = re.compile(r"([1-47])g\.(\d{1,3})gb")
# Memory slices of a profile by its compute slices: a card has eight, and 3 compute slices come with 4 of them.
_MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}


@dataclass(frozen=True)
class MigLayout:
    """A MIG device: its profile, compute slices, first memory slice and how many, memory in bytes."""

    profile: str
    slices: int
    start: int
    size: int
    memory: int


@dataclass(frozen=True)
class VgpuConfig:
    """A vGPU: its type, the virtual machine it is given to, memory in bytes, what it uses of the card in percent, whether it is licensed."""

    type: str
    vm: str
    framebuffer: int
    used: int = 0
    busy_percent: int = 0
    licensed: bool = True


def lay_out(profiles: Sequence[str], where: str) -> tuple[MigLayout, ...]:
    """Places profiles (`3g.71gb`) one after the other on a card of 7 compute slices and 8 memory slices. An empty text leaves its slot empty.

    Raises BadInput for a text that is no profile, and when they do not fit.
    """
    placed, start, compute = list[MigLayout](), 0, 0
    if len(profiles) > MAX_INSTANCES:
        raise BadInput(f"{where} has {len(profiles)} MIG devices, expected at most {MAX_INSTANCES}")
    for profile in profiles:
        match = _PROFILE.fullmatch(profile)
        if match is None and profile:
            raise BadInput(f"{where} has the MIG profile {profile!r:.40}, expected one like 1g.18gb with 1, 2, 3, 4 or 7 slices")
        slices = int(match.group(1)) if match else 0
        size = _MEMORY_SLICES.get(slices, 0)
        memory = int(match.group(2)) * GIB if match else 0
        placed.append(MigLayout(profile, slices, start, size, memory))
        start, compute = start + size, compute + slices
    if start > SLICES + 1 or compute > SLICES:
        raise BadInput(
            f"{where} has MIG devices of {compute} compute and {start} memory slices, expected at most {SLICES} and {SLICES + 1}"
        )
    return tuple(placed)


def signatures() -> dict[str, tuple[object, list[object]]]:
    """Results and arguments of the accessor's calls for this."""
    u32, u64, text, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
    return {
        "psim_instance": (ctypes.c_int, [pointer, u32, u32, text, text, u32, u32, u32, u64]),
        "psim_assign": (ctypes.c_int, [pointer, u32, u32, u32]),
        "psim_vgpu": (ctypes.c_int, [pointer, u32, u32, text, text, text, u64, u64, u32, u32]),
    }


def derived_uuid(seed: str, prefix: str = "") -> str:
    """A UUID that follows from a text."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    return f"{prefix}{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def set_instances(library: ctypes.CDLL, handle: int, device: int, uuid: str, layout: Sequence[MigLayout]) -> None:
    """Lays a card's MIG devices out anew; slots beyond the layout are empty. A MIG device's UUID follows from card, slot and profile."""
    for slot in range(MAX_INSTANCES):
        item = layout[slot] if slot < len(layout) else MigLayout("", 0, 0, 0, 0)
        name = derived_uuid(f"{uuid}/{slot}/{item.profile}", "MIG-")
        library.psim_instance(handle, device, slot, name.encode(), item.profile.encode(), item.slices, item.start, item.size, item.memory)


def set_vgpus(library: ctypes.CDLL, handle: int, device: int, uuid: str, vgpus: Sequence[VgpuConfig]) -> None:
    """Makes a card's vGPUs anew; places beyond them are empty."""
    for place in range(MAX_VGPUS):
        item = vgpus[place] if place < len(vgpus) else VgpuConfig("", "", 0)
        name = derived_uuid(f"{uuid}/vgpu/{place}/{item.vm}")
        library.psim_vgpu(
            handle,
            device,
            place,
            name.encode(),
            item.type.encode(),
            item.vm.encode(),
            item.framebuffer,
            item.used,
            item.busy_percent,
            item.licensed,
        )
