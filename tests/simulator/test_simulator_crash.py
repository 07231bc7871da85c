"""Processes that die at any instruction: the machine stays whole, and what the dead used is neither lost nor kept."""

import os
import random
import signal
import subprocess
import sys
import time

from .conftest import LONG, MakeMachine, start_tenant


def _until(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_a_killed_process_leaves_its_memory_and_keeps_its_truth(make_machine: MakeMachine) -> None:
    machine = make_machine()
    tenant = start_tenant(machine, kernel_us=1000, seconds=0, allocate=1 << 30)
    _until(lambda: any(record.kernels > 50 for record in machine.truth()), 20, "the tenant never ran")
    tenant.kill()
    tenant.wait()
    killed_at = machine.now_ns()
    _until(lambda: machine.device_truth(0).memory_used == 0, 5, "the memory of the dead stayed taken")
    (truth,) = machine.truth()
    assert truth.killed and not truth.live
    assert truth.memory_peak == 1 << 30
    assert truth.busy_ns == machine.device_truth(0).busy_ns
    # What was still queued did not run on: at most a few milliseconds beyond the death.
    assert truth.attached_ns < killed_at
    assert truth.busy_ns <= killed_at - truth.attached_ns + 30_000_000


def test_the_neighbour_goes_on_alone(make_machine: MakeMachine) -> None:
    machine = make_machine()
    survivor = start_tenant(machine, kernel_us=500, seconds=1.2)
    victim = start_tenant(machine, kernel_us=500, seconds=0)
    _until(lambda: len([r for r in machine.truth() if r.kernels > 20]) == 2, 20, "the two never ran together")
    victim.kill()
    victim.wait()
    _output, errors = survivor.communicate(timeout=30)
    assert survivor.returncode == 0, errors
    assert not machine.truth()[-1].live


def test_kills_at_random_never_hang_or_leak(make_machine: MakeMachine) -> None:
    seed = int(os.environ.get("POOLMETER_SEED", "1"))
    chance = random.Random(seed)
    machine = make_machine("t4x2")
    rounds = 400 if LONG else 40
    running: list[subprocess.Popen[str]] = []
    for number in range(rounds):
        while len(running) < 6:
            running.append(
                start_tenant(
                    machine,
                    kernel_us=chance.choice([5, 50, 1000]),
                    seconds=0,
                    allocate=chance.choice([0, 64 << 20, 1 << 30]),
                    graph=chance.choice([0, 0, 10]),
                    streams=chance.choice([1, 3]),
                    sync_every=chance.choice([0, 1, 7]),
                    device=chance.choice([0, 1]),
                )
            )
        time.sleep(chance.random() * 0.04)
        victim = running.pop(chance.randrange(len(running)))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        started = time.monotonic()
        machine.advance()
        assert time.monotonic() - started < 5, f"round {number} (seed {seed}): the machine did not answer"
    for tenant in running:
        tenant.kill()
        tenant.communicate()
    _until(lambda: all(machine.device_truth(d).memory_used == 0 for d in (0, 1)), 10, "memory stayed taken")
    for device in (0, 1):
        card = machine.device_truth(device)
        mine = [record for record in machine.truth() if record.device == device]
        assert sum(record.busy_ns for record in mine) == card.busy_ns
        assert sum(record.kernels for record in mine) == card.kernels
        assert card.busy_ns + card.fill_ns + card.switched_ns <= card.time_ns
    assert machine.setting("undo_overflows") == 0
    report = start_tenant(machine, kernel_us=100, kernels=100)
    assert report.communicate(timeout=30) and report.returncode == 0


def test_many_programs_start_and_end_at_once(make_machine: MakeMachine) -> None:
    machine = make_machine("t4x2")
    count = 200 if LONG else 40
    tenants = [start_tenant(machine, kernel_us=20, kernels=20, device=number % 2, allocate=1 << 20) for number in range(count)]
    for tenant in tenants:
        _, errors = tenant.communicate(timeout=100)
        assert tenant.returncode == 0, errors
    truth = machine.truth()
    assert len(truth) == count and not any(record.live for record in truth)
    assert sum(record.kernels for record in truth) == 20 * count
    assert [machine.device_truth(device).memory_used for device in (0, 1)] == [0, 0]


def test_a_stopped_program_does_not_hold_the_machine(make_machine: MakeMachine) -> None:
    machine = make_machine()
    tenant = start_tenant(machine, kernel_us=5, seconds=0)
    _until(lambda: machine.device_truth(0).kernels > 1000, 20, "the tenant never ran")
    answered = 0
    try:
        for _ in range(40 if LONG else 6):
            tenant.send_signal(signal.SIGSTOP)
            reader = subprocess.Popen([sys.executable, "-c", READ], env=machine.environment())
            # It may have been stopped inside: then the reader waits until it goes on, and never longer.
            try:
                reader.wait(4)
                answered += 1
            except subprocess.TimeoutExpired:
                pass
            tenant.send_signal(signal.SIGCONT)
            assert reader.wait(10) == 0
            time.sleep(0.01)
    finally:
        tenant.kill()
        tenant.communicate()
    assert answered > 0


READ = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)); n.nvmlDeviceGetUtilizationRates(n.nvmlDeviceGetHandleByIndex(0))"
