"""The sampler child: answered, hung, ended, restarted; the page stays up throughout."""

import sys
import time
from pathlib import Path

import pytest
from exporter_fakes import CARD, SECOND, Node

from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.vendors.reading import VendorReading

CHILD = """
import json, sys, time
from pathlib import Path
from poolmeter.exporter.sampler import LENGTH, read_frame
from poolmeter.model.plain import to_plain
from poolmeter.vendors.reading import VendorReading
mood = Path(sys.argv[1])
print("a library that prints to stdout would break the frames", file=sys.stderr)
while read_frame(sys.stdin.buffer) is not None:
    word = mood.read_text()
    if word == "hang":
        time.sleep(600)
    if word == "end":
        sys.exit(7)
    if word == "slow":
        time.sleep(0.3)
    reading = VendorReading(vendor="nvidia", origin="o", at_us=1, duration_us=1)
    body = b"rubbish" if word == "rubbish" else json.dumps(to_plain(reading)).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(body)) + body)
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def mood(tmp_path: Path) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    file = tmp_path / "mood"
    file.write_text("good")
    return file


def start(mood: Path, timeout_s: float = 0.5, restart_s: float = 0.0) -> SamplerProcess:
    return SamplerProcess(
        "nvidia", timeout_s, command=(sys.executable, str(mood.with_name("child.py")), str(mood)), restart_after_s=restart_s
    )


def until_answer(sampler: SamplerProcess, seconds: float = 20.0) -> VendorReading:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reading = sampler.poll(0.2)
        if reading is not None:
            return reading
    raise AssertionError(f"no answer: {sampler.trouble}")


def test_a_hung_child_is_killed_and_another_started(mood: Path) -> None:
    sampler = start(mood)
    assert until_answer(sampler).origin == "o" and sampler.trouble is None
    first = sampler.pid
    mood.write_text("hang")
    deadline = time.monotonic() + 20
    while sampler.restarts == 0 and time.monotonic() < deadline:
        began = time.monotonic()
        assert sampler.poll(0.05) is None
        assert time.monotonic() - began < 5
    assert sampler.trouble is not None and "was killed" in sampler.trouble
    mood.write_text("good")
    assert until_answer(sampler) and sampler.pid != first and sampler.trouble is None
    sampler.close()


@pytest.mark.parametrize(("word", "said"), [("end", "ended by itself with status 7"), ("rubbish", "no reading")])
def test_a_child_that_ends_or_talks_rubbish(mood: Path, word: str, said: str) -> None:
    sampler = start(mood, timeout_s=20)
    until_answer(sampler)
    mood.write_text(word)
    deadline = time.monotonic() + 20
    while sampler.restarts == 0 and time.monotonic() < deadline:
        sampler.poll(0.1)
    assert sampler.trouble is not None and said in sampler.trouble
    mood.write_text("good")
    assert until_answer(sampler)
    sampler.close()


def test_a_slow_answer_is_taken_later(mood: Path) -> None:
    sampler = start(mood, timeout_s=20)
    until_answer(sampler)
    mood.write_text("slow")
    assert sampler.poll(0.01) is None and sampler.trouble is None
    assert until_answer(sampler)
    sampler.close()


def test_the_real_child_answers_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")  # found first, and no library
    sampler = SamplerProcess("nvidia", 20, {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    reading = until_answer(sampler)
    assert reading.devices == () and reading.error is not None and reading.error == sampler.trouble
    sampler.close()


def test_gauges_go_when_the_source_does_and_come_back(node: Node) -> None:
    node.sampler.change(CARD, busy_us_total=0)
    node.tick()
    node.sampler.answers = False
    node.tick(turns=4)
    page = node.agent.page()
    assert page is not None and page.snapshot.devices[0].power_mw == 80_000  # a slow tick: the last reading, for a while
    (nvml,) = [source for source in page.snapshot.sources if source.source == "nvml"]
    assert nvml.ok and nvml.at_us == node.clock.wall - 4 * SECOND
    node.tick(turns=3)
    page = node.agent.page()
    assert page is not None and len(page.snapshot.devices) == 1
    device = page.snapshot.devices[0]
    assert not device.up and device.power_mw is None and device.memory_used_bytes is None
    (nvml,) = [source for source in page.snapshot.sources if source.source == "nvml"]
    assert not nvml.ok and nvml.reason is not None and "has not answered" in nvml.reason
    node.sampler.answers = True
    node.tick()
    page = node.agent.page()
    assert page is not None and page.snapshot.devices[0].up and all(source.ok for source in page.snapshot.sources)
