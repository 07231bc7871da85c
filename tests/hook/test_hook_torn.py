"""Pages truncated under a program that has them mapped: it goes on, takes no new memory, and the readers say so."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolmeter.pages import native as pages_native
from poolmeter.pages.errors import PageError, TamperedPage
from poolmeter.pages.grant import DeviceGrant, Grant, read_grant, write_grant
from poolmeter.pages.meter import create_meter, read_meter

from .conftest import DEVICE

GIB = 1 << 30


@pytest.fixture
def allocation(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("POOLMETER_NATIVE", str(native))
    pages_native.pages_library.cache_clear()
    folder = tmp_path / "allocations" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "devices").mkdir()
    write_grant(folder / "grant", Grant("a", (DeviceGrant(DEVICE, 300_000, GIB),)))
    create_meter(folder / "meter", [DEVICE])
    yield folder
    pages_native.pages_library.cache_clear()


class Worker:
    """A process of the allocation that does one round for each line."""

    def __init__(self, native: Path, folder: Path) -> None:
        words = [str(native / "worker"), str(folder), str(folder / "result"), "torn"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout and self.process.stdout.readline().startswith("ready")

    def round(self) -> list[str]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def end(self) -> str:
        errors = self.process.communicate(timeout=30)[1]
        assert self.process.returncode == 0, self.process.returncode
        return errors


@pytest.mark.parametrize("page", ["meter", "grant"])
@pytest.mark.parametrize("size", [0, 4096])
def test_a_truncated_page_takes_no_new_memory_and_ends_nobody(native: Path, allocation: Path, page: str, size: int) -> None:
    worker = Worker(native, allocation)
    assert worker.round() == ["taken", "300000"]
    os.truncate(allocation / page, size)
    worker.round()  # whatever it touches first
    assert worker.round() == (["denied", "300000"] if size == 0 or page == "meter" else ["taken", "300000"])
    with pytest.raises(TamperedPage) as raised:
        (read_meter if page == "meter" else read_grant)(allocation / page)
    assert str(allocation / page) in str(raised.value)
    errors = worker.end()
    assert errors.count("torn away") == (1 if size == 0 or page == "meter" else 0)


def test_a_board_that_a_neighbour_truncates_costs_nothing_but_its_advice(native: Path, allocation: Path) -> None:
    worker = Worker(native, allocation)
    assert worker.round() == ["taken", "300000"]
    os.truncate(allocation.parents[1] / "devices" / DEVICE, 0)
    for _ in range(3):
        assert worker.round() == ["taken", "300000"]
    assert worker.end() == ""
    assert read_meter(allocation / "meter").retired[DEVICE].launches == 4


def test_bus_errors_of_the_program_are_its_own(native: Path, allocation: Path) -> None:
    worker = Worker(native, allocation)
    assert worker.round() == ["taken", "300000"]
    worker.process.send_signal(signal.SIGBUS)
    assert worker.process.wait(30) == -signal.SIGBUS
    for stream in (worker.process.stdin, worker.process.stdout, worker.process.stderr):
        assert stream is not None
        stream.close()


def test_a_page_back_in_its_size_is_read_again_or_said_to_be_tampered(native: Path, allocation: Path) -> None:
    whole = (allocation / "meter").stat().st_size
    os.truncate(allocation / "meter", 0)
    os.truncate(allocation / "meter", whole)
    with pytest.raises(PageError):
        read_meter(allocation / "meter")
