"""Cards that are slow, hang or come late, on the simulated machine through the real sampler child and agent."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poolmeter.clock import SystemClock
from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.render import Renderer
from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.exporter.spool import Spool
from poolmeter.native import native_path
from poolmeter.places import NodeData, NodeRun
from poolmeter.simulator.machine import Machine
from poolmeter.vendors.reading import VendorReading

pytestmark = pytest.mark.timeout(120)
MakeMachine = Callable[..., Machine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeMachine]:
    with contextlib.ExitStack() as stack:

        def made(name: str) -> Machine:
            return stack.enter_context(contextlib.closing(Machine.create(name, tmp_path / f"{name}.sim")))

        yield made


@pytest.fixture
def start() -> Iterator[Callable[..., SamplerProcess]]:
    started: list[SamplerProcess] = []

    def begin(machine: Machine, timeout_s: float = 30.0, **options: object) -> SamplerProcess:
        started.append(SamplerProcess("nvidia", timeout_s, machine.environment(), restart_after_s=0.1, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for sampler in started:
        sampler.close()


def until(sampler: SamplerProcess, wanted: Callable[[VendorReading], bool], seconds: float = 40.0) -> VendorReading:
    deadline = time.monotonic() + seconds
    reading = None
    while time.monotonic() < deadline:
        reading = sampler.poll(0.5) or reading
        if reading is not None and wanted(reading):
            return reading
        time.sleep(0.05)
    raise AssertionError(f"{sampler.trouble}: {reading}")


def whole(reading: VendorReading) -> bool:
    return reading.error is None and reading.unidentified == 0 and not any(d.hardware.stale for d in reading.devices)


def test_scrape_time_outs_with_8_cards_x_7_instances_at_50_ms_a_call(
    make: MakeMachine, start: Callable[..., SamplerProcess], tmp_path: Path
) -> None:
    machine = make("mig-a100x8")
    machine.script("nvmlDevice*", delay_ms=50)
    run, data = NodeRun(tmp_path / "run"), NodeData(tmp_path / "data")
    for folder in (run.allocations, run.retired, data.root):
        folder.mkdir(parents=True)
    with contextlib.closing(Spool(data.spool, "node-a", ())) as spool:
        agent = Agent(Settings(node="node-a", pool="lab"), run, data, spool, start(machine), SystemClock())
        renderer, deadline = Renderer(), time.monotonic() + 60
        seen: set[int] = set()
        marked = 0
        while len(seen) < 3 and time.monotonic() < deadline:
            snapshot = agent.turn(0.5)
            began = time.monotonic()
            page = agent.page()
            assert page is not None and renderer.render(page)
            assert time.monotonic() - began < 0.2
            ready = [d for d in snapshot.devices if d.hardware is not None and d.hardware.instances is not None]
            if len(ready) < 8:
                continue
            assert all(d.up and len(d.hardware.instances) == 7 for d in ready if d.hardware and d.hardware.instances)
            at = [d.hardware.at_us or 0 for d in ready if d.hardware]
            seen.add(max(at))
            marked += sum(d.hardware.stale for d in ready if d.hardware)
            # One slow look of a card is under way, and what is shown is the one before it.
            assert snapshot.taken_us - min(at) < 15_000_000
        assert len(seen) >= 3 and marked > 0


def test_a_card_whose_call_hangs_leaves_the_others_fresh(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    sampler = start(machine)
    until(sampler, whole)
    rule = machine.script("nvmlDeviceGetTemperature", device=1, delay_ms=600_000, times=1)
    hung = until(sampler, lambda r: r.hung_us > 500_000)
    assert machine.hits(rule) == 1
    good, bad = hung.devices
    assert good.up and not good.hardware.stale and bad.hardware.stale
    later = until(sampler, lambda r: r.hung_us > 5_500_000)
    good, bad = later.devices
    assert good.up and not good.hardware.stale and later.error is None and sampler.restarts == 0
    assert (good.hardware.at_us or 0) > (hung.devices[0].hardware.at_us or 0)
    # Old values are not served after their source died.
    assert not bad.up and bad.power_mw is None and bad.reason is not None and "has not come back" in bad.reason


def test_a_hung_card_costs_the_child_its_life_and_then_ever_more_seldom(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    sampler = start(machine, timeout_s=1.0)
    until(sampler, whole)
    rule = machine.script("nvmlDeviceGetTemperature", device=1, delay_ms=600_000)
    until(sampler, lambda _: sampler.restarts == 1)
    began = time.monotonic()
    found = until(sampler, lambda _: sampler.restarts == 2)
    assert found.devices[0].up and time.monotonic() - began > 2.0
    machine.unscript(rule)
    healed = until(sampler, lambda r: whole(r) and len(r.devices) == 2)
    assert all(device.up for device in healed.devices)


def test_a_shorter_limit_is_that_of_the_next_child_too(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    sampler = start(machine)
    until(sampler, whole)
    machine.script("nvmlDeviceGetTemperature", device=1, delay_ms=600_000)
    sampler.timeout_s = 1.0
    until(sampler, lambda _: sampler.restarts >= 1)
    # Of a child that has never answered before: it waits for its cards no longer than whoever asks waits for it.
    assert until(sampler, lambda r: r.error is None and len(r.devices) > 0).devices[0].up and sampler.restarts == 1


def test_a_driver_reload_under_a_running_exporter(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    sampler = start(machine)
    first = until(sampler, whole)
    pid = sampler.pid
    rule = machine.script("nvmlDeviceGetUtilizationRates", code=18)
    until(sampler, lambda r: r.error is not None)
    assert sampler.trouble is not None and "mismatch" in sampler.trouble and sampler.restarts >= 1
    machine.unscript(rule)
    again = until(sampler, whole)
    assert again.origin != first.origin and sampler.pid != pid and len(again.devices) == 2


def test_a_started_before_driver_exporter_that_never_recovers(
    make: MakeMachine, start: Callable[..., SamplerProcess], tmp_path: Path
) -> None:
    """No library at all, then an empty file in its place, then the library."""
    machine = make("t4x2")
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    environment = {**machine.environment(), "LD_LIBRARY_PATH": str(folder)}
    sampler = SamplerProcess("nvidia", 20, environment, restart_after_s=0.1)
    with contextlib.closing(sampler):
        assert until(sampler, lambda r: r.error is not None).devices == ()
        child = sampler.pid
        (folder / "libnvidia-ml.so.1").unlink()
        (folder / "libnvidia-ml.so.1").symlink_to(native_path("sim/libnvidia-ml.so.1"))
        assert len(until(sampler, whole).devices) == 2
        assert sampler.pid == child and sampler.trouble is None


def test_a_card_that_is_not_up_at_first(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    machine.lose(1)
    sampler = start(machine)
    first = until(sampler, lambda r: r.error is None)
    assert [d.uuid for d in first.devices] == [machine.uuid(0)] and first.unidentified == 1
    machine.lose(1, lost=False)
    assert [d.up for d in until(sampler, whole).devices] == [True, True]


def test_sigterm_during_a_slow_call(make: MakeMachine, tmp_path: Path) -> None:
    machine = make("single")
    rule = machine.script("nvmlDeviceGetPowerUsage", delay_ms=600_000, after=2)
    ready = tmp_path / "ready"
    words = ["exporter", "--simulate", "--name", "n1", "--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--port", "0"]
    child = subprocess.Popen(
        [sys.executable, "-m", "poolmeter.cli", *words, "--linger", "0", "--ready-file", str(ready)],
        env={**os.environ, "POOLMETER_SIM_MACHINE": str(machine.file)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (ready.exists() and machine.hits(rule)):
        assert time.monotonic() < deadline, "no call is slow"
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 0


# ---- partitions ----------------------------------------------------------------------------------------------------------------------


def test_mig_utilisation_shown_as_0(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    """An A100 tells no utilisation while MIG is on: absent, of the card and of its instances; an H200 tells its instances'."""
    old = until(start(make("mig-a100x8")), whole).devices[0]
    assert old.mig and old.utilization_ppm is old.busy_us_total is old.hardware.activity is None and old.power_mw
    assert old.hardware.instances is not None and len(old.hardware.instances) == 7
    assert all(part.activity is None and part.busy_us_total is None for part in old.hardware.instances)
    sampler = start(make("mig-h200x8"))
    new = until(sampler, lambda r: whole(r) and all(p.activity for d in r.devices for p in d.hardware.instances or ()))
    six, split, empty = new.devices[0], new.devices[6], new.devices[7]
    assert six.utilization_ppm is None and six.hardware.instances is not None and len(six.hardware.instances) == 7
    assert split.hardware.instances is not None and empty.hardware.instances == ()
    assert [(p.profile, p.placement_start, p.placement_size) for p in split.hardware.instances] == [("4g.71gb", 0, 4), ("3g.71gb", 4, 4)]
    assert all(p.activity is not None and p.activity.graphics_ppm == 0 and p.memory_total_bytes for p in split.hardware.instances)


