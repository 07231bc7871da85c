"""kill -9 of a real exporter process, while its meter grows and a collector pulls: nothing lost, nothing twice."""

import contextlib
import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from exporter_fakes import CARD, Node

from poolmeter import arrow
from poolmeter.model.units import MINUTE_US

CHILD = Path(__file__).with_name("exporter_child.py")


class Collector:
    """Pulls and acknowledges like the real one: after what it has acknowledged, dropping what it has."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], dict[str, object]] = {}
        self.position: tuple[str, int] | None = None

    def pull(self, url: str, acknowledge: bool) -> None:
        after = f"?after={self.position[0]},{self.position[1]}" if self.position else ""
        with urllib.request.urlopen(f"{url}/v1/usage{after}", timeout=5) as response:
            epoch, last = response.headers["X-Poolmeter-Epoch"], int(response.headers["X-Poolmeter-Last-Sequence"])
            rows = arrow.from_bytes(response.read()).to_pylist()
        for row in rows:
            known = self.rows.setdefault((epoch, row["sequence"]), row)
            assert known == row, "a sequence number came back with another record"
        if acknowledge and rows:
            body = json.dumps({"consumer": "collector", "epoch": epoch, "seq": last}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/ack", body), timeout=5):
                self.position = (epoch, last)


def test_kill_at_any_moment(tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    node = Node(tmp_path)
    node.create("a")
    node.kill()
    for path in node.data.root.glob("spool*"):
        path.unlink()
    meter = node.meters["a"]
    meter.attach()
    base_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    stop, busy = threading.Event(), [0]

    def work() -> None:
        while not stop.wait(0.003):
            busy[0] += 50_000_123
            meter.count(CARD, busy_ns=busy[0], launches=busy[0] // 50_000_123)

    worker = threading.Thread(target=work)
    collector = Collector()
    child: subprocess.Popen[str] | None = None
    try:
        for turn in rounds(4, 1000):
            child = subprocess.Popen([sys.executable, str(CHILD), str(tmp_path), str(base_ns)], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            assert url, "the exporter did not start"
            if turn == 0:
                worker.start()
            deadline = time.monotonic() + rng.uniform(0.05, 0.9)
            while time.monotonic() < deadline:
                with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                    collector.pull(url, acknowledge=rng.random() < 0.5)
                time.sleep(rng.uniform(0, 0.1))
            child.kill()
            child.wait()
            child.stdout.close()
        stop.set()
        worker.join()
        child = subprocess.Popen([sys.executable, str(CHILD), str(tmp_path), str(base_ns)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        wait_until = time.monotonic() + 60
        while time.monotonic() < wait_until and used(collector) < busy[0] // 1000:
            time.sleep(0.1)
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                collector.pull(url, acknowledge=True)
    finally:
        stop.set()
        if child is not None:
            child.kill()
            child.wait()
        node.close_meters()
    sequences = sorted(sequence for _, sequence in collector.rows)
    assert len({epoch for epoch, _ in collector.rows}) == 1 and sequences == list(range(1, len(sequences) + 1))
    assert used(collector) == busy[0] // 1000
    devices = [row for row in collector.rows.values() if row["kind"] == "device"]
    spans = sorted((row["start_us"], row["start_us"] + row["span_us"]) for row in devices)  # type: ignore[operator]
    assert all(first[1] == second[0] for first, second in itertools.pairwise(spans))
    assert all(row["span_us"] == MINUTE_US for row in devices[1:])
    parts = [row for row in collector.rows.values() if row["kind"] == "slice"]
    assert sum(row["launches"] for row in parts) == busy[0] // 50_000_123  # type: ignore[misc]


def used(collector: Collector) -> int:
    return sum(int(row["used_us"]) for row in collector.rows.values() if row["kind"] == "slice")  # type: ignore[call-overload]
