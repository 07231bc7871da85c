"""Cards, books and daemons for the enforcer's tests; nothing needs a card or the simulator."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from poolmeter.enforcer.admission import OverCommit, occupancy
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import claim_of
from poolmeter.enforcer.client import EnforcerClient
from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.journal import Journal, read_events
from poolmeter.model.allocation import Allocation, AllocationState, Mode
from poolmeter.model.plain import from_plain
from poolmeter.pages.grant import read_grant
from poolmeter.pages.meter import read_meter
from poolmeter.places import NodeRun

GIB = 1 << 30

# Stands in for nvidia-ml-py in the probe of a daemon: the same calls, from a file of "uuid memory" lines.
FAKE_PYNVML = """
import os
NVML_DEVICE_MIG_ENABLE = 1
class NVMLError(Exception):
    pass
_cards = [line.split() for line in open(os.environ["FAKE_CARDS"])]
def nvmlInit():
    if not _cards:
        raise NVMLError("Driver Not Loaded")
def nvmlShutdown():
    pass
def nvmlDeviceGetCount():
    return len(_cards)
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetUUID(handle):
    return _cards[handle][0]
def nvmlDeviceGetName(handle):
    return "Test Card"
def nvmlDeviceGetMemoryInfo(handle):
    class Info:
        total = int(_cards[handle][1])
    return Info
def nvmlDeviceGetMigMode(handle):
    if len(_cards[handle]) > 2:
        return (1, 1)
    raise NVMLError("Not Supported")
"""


@dataclass
class Cards:
    """An inventory that lists what it was given."""

    listed: tuple[Device, ...]

    def devices(self) -> tuple[Device, ...]:
        return self.listed


def agree(book: Book) -> None:
    """Fails unless journal, folders, files and grants of an open book tell one story."""
    entries = {item.id: item for item in book.entries()}
    told: dict[str, Allocation] = {}
    sequence = 0
    for event in read_events(book.journal.path):
        assert event.sequence == sequence + 1
        sequence = event.sequence
        if event.allocation is not None:
            allocation = from_plain(Allocation, event.allocation)
            told[allocation.id] = allocation
    assert {key: item for key, item in told.items() if item.state is not AllocationState.RELEASED} == entries
    assert {folder.name for folder in book.run.allocations.iterdir()} == set(entries)
    for key, allocation in entries.items():
        folder = book.run.allocations / key
        assert from_plain(Allocation, json.loads((folder / "allocation.json").read_text())) == allocation
        grant = read_grant(folder / "grant")
        assert (grant.generation, grant.allocation_id, grant.decision_id) == (allocation.generation, key, allocation.decision_id)
        limits = [(item.device_uuid, item.compute_limit_ppm, item.memory_bytes) for item in allocation.slices]
        rests = allocation.state is AllocationState.SUSPENDED
        assert grant.suspended is rests
        if rests:
            assert [item.memory_bytes for item in grant.devices] == [0] * len(limits)
        elif allocation.mode is Mode.HOOK:
            assert [(item.uuid, item.compute_ppm, item.memory_bytes) for item in grant.devices] == limits
        assert read_meter(folder / "meter").device_uuids == tuple(item.device_uuid for item in allocation.slices)
    for folder in book.run.retired.iterdir():
        assert told[folder.name].state is AllocationState.RELEASED
        assert read_grant(folder / "grant").suspended
    for card in occupancy(
        book.inventory.devices(), (claim_of(item, {}) for item in entries.values() if item.state is AllocationState.ACTIVE)
    ):
        assert card.free_ppm(book.over) >= 0 and card.free_bytes(book.over) >= 0


@pytest.fixture(name="agree")
def agree_fixture() -> Callable[[Book], None]:
    """The check that journal, folders and grants agree."""
    return agree


@pytest.fixture
def cards() -> Callable[..., Cards]:
    """`cards(4)`: that many cards of 80 GiB."""

    def make(count: int = 4, memory: int = 80 * GIB) -> Cards:
        return Cards(tuple(Device(f"GPU-{index:08x}", index, "Test Card", memory) for index in range(count)))

    return make


@pytest.fixture
def open_book(tmp_path: Path, cards: Callable[..., Cards]) -> Iterator[Callable[..., Book]]:
    """`open_book()` opens the book of tmp_path, again and again as after a restart."""
    books: list[Book] = []

    def make(count: int = 4, over: OverCommit | None = None) -> Book:
        for book in books:
            book.close()
        book = Book(NodeRun(tmp_path / "run"), Journal(tmp_path / "data" / "events.jsonl"), cards(count), over)
        book.open()
        books.append(book)
        return book

    yield make
    for book in books:
        book.close()


@dataclass
class Node:
    """An enforcer that runs as a process of its own."""

    root: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    options: list[str] = field(default_factory=list)

    @property
    def run(self) -> NodeRun:
        return NodeRun(self.root / "run")

    @property
    def journal(self) -> Path:
        return self.root / "data" / "events.jsonl"

    @property
    def client(self) -> EnforcerClient:
        return EnforcerClient(self.run, timeout_s=30)

    def start(self) -> None:
        """Starts the enforcer and returns once it answers."""
        ready = self.root / "ready"
        ready.unlink(missing_ok=True)
        words = ["enforcer", "--run", str(self.run.root), "--data", str(self.root / "data"), "--ready-file", str(ready), *self.options]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "poolmeter.cli", *words], env=self.environment, stderr=log)
        deadline = time.monotonic() + 30
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the enforcer did not start: {(self.root / 'log').read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends the enforcer; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def poolmeter(self, *words: str, streams: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """A poolmeter command on this node; `streams` are redirections of a shell."""
        command = [sys.executable, "-m", "poolmeter.cli", *words]
        return subprocess.run(
            ["sh", "-c", f'exec "$0" "$@" {streams}', *command] if streams else command,
            env={**self.environment, "POOLMETER_RUN": str(self.run.root), "POOLMETER_DATA": str(self.root / "data"), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )


def new_node(root: Path, name: str, count: int = 4, options: tuple[str, ...] = ()) -> Node:
    """An enforcer not started yet, with `count` cards of 80 GiB."""
    (root / "python").mkdir(parents=True)
    (root / "python" / "pynvml.py").write_text(FAKE_PYNVML)
    (root / "cards").write_text("".join(f"GPU-{name}-{index} {80 * GIB}\n" for index in range(count)))
    config = root / "config.toml"
    config.write_text(f'[node]\nname = "{name}"\n[enforcer]\ncollector = "http://127.0.0.1:9"\n')
    path = os.pathsep.join([str(root / "python"), *(part for part in sys.path if part)])
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("POOLMETER_R", "POOLMETER_D", "POOLMETER_SIM"))}
    environment |= {"PYTHONPATH": path, "FAKE_CARDS": str(root / "cards"), "POOLMETER_CONFIG": str(config)}
    return Node(root, environment, options=list(options))


def maker(root: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str = "node", count: int = 4, options: tuple[str, ...] = (), start: bool = True) -> Node:
        node = new_node(root / name, name, count, options)
        nodes.append(node)
        if start:
            node.start()
        return node

    yield make
    for node in nodes:
        if node.process is not None and node.process.poll() is None:
            node.kill()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """`make_node("a")` starts an enforcer with four cards of 80 GiB."""
    yield from maker(tmp_path)


@pytest.fixture(scope="module")
def make_shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """The same for the tests of a module together, where nothing is killed."""
    yield from maker(tmp_path_factory.mktemp("node"))