def test_mig_layout_changed_between_two_cycles(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("h200x4")
    sampler = start(machine)
    assert until(sampler, whole).devices[0].hardware.instances is None
    machine.mig(0, "4g.71gb", "3g.71gb")
    first = until(sampler, lambda r: bool(r.devices[0].hardware.instances)).devices[0].hardware.instances
    machine.mig(0, "", "3g.71gb", "1g.18gb")
    second = until(sampler, lambda r: len(r.devices[0].hardware.instances or ()) == 2 and r.devices[0].hardware.instances != first)
    assert first is not None
    now = second.devices[0].hardware.instances or ()
    assert [p.profile for p in now] == ["3g.71gb", "1g.18gb"] and first[0].uuid not in {p.uuid for p in now}
    machine.mig(0)
    assert until(sampler, lambda r: r.devices[0].hardware.instances == ()).devices[0].up
    machine.set("mig_mode", 0, device=0)
    back = until(sampler, lambda r: r.devices[0].hardware.instances is None).devices[0]
    assert back.utilization_ppm == 0 and sampler.restarts == 0


def test_memory_processes_and_time_of_an_instance(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    from poolmeter.simulator.tenant import TenantPlan, tenant_program

    machine = make("h200x4")
    machine.mig(0, "4g.71gb", "3g.71gb")
    plan = TenantPlan(kernel_us=1000, seconds=60, allocate=1 << 30)
    words = [str(tenant_program(plan.resolve)), "--die-with-parent", *plan.words()]
    child = subprocess.Popen(words, env=machine.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        sampler = start(machine)
        deadline = time.monotonic() + 30
        while not any(t.pid == child.pid and t.memory for t in machine.truth()) and time.monotonic() < deadline:
            time.sleep(0.05)
        machine.assign(child.pid, 0, 1)
        found = until(sampler, lambda r: any((p.busy_us_total or 0) > 200_000 for p in r.devices[0].hardware.instances or ()))
        idle, busy = found.devices[0].hardware.instances or ()
        assert (idle.processes, idle.memory_used_bytes, idle.busy_us_total) == (0, 0, 0)
        assert busy.processes == 1 and (busy.memory_used_bytes or 0) >= 1 << 30 and busy.activity is not None
        assert (busy.activity.graphics_ppm or 0) > 300_000
        (process,) = found.devices[0].processes
        assert (process.pid, process.gpu_instance_id, process.compute_instance_id) == (child.pid, busy.gpu_instance_id, 0)
        assert found.devices[0].utilization_ppm is None and process.busy_us_total is None
    finally:
        child.kill()
        child.wait()


def test_active_vgpus_of_a_host(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("vgpu-hostx1")
    sampler = start(machine)
    found = until(sampler, lambda r: any((v.busy_us_total or 0) > 400_000 for v in r.devices[0].hardware.vgpus or ()))
    first, second = found.devices[0].hardware.vgpus or ()
    assert found.devices[0].hardware.virtualization == "host_vgpu"
    assert first.type_name == "NVIDIA L40S-24C" and first.vm_id == "9d0c7b3e-6f0c-4a3e-8d58-5b1c2d1f6a01"
    assert (first.framebuffer_total_bytes, first.framebuffer_used_bytes) == (24 << 30, 6 << 30)  # more than 32 bits hold
    assert (first.licensed, second.licensed) == (True, False)
    assert (first.busy_us_total or 0) == pytest.approx(4 * (second.busy_us_total or 0), rel=0.01)
    machine.vgpus(0)
    assert until(sampler, lambda r: r.devices[0].hardware.vgpus == ()).devices[0].up


def test_the_licence_of_a_guest(make: MakeMachine, start: Callable[..., SamplerProcess]) -> None:
    machine = make("t4x2")
    machine.set("virtualization", 2, device=0)
    machine.set("licensed", 1, device=0)
    machine.set("virtualization", 2, device=1)
    first, second = (device.hardware for device in until(start(machine), whole).devices)
    assert (first.licensed, second.licensed) == (True, False) and first.license_product == "NVIDIA Virtual Compute Server"


def test_an_mps_server_and_its_clients(make: MakeMachine, start: Callable[..., SamplerProcess], tmp_path: Path) -> None:
    from poolmeter.simulator.tenant import TenantPlan, tenant_program

    machine = make("t4x2")
    program = tmp_path / "nvidia-cuda-mps-server"
    program.symlink_to("/bin/sleep")
    server = subprocess.Popen([str(program), "120"])
    plan = TenantPlan(kernel_us=1000, seconds=60, allocate=1 << 28)
    words = [str(tenant_program(plan.resolve)), "--die-with-parent", *plan.words()]
    clients = [subprocess.Popen(words, env=machine.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        machine.set("mps_server", server.pid, device=0)
        found = until(start(machine), lambda r: sum((p.busy_us_total or 0) > 300_000 for p in r.devices[0].processes) == 2)
        device = found.devices[0]
        by_pid = {p.pid: p for p in device.processes}
        assert by_pid.keys() == {server.pid, *(c.pid for c in clients)} and device.hardware.mps_server_pid == server.pid
        assert by_pid[server.pid].mps == "server" and by_pid[server.pid].busy_us_total == 0
        parts = [by_pid[c.pid].busy_us_total or 0 for c in clients]
        assert all(by_pid[c.pid].divided and by_pid[c.pid].mps == "client" for c in clients) and abs(parts[0] - parts[1]) <= len(parts) * 40
        assert sum(parts) <= (device.busy_us_total or 0) + 1_000_000
    finally:
        for child in (server, *clients):
            child.kill()
            child.wait()


def test_xids_and_counters_over_a_restarted_sampler(make: MakeMachine, start: Callable[..., SamplerProcess], tmp_path: Path) -> None:
    from poolmeter.exporter.hardware import HardwareTotals

    machine = make("h200x4")
    machine.set("held_power_ns", 5_000_000_000, device=0)
    machine.set("nvlink_tx_kib", 77, device=0)
    machine.set("ecc_aggregate_uncorrectable", 3, device=0)
    sampler, totals = start(machine), HardwareTotals({}, "epoch")
    until(sampler, whole)
    machine.xid(0, 31)

    def told(reading: VendorReading) -> list[tuple[int, int]]:
        return [(x.xid, x.count) for x in totals.carry(reading).devices[0].hardware.xids]

    until(sampler, lambda r: told(r) == [(31, 1)])
    assert sampler.pid is not None
    os.kill(sampler.pid, signal.SIGKILL)
    reading = until(sampler, lambda r: whole(r) and sampler.restarts == 1)
    assert told(reading) == [(31, 1)]
    machine.xid(0, 31)
    hardware = totals.carry(until(sampler, lambda r: told(r) == [(31, 2)])).devices[0].hardware
    assert hardware.throttle_us_total["sw_power_cap"] == 5_000_000 and hardware.nvlink_tx_bytes_total == 77 * 1024
    assert hardware.ecc_errors_total == {"corrected": 0, "uncorrected": 3}
