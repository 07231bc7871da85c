"""One function and one grid, many lengths: what is charged follows the card, not what the launch used to take."""

import subprocess
import sys
from pathlib import Path

import pytest

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter, read_meter
from poolmeter.simulator.machine import Machine

# Launches of one function with the lengths given as NS:COUNT[:BLOCKS], waiting after each where asked, or where the plan says "wait".
PROGRAM = """
import sys, time
from poolmeter.simulator.driver import Driver
wait, gap_us, plan = sys.argv[1] == "sync", int(sys.argv[2]), sys.argv[3:]
driver = Driver()
driver.open(0)
function, stream = driver.function(), driver.stream()
for part in plan:
    if part == "wait":
        driver("cuStreamSynchronize", stream)
        continue
    if part.startswith("sleep:"):
        time.sleep(float(part[6:]))
        continue
    ns, count, blocks = map(int, (part + ":1024").split(":")[:3])
    began = time.monotonic_ns()
    for _ in range(count):
        driver.launch(function, ns, stream, blocks)
        if wait or gap_us:
            driver("cuStreamSynchronize", stream)
        if gap_us:
            time.sleep(gap_us / 1e6)
    handing_over = time.monotonic_ns() - began
driver("cuStreamSynchronize", stream)
print(handing_over)
"""


def start(machine: Machine, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """The program in an allocation of its own."""
    folder.mkdir(parents=True)
    (folder.parent.parent / "devices").mkdir(exist_ok=True)  # where tenants of a node tell each other of their work
    write_grant(folder / "grant", Grant(folder.name, (DeviceGrant(machine.uuid(0)),)))
    create_meter(folder / "meter", [machine.uuid(0)])
    hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=machine.environment() | hook, stdout=subprocess.PIPE)


def charged(machine: Machine, folder: Path) -> int:
    """Device time charged to the allocation, in ns."""
    return read_meter(folder / "meter").total(machine.uuid(0)).busy_ns


@pytest.mark.parametrize("pattern", ["stream", "sync"])
@pytest.mark.parametrize(
    "plan",
    [
        ("10000:15", "1000000:600"),
        ("10000:15", "5000000:120"),
        ("10000:15", "20000000:40"),
        ("20000:300", "200000:2000"),
        ("20000000:4", "50000:4000"),
        ("50000:1000", "400000000:1"),
        ("1000000:100", "50000:2000", "3000000:100", "10000:2000"),
    ],
    ids=lambda plan: "-".join(plan).replace(":", "x"),
)
def test_another_length_is_learned_at_once(tmp_path: Path, pattern: str, plan: tuple[str, ...]) -> None:
    with Machine.create("single", tmp_path / "machine", clock="virtual" if pattern == "sync" else "real") as machine:
        folder = tmp_path / "allocations" / "a"
        assert start(machine, folder, pattern, "0", *plan).wait(60) == 0
        truth = sum(record.busy_ns for record in machine.truth())
        assert charged(machine, folder) == pytest.approx(truth, rel=0.02)


def test_the_last_of_a_queue_are_not_charged_for_what_ran_before_them(tmp_path: Path) -> None:
    """The queue takes much longer than thought, and the program waits once, for all of it.

    A sample every 75 to 225 launches ends what is measured together; steps of 6 leave a few launches behind one of them. While the
    host still hands them over (some 1 ms, unless it is taken off its processor) nobody can know whether the card waited for it.
    """
    for count in range(76, 232, 6):
        with Machine.create("single", tmp_path / f"machine{count}") as machine:
            folder = tmp_path / f"node{count}" / "allocations" / "a"
            said, _ = start(machine, folder, "stream", "0", "10000:20", "wait", f"300000:{count}").communicate(timeout=60)
            truth = sum(record.busy_ns for record in machine.truth())
            assert 0.97 * truth - int(said) <= charged(machine, folder) <= 1.03 * truth, count


def test_launches_beside_one_that_was_measured_are_charged_as_that_was(tmp_path: Path) -> None:
    """The host is off its processor in the midst of a queue, so that the card may have waited; a sample in it knows the length."""
    for pause in ("1", "39", "77"):
        with Machine.create("single", tmp_path / f"machine{pause}") as machine:
            folder = tmp_path / f"node{pause}" / "allocations" / "a"
            plan = ("10000:20", "wait", f"300000:{pause}", "sleep:0.01", f"300000:{400 - int(pause)}")
            assert start(machine, folder, "stream", "0", *plan).wait(60) == 0
            truth = sum(record.busy_ns for record in machine.truth())
            assert charged(machine, folder) == pytest.approx(truth, rel=0.03), pause


def test_time_waited_for_is_not_taken_for_the_hosts(tmp_path: Path) -> None:
    """Short launches and a few long ones of the same kind, then a wait, over and over: what comes after a wait begins after it."""
    with Machine.create("single", tmp_path / "machine") as machine:
        folder = tmp_path / "allocations" / "a"
        assert start(machine, folder, "stream", "0", *(("10000:30", "400000:2", "wait") * 400)).wait(60) == 0
        truth = sum(record.busy_ns for record in machine.truth())
        assert 0.8 * truth < charged(machine, folder) < 1.02 * truth  # lengths that vary so are known by their mean alone


def test_tenants_that_come_and_go_beside_a_busy_host(tmp_path: Path) -> None:
    """The host takes threads off its processors between a mark and a launch: no sample may come out shorter for that."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        with Machine.create("single", tmp_path / "machine") as machine:
            folders = [tmp_path / "allocations" / name for name in "abc"]
            running = [
                start(machine, folder, "stream", "300", f"300000:{count}") for folder, count in zip(folders, (1500, 2200, 800), strict=True)
            ]
            assert [process.wait(60) for process in running] == [0, 0, 0]
            truth = {record.pid: record.busy_ns for record in machine.truth()}
            for process, folder in zip(running, folders, strict=True):
                assert charged(machine, folder) == pytest.approx(truth[process.pid], rel=0.03)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
