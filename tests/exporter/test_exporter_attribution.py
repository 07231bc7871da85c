"""From a slot to the process on the host: own namespace, nested namespaces, namespaces that are closed to us."""

import dataclasses
import os
from pathlib import Path

from poolmeter.exporter.allocations import AllocationReading
from poolmeter.exporter.attribution import OwnAllocations, ProcessKey
from poolmeter.pages.meter import Left, MeterReading, SlotReading

HOST, POD = 4026531836, 4026532999


def proc(root: Path, pid: int, start: int, namespace: int | None, *inner: int) -> None:
    """A process in a /proc of our own; `namespace` None: its link may not be followed."""
    folder = root / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (cuda x) S 1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 {start} 1 1")
    (folder / "status").write_text("Name:\tcuda\nNSpid:\t" + "\t".join(str(number) for number in (pid, *inner)) + "\n")
    if namespace is not None:
        place = root.parent / f"ns-{namespace}"
        place.touch()
        os.link(place, folder / "ns" / "pid")


def inode(root: Path, namespace: int) -> int:
    return (root.parent / f"ns-{namespace}").stat().st_ino


def slot(index: int, pid: int, namespace: int, start: int, locked: bool | None = True) -> SlotReading:
    return SlotReading(index, 1, "live", pid, namespace, start, 0, "cuda", 0, locked, {})


def readings(*slots: SlotReading, left: tuple[Left, ...] = ()) -> dict[str, AllocationReading]:
    meter = MeterReading((), slots, {}, {}, 1, 0, left)
    return {"a": AllocationReading("a", Path("/nowhere"), False, None, None, meter)}


def test_processes_of_our_own_namespace(tmp_path: Path) -> None:
    root = tmp_path / "proc"
    proc(root, 50, 700, HOST)
    (root / "self").symlink_to(root / "50")
    own = OwnAllocations(root)
    here = inode(root, HOST)
    live, dead, reused = slot(0, 50, here, 700), slot(1, 51, here, 800, locked=False), slot(2, 50, here, 600, locked=False)
    own.refresh(readings(live, dead, reused), 0)
    assert own.host_of("a", live) == ProcessKey(50, 700)
    assert own.host_of("a", dead) == ProcessKey(51, 800)  # gone already, and still known by what its slot says
    assert own.host_of("a", reused) is None  # another process has that pid now
    owner = own.owner_of(ProcessKey(50, 700))
    assert owner is not None and owner.allocation_id == "a" and own.owner_of(ProcessKey(50, 600)) is None


def test_processes_of_a_container(tmp_path: Path) -> None:
    root = tmp_path / "proc"
    proc(root, 1, 1, HOST)
    (root / "self").symlink_to(root / "1")
    proc(root, 4711, 900, POD, 12)
    proc(root, 4712, 900, POD, 13)
    proc(root, 4713, 900, HOST)
    own = OwnAllocations(root)
    inside = slot(0, 12, inode(root, POD), 900)
    own.refresh(readings(inside), 0)
    assert own.host_of("a", inside) == ProcessKey(4711, 900)
    assert own.owner_of(ProcessKey(4712, 900)) is None


def test_a_namespace_that_is_closed_to_us(tmp_path: Path) -> None:
    root = tmp_path / "proc"
    proc(root, 1, 1, HOST)
    (root / "self").symlink_to(root / "1")
    proc(root, 4711, 901, None, 12)
    own = OwnAllocations(root)
    inside = slot(0, 12, 987654321, 901)
    own.refresh(readings(inside), 0)
    assert own.host_of("a", inside) is None
    owner = own.owner_of(ProcessKey(4711, 901))
    assert owner is not None and owner.allocation_id == "a"  # no stranger, though nobody can say which slot it is
    own.refresh(readings(dataclasses.replace(inside, locked=False)), 1)
    assert own.owner_of(ProcessKey(4711, 901)) is None


def test_an_owner_is_remembered_for_a_while(tmp_path: Path) -> None:
    root = tmp_path / "proc"
    proc(root, 50, 700, HOST)
    (root / "self").symlink_to(root / "50")
    own = OwnAllocations(root)
    own.refresh(readings(slot(0, 50, inode(root, HOST), 700)), 0)
    own.refresh(readings(), 299_000_000)
    assert own.owner_of(ProcessKey(50, 700)) is not None
    own.refresh(readings(), 301_000_000)
    assert own.owner_of(ProcessKey(50, 700)) is None


def test_one_that_came_and_went_between_two_ticks_was_hooked(tmp_path: Path) -> None:
    root = tmp_path / "proc"
    proc(root, 50, 700, HOST)
    (root / "self").symlink_to(root / "50")
    here, away = inode(root, HOST), 987654321
    own = OwnAllocations(root)
    own.refresh(readings(), 0)
    assert own.owner_of(ProcessKey(60, 800)) is own.owner_of(ProcessKey(61, 801)) is None
    proc(root, 62, 801, POD, 3)
    both = (Left(60, here, 800), Left(3, away, 801))
    own.refresh(readings(left=both), 1)
    owner = own.owner_of(ProcessKey(60, 800))
    assert owner is not None and owner.hooked and owner.allocation_id == "a"
    assert own.owner_of(ProcessKey(60, 900)) is None  # who has the pid next
    # In another namespace the start time names it, and one that lives is another.
    assert own.owner_of(ProcessKey(61, 801)) is not None and own.owner_of(ProcessKey(62, 801)) is None
    own.refresh(readings(left=both), 299_000_000)
    assert own.owner_of(ProcessKey(60, 800)) is not None
    own.refresh(readings(left=both), 301_000_000)  # however long the page goes on naming it
    assert own.owner_of(ProcessKey(60, 800)) is own.owner_of(ProcessKey(61, 801)) is None
