"""Cards on the PCI bus that the vendor's library does not list, from sysfs: passed through, handed out as vGPUs, or not up.

A card bound to vfio-pci is a virtual machine's, whole. A virtual function (SR-IOV) or a mediated device (mdev) is a part of its physical
card by its profile. What they do is unknown here: only the guest can say.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from poolmeter.model.hardware import BusFunction

SYSFS = Path("/sys")
NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def bus_key(bus_id: str) -> str:
    """One spelling of a bus id: NVML writes a domain of eight digits and capital letters, sysfs one of four and small ones."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest and all(c in "0123456789abcdef" for c in domain) and domain else bus_id.lower()


def read_functions(
    listed: Iterable[str], sysfs: Path = SYSFS, vendor: str = NVIDIA, drivers: tuple[str, ...] = ("nvidia",)
) -> tuple[BusFunction, ...]:
    """Display and compute functions of a vendor that are not among the bus ids `listed`, and mediated devices of all of them.

    `drivers` are the vendor's own. A tree that cannot be read gives nothing.
    """
    known = {bus_key(bus_id) for bus_id in listed}
    found = []
    for folder in _sorted(sysfs / "bus/pci/devices"):
        if _word(folder / "vendor") != vendor or not (_word(folder / "class") or "").startswith(_DISPLAY_CLASSES):
            continue
        bus_id = bus_key(folder.name)
        found += list(_mediated(sysfs, folder, bus_id))
        if bus_id in known:
            continue
        driver, parent = _link(folder / "driver"), _link(folder / "physfn")
        profile = _word(folder / "nvidia/current_vgpu_type")
        if parent is not None and profile in (None, "0") and driver in (None, *drivers):
            continue  # a virtual function that nobody was given
        found.append(
            BusFunction(
                pci_bus_id=bus_id,
                state=_state(driver, parent, drivers),
                driver=driver,
                device_id=_word(folder / "device"),
                parent=bus_key(parent) if parent else None,
                profile=None if profile in (None, "0") else _profile_name(folder, profile),
            )
        )
    return tuple(found)


def _state(driver: str | None, parent: str | None, drivers: tuple[str, ...]) -> str:
    if parent is not None:
        return "virtual_function"
    if driver is None:
        return "unbound"
    return "passed_through" if driver.startswith("vfio") else "not_up" if driver in drivers else "other_driver"


def _mediated(sysfs: Path, folder: Path, bus_id: str) -> Iterator[BusFunction]:
    """Mediated devices made on the function: each is a folder named by its UUID, with a link to its type."""
    for device in _sorted(folder):
        kind = _link(device / "mdev_type")
        if kind is None:
            continue
        parent = _link(folder / "physfn")
        yield BusFunction(
            pci_bus_id=bus_id,
            state="mediated",
            driver=_link(device / "driver"),
            device_id=_word(folder / "device"),
            parent=bus_key(parent) if parent else bus_id,
            profile=_word(folder / "mdev_supported_types" / kind / "name") or kind,
            uuid=device.name,
        )


def _profile_name(folder: Path, number: str) -> str:
    """The name of a vGPU type by its number, as the driver lists those that could be made; a full card lists none any more."""
    for line in (_text(folder / "nvidia/creatable_vgpu_types") or "").splitlines():
        identifier, colon, name = line.partition(":")
        if colon and identifier.strip() == number:
            return name.strip()
    return number


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return None


def _word(file: Path) -> str | None:
    text = _text(file)
    return None if text is None else text.strip() or None


def _link(path: Path) -> str | None:
    try:
        return path.readlink().name
    except OSError:
        return None
