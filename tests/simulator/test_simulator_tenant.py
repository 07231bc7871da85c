"""Tenants: what they report is the truth, and the truth is what they asked for."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from poolmeter.errors import Unavailable
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, run_tenant
from poolmeter.simulator.workloads.training import step_ns

from .conftest import LONG, MakeMachine, start_tenant


@pytest.mark.parametrize("resolve", ["gpa", "dlsym", "link"])
def test_device_time_is_the_sum_of_the_kernels(make_machine: MakeMachine, resolve: str) -> None:
    machine = make_machine()
    report = run_tenant(TenantPlan(kernel_us=200, kernels=1000, resolve=resolve), machine.file)
    jsonschema.validate(report, json.loads((Path(__file__).parents[2] / "docs/reference/tenant.schema.json").read_text()))
    assert report["kernels"] == 1000
    assert report["device_seconds"] == pytest.approx(0.2, abs=1e-9)
    assert report["cuda_error"] is None
    assert machine.device_truth(0).busy_ns == 200_000_000
    assert machine.device_truth(0).switched_ns == 0


def test_short_kernels_keep_the_card_full(make_machine: MakeMachine) -> None:
    report = run_tenant(TenantPlan(kernel_us=50, seconds=0.5), make_machine(clock="virtual").file)
    assert report["share"] > 0.999


def test_graph_launches_count_every_kernel(make_machine: MakeMachine) -> None:
    machine = make_machine()
    report = run_tenant(TenantPlan(kernel_us=50, graph=20, kernels=2000), machine.file)
    (truth,) = machine.truth()
    assert (truth.graph_launches, truth.launches, truth.kernels) == (100, 0, 2000)
    assert report["device_seconds"] == pytest.approx(0.1, abs=1e-9)


def test_kernels_that_fill_the_card_gain_nothing_from_streams(make_machine: MakeMachine) -> None:
    report = run_tenant(TenantPlan(kernel_us=500, kernels=400, streams=4), make_machine().file)
    assert report["device_seconds"] == pytest.approx(0.2, rel=1e-3)


def test_kernels_of_a_quarter_of_the_card_run_four_at_once(make_machine: MakeMachine) -> None:
    report = run_tenant(TenantPlan(kernel_us=500, kernels=400, streams=4, blocks=16), make_machine().file)
    assert report["kernels"] == 400
    assert 0.05 <= report["device_seconds"] < 0.06


def test_two_saturating_tenants_share_equally_and_lose_eight_per_cent(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="virtual", participants=2)
    tenants = [start_tenant(machine, kernel_us=1000, seconds=4) for _ in range(2)]
    for tenant in tenants:
        _output, errors = tenant.communicate(timeout=60)
        assert tenant.returncode == 0, errors
    first, second = machine.truth()
    card = machine.device_truth(0)
    assert first.busy_ns == pytest.approx(second.busy_ns, rel=0.01)
    lost = card.switched_ns / (card.busy_ns + card.switched_ns)
    assert lost == pytest.approx(0.08, abs=0.004)
    assert first.busy_ns + second.busy_ns == card.busy_ns


def test_out_of_memory_is_reported_and_the_work_goes_on(make_machine: MakeMachine) -> None:
    report = run_tenant(TenantPlan(kernel_us=100, kernels=10, allocate=20 << 30), make_machine().file)
    assert report["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert report["allocated_bytes"] == 0
    assert report["kernels"] == 10


def test_the_card_is_full_over_all_processes(make_machine: MakeMachine) -> None:
    machine = make_machine()
    holder = start_tenant(machine, kernels=0, seconds=0, allocate=10 << 30)
    try:
        _wait_for_memory(machine, 10 << 30)
        assert run_tenant(TenantPlan(kernels=0, seconds=0.01, allocate=6 << 30), machine.file)["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert run_tenant(TenantPlan(kernels=0, seconds=0.01, allocate=4 << 30), machine.file)["cuda_error"] is None
    finally:
        holder.terminate()
        holder.communicate(timeout=20)
    assert run_tenant(TenantPlan(kernels=0, seconds=0.01, allocate=14 << 30), machine.file)["cuda_error"] is None
    assert machine.device_truth(0).memory_used == 0


def _wait_for_memory(machine: Machine, size: int) -> None:
    import time

    deadline = time.monotonic() + 20
    while not any(record.memory >= size for record in machine.truth()):
        assert time.monotonic() < deadline, "the tenant never took its memory"
        time.sleep(0.01)


def test_processes_of_one_tenant_are_summed(make_machine: MakeMachine) -> None:
    machine = make_machine()
    report = run_tenant(TenantPlan(kernel_us=100, kernels=300, processes=3), machine.file)
    assert report["processes"] == 3
    assert report["kernels"] == 900
    assert report["device_seconds"] == pytest.approx(0.09, abs=1e-6)
    assert len({record.pid for record in machine.truth()}) == 3


def test_second_card(make_machine: MakeMachine) -> None:
    machine = make_machine("t4x2")
    run_tenant(TenantPlan(kernel_us=100, kernels=100, device=1), machine.file)
    assert [machine.device_truth(device).busy_ns for device in (0, 1)] == [0, 10_000_000]


def test_sigterm_ends_a_tenant_in_order(make_machine: MakeMachine) -> None:
    import time

    machine = make_machine()
    command = [
        sys.executable,
        "-m",
        "poolmeter.cli",
        "simulate",
        "tenant",
        "--seconds",
        "0",
        "--kernel-us",
        "500",
        "--machine",
        str(machine.file),
    ]
    process = subprocess.Popen(command, env=machine.environment(), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while machine.device_truth(0).kernels < 50:
        assert time.monotonic() < deadline, "the tenant never began"
        time.sleep(0.02)
    process.terminate()
    output, _ = process.communicate(timeout=20)
    report = json.loads(output)
    assert process.returncode == 0
    assert report["device_seconds"] * 1e9 == pytest.approx(machine.device_truth(0).busy_ns)
    assert report["kernels"] == machine.device_truth(0).kernels


def test_command_prints_one_line_and_refuses_bad_flags(make_machine: MakeMachine) -> None:
    machine = make_machine()
    command = [sys.executable, "-m", "poolmeter.cli", "simulate", "tenant", "--kernels", "10", "--kernel-us", "100"]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] == 10
    bad = subprocess.run([*command, "--streams", "900"], env=machine.environment(), capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2
    assert "--streams is 900" in bad.stderr


def test_without_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POOLMETER_SIM_MACHINE", raising=False)
    with pytest.raises(Unavailable, match="POOLMETER_SIM_MACHINE"):
        run_tenant(TenantPlan())
    (tmp_path / "empty").write_bytes(b"no machine")
    with pytest.raises(Unavailable, match="empty has 10 bytes"):
        run_tenant(TenantPlan(), tmp_path / "empty")


def test_training_loop(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="virtual")  # a slow host would let the streams drift apart
    steps = 400 if LONG else 40
    command = [sys.executable, "-m", "poolmeter.simulator.workloads.training", "--steps", str(steps)]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data_intact"] is True
    (truth,) = machine.truth()
    assert truth.busy_ns == steps * step_ns()
    assert truth.kernels == steps * 13
    assert truth.h2d_bytes == steps << 20
