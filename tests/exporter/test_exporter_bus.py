"""Cards that the library does not list, from a tree like sysfs: passed through, virtual functions, mediated devices, not up."""

from pathlib import Path

import pytest
from exporter_binding import Say, say

from poolmeter.model.hardware import BusFunction
from poolmeter.vendors.nvidia import NvidiaVendor
from poolmeter.vendors.pci import bus_key, read_functions

__all__ = ["say"]


class Tree:
    """A sysfs to be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "bus/pci/devices"
        self.devices.mkdir(parents=True)

    def function(
        self, bus: str, driver: str | None = "nvidia", vendor: str = "0x10de", kind: str = "0x030200", parent: str | None = None
    ) -> Path:
        folder = self.devices / bus
        folder.mkdir()
        for name, value in (("vendor", vendor), ("class", kind), ("device", "0x2335")):
            (folder / name).write_text(value + "\n")
        if driver is not None:
            self.bind(folder, driver)
        if parent is not None:
            (folder / "physfn").symlink_to(self.devices / parent)
        return folder

    def bind(self, folder: Path, driver: str) -> None:
        target = self.root / "bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (folder / "driver").unlink(missing_ok=True)
        (folder / "driver").symlink_to(target)

    def read(self, *listed: str) -> tuple[BusFunction, ...]:
        return read_functions(listed, self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_card_bound_to_vfio_is_passed_through_whole(tree: Tree) -> None:
    tree.function("0000:18:00.0")
    tree.function("0000:28:00.0", "vfio-pci")
    (found,) = tree.read("00000000:18:00.0")
    assert found == BusFunction(pci_bus_id="0000:28:00.0", state="passed_through", driver="vfio-pci", device_id="0x2335")


def test_cards_of_others_and_other_kinds_of_device_are_left_out(tree: Tree) -> None:
    tree.function("0000:01:00.0", vendor="0x8086")
    tree.function("0000:18:00.1", kind="0x040300")  # a card's sound
    tree.function("0000:a1:00.0", "nvidia", kind="0x068000")  # an NVSwitch
    assert tree.read() == ()


@pytest.mark.parametrize(
    ("driver", "state"), [("nvidia", "not_up"), ("nouveau", "other_driver"), (None, "unbound"), ("vfio-pci", "passed_through")]
)
def test_cards_not_yet_up(tree: Tree, driver: str | None, state: str) -> None:
    tree.function("0000:18:00.0", driver)
    (found,) = tree.read()
    assert (found.state, found.driver) == (state, driver)


def test_virtual_functions_are_shown_when_somebody_has_them(tree: Tree) -> None:
    tree.function("0000:18:00.0")
    given = tree.function("0000:18:00.4", "nvidia", parent="0000:18:00.0")
    tree.function("0000:18:00.5", "nvidia", parent="0000:18:00.0")  # nobody's
    tree.function("0000:18:00.6", "vfio-pci", parent="0000:18:00.0")
    (given / "nvidia").mkdir()
    (given / "nvidia/current_vgpu_type").write_text("1015\n")
    (given / "nvidia/creatable_vgpu_types").write_text("ID    : vGPU Name\n1015  : NVIDIA H200-71C\n")
    first, second = tree.read("00000000:18:00.0")
    assert (first.state, first.parent, first.profile) == ("virtual_function", "0000:18:00.0", "NVIDIA H200-71C")
    assert (second.state, second.driver, second.profile) == ("virtual_function", "vfio-pci", None)


def test_mediated_devices_by_their_profile(tree: Tree) -> None:
    card = tree.function("0000:18:00.0")
    kind = card / "mdev_supported_types/nvidia-1015"
    kind.mkdir(parents=True)
    (kind / "name").write_text("GRID A100-10C\n")
    device = card / "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    device.mkdir()
    (device / "mdev_type").symlink_to(kind)
    other = card / "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"
    other.mkdir()
    (other / "mdev_type").symlink_to(card / "mdev_supported_types/nvidia-9")
    first, second = tree.read("00000000:18:00.0")  # also of a card that the library lists
    assert (first.state, first.profile, first.uuid, first.parent) == ("mediated", "GRID A100-10C", device.name, "0000:18:00.0")
    assert second.profile == "nvidia-9"


def test_a_tree_that_cannot_be_read_gives_nothing(tmp_path: Path) -> None:
    assert read_functions((), tmp_path / "none") == ()
    (tmp_path / "bus/pci/devices/0000:18:00.0").mkdir(parents=True)  # a function without a single file
    assert read_functions((), tmp_path) == ()


@pytest.mark.parametrize(
    ("bus", "key"),
    [("00000000:18:00.0", "0000:18:00.0"), ("0001:AF:00.0", "0001:af:00.0"), ("rubbish", "rubbish"), ("x:1", "x:1"), (":1", ":1")],
)
def test_one_spelling_of_a_bus_id(bus: str, key: str) -> None:
    assert bus_key(bus) == key


def test_a_card_that_is_handed_to_a_virtual_machine_and_back(say: Say, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolmeter.vendors.nvidia.SELDOM_US", 0)
    card = tree.function("0000:01:00.0")
    vendor = NvidiaVendor(sysfs=tree.root)
    assert vendor.read().functions == ()
    say(nvmlDeviceGetCount=0)
    tree.bind(card, "vfio-pci")
    (found,) = vendor.read().functions
    assert found.state == "passed_through"
    say(nvmlDeviceGetCount=1)
    tree.bind(card, "nvidia")
    assert vendor.read().functions == ()
