"""The hook between programs and the simulated driver: how it is found, memory, launches, captures, children, refusals."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter, reclaim
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, tenant_program

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Node:
    """A simulated node and the allocations on it."""

    machine: Machine
    root: Path

    @property
    def uuid(self) -> str:
        return self.machine.uuid(0)

    def allocation(self, name: str, memory: int | None = None, uuid: str | None = None) -> Path:
        folder = self.root / "allocations" / name
        folder.mkdir(parents=True)
        write_grant(folder / "grant", Grant(name, (DeviceGrant(uuid or self.uuid, memory_bytes=memory),)))
        create_meter(folder / "meter", [uuid or self.uuid])
        return folder

    def start(self, folder: Path | None, *command: str, **extra: str) -> subprocess.Popen[str]:
        environment = self.machine.environment() | {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so"))} | extra
        if folder:
            environment["POOLMETER_ALLOCATION_DIR"] = str(folder)
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, folder: Path | None, *arguments: str, **extra: str) -> dict[str, Any]:
        process = self.start(folder, str(native_path("bin/poolmeter-exercise-program")), *arguments, **extra)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        answer: dict[str, Any] = json.loads(output)
        return answer

    def tenant(self, folder: Path, plan: TenantPlan) -> subprocess.Popen[str]:
        return self.start(folder, str(tenant_program(plan.resolve)), *plan.words())

    def counters(self, folder: Path) -> DeviceCounters:
        return read_meter(folder / "meter").total(self.uuid)

    def truth_ns(self, pid: int) -> int:
        self.machine.advance()
        return sum(truth.busy_ns for truth in self.machine.truth() if truth.pid == pid)


@pytest.fixture
def node(tmp_path: Path) -> Callable[..., Node]:
    def make(clock: str = "virtual", participants: int | None = None) -> Node:
        (tmp_path / "devices").mkdir(exist_ok=True)
        return Node(Machine.create("single", tmp_path / "machine", clock=clock, participants=participants), tmp_path)

    return make


def test_every_way_of_finding_a_function_leads_to_the_hook(node: Callable[..., Node]) -> None:
    here = node()
    answer = here.run(here.allocation("a"), "resolve")
    expected = dict.fromkeys(answer, 1) | {"gpa unknown address": 0, "dlsym unknown": 0}
    expected["gpa unknown"] = answer["gpa unknown"]
    assert answer == expected


def test_exports_only_what_it_interposes() -> None:
    hooks = (Path(__file__).parents[2] / "enforcer/native/hook/hooks.h").read_text().split("#define PM_NEEDS")[0]
    listed = {word.split(")")[0] for word in hooks.split("X(")[1:]}
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", str(native_path("libpoolmeter_hook.so"))], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in lines.stdout.splitlines() if line.split()[-2] not in ("A",)}
    assert exported == listed | {"dlsym@GLIBC_2.2.5", "dlsym@@GLIBC_2.34"}


def test_programs_without_a_driver_or_pages_run_on(tmp_path: Path) -> None:
    environment = dict(os.environ, LD_PRELOAD=str(native_path("libpoolmeter_hook.so")))
    assert subprocess.run(["sh", "-c", "echo $((6 * 7))"], env=environment, capture_output=True, text=True).stdout == "42\n"
    environment["POOLMETER_ALLOCATION_DIR"] = str(tmp_path / "nothing")
    assert subprocess.run(["python3", "-c", "import ctypes"], env=environment).returncode == 0


def test_memory_of_every_kind_counts_against_one_limit(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a", memory=GIB)
    answer = here.run(folder, "memory")
    pitch = answer.pop("pitch_bytes")
    assert answer == {
        "total": GIB,
        "create_without_context": 0,
        "create_bad_device": 101,
        "create_on_host": 0,
        "alloc_600": 0,
        "alloc_600_more": 2,
        "managed_600_more": 2,
        "async_600_more": 2,
        "create_600_more": 2,
        "info_free": GIB - 600 * MIB,
        "info_total": GIB,
        "info_null_total": answer["info_null_total"],
        "alloc_null": 1,
        "alloc_zero": 1,
        "alloc_rest": 0,
        "alloc_a_byte": 2,
        "free_twice": 1,
        "free_unknown": 1,
        "pitch": 0,
        "info_free_after_pitch": GIB - 600 * MIB - pitch,
        "alloc_whole": 0,
        "info_free_at_end": GIB,
    }
    counters = here.counters(folder)
    assert (counters.denied_limit, counters.denied_card, counters.memory_peak, counters.memory_bytes) == (5, 0, GIB, 0)
    assert counters.denied_limit_bytes == 4 * 600 * MIB + 1


def test_without_a_limit_the_card_itself_denies(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a")
    process = here.tenant(folder, TenantPlan(kernels=0, seconds=0.01, allocate=100 * GIB))
    assert "OUT_OF_MEMORY" in process.communicate(timeout=30)[0]
    counters = here.counters(folder)
    assert (counters.denied_card, counters.denied_card_bytes, counters.denied_limit, counters.memory_bytes) == (1, 100 * GIB, 0, 0)


def test_physical_memory_lives_until_its_last_handle_and_mapping(node: Callable[..., Node]) -> None:
    here = node()
    assert here.run(here.allocation("a", memory=GIB), "mappings") == {"mapped_only": 64 * MIB, "retained_only": 64 * MIB, "after": 0}


def test_stream_ordered_pairs_return_to_zero(node: Callable[..., Node], long_run: int) -> None:
    here = node()
    folder = here.allocation("a", memory=20 * MIB)
    answer = here.run(folder, "async", str(3000 if long_run == 1 else 1_000_000))
    counters = here.counters(folder)
    assert counters.memory_bytes == 0 and read_meter(folder / "meter").shared[here.uuid].memory_bytes == 0
    assert answer["denied"] == counters.denied_limit > 0
    assert counters.memory_peak <= 20 * MIB


def test_copies_are_counted_by_direction(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a")
    here.run(folder, "copies")
    counters = here.counters(folder)
    assert (counters.copies, counters.copy_h2d_bytes, counters.copy_d2h_bytes, counters.copy_d2d_bytes) == (6, 21000, 4300, 75)


def test_captures_are_left_alone_and_graphs_counted(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a")
    answer = here.run(folder, "capture")
    counters = here.counters(folder)
    assert (counters.graph_launches, counters.launches, counters.internal_faults) == (100, answer["other_launches"], 0)


def test_work_beside_a_capture_that_is_left_behind_is_charged_as_known(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a")
    assert here.run(folder, "left-behind")["ended"] != 0
    counters = here.counters(folder)
    assert (counters.launches, counters.pending_ns) == (10_200, 0)
    assert counters.busy_ns == pytest.approx(10_200 * 50_000, rel=0.02)


def test_launches_of_many_threads_are_all_counted(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a")
    answer = here.run(folder, "threads", "4")
    counters = here.counters(folder)
    assert (counters.launches, counters.internal_faults, counters.pending_ns) == (answer["launches"], 0, 0)


def test_streams_and_contexts_may_go_with_work_under_way(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a")
    answer = here.run(folder, "streams")
    counters = here.counters(folder)
    assert (counters.launches, counters.internal_faults, counters.pending_ns) == (answer["launches"], 0, 0)


def test_children_before_and_after_the_driver_started(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a")
    assert here.run(folder, "children")["late_child"] == 0
    reclaim(folder / "meter")
    reading = read_meter(folder / "meter")
    assert reading.slots == () and reading.retired[here.uuid].launches == 300


def test_a_device_outside_the_grant_is_denied(node: Callable[..., Node]) -> None:
    here = node()
    folder = here.allocation("a", uuid="GPU-00000000-0000-0000-0000-00000000dead")
    assert here.run(folder, "refused") == {"init": 0, "device": 0, "retain": 46}
    assert read_meter(folder / "meter").total("GPU-00000000-0000-0000-0000-00000000dead").denied_device == 1


@pytest.mark.parametrize("damage", ["absent", "short", "magic", "version", "fifo", "link"])
def test_a_bad_page_lets_the_program_run_or_refuses_as_told(node: Callable[..., Node], damage: str) -> None:
    here = node()
    folder = here.allocation("a")
    meter = folder / "meter"
    data = bytearray(meter.read_bytes())
    meter.unlink()
    if damage == "short":
        meter.write_bytes(data[:5000])
    elif damage == "magic":
        meter.write_bytes(b"x" * len(data))
    elif damage == "version":
        data[8] = 9
        meter.write_bytes(data)
    elif damage == "fifo":
        os.mkfifo(meter)
    elif damage == "link":
        (folder / "elsewhere").write_bytes(data)
        meter.symlink_to(folder / "elsewhere")
    assert here.run(folder, "refused") == {"init": 0, "device": 0, "retain": 0}
    assert here.run(folder, "refused", POOLMETER_ON_FAULT="refuse") == {"init": 800, "device": 0, "retain": 46}


def test_nothing_is_asked_of_the_driver_before_the_program_does(node: Callable[..., Node]) -> None:
    here = node()
    process = here.start(here.allocation("a"), "/bin/true")
    assert process.wait() == 0
    assert here.machine.calls() == {}


@pytest.mark.parametrize(
    "plan",
    [
        TenantPlan(50, 0.5),
        TenantPlan(1000, 0.5, resolve="link"),
        TenantPlan(20000, 0.5, sync_every=1, resolve="dlsym"),
        TenantPlan(50, 0.5, graph=20),
        TenantPlan(50, 0.5, streams=3),
        TenantPlan(50, 0.2, gap_us=100),
        TenantPlan(5, 0.1),
    ],
    ids=["50us", "1ms-linked", "20ms-sync", "graph", "streams", "gaps", "5us"],
)
def test_busy_time_alone_is_the_truth_within_one_percent(node: Callable[..., Node], plan: TenantPlan) -> None:
    here = node()
    folder = here.allocation("a")
    process = here.tenant(folder, plan)
    assert process.communicate(timeout=60) and process.returncode == 0
    counters = here.counters(folder)
    assert counters.busy_ns == pytest.approx(here.truth_ns(process.pid), rel=0.01)
    assert (counters.internal_faults, counters.pending_ns) == (0, 0)


@pytest.mark.parametrize("pair", [(50, 50), (1000, 1000), (50, 20000)])
def test_two_sharers_pay_for_their_own_time(node: Callable[..., Node], pair: tuple[int, int]) -> None:
    here = node(participants=2)
    folders = [here.allocation(name) for name in ("a", "b")]
    tenants = [here.tenant(folder, TenantPlan(us, 1.0)) for folder, us in zip(folders, pair, strict=True)]
    for tenant in tenants:
        assert tenant.communicate(timeout=60) and tenant.returncode == 0
    for folder, tenant, us in zip(folders, tenants, pair, strict=True):
        # Launches longer than a turn of the device are known only up to the turns at their two ends.
        tolerance = 0.01 if us <= 1000 else 0.03
        assert here.counters(folder).busy_ns == pytest.approx(here.truth_ns(tenant.pid), rel=tolerance)


def test_busy_time_holds_on_a_clock_that_does_not_wait(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a")
    process = here.tenant(folder, TenantPlan(200, 0.5))
    assert process.communicate(timeout=60) and process.returncode == 0
    assert here.counters(folder).busy_ns == pytest.approx(here.truth_ns(process.pid), rel=0.02)


def test_a_kernel_that_does_not_end_is_metered_as_it_runs(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a")
    process = here.tenant(folder, TenantPlan(1_500_000, 0, kernels=1))
    seen = []
    while process.poll() is None:
        seen.append(here.counters(folder).busy_ns)
        time.sleep(0.02)
    process.communicate()
    partial = {busy for busy in seen if 100_000_000 < busy < 1_400_000_000}
    assert len(partial) >= 3 and seen == sorted(seen)
    assert here.counters(folder).busy_ns == pytest.approx(1_500_000_000, rel=0.02)


def test_a_killed_tenant_is_billed_and_its_memory_returns(node: Callable[..., Node]) -> None:
    here = node("real")
    folder = here.allocation("a", memory=GIB)
    process = here.tenant(folder, TenantPlan(500, 0, allocate=512 * MIB))
    deadline = time.monotonic() + 20
    while here.counters(folder).launches < 300:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert read_meter(folder / "meter").shared[here.uuid].memory_bytes == 512 * MIB
    assert reclaim(folder / "meter") == 1
    reading = read_meter(folder / "meter")
    assert reading.slots == () and reading.shared[here.uuid].memory_bytes == 0
    truth = here.truth_ns(process.pid)
    assert reading.retired[here.uuid].busy_ns == pytest.approx(truth, abs=50_000_000)
