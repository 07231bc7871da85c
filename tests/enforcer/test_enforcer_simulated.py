"""The enforcer with the simulated driver and the real hook: what is granted is what programs get."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolmeter.enforcer.inventory import NvmlInventory
from poolmeter.enforcer.journal import read_events
from poolmeter.enforcer.launch import hooked_environment
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.enforcer.run import simulated_environment
from poolmeter.model.allocation import Labels
from poolmeter.native import native_path
from poolmeter.pages.meter import read_meter
from poolmeter.pages.native import HOOK_LIBRARY
from poolmeter.simulator.configuration import load_machine
from poolmeter.simulator.machine import Machine

GIB = 1 << 30
TENANT = [sys.executable, "-m", "poolmeter.cli", "simulate", "tenant"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("machine") / "machine.sim"
    with Machine.create("t4x2", path):
        yield path


@pytest.fixture(scope="module")
def node(make_shared_node, machine: Path):
    node = make_shared_node("sim", start=False)
    # The real nvidia-ml-py over the simulated library, instead of the stand-in.
    (node.root / "python" / "pynvml.py").unlink()
    node.environment["POOLMETER_SIM_MACHINE"] = str(machine)
    node.options.append("--simulate")
    node.start()
    del node.environment["POOLMETER_SIM_MACHINE"]  # programs learn of it from the enforcer
    return node


def test_the_inventory_is_the_machines_cards(machine: Path) -> None:
    cards = load_machine("t4x2").cards
    devices = NvmlInventory(simulated_environment(machine)).devices()
    assert [(item.uuid, item.index, item.model, item.memory_bytes, item.problem) for item in devices] == [
        (card.uuid, index, card.name, card.memory, None) for index, card in enumerate(cards)
    ]


def test_a_program_runs_on_its_card_and_is_metered(node) -> None:
    done = node.poolmeter("run", "--quiet", "--device", "1", "--", *TENANT, "--seconds", "0.2", "--allocate", "256M")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cuda_error"] is None
    uuid = load_machine("t4x2").cards[1].uuid
    newest = max(node.run.retired.iterdir())
    meter = read_meter(newest / "meter")
    assert meter.device_uuids == (uuid,)
    assert meter.total(uuid).launches == told["kernels"] > 0


def test_memory_above_the_limit_is_denied_and_counted(node) -> None:
    done = node.poolmeter("run", "--quiet", "--memory", "1G", "--", *TENANT, "--seconds", "0.05", "--allocate", "1025M")
    assert json.loads(done.stdout)["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    newest = max(node.run.retired.iterdir())
    (uuid,) = read_meter(newest / "meter").device_uuids
    total = read_meter(newest / "meter").total(uuid)
    assert (total.denied_limit, total.denied_limit_bytes) == (1, 1025 << 20)


def test_a_raised_limit_lets_the_next_allocation_through_and_a_release_waits_for_the_program(node, machine: Path) -> None:
    allocation = node.client.create(AllocationRequest(Labels("acme"), memory_bytes=GIB))
    folder = node.run.allocations / allocation.id
    environment = hooked_environment(os.environ, allocation, folder, native_path(HOOK_LIBRARY), simulated_environment(machine))

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*TENANT, *words], env=environment, stdout=subprocess.PIPE, text=True)

    denied = start("--seconds", "0.05", "--allocate", "2G")
    assert json.loads(denied.communicate(timeout=30)[0])["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    node.client.resize(ResizeRequest(allocation.id, memory_bytes=3 * GIB))
    lasting = start("--seconds", "0", "--allocate", "2G")
    until(lambda: node.client.show(allocation.id)["memory_used_bytes"] == {allocation.slices[0].device_uuid: 2 * GIB})
    _, warnings = node.client.resize(ResizeRequest(allocation.id, memory_bytes=GIB))
    assert "is below the 2.0 GiB in use" in warnings[0]
    refused = node.poolmeter("allocation", "release", allocation.id)
    assert refused.returncode == 1 and "is used by 1 process(es)" in refused.stderr
    second = start("--seconds", "0.05", "--allocate", "1M")
    assert json.loads(second.communicate(timeout=30)[0])["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    lasting.terminate()
    assert json.loads(lasting.communicate(timeout=30)[0])["cuda_error"] is None
    assert node.poolmeter("allocation", "release", allocation.id).returncode == 0


def test_a_program_gets_the_compute_it_was_promised(node) -> None:
    done = node.poolmeter("run", "--quiet", "--compute", "30", "--", *TENANT, "--kernel-us", "1000", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert 0.2 < json.loads(done.stdout)["share"] < 0.33  # a loaded machine may keep it from using all of it


def test_a_resized_compute_limit_bites_while_the_program_runs(node, machine: Path) -> None:
    allocation = node.client.create(AllocationRequest(Labels("acme"), compute_ppm=50_000))
    folder = node.run.allocations / allocation.id
    environment = hooked_environment(os.environ, allocation, folder, native_path(HOOK_LIBRARY), simulated_environment(machine))
    (uuid,) = read_meter(folder / "meter").device_uuids
    running = subprocess.Popen([*TENANT, "--kernel-us", "500", "--seconds", "0"], env=environment, stdout=subprocess.PIPE, text=True)

    def share_over(seconds: float) -> float:
        before, began = read_meter(folder / "meter").total(uuid).busy_ns, time.monotonic_ns()
        time.sleep(seconds)
        return (read_meter(folder / "meter").total(uuid).busy_ns - before) / (time.monotonic_ns() - began)

    until(lambda: read_meter(folder / "meter").total(uuid).launches > 20)
    assert share_over(0.6) < 0.09
    done = node.poolmeter("allocation", "resize", allocation.id, "--compute", "60", "--device", "0")
    assert done.returncode == 0, done.stderr
    time.sleep(0.3)
    assert share_over(0.5) > 0.2
    done = node.poolmeter("allocation", "resize", allocation.id, "--compute", "5")
    assert done.returncode == 0, done.stderr
    time.sleep(0.5)
    assert share_over(0.6) < 0.09
    running.terminate()
    assert json.loads(running.communicate(timeout=30)[0])["cuda_error"] is None
    assert node.poolmeter("allocation", "release", allocation.id).returncode == 0


def test_a_suspended_program_waits_and_goes_on_where_it_was(node, machine: Path) -> None:
    allocation = node.client.create(AllocationRequest(Labels("acme"), compute_ppm=500_000, memory_bytes=GIB, devices=("1",)))
    folder = node.run.allocations / allocation.id
    environment = hooked_environment(os.environ, allocation, folder, native_path(HOOK_LIBRARY), simulated_environment(machine))
    (uuid,) = read_meter(folder / "meter").device_uuids
    words = [*TENANT, "--kernel-us", "500", "--seconds", "0", "--allocate", "256M"]
    running = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)

    def launches() -> int:
        return read_meter(folder / "meter").total(uuid).launches

    until(lambda: launches() > 20)
    done = node.poolmeter("allocation", "suspend", allocation.id, "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rows"][0]["state"] == "suspended" and "256.0 MiB on device" in told["warnings"][0]
    time.sleep(0.3)
    before = launches()
    # Its time is another's now; what it holds of the memory is not.
    other = node.client.create(AllocationRequest(Labels("other"), compute_ppm=1_000_000, memory_bytes=GIB, devices=("1",)))
    refused = node.poolmeter("allocation", "resume", allocation.id)
    assert refused.returncode == 1 and "of its time is asked, 0 % is free" in refused.stderr
    assert launches() == before and running.poll() is None
    node.client.release(other.id)
    assert node.poolmeter("allocation", "resume", allocation.id).returncode == 0
    until(lambda: launches() > before + 20)
    running.terminate()
    assert json.loads(running.communicate(timeout=30)[0])["cuda_error"] is None
    assert node.poolmeter("allocation", "release", allocation.id).returncode == 0
    assert [event.kind for event in read_events(node.journal) if event.allocation_id == allocation.id] == [
        "created",
        "suspended",
        "resumed",
        "released",
    ]


def test_killed_programs_leave_no_promise(node) -> None:
    words = [sys.executable, "-m", "poolmeter.cli", "run", "--quiet", "--", *TENANT, "--seconds", "0", "--processes", "2"]
    environment = {**node.environment, "POOLMETER_RUN": str(node.run.root)}
    running = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: [len(node.client.show(item.id)["processes"]) for item in node.client.list()] == [2])
    (allocation,) = node.client.list()
    pids = [item["pid"] for item in node.client.show(allocation.id)["processes"]]
    running.kill()
    running.wait(30)
    time.sleep(1.2)  # a tending passes; its programs live
    assert node.client.list() == (allocation,)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: node.client.list() == ())


def test_without_a_pool_there_is_a_private_card(node, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return node.poolmeter(*words, POOLMETER_RUN=str(tmp_path / "none"), POOLMETER_DATA=str(tmp_path / "none"), TMPDIR=str(tmp_path))

    done = run("run", "--simulate", "--compute", "50", "--", *TENANT, "--seconds", "0.1", "--allocate", "1G")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cuda_error"] is None
    assert run("run", "--simulate", "--", "sh", "-c", "exit 9").returncode == 9
    assert run("run", "--simulate", "--memory", "1000G", "--", "true").returncode == 125
    assert list(tmp_path.iterdir()) == []


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
