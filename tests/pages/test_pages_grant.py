"""Grant pages: round trips, atomic changes, what is refused."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import PoolmeterError, Unavailable
from poolmeter.pages import layout
from poolmeter.pages.errors import PageError, PageVersionError, TamperedPage
from poolmeter.pages.grant import DeviceGrant, Grant, read_grant, write_grant

limits = st.none() | st.integers(0, 2**64 - 2)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
devices = st.builds(
    DeviceGrant, uuid=names, compute_ppm=limits, memory_bytes=limits, weight=st.integers(0, 2**32 - 1), soft=st.booleans(),
    show_memory=st.booleans(), mask_nvml=st.booleans(), device_memory=st.none() | st.integers(1, 2**63),
)  # fmt: skip
grants = st.builds(
    Grant, allocation_id=names, devices=st.lists(devices, max_size=64, unique_by=lambda device: device.uuid).map(tuple),
    decision_id=st.none() | names, on_fault=st.sampled_from(["run", "refuse"]), suspended=st.booleans(), charge_copies=st.booleans(),
)  # fmt: skip


@given(first=grants, second=grants)
def test_round_trip_of_creation_and_change(tmp_path_factory: pytest.TempPathFactory, first: Grant, second: Grant) -> None:
    path = tmp_path_factory.mktemp("grant") / "grant"
    for number, grant in enumerate((first, second, first), 1):
        generation = write_grant(path, grant)
        found = read_grant(path)
        assert found.generation == generation == 2 * number
        times = {"generation": generation, "created_ns": found.created_ns, "updated_ns": found.updated_ns}
        assert found == Grant(**{name: getattr(grant, name) for name in Grant.__dataclass_fields__} | times)
        assert found.created_ns <= found.updated_ns


def test_a_reader_never_sees_half_of_a_change(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    states = [Grant(letter * 40, tuple(DeviceGrant(f"{letter}-{i}", ord(letter), ord(letter)) for i in range(64))) for letter in "ab"]
    write_grant(path, states[0])
    done = threading.Event()

    def write() -> None:
        for round_ in range(400):
            write_grant(path, states[round_ % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not done.is_set() or seen == 0:
        found = read_grant(path)
        letter = found.allocation_id[0]
        assert found.allocation_id == letter * 40
        assert all(device.uuid[0] == letter and device.memory_bytes == ord(letter) for device in found.devices)
        seen += 1
    writer.join()


def test_a_change_reaches_a_file_that_is_open(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    write_grant(path, Grant("a", ()))
    inode = path.stat().st_ino
    write_grant(path, Grant("b", ()))
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == (0o444 if os.geteuid() == 0 else 0o644)
    assert [entry.name for entry in tmp_path.iterdir()] == ["grant"]


def test_a_writer_that_died_at_work_is_reported_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    write_grant(path, Grant("a", ()))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(layout.Grant.generation.offset)
        file.write((3).to_bytes(8, "little"))
    with pytest.raises(PageError, match="generation 3"):
        read_grant(path)


@pytest.mark.parametrize(
    ("grant", "text"),
    [
        (Grant("x" * 64, ()), "allocation id"),
        (Grant("a", (DeviceGrant("u", compute_ppm=-1),)), "compute_ppm"),
        (Grant("a", (DeviceGrant("u", memory_bytes=2**64 - 1),)), "memory_bytes"),
        (Grant("a", (DeviceGrant("u"), DeviceGrant("u"))), "twice"),
        (Grant("a", tuple(DeviceGrant(str(i)) for i in range(65))), "65 devices"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, grant: Grant, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        write_grant(tmp_path / "grant", grant)
    assert list(tmp_path.iterdir()) == []


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    with pytest.raises(Unavailable, match="absent"):
        read_grant(path)
    write_grant(path, Grant("a", ()))
    whole = path.read_bytes()
    path.unlink()
    for data, error, text in (
        (whole[:-1], TamperedPage, "ends at byte"),
        (b"\0" * len(whole), TamperedPage, "begins with"),
        (whole[:8] + b"\2" + whole[9:], PageVersionError, f"ABI version 2.{layout.ABI_MINOR}, expected 1.x"),
        (whole[:16] + b"\1" + whole[17:], TamperedPage, "sizes"),
    ):
        path.write_bytes(data)
        with pytest.raises(error, match=text) as raised:
            read_grant(path)
        assert str(path) in str(raised.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TamperedPage):
        read_grant(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(TamperedPage):
        read_grant(path)


def test_fuzzed_pages_give_limits_or_a_poolmeter_error(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    write_grant(path, Grant("a", tuple(DeviceGrant(f"GPU-{n}", 300_000, 1 << 30) for n in range(3)), decision_id="d"))
    whole = path.read_bytes()
    dice = random.Random(int(os.environ.get("POOLMETER_SEED", "3")))
    read = 0
    for _ in range(300 * (20 if os.environ.get("POOLMETER_LONG") == "1" else 1)):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 20)):
            place = dice.randrange(600) if dice.random() < 0.6 else dice.randrange(len(data))
            data[place] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
        data[40] &= 0xFE if dice.random() < 0.95 else 0xFF  # an odd generation is waited for
        path.unlink()
        path.write_bytes(data[: dice.choice((len(data), len(data), dice.randrange(len(data))))])
        with contextlib.suppress(PoolmeterError):
            read += bool(read_grant(path).allocation_id is not None)
    assert read > 20
