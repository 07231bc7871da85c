"""Slots and memory of an allocation's processes, through kills at random, forks and races."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poolmeter.enforcer.allocations import slot_lives
from poolmeter.pages import layout
from poolmeter.pages import native as pages_native
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import Left, MeterReading, create_meter, read_meter, reclaim

DEVICE = "GPU-00000000-0000-0000-0000-000000000001"
GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def allocation(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("POOLMETER_NATIVE", str(native))
    pages_native.pages_library.cache_clear()
    folder = tmp_path / "allocations" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "devices").mkdir()
    write_grant(folder / "grant", Grant("a", (DeviceGrant(DEVICE, memory_bytes=GIB),)))
    create_meter(folder / "meter", [DEVICE])
    yield folder
    pages_native.pages_library.cache_clear()


def start(native: Path, folder: Path, *arguments: str, name: str = "r") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(native / "worker"), str(folder), str(folder.parent / f"{name}.result"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def until(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


def counted(folder: Path, names: list[str]) -> tuple[int, int]:
    """Launches that the workers had counted for certain, and at most."""
    low = high = 0
    for name in names:
        file = folder.parent / f"{name}.result"
        data = file.read_bytes() if file.exists() else b""  # killed before it began
        high += int.from_bytes(data[:8], "little")
        low += int.from_bytes(data[8:16], "little")
    return low, high


def test_kill_at_random_loses_and_doubles_nothing(native: Path, allocation: Path, rounds: Callable[[int, int], Iterator[int]]) -> None:
    seed = int(os.environ.get("POOLMETER_SEED", "7"))
    dice = random.Random(seed)
    meter = allocation / "meter"
    names: list[str] = []
    alive: list[subprocess.Popen[str]] = []
    last = 0
    for round_ in rounds(40, 1000):
        while len(alive) < 4:
            names.append(f"w{len(names)}")
            alive.append(start(native, allocation, "churn", name=names[-1]))
        time.sleep(dice.random() * 0.02)
        victim = alive.pop(dice.randrange(len(alive)))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        low, _ = counted(allocation, names)
        reading = read_meter(meter)
        _, high = counted(allocation, names)
        total = reading.total(DEVICE).launches
        assert low <= total <= high, f"seed {seed}, round {round_}"
        assert total >= last
        last = total
    for victim in alive:
        victim.kill()
        victim.wait()
    reclaim(meter)
    reading = read_meter(meter)
    low, high = counted(allocation, names)
    assert reading.slots == ()
    assert low <= reading.retired[DEVICE].launches <= high
    assert high - low <= len(names)
    assert reading.shared[DEVICE].memory_bytes == 0
    assert reading.retired[DEVICE].memory_bytes == 0


def test_memory_in_slots_is_what_the_total_says(native: Path, allocation: Path) -> None:
    workers = [start(native, allocation, "churn", name=f"w{i}") for i in range(3)]
    meter = allocation / "meter"
    until(lambda: sum(DEVICE in slot.devices for slot in read_meter(meter).slots) == 3 and read_meter(meter).total(DEVICE).launches > 3000)
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    reading = read_meter(meter)
    in_slots = sum(slot.devices[DEVICE].memory_bytes for slot in reading.slots)
    # A worker stopped inside a change has it in one place and not in the other.
    assert abs(reading.shared[DEVICE].memory_bytes - in_slots) <= 3 * MIB
    for worker in workers[:2]:
        worker.kill()
        worker.wait()
    assert reclaim(meter) == 2
    after = read_meter(meter)
    assert [slot.pid for slot in after.slots] == [workers[2].pid]
    workers[2].kill()
    workers[2].wait()
    assert reclaim(meter) == 1
    assert read_meter(meter).shared[DEVICE].memory_bytes == 0


def test_two_of_600_mib_never_both_fit_in_1_gib(native: Path, allocation: Path, rounds: Callable[[int, int], Iterator[int]]) -> None:
    done = 0
    for _ in rounds(15, 1000):
        done += 1
        pair = [start(native, allocation, "take", str(600 * MIB), name=f"t{i}") for i in range(2)]
        for process in pair:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in pair:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = sorted(process.stdout.readline().strip() for process in pair if process.stdout)
        assert answers == ["denied", "taken"]
        for process in pair:
            process.communicate()
    total = read_meter(allocation / "meter").total(DEVICE)
    assert total.denied_limit == done
    assert total.denied_limit_bytes == done * 600 * MIB
    assert total.memory_peak == 600 * MIB


def test_memory_of_a_killed_process_is_there_for_the_next(native: Path, allocation: Path) -> None:
    first = start(native, allocation, "take", str(600 * MIB), name="first")
    second = start(native, allocation, "take", str(600 * MIB), name="second")
    for process in (first, second):
        assert process.stdout and process.stdout.readline() == "ready\n"
    assert first.stdin and second.stdin and first.stdout and second.stdout
    first.stdin.write("go\n")
    first.stdin.flush()
    assert first.stdout.readline() == "taken\n"
    first.kill()
    first.wait()
    second.stdin.write("go\n")
    second.stdin.flush()
    assert second.stdout.readline() == "taken\n"
    second.communicate()


def test_a_limit_lowered_below_use_denies_and_a_raised_one_allows(native: Path, allocation: Path) -> None:
    for limit, answer in ((500 * MIB, "denied"), (600 * MIB, "taken"), (600 * MIB - 512, "denied"), (None, "taken")):
        write_grant(allocation / "grant", Grant("a", (DeviceGrant(DEVICE, memory_bytes=limit),)))
        process = start(native, allocation, "take", str(600 * MIB))
        assert process.communicate("go\n")[0].split() == ["ready", answer], limit


@pytest.mark.parametrize("how", ["fork", "clone"])
def test_a_child_takes_a_slot_of_its_own(native: Path, allocation: Path, how: str) -> None:
    process = start(native, allocation, how)
    lines = [line.split() for line in process.communicate()[0].splitlines()]
    parents = [line for line in lines if line[0] == "parent"]
    children = [line for line in lines if line[0] == "child"]
    assert len(parents) == 2 and len(children) == 1
    assert parents[0] == parents[1]
    assert children[0][1] != parents[0][1] and children[0][2] != parents[0][2]
    reclaim(allocation / "meter")
    reading = read_meter(allocation / "meter")
    assert reading.slots == ()
    assert reading.retired[DEVICE].launches == 7


def test_vfork_leaves_the_parent_its_slot(native: Path, allocation: Path) -> None:
    lines = start(native, allocation, "vfork").communicate()[0].splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]


def test_an_orphan_that_inherited_the_lock_does_not_keep_the_dead_alive(native: Path, allocation: Path) -> None:
    # The shell holds the meter open and locked on the worker's behalf only if descriptors leak; the pid decides.
    process = start(native, allocation, "fold-race")
    assert process.stdout and process.stdout.readline().startswith("ready")
    reading = read_meter(allocation / "meter")
    assert [slot.locked for slot in reading.slots] == [True]
    assert reclaim(allocation / "meter") == 0
    process.kill()
    process.wait()
    assert [slot.locked for slot in read_meter(allocation / "meter").slots] == [False]
    assert reclaim(allocation / "meter") == 1


@pytest.mark.parametrize("folded", [False, True])
def test_a_program_that_closes_all_descriptors_keeps_its_memory(native: Path, allocation: Path, folded: bool) -> None:
    process = start(native, allocation, "close")
    assert process.stdin and process.stdout and process.stdout.readline().startswith("closed")
    meter = allocation / "meter"
    assert [slot.locked for slot in read_meter(meter).slots] == [False]
    if folded:
        assert reclaim(meter) == 1
        assert read_meter(meter).shared[DEVICE].memory_bytes == 0
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("kept")
    reading = read_meter(meter)
    assert [slot.locked for slot in reading.slots] == [True]
    assert reading.shared[DEVICE].memory_bytes == MIB and reading.faults == int(folded)
    assert reclaim(meter) == 0
    process.communicate()
    assert read_meter(meter).shared[DEVICE].memory_bytes == 0


def test_normal_exit_folds_the_estimate_of_what_is_pending(native: Path, allocation: Path) -> None:
    assert start(native, allocation, "exit", "9").wait() == 0
    reading: MeterReading = read_meter(allocation / "meter")
    assert reading.slots == ()
    assert (reading.retired[DEVICE].launches, reading.retired[DEVICE].busy_ns, reading.retired[DEVICE].pending_ns) == (9, 1234, 0)


def test_a_page_names_those_whose_slots_were_folded_last(native: Path, allocation: Path) -> None:
    meter = allocation / "meter"
    killed = start(native, allocation, "fold-race")
    assert killed.stdout and killed.stdout.readline().startswith("ready")
    (slot,) = read_meter(meter).slots
    killed.kill()
    killed.wait()
    assert read_meter(meter).left == () and reclaim(meter) == 1
    assert read_meter(meter).left == (Left(killed.pid, slot.pid_namespace, slot.start_time_ticks),)
    pids = [killed.pid]
    for _ in range(40):
        process = start(native, allocation, "exit", "1")
        assert process.wait() == 0
        pids.append(process.pid)
        assert [left.pid for left in read_meter(meter).left] == pids[-31:]
    assert {left.pid_namespace for left in read_meter(meter).left} == {slot.pid_namespace}


def test_many_starts_at_once_each_get_a_slot(native: Path, allocation: Path, long_run: int) -> None:
    count = 60 if long_run == 1 else 200
    crowd = [start(native, allocation, "exit", "1", name=f"c{i}") for i in range(count)]
    assert [process.wait() for process in crowd] == [0] * count
    reclaim(allocation / "meter")
    assert read_meter(allocation / "meter").retired[DEVICE].launches == count


def test_sixteen_start_while_an_initialiser_hangs_and_is_killed(
    native: Path, allocation: Path, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    done = 0
    for _ in rounds(3, 60):
        starter = start(native, allocation, "initialiser", name="starter")
        assert starter.stdout and starter.stdout.readline() == "ready\n"
        # It holds the lock that all of them want, and then dies with it.
        waiters = [start(native, allocation, "exit", "1", name=f"s{i}") for i in range(16)]
        starter.kill()
        starter.communicate()
        deadline = time.monotonic() + 20
        assert [waiter.wait(max(deadline - time.monotonic(), 0.01)) for waiter in waiters] == [0] * 16
        done += 16
        reclaim(allocation / "meter")
        assert read_meter(allocation / "meter").slots == ()
    assert read_meter(allocation / "meter").retired[DEVICE].launches == done


def test_an_initialiser_that_only_hangs_stops_nobody(native: Path, allocation: Path) -> None:
    starter = start(native, allocation, "initialiser", name="starter")
    assert starter.stdout and starter.stdout.readline() == "ready\n"
    assert start(native, allocation, "exit", "3").wait(20) == 0
    starter.kill()
    starter.communicate()
    reclaim(allocation / "meter")
    assert read_meter(allocation / "meter").retired[DEVICE].launches == 3


def test_kills_while_others_start(native: Path, allocation: Path, rounds: Callable[[int, int], Iterator[int]]) -> None:
    dice = random.Random(int(os.environ.get("POOLMETER_SEED", "7")))
    names: list[str] = []
    for _ in rounds(10, 200):
        crowd = []
        for _ in range(6):
            names.append(f"k{len(names)}")
            crowd.append(start(native, allocation, "churn", name=names[-1]))
        time.sleep(dice.random() * 0.004)  # somewhere between exec and the first allocation
        for process in crowd:
            process.kill()
        for process in crowd:
            process.communicate()
    reclaim(allocation / "meter")
    reading = read_meter(allocation / "meter")
    low, high = counted(allocation, names)
    assert reading.slots == () and reading.shared[DEVICE].memory_bytes == 0
    assert low <= reading.retired[DEVICE].launches <= high <= low + len(names)


def own_start_ticks() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("reused", [True, False])
def test_a_pid_that_is_somebody_elses_by_now_is_no_life(native: Path, allocation: Path, reused: bool) -> None:
    """The slot's lock is still held, by an orphan that inherited it; its pid is ours, its start time is ours or another's."""
    meter = allocation / "meter"
    holder = start(native, allocation, "fold-race")
    assert holder.stdout and holder.stdout.readline().startswith("ready")
    assert len(read_meter(meter).slots) == 1
    at = layout.Meter.from_buffer_copy(meter.read_bytes()).slots_offset
    with meter.open("r+b") as file:
        for field, value in ((layout.Slot.pid, os.getpid()), (layout.Slot.start_time_ticks, own_start_ticks() - int(reused))):
            file.seek(at + field.offset)
            file.write(value.to_bytes(field.size, "little"))
    changed = read_meter(meter).slots[0]
    assert (changed.pid, changed.locked) == (os.getpid(), True) and slot_lives(changed) is not reused
    assert reclaim(meter) == int(reused)
    holder.kill()
    holder.communicate()
    assert reclaim(meter) == int(not reused) and read_meter(meter).slots == ()


def test_without_a_free_slot_the_hook_is_inert_and_says_so(native: Path, tmp_path: Path, allocation: Path) -> None:
    (allocation / "meter").unlink()
    create_meter(allocation / "meter", [DEVICE], slots=1)
    holder = start(native, allocation, "fold-race", name="holder")
    assert holder.stdout and holder.stdout.readline().startswith("ready")
    assert start(native, allocation, "exit", "1", name="late").wait() == 3
    assert read_meter(allocation / "meter").faults == 1
    holder.kill()
    holder.wait()
    assert start(native, allocation, "exit", "1", name="next").wait() == 0
