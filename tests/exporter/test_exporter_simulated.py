"""The exporter's own code on the simulated library: what it reads is what is true, with tenants under the real hook."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from exporter_fakes import GIB

from poolmeter import arrow
from poolmeter.clock import SystemClock
from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.exporter.spool import Spool
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode, SlicePromise
from poolmeter.model.plain import canonical_json
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.usage import DeviceRecord, ProcessRecord, SliceRecord
from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter, read_meter
from poolmeter.places import NodeData, NodeRun
from poolmeter.simulator.machine import Machine
from poolmeter.vendors.reading import VendorReading

pytestmark = pytest.mark.timeout(120)


class Watched:
    """A real agent over the simulated library, turned by a thread."""

    def __init__(self, root: Path, machine: Machine, timeout_s: float = 10.0) -> None:
        self.machine = machine
        self.run, self.data = NodeRun(root / "run"), NodeData(root / "data")
        for folder in (self.run.allocations, self.run.retired, self.run.devices):
            folder.mkdir(parents=True)
        self.spool = Spool(self.data.spool, "node-a", ("collector",))
        self.sampler = SamplerProcess("nvidia", timeout_s, machine.environment(), restart_after_s=0.2)
        settings = Settings(node="node-a", pool="lab", interval_ms=200, simulated=True)
        self.agent = Agent(settings, self.run, self.data, self.spool, self.sampler, SystemClock())
        deadline = time.monotonic() + 30
        while not self.agent.turn(1.0).devices and time.monotonic() < deadline:
            pass
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._turns, daemon=True)
        self._thread.start()

    def _turns(self) -> None:
        while not self._stop.wait(0.1):
            self.agent.turn(0.5)

    def snapshot(self) -> Snapshot:
        """The newest."""
        page = self.agent.page()
        assert page is not None
        return page.snapshot

    def allocate(self, name: str, ppm: int, memory: int, device: int = 0) -> tuple[Path, dict[str, str]]:
        """A folder as the enforcer makes it, and the environment of a program in it."""
        uuid = self.machine.uuid(device)
        now = SystemClock().wall_us()
        allocation = Allocation(
            name, Labels(f"tenant-{name}"), Mode.HOOK, (SlicePromise(uuid, ppm, memory),), AllocationState.ACTIVE, 1, now, now
        )
        folder = self.run.root / f".{name}"
        folder.mkdir()
        (folder / "allocation.json").write_text(canonical_json(allocation))
        write_grant(folder / "grant", Grant(name, (DeviceGrant(uuid, None, memory),)))
        create_meter(folder / "meter", [uuid], allocation_id=name)
        folder.rename(self.run.allocations / name)
        folder = self.run.allocations / name
        environment = self.machine.environment()
        environment |= {"POOLMETER_ALLOCATION_DIR": str(folder), "LD_PRELOAD": str(native_path("libpoolmeter_hook.so"))}
        environment |= {"CUDA_VISIBLE_DEVICES": uuid}
        return folder, environment

    def tenant(self, environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
        """The workload, started."""
        words = [sys.executable, "-m", "poolmeter.cli", "simulate", "tenant", *options]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)

    def settle(self) -> None:
        """Let the last samples of the card come in."""
        time.sleep(0.6)

    def end(self) -> None:
        """Stop, close the minute."""
        self._stop.set()
        self._thread.join()
        self.agent.turn(0.5)
        self.agent.stop()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.sampler.close()
        self.spool.close()


@pytest.fixture
def watched(tmp_path: Path, machine: Machine) -> Iterator[Watched]:
    made = Watched(tmp_path, machine)
    yield made
    made.close()


def sampled(machine: Machine, timeout_s: float = 10.0) -> tuple[SamplerProcess, VendorReading]:
    sampler = SamplerProcess("nvidia", timeout_s, machine.environment(), restart_after_s=0.2)
    return sampler, answer(sampler)


def answer(sampler: SamplerProcess, seconds: float = 30.0) -> VendorReading:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reading = sampler.poll(0.5)
        if reading is not None:
            return reading
    raise AssertionError(sampler.trouble)


def test_a_reading_is_what_the_machine_is(machine: Machine) -> None:
    sampler, reading = sampled(machine)
    sampler.close()
    assert reading.error is None and reading.unidentified == 0 and len(reading.devices) == machine.devices == 2
    for index, device in enumerate(reading.devices):
        assert (device.uuid, device.index, device.minor) == (machine.uuid(index), index, index)
        assert device.up and device.memory_total_bytes == machine.setting("memory", index)
        assert device.memory_used_bytes == 0 and device.memory_reserved_bytes is not None
        assert device.utilization_ppm == 0 and device.power_mw and device.energy_uj_total is not None
        assert device.pci_bus_id and device.driver_version and device.temperature_celsius and device.sm_clock_hz
        assert device.processes == () and device.processes_known
    # Nothing of a card is changed, and no call is made that the simulator lacks.
    calls = machine.calls()
    assert all(count.implemented for count in calls.values()) and not any("Set" in name.removeprefix("nvmlEventSet") for name in calls)


def test_a_call_that_fails_costs_its_value(machine: Machine) -> None:
    machine.script("nvmlDeviceGetPowerUsage", device=0, code=3)
    machine.script("nvmlDeviceGetMemoryInfo_v2", device=0, code=13)
    machine.script("nvmlDeviceGetSamples", device=1, code=3)
    sampler, reading = sampled(machine)
    first, second = reading.devices
    assert first.power_mw is None and first.memory_reserved_bytes is None and first.temperature_celsius
    # The older call counts what the driver keeps as used.
    assert first.memory_used_bytes == second.memory_reserved_bytes
    assert second.power_mw and second.busy_us_total == 0 and "nvmlDeviceGetSamples: Not Supported" in second.errors
    sampler.close()


def test_a_lost_card_and_its_return(machine: Machine) -> None:
    sampler, _ = sampled(machine)
    machine.lose(0)
    lost = answer(sampler)
    assert [device.up for device in lost.devices] == [False, True] and lost.devices[0].uuid == machine.uuid(0) and lost.error is None
    assert lost.devices[1].power_mw
    machine.lose(0, lost=False)
    assert [device.up for device in answer(sampler).devices] == [True, True]
    sampler.close()


def test_a_hung_call_stops_neither_the_page_nor_the_turns(tmp_path: Path, machine: Machine) -> None:
    watched = Watched(tmp_path, machine, timeout_s=1.0)
    rule = machine.script("nvmlDeviceGetTemperature", device=1, delay_ms=600_000, times=1)
    deadline = time.monotonic() + 30
    seen_trouble = False
    while time.monotonic() < deadline and not (seen_trouble and watched.sampler.trouble is None):
        before, since = watched.snapshot().taken_us, time.monotonic()
        while watched.snapshot().taken_us == before:
            assert time.monotonic() - since < 10, "the turns stand still"
            time.sleep(0.05)
        seen_trouble = seen_trouble or watched.sampler.restarts > 0
    assert machine.hits(rule) == 1 and watched.sampler.restarts == 1
    assert all(device.up for device in watched.snapshot().devices)
    watched.close()


def test_tenants_are_billed_what_is_true(watched: Watched) -> None:
    _, environment = watched.allocate("a", 500_000, 4 * GIB)
    hooked = watched.tenant(environment, "--kernel-us", "1000", "--seconds", "2", "--allocate", "1GiB", "--sync-every", "4")
    plain = watched.tenant(watched.machine.environment(), "--kernel-us", "2000", "--seconds", "2", "--device", "1", "--allocate", "512MiB")
    time.sleep(1.2)
    snapshot = watched.snapshot()
    truth = [json.loads(child.communicate(timeout=60)[0]) for child in (hooked, plain)]
    watched.settle()
    watched.end()
    records = watched.spool.read(None, 0).records
    parts = [record for record in records if isinstance(record, SliceRecord)]
    used = sum(part.used_us or 0 for part in parts)
    assert used == pytest.approx(truth[0]["device_seconds"] * 1e6, rel=0.01)
    assert sum(part.launches or 0 for part in parts) == truth[0]["kernels"]
    first, second = (
        [record for record in records if isinstance(record, DeviceRecord) and record.device_uuid == watched.machine.uuid(i)] for i in (0, 1)
    )
    # NVML's percentages are whole numbers over a sample period: that is the margin of what is sampled.
    assert sum(record.unaccounted_us or 0 for record in second) == pytest.approx(truth[1]["device_seconds"] * 1e6, rel=0.1, abs=50_000)
    assert sum(record.unaccounted_us or 0 for record in first) == 0 and sum(record.hooked_us or 0 for record in second) == 0
    assert sum(record.busy_us or 0 for record in first) == pytest.approx(truth[0]["device_seconds"] * 1e6, rel=0.1, abs=50_000)
    strangers = {record.pid for record in records if isinstance(record, ProcessRecord) and not record.hooked}
    owned = {record.tenant for record in records if isinstance(record, ProcessRecord) and record.hooked}
    assert len(strangers) == 1 and owned == {"tenant-a"}
    (part,) = snapshot.slices
    assert part.state == "active" and part.processes == 1 and (part.memory_used_bytes or 0) >= GIB
    assert snapshot.devices[1].unaccounted_memory_bytes and not snapshot.devices[0].unaccounted_memory_bytes


def test_a_tenant_of_300_ms_is_billed_and_its_folder_goes(watched: Watched) -> None:
    folder, environment = watched.allocate("short", 200_000, GIB)
    child = watched.tenant(environment, "--kernel-us", "500", "--seconds", "0.3", "--allocate", "64MiB")
    truth = json.loads(child.communicate(timeout=60)[0])
    counted = read_meter(folder / "meter").total(watched.machine.uuid(0))
    allocation = json.loads((folder / "allocation.json").read_text())
    allocation |= {"state": "released", "changed_us": SystemClock().wall_us()}
    (folder / "allocation.json").write_text(json.dumps(allocation))
    folder.rename(watched.run.retired / "short")
    watched.settle()
    watched.end()
    records = watched.spool.read(None, 0).records
    parts = [record for record in records if isinstance(record, SliceRecord)]  # two where a minute ended in between
    used = sum(part.used_us or 0 for part in parts)
    assert parts and used == counted.busy_ns // 1000 and sum(part.launches or 0 for part in parts) == truth["kernels"]
    assert used == pytest.approx(truth["device_seconds"] * 1e6, rel=0.1)  # how near it is to the truth is the hook's to show
    watched.spool.acknowledge("collector", watched.spool.epoch, watched.spool.last_sequence)
    watched.agent.turn(0.5)
    assert not (watched.run.retired / "short").exists()


def test_after_kill_9_of_the_last_process_nothing_stays_reserved(watched: Watched) -> None:
    _, environment = watched.allocate("a", 500_000, 4 * GIB)
    child = watched.tenant(environment, "--seconds", "60", "--allocate", "1GiB", "--kernel-us", "1000", "--sync-every", "4")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any((part.memory_used_bytes or 0) >= GIB for part in watched.snapshot().slices):
        time.sleep(0.05)
    (part,) = watched.snapshot().slices
    assert (part.memory_used_bytes or 0) >= GIB
    # The program that runs the workload may itself be a child of what was started here.
    for process in watched.snapshot().processes:
        os.kill(process.pid, 9)
    child.communicate(timeout=30)
    while time.monotonic() < deadline and watched.snapshot().slices[0].memory_used_bytes:
        time.sleep(0.05)
    assert watched.snapshot().slices[0].memory_used_bytes == 0 and watched.snapshot().slices[0].processes == 0
    before = watched.snapshot().slices[0].busy_us_total
    watched.settle()
    assert before and watched.snapshot().slices[0].busy_us_total == before


def test_the_daemon_on_a_simulated_machine(tmp_path: Path, machine: Machine) -> None:
    import signal
    import urllib.request

    ready = tmp_path / "ready"
    words = ["exporter", "--simulate", "--name", "n1", "--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--port", "0"]
    words += ["--linger", "60"]
    child = subprocess.Popen(
        [sys.executable, "-m", "poolmeter.cli", *words, "--ready-file", str(ready)],
        env={**os.environ, "POOLMETER_SIM_MACHINE": str(machine.file)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    url = json.loads(ready.read_text())["url"]
    while time.monotonic() < deadline:
        snapshot = json.loads(urllib.request.urlopen(f"{url}/v1/snapshot", timeout=10).read())
        if len(snapshot["devices"]) == 2 and snapshot["simulated"]:
            break
        time.sleep(0.1)
    assert urllib.request.urlopen(f"{url}/readyz", timeout=10).status == 200
    child.send_signal(signal.SIGTERM)
    # It serves on until the collector has the last minute, and ends as soon as it has.
    rows: list[dict[str, object]] = []
    while time.monotonic() < deadline and len({row["device_uuid"] for row in rows}) < 2:
        with urllib.request.urlopen(f"{url}/v1/usage", timeout=10) as response:
            rows, epoch, last = (
                arrow.from_bytes(response.read()).to_pylist(),
                *(response.headers[f"X-Poolmeter-{n}"] for n in ("Epoch", "Last-Sequence")),
            )
        time.sleep(0.1)
    assert rows and all(row["kind"] == "device" and row["unallocated_us"] == row["span_us"] for row in rows)
    assert child.poll() is None
    body = json.dumps({"consumer": "collector", "epoch": epoch, "seq": int(last)}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/ack", body), timeout=10).close()
    assert child.wait(timeout=20) == 0


def test_slices_and_switch_overhead_make_up_the_cards_busy_time(watched: Watched) -> None:
    _, first = watched.allocate("a", 500_000, 4 * GIB)
    _, second = watched.allocate("b", 500_000, 4 * GIB)
    options = ("--kernel-us", "1000", "--seconds", "3", "--sync-every", "8")
    children = [watched.tenant(first, *options), watched.tenant(second, *options)]
    for child in children:
        child.communicate(timeout=60)
    watched.settle()
    watched.end()
    records = watched.spool.read(None, 0).records
    mine = [record for record in records if isinstance(record, DeviceRecord) and record.device_uuid == watched.machine.uuid(0)]
    busy, hooked, overhead, strangers = (
        sum(getattr(record, name) or 0 for record in mine) for name in ("busy_us", "hooked_us", "switch_overhead_us", "unaccounted_us")
    )
    used = sum(record.used_us or 0 for record in records if isinstance(record, SliceRecord))
    kept = watched.machine.device_truth(0)
    assert used == hooked and strangers == 0
    assert hooked + overhead == pytest.approx(busy, rel=0.01)
    assert hooked == pytest.approx(kept.busy_ns / 1000, rel=0.01) and overhead == pytest.approx(kept.switched_ns / 1000, rel=0.1)
    assert busy == pytest.approx((kept.busy_ns + kept.switched_ns) / 1000, rel=0.02)


def test_a_hooked_program_of_less_than_a_tick_is_no_stranger(watched: Watched) -> None:
    """The sampler sees it, and its slot is folded before the page is read: the turns here do no more than ask who is on the card."""
    _, environment = watched.allocate("a", 500_000, GIB)
    watched._stop.set()
    watched._thread.join()
    watched.agent.turn(1.0)
    program = watched.tenant(environment, "--seconds", "0.6", "--kernel-us", "2000")
    seen = []
    while program.poll() is None:
        reading = watched.sampler.poll(0.1)
        seen += [item.pid for device in reading.devices for item in device.processes] if reading else []
    (pid,) = set(seen)
    meter = read_meter(watched.run.allocations / "a" / "meter")
    assert meter.slots == () and [left.pid for left in meter.left] == [pid]
    for _ in range(5):
        snapshot = watched.agent.turn(1.0)
        time.sleep(0.2)
    assert all(process.hooked for process in watched.agent.ledger.processes.values())
    assert snapshot.devices[0].unaccounted_us_total == 0 and (snapshot.slices[0].busy_us_total or 0) > 0
