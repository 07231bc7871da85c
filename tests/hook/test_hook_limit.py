"""The compute limit: share obtained against the simulator's truth, live changes, processes of one allocation together."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter, read_meter
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, tenant_program


def allocation(root: Path, name: str, uuid: str, limit_ppm: int | None) -> Path:
    folder = root / "allocations" / name
    folder.mkdir(parents=True)
    (root / "devices").mkdir(exist_ok=True)
    write_grant(folder / "grant", Grant(name, (DeviceGrant(uuid, limit_ppm),)))
    create_meter(folder / "meter", [uuid])
    return folder


def start(machine: Machine, folder: Path, plan: TenantPlan) -> subprocess.Popen[str]:
    environment = machine.environment() | {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
    return subprocess.Popen([str(tenant_program(plan.resolve)), *plan.words()], env=environment, stdout=subprocess.PIPE, text=True)


def share(machine: Machine, process: subprocess.Popen[str]) -> float:
    """Percent of the device's time that the process had, by the simulator."""
    lines = process.communicate(timeout=60)[0].splitlines()
    wall = max(json.loads(line)["wall_seconds"] for line in lines)
    machine.advance()
    pids = {json.loads(line)["pid"] for line in lines}
    return 100 * sum(truth.busy_ns for truth in machine.truth() if truth.pid in pids) / 1e9 / wall


PLANS: dict[str, Callable[[], TenantPlan]] = {
    "50us": lambda: TenantPlan(50, 2.0),
    "1ms": lambda: TenantPlan(1000, 2.0),
    "20ms-sync": lambda: TenantPlan(20000, 4.0, sync_every=1),
    "graph": lambda: TenantPlan(50, 2.0, graph=20),
}


@pytest.mark.parametrize("percent", [10, 25, 50, 75, 90])
@pytest.mark.parametrize("plan", PLANS)
def test_the_share_is_the_limit(tmp_path: Path, plan: str, percent: int) -> None:
    with Machine.create("single", tmp_path / "machine", clock="virtual") as machine:
        folder = allocation(tmp_path, "a", machine.uuid(0), percent * 10_000)
        assert share(machine, start(machine, folder, PLANS[plan]())) == pytest.approx(percent, abs=1.0)
        counters = read_meter(folder / "meter").total(machine.uuid(0))
        assert counters.throttle_waits > 0 and counters.throttled_ns > 0


@pytest.mark.parametrize("us", [50, 1000])
def test_two_tenants_each_get_their_limit(tmp_path: Path, us: int) -> None:
    with Machine.create("single", tmp_path / "machine", clock="virtual", participants=2) as machine:
        folders = [allocation(tmp_path, name, machine.uuid(0), percent * 10_000) for name, percent in (("a", 25), ("b", 55))]
        tenants = [start(machine, folder, TenantPlan(us, 2.0)) for folder in folders]
        assert [share(machine, tenant) for tenant in tenants] == pytest.approx([25, 55], abs=2.0)


def test_without_a_limit_nothing_waits(tmp_path: Path) -> None:
    with Machine.create("single", tmp_path / "machine", clock="virtual") as machine:
        for name, limit in (("none", None), ("whole", 1_000_000)):
            folder = allocation(tmp_path, name, machine.uuid(0), limit)
            assert share(machine, start(machine, folder, TenantPlan(1000, 0.3))) > 99
            assert read_meter(folder / "meter").total(machine.uuid(0)).throttle_waits == 0


def test_processes_of_one_allocation_share_one_limit(tmp_path: Path) -> None:
    with Machine.create("single", tmp_path / "machine", clock="real") as machine:
        uuid = machine.uuid(0)
        folder = allocation(tmp_path, "a", uuid, 400_000)
        tenants = [start(machine, folder, TenantPlan(500, 1.5)) for _ in range(4)]
        for tenant in tenants:
            tenant.communicate(timeout=60)
        machine.advance()
        busy = sum(truth.busy_ns for truth in machine.truth())
        first = min(truth.attached_ns for truth in machine.truth())
        last = max(truth.ended_ns or 0 for truth in machine.truth())
        # never above the limit; on a busy machine the tenants may not use all of it
        assert busy / (last - first) < 0.43


def test_a_new_limit_bites_while_the_program_runs(tmp_path: Path) -> None:
    with Machine.create("single", tmp_path / "machine", clock="real") as machine:
        uuid = machine.uuid(0)
        folder = allocation(tmp_path, "a", uuid, 50_000)
        tenant = start(machine, folder, TenantPlan(500, 0))

        def share_over(seconds: float) -> float:
            before, began = read_meter(folder / "meter").total(uuid).busy_ns, time.monotonic_ns()
            time.sleep(seconds)
            return 100 * (read_meter(folder / "meter").total(uuid).busy_ns - before) / (time.monotonic_ns() - began)

        deadline = time.monotonic() + 20
        while read_meter(folder / "meter").total(uuid).launches < 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        low = share_over(0.8)
        write_grant(folder / "grant", Grant("a", (DeviceGrant(uuid, 600_000),)))
        time.sleep(0.3)
        high = share_over(0.5)
        write_grant(folder / "grant", Grant("a", (DeviceGrant(uuid, 50_000),)))
        time.sleep(0.7)
        again = share_over(0.8)
        tenant.terminate()
        tenant.communicate()
        assert low < 9 and again < 9
        assert high > 25  # a loaded machine may keep the program from using all of its 60
