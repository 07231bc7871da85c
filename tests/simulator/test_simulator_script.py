"""Scripted faults and delays, call counts, the virtual clock."""

import ctypes
import time

import pytest

from poolmeter.errors import BadInput
from poolmeter.native import native_path
from poolmeter.simulator.configuration import parse_machine
from poolmeter.simulator.tenant import TenantPlan, run_tenant

from .conftest import LONG, MakeMachine, RunProgram, start_tenant


@pytest.fixture
def loaded(make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """pynvml in this process on a fresh two-card machine."""
    import pynvml

    machine = make_machine("t4x2")
    monkeypatch.setenv("POOLMETER_SIM_MACHINE", str(machine.file))
    ctypes.CDLL(str(native_path("sim/libnvidia-ml.so.1")))
    pynvml.nvmlInit()
    yield machine, pynvml
    pynvml.nvmlShutdown()


def test_a_fault_after_some_calls_for_some_calls(loaded) -> None:  # type: ignore[no-untyped-def]
    machine, nvml = loaded
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    rule = machine.script("nvmlDeviceGetPowerUsage", after=2, times=2, code=15)
    outcomes = []
    for _ in range(6):
        try:
            nvml.nvmlDeviceGetPowerUsage(handle)
            outcomes.append(True)
        except nvml.NVMLError_GpuIsLost:
            outcomes.append(False)
    assert outcomes == [True, True, False, False, True, True]
    assert machine.hits(rule) == 2
    assert machine.calls()["nvmlDeviceGetPowerUsage"].count == 6


def test_a_fault_of_one_card_and_its_end(loaded) -> None:  # type: ignore[no-untyped-def]
    machine, nvml = loaded
    first, second = (nvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    rule = machine.script("nvmlDeviceGet*", device=1, code=999)
    assert nvml.nvmlDeviceGetName(first)
    with pytest.raises(nvml.NVMLError_Unknown):
        nvml.nvmlDeviceGetName(second)
    machine.unscript(rule)
    assert nvml.nvmlDeviceGetName(second)


def test_a_delay(loaded) -> None:  # type: ignore[no-untyped-def]
    machine, nvml = loaded
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    machine.script("nvmlDeviceGetTemperature", delay_ms=60, times=1)
    started = time.monotonic()
    nvml.nvmlDeviceGetTemperature(handle, 0)
    assert time.monotonic() - started >= 0.06


def test_unknown_calls_and_too_many_rules_are_refused(make_machine: MakeMachine) -> None:
    machine = make_machine()
    with pytest.raises(BadInput, match="cuMemAllocate"):
        machine.script("cuMemAllocate", code=2)
    for _ in range(64):
        machine.script("cuInit", code=1)
    with pytest.raises(BadInput, match="64 rules"):
        machine.script("cuInit", code=1)


def test_faults_from_the_machine_file_reach_the_driver(make_machine: MakeMachine, run_program: RunProgram) -> None:
    text = '[machine]\nname = "f"\n[[card]]\n[[fault]]\ncall = "cuMemAlloc"\nafter = 1\ntimes = 1\ncode = 2\n'
    answer = run_program(
        make_machine(parse_machine(text, "f.toml")),
        "cu.open()\np = c_uint64()\nsay(codes=[cu.status('cuMemAlloc_v2', byref(p), c_size_t(4096)) for _ in range(3)])",
    )
    assert answer["codes"] == [0, 2, 0]


def test_a_lost_card_fails_its_programs(make_machine: MakeMachine) -> None:
    machine = make_machine()
    tenant = start_tenant(machine, kernel_us=1000, seconds=0)
    deadline = time.monotonic() + 20
    while machine.device_truth(0).kernels < 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    machine.lose(0)
    output, _errors = tenant.communicate(timeout=20)
    assert '"cuda_error":"CUDA_ERROR_UNKNOWN"' in output


@pytest.mark.parametrize("tenants", [1, 3])
def test_the_same_script_gives_the_same_truth(make_machine: MakeMachine, tenants: int) -> None:
    def once() -> list[tuple[int, int, int]]:
        machine = make_machine("t4x2", clock="virtual", participants=tenants)
        plans = [
            {"kernel_us": 137 * (number + 1), "seconds": 1.0, "gap_us": 31 * number, "sync_every": 3 * number, "streams": 1 + number}
            for number in range(tenants)
        ]
        # Started one after the other: the turn among equals goes by process number.
        started = [start_tenant(machine, **plan) for plan in plans]
        for tenant in started:
            _, errors = tenant.communicate(timeout=60)
            assert tenant.returncode == 0, errors
        order = {tenant.pid: number for number, tenant in enumerate(started)}
        return sorted((order[record.pid], record.busy_ns, record.kernels) for record in machine.truth())

    first = once()
    assert len(first) == tenants and all(busy > 0 for _, busy, _ in first)
    for _ in range(10 if LONG else 2):
        assert once() == first


def test_virtual_time_runs_faster_than_the_wall(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="virtual")
    started = time.monotonic()
    report = run_tenant(TenantPlan(kernel_us=1000, seconds=60), machine.file)
    assert report["device_seconds"] == pytest.approx(60, rel=0.001)
    assert time.monotonic() - started < 30


def test_a_dead_participant_does_not_stop_the_clock(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="virtual", participants=2)
    survivor = start_tenant(machine, kernel_us=1000, seconds=30)
    victim = start_tenant(machine, kernel_us=1000, seconds=0)
    deadline = time.monotonic() + 20
    while len([record for record in machine.truth() if record.kernels > 5]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.kill()
    victim.wait()
    _, errors = survivor.communicate(timeout=60)
    assert survivor.returncode == 0, errors


def test_a_thread_that_sleeps_elsewhere_does_not_stop_the_clock(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(clock="virtual"),
        """
import threading
context = cu.open()
f = cu.function()
held = threading.Event()
def other():
    cu("cuCtxSetCurrent", context)
    held.wait()  # has the turn, and waits for the main thread, which waits for the clock
    s = cu.stream(); cu.launch(f, 1_000_000, s); cu("cuStreamSynchronize", s)
thread = threading.Thread(target=other)
thread.start()
s = cu.stream()
cu.launch(f, 2_000_000, s); cu("cuStreamSynchronize", s)
held.set()
thread.join()
say(done=True)
""",
    )
    assert answer == {"done": True}


def test_manual_time_stands_until_it_is_moved(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="manual")
    tenant = start_tenant(machine, kernel_us=1000, kernels=8)
    deadline = time.monotonic() + 20
    while not any(record.launches == 8 for record in machine.truth()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert machine.device_truth(0).kernels == 0
    machine.advance(2_500_000)
    assert machine.device_truth(0).kernels == 2
    assert machine.device_truth(0).busy_ns == 2_500_000
    while tenant.poll() is None:
        assert time.monotonic() < deadline
        machine.advance(1_000_000)
        time.sleep(0.002)
    (truth,) = machine.truth()
    assert (truth.kernels, truth.busy_ns) == (8, 8_000_000)
