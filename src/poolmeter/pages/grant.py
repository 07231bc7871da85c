"""The grant page: limits of one allocation, written by the enforcer and read by hooks and exporters."""

import ctypes
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from poolmeter.errors import Unavailable
from poolmeter.pages import layout
from poolmeter.pages.access import check_magic, encoded, open_page, read_exactly, text
from poolmeter.pages.errors import PageError, TamperedPage
from poolmeter.pages.native import pages_library

_ATTEMPTS = 1000


@dataclass(frozen=True)
class DeviceGrant:
    """Limits on one device. `compute_ppm`: parts per million of its time, None: no limit. `memory_bytes`: over all processes, None: no limit."""

    uuid: str
    compute_ppm: int | None = None
    memory_bytes: int | None = None
    weight: int = 100
    soft: bool = False
    show_memory: bool = True
    mask_nvml: bool = False
    device_memory: int | None = None


@dataclass(frozen=True)
class Grant:
    """Limits of one allocation. A device that is not listed is denied. `generation` is even, grows with each change and is set by `write_grant`."""

    allocation_id: str
    devices: tuple[DeviceGrant, ...]
    generation: int = 0
    decision_id: str | None = None
    on_fault: Literal["run", "refuse"] = "run"
    suspended: bool = False
    charge_copies: bool = False
    created_ns: int = 0
    updated_ns: int = 0


def write_grant(path: Path, grant: Grant) -> int:
    """Makes the page at `path` say `grant` and returns its new generation.

    The first write creates the file whole (mode 0444 as root, else 0644); later ones change it in place, so that a program that has it mapped sees the new
    limits. A reader never sees half of a change. Raises ValueError for values that do not fit and PageError for a file that is no grant.
    """
    image = _image(grant)
    path = Path(path)
    if not path.exists() and not path.is_symlink():
        image.generation = 2
        image.created_ns = image.updated_ns
        _create(path, bytes(image))
        return 2
    with open_page(path, os.O_RDWR) as descriptor:
        # Not _read: a page whose writer died at work has an odd generation, and this writing is what mends it.
        current = layout.Grant.from_buffer_copy(read_exactly(descriptor, path, 0, ctypes.sizeof(layout.Grant)))
        check_magic(path, current.magic, current.abi_major, current.abi_minor, layout.GRANT_MAGIC)
        image.created_ns = current.created_ns
        outcome = pages_library().pm_pages_store_grant(descriptor, bytes(image), ctypes.sizeof(image))
        if outcome != 0:
            raise Unavailable(f"grant {path} cannot be written ({os.strerror(-outcome)}), expected a writable grant page")
        return int(_read(descriptor, path).generation)


def read_grant(path: str | Path) -> Grant:
    """The limits at `path`, of one instant. Raises TamperedPage, PageVersionError or Unavailable."""
    with open_page(path) as descriptor:
        page = _read(descriptor, path)
    return Grant(
        allocation_id=text(page.allocation_id, path, "allocation id"),
        devices=tuple(_device(page.devices[index], path) for index in range(page.device_count)),
        generation=page.generation,
        decision_id=text(page.decision_id, path, "decision id") or None,
        on_fault="refuse" if page.on_fault == layout.ON_FAULT_REFUSE else "run",
        suspended=bool(page.suspended),
        charge_copies=bool(page.charge_copies),
        created_ns=page.created_ns,
        updated_ns=page.updated_ns,
    )


def _read(descriptor: int, path: str | Path) -> layout.Grant:
    for attempt in range(_ATTEMPTS):
        page = layout.Grant.from_buffer_copy(read_exactly(descriptor, path, 0, ctypes.sizeof(layout.Grant)))
        check_magic(path, page.magic, page.abi_major, page.abi_minor, layout.GRANT_MAGIC)
        again = layout.Grant.from_buffer_copy(read_exactly(descriptor, path, 0, ctypes.sizeof(layout.Grant)))
        if page.generation % 2 == 0 and page.generation == again.generation:
            break
        time.sleep(0.0001 * min(attempt, 10))
    else:
        raise PageError(f"grant {path} stayed at generation {page.generation}, expected an even one: its writer died at work")
    expected = (layout.Grant.devices.offset, ctypes.sizeof(layout.GrantDevice), ctypes.sizeof(layout.Grant))
    found = (page.header_size, page.entry_size, page.total_size)
    if found != expected or page.device_count > layout.MAX_DEVICES:
        raise TamperedPage(f"grant {path} states sizes {found} and {page.device_count} devices, expected {expected} and at most 64")
    return page


def _device(entry: layout.GrantDevice, path: str | Path) -> DeviceGrant:
    return DeviceGrant(
        uuid=text(entry.uuid, path, "device uuid"),
        compute_ppm=None if entry.limit_ppm == layout.UNLIMITED else entry.limit_ppm,
        memory_bytes=None if entry.memory_limit == layout.UNLIMITED else entry.memory_limit,
        weight=entry.weight,
        soft=bool(entry.soft),
        show_memory=bool(entry.show_memory),
        mask_nvml=bool(entry.mask_nvml),
        device_memory=entry.device_memory or None,
    )


def _image(grant: Grant) -> layout.Grant:
    if len(grant.devices) > layout.MAX_DEVICES:
        raise ValueError(f"grant {grant.allocation_id} lists {len(grant.devices)} devices, expected at most {layout.MAX_DEVICES}")
    if len({device.uuid for device in grant.devices}) != len(grant.devices):
        raise ValueError(f"grant {grant.allocation_id} lists a device twice, expected each once")
    page = layout.Grant(
        magic=layout.GRANT_MAGIC,
        abi_major=layout.ABI_MAJOR,
        abi_minor=layout.ABI_MINOR,
        header_size=layout.Grant.devices.offset,
        entry_size=ctypes.sizeof(layout.GrantDevice),
        total_size=ctypes.sizeof(layout.Grant),
        device_count=len(grant.devices),
        device_capacity=layout.MAX_DEVICES,
        on_fault=layout.ON_FAULT_REFUSE if grant.on_fault == "refuse" else layout.ON_FAULT_RUN,
        suspended=grant.suspended,
        charge_copies=grant.charge_copies,
        updated_ns=time.time_ns(),
        allocation_id=encoded(grant.allocation_id, layout.ID_BYTES, "allocation id"),
        decision_id=encoded(grant.decision_id or "", layout.ID_BYTES, "decision id"),
    )
    for index, device in enumerate(grant.devices):
        page.devices[index] = layout.GrantDevice(
            uuid=encoded(device.uuid, layout.UUID_BYTES, "device uuid"),
            limit_ppm=_limit(device.compute_ppm, "compute_ppm"),
            memory_limit=_limit(device.memory_bytes, "memory_bytes"),
            weight=device.weight,
            soft=device.soft,
            show_memory=device.show_memory,
            mask_nvml=device.mask_nvml,
            device_index=index,
            device_memory=device.device_memory or 0,
        )
    return page


def _limit(value: int | None, name: str) -> int:
    if value is None:
        return layout.UNLIMITED
    if not 0 <= value < layout.UNLIMITED:
        raise ValueError(f"{name} is {value}, expected 0 to 2**64 - 2")
    return value


def _create(path: Path, data: bytes) -> None:
    # A name that nobody knows, then link(2): another creator's page is never replaced and no reader sees a part.
    descriptor, name = tempfile.mkstemp(prefix=".grant-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o444 if os.geteuid() == 0 else 0o644)  # only root may write what is read-only
        os.link(name, path)
    finally:
        os.unlink(name)
