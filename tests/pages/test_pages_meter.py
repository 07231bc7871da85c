"""Meter pages: creation, reading, folding, and pages that somebody damaged."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from poolmeter.errors import PoolmeterError
from poolmeter.pages import layout
from poolmeter.pages.errors import PageVersionError, TamperedPage
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter, reclaim

DEVICES = ["GPU-1", "GPU-2", "MIG-3"]


def put(path: Path, offset: int, value: int, size: int = 8) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(size, "little"))


def slot_offset(devices: int, slot: int) -> int:
    size = 512 + devices * 512
    return 4096 + devices * 2048 + slot * size


def counter_offset(devices: int, slot: int, device: int, name: str) -> int:
    return slot_offset(devices, slot) + 512 + device * 512 + getattr(layout.Counters, name).offset


def dead_process(path: Path, slot: int = 0, **counters: int) -> None:
    """A slot whose owner is gone: nobody holds its lock."""
    start = slot_offset(len(DEVICES), slot)
    put(path, layout.Meter.slots_used.offset, slot + 1, 4)
    put(path, start + layout.Slot.state.offset, layout.SLOT_LIVE, 4)
    put(path, start + layout.Slot.pid.offset, 4242, 4)
    put(path, start + layout.Slot.generation.offset, 1)
    for name, value in counters.items():
        put(path, counter_offset(len(DEVICES), slot, 1, name), value)


@pytest.fixture
def meter(tmp_path: Path) -> Path:
    create_meter(tmp_path / "meter", DEVICES, slots=8)
    return tmp_path / "meter"


def test_a_new_meter_is_empty_and_refuses_a_second(meter: Path) -> None:
    reading = read_meter(meter)
    assert reading.device_uuids == tuple(DEVICES)
    assert reading.slots == () and reading.faults == 0
    assert all(reading.total(uuid) == DeviceCounters() for uuid in DEVICES)
    assert all(reading.shared[uuid].memory_bytes == 0 for uuid in DEVICES)
    with pytest.raises(FileExistsError):
        create_meter(meter, DEVICES)
    assert [entry.name for entry in meter.parent.iterdir()] == ["meter"]


@pytest.mark.parametrize("devices", [[], ["a"] * 2, [str(i) for i in range(65)], ["x" * 48]])
def test_devices_that_do_not_fit(tmp_path: Path, devices: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        create_meter(tmp_path / "meter", devices)
    assert list(tmp_path.iterdir()) == []


def test_a_slot_is_read_with_its_counters(meter: Path) -> None:
    dead_process(meter, slot=2, launches=7, busy_ns=9, memory_peak=5, last_activity_ns=11)
    (slot,) = read_meter(meter).slots
    assert (slot.index, slot.pid, slot.state, slot.locked, slot.generation) == (2, 4242, "live", False, 1)
    assert set(slot.devices) == {"GPU-2"}
    counters = slot.devices["GPU-2"]
    assert (counters.launches, counters.busy_ns, counters.memory_peak, counters.last_activity_ns) == (7, 9, 5, 11)
    assert read_meter(meter).total("GPU-2").launches == 7 and read_meter(meter).total("GPU-1").launches == 0


def test_reclaim_folds_each_dead_slot_once(meter: Path) -> None:
    dead_process(meter, slot=0, launches=7, busy_ns=100, pending_ns=23, memory_peak=5)
    dead_process(meter, slot=3, launches=2, memory_peak=9, last_activity_ns=4)
    before = read_meter(meter).total("GPU-2")
    assert reclaim(meter) == 2
    reading = read_meter(meter)
    assert reading.slots == ()
    total = reading.total("GPU-2")
    assert (total.launches, total.busy_ns, total.pending_ns, total.memory_peak) == (before.launches, 123, 0, 9)
    assert reclaim(meter) == 0


def test_a_folder_that_died_after_committing_is_finished_by_the_next(meter: Path) -> None:
    dead_process(meter, slot=0, launches=7)
    line = 4096 + 2048 + layout.MeterDevice.retired.offset
    put(meter, line + 512 + layout.Counters.launches.offset, 7)  # the second copy holds slot 0, and counts
    put(meter, layout.Meter.fold.offset, 1 << 17 | 1 << 1 | 1)
    assert read_meter(meter).total("GPU-2").launches == 7
    assert reclaim(meter) == 0
    assert read_meter(meter).total("GPU-2").launches == 7 and read_meter(meter).slots == ()


@pytest.mark.parametrize(("word_happened", "confirmed"), [(True, False), (False, False), (False, True)])
def test_a_process_that_died_inside_a_change_of_memory(meter: Path, word_happened: bool, confirmed: bool) -> None:
    # Died while taking 10 units: after the word was changed, before it, or after it with another's change on top.
    dead_process(meter, slot=0)
    start = slot_offset(len(DEVICES), 0)
    put(meter, start + layout.Slot.intent_sequence.offset, 5)
    put(meter, start + layout.Slot.intent_value.offset, 5120)
    put(meter, start + layout.Slot.confirmed.offset, 5 if confirmed else 4)
    put(meter, start + layout.Slot.intent.offset, 1 << 63 | 0 << 42 | 1 << 36 | 10)
    word = 4096 + 2048 + layout.MeterDevice.memory_word.offset
    put(meter, word, 10 | 0 << 36 | 5 << 44 if word_happened else 30 | 1 << 36 | 9 << 44)
    assert reclaim(meter) == 1
    held = read_meter(meter).shared["GPU-2"].memory_bytes // 512
    assert held == (0 if word_happened else 20 if confirmed else 30)


@pytest.mark.parametrize(
    "damage", ["short", "long", "empty", "magic", "sizes", "slots", "hole", "names", "fifo", "link", "folder", "socket"]
)
def test_damaged_pages_are_tampered(meter: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = meter.read_bytes()
    if damage == "short":
        os.truncate(meter, 5000)
    elif damage == "long":
        meter.write_bytes(whole + b"x")
    elif damage == "empty":
        os.truncate(meter, 0)
    elif damage == "magic":
        put(meter, 0, 1)
    elif damage == "sizes":
        put(meter, layout.Meter.slot_size.offset, 64, 4)
    elif damage == "slots":
        put(meter, layout.Meter.slot_count.offset, 2**32 - 1, 4)
    elif damage == "hole":
        os.truncate(meter, 4096)
        os.truncate(meter, len(whole))
    elif damage == "names":
        put(meter, 4096, 0xFF)
    else:
        os.rename(meter, meter.with_name("elsewhere"))
        if damage == "fifo":
            os.mkfifo(meter)
        elif damage == "link":
            meter.symlink_to("elsewhere")
        elif damage == "folder":
            meter.mkdir()
        else:
            server = socket.socket(socket.AF_UNIX)
            monkeypatch.chdir(meter.parent)  # a path this long is none for a socket
            server.bind("meter")
            server.close()
    with pytest.raises(TamperedPage) as raised:
        read_meter(meter)
    assert str(meter) in str(raised.value)


def test_another_version_names_path_and_versions(meter: Path) -> None:
    put(meter, layout.Meter.abi_major.offset, 7, 4)
    with pytest.raises(PageVersionError, match=rf"ABI version 7\.{layout.ABI_MINOR}, expected 1\.x") as raised:
        read_meter(meter)
    assert str(meter) in str(raised.value)


def test_fuzzed_pages_give_a_reading_or_a_poolmeter_error(meter: Path) -> None:
    dice = random.Random(int(os.environ.get("POOLMETER_SEED", "3")))
    whole = meter.read_bytes()
    for _ in range(300 * (20 if os.environ.get("POOLMETER_LONG") == "1" else 1)):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 30)):
            place = dice.randrange(4200) if dice.random() < 0.7 else dice.randrange(len(data))
            data[place] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
        meter.write_bytes(data[: dice.choice((len(data), len(data), dice.randrange(len(data))))])
        for use in (read_meter, reclaim):
            with contextlib.suppress(PoolmeterError):
                use(meter)


def test_a_page_truncated_while_it_is_reclaimed_harms_nobody(meter: Path) -> None:
    # The reclaiming child may die by SIGBUS; the caller goes on.
    program = (
        "import os,sys,threading\nfrom pathlib import Path\nfrom poolmeter.errors import PoolmeterError\n"
        "from poolmeter.pages.meter import reclaim\npath=Path(sys.argv[1])\nsize=path.stat().st_size\nstop=False\n"
        "def tear():\n while not stop:\n  os.truncate(path,0)\n  os.truncate(path,size)\n"
        "t=threading.Thread(target=tear)\nt.start()\n"
        "for _ in range(100):\n try:\n  reclaim(path)\n except PoolmeterError:\n  pass\n"
        "stop=True\nt.join()\nprint('alive')\n"
    )
    outcome = subprocess.run([sys.executable, "-c", program, str(meter)], capture_output=True, text=True, timeout=60)
    assert outcome.stdout == "alive\n", outcome.stderr
