"""The accounting library under sanitizers: threads that launch while their limit changes, and pages that somebody scribbles over."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from poolmeter.pages import native as pages_native
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter

from .conftest import DEVICE, build

HERE = Path(__file__).parent
SEED = int(os.environ.get("POOLMETER_SEED", "1"))


def allocation(root: Path, devices: int = 1) -> Path:
    """An allocation of `devices` devices, limited to 30 % of their time and 64 MiB."""
    folder = root / "allocations" / "a"
    folder.mkdir(parents=True)
    (root / "devices").mkdir()
    uuids = [DEVICE, *(f"GPU-{index:08x}-0000-0000-0000-000000000000" for index in range(2, devices + 1))]
    write_grant(folder / "grant", Grant("a", tuple(DeviceGrant(uuid, 300_000, 64 << 20) for uuid in uuids)))
    create_meter(folder / "meter", uuids, slots=8)
    return folder


def run(program: Path, *words: str, seconds: int) -> str:
    """Standard output of a program that no sanitizer had anything to say about. What a process holds at its end is no leak."""
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0"}
    done = subprocess.run([str(program), *words], capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def sanitized(target: Path, source: str, sanitizer: str) -> Path:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{HERE}")
    return build(target, HERE / source, flags=flags)


@pytest.fixture(autouse=True)
def own_native(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLMETER_NATIVE", str(native))
    pages_native.pages_library.cache_clear()


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_launch_while_their_limit_changes(tmp_path: Path, sanitizer: str, long_run: int) -> None:
    folder = allocation(tmp_path)
    program = sanitized(tmp_path / "launch_threads", "launch_threads.c", sanitizer)
    told = json.loads(run(program, str(folder), "4", str(800 * long_run), seconds=300))
    assert told["launched"] == told["counted"] > 100
    assert (told["pending_ns"], told["memory"], told["faults"], told["waiters"]) == (0, 0, 0, 0)
    assert told["waits"] > 0 and told["balance"] == told["account"]


def test_every_seat_of_a_process_shows_its_limit_and_the_busy_one_that_it_is_starved(tmp_path: Path) -> None:
    program = sanitized(tmp_path / "seats", "seats.c", "thread")
    soft, soft_second, first, second, left = json.loads(run(program, str(allocation(tmp_path)), seconds=60))
    assert soft == soft_second == [200_000, 1, 7, 0]
    assert first[:3] == second[:3] == [700_000, 0, 9]
    assert second[3] == 1
    assert left[0] == 5


@pytest.mark.parametrize("devices", [1, 3])
def test_no_page_ends_a_program(tmp_path: Path, devices: int, long_run: int) -> None:
    folder = allocation(tmp_path, devices)
    program = sanitized(tmp_path / "fuzz", "fuzz.c", "address,undefined")
    plain = build(tmp_path / "worker", HERE / "worker.c")
    subprocess.run([str(plain), str(folder), str(tmp_path / "result"), "exit", "1"], check=True)
    board = tmp_path / "devices" / DEVICE  # made by the first process
    rounds = 30 * (100 if long_run > 1 else 1)
    told = json.loads(run(program, str(folder), str(board), str(SEED), str(rounds), seconds=1500))
    assert told["rounds"] == rounds and told["attached"] > rounds / 3 and told["beside"] > rounds / 5
