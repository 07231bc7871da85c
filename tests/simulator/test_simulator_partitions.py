"""MIG devices, MPS and vGPUs as NVML shows them on a simulated machine."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import BadInput
from poolmeter.simulator.configuration import load_machine, parse_machine
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.partition import SLICES, VgpuConfig, lay_out

from .conftest import MakeMachine, start_tenant


def nvml(machine: Machine, source: str) -> Any:
    prelude = "import json, pynvml as n\nn.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
    prelude += "def ask(f, *a):\n    try: return f(*a)\n    except n.NVMLError as e: return e.value\n"
    done = subprocess.run([sys.executable, "-c", prelude + source], env=machine.environment(), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "not implemented" not in done.stderr
    return json.loads(done.stdout)


WALK = """
found = []
for i in range(n.nvmlDeviceGetMaxMigDeviceCount(h)):
    m = ask(n.nvmlDeviceGetMigDeviceHandleByIndex, h, i)
    if isinstance(m, int): found.append(m); continue
    gi = n.nvmlDeviceGetGpuInstanceId(m)
    p = n.nvmlGpuInstanceGetInfo(n.nvmlDeviceGetGpuInstanceById(h, gi)).placement
    a = n.nvmlDeviceGetAttributes(m)
    found.append([n.nvmlDeviceGetUUID(m)[:4], n.nvmlDeviceGetName(m), gi, n.nvmlDeviceGetComputeInstanceId(m), p.start, p.size,
                  a.multiprocessorCount, a.memorySizeMB, n.nvmlDeviceGetMemoryInfo(m).total, n.nvmlDeviceIsMigDeviceHandle(m).value,
                  n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m))])
"""


def test_instances_of_a_card(make_machine: MakeMachine) -> None:
    machine = make_machine("h200x4")
    machine.mig(0, "4g.71gb", "", "1g.18gb")
    answer = nvml(machine, WALK + "print(json.dumps([found, n.nvmlDeviceGetMigMode(h)]))")
    whole, uuid = 71 << 30, machine.uuid(0)
    assert answer == [
        [
            ["MIG-", "NVIDIA H200 MIG 4g.71gb", 1, 0, 0, 4, 72, 71 << 10, whole, 1, uuid],
            6,
            ["MIG-", "NVIDIA H200 MIG 1g.18gb", 3, 0, 4, 1, 18, 18 << 10, 18 << 30, 1, uuid],
            6,
            6,
            6,
            6,
        ],
        [1, 1],
    ]


def test_what_a_card_and_an_instance_do_not_tell_while_mig_is_on(make_machine: MakeMachine) -> None:
    machine = make_machine("h200x4")
    machine.mig(0, "7g.141gb")
    answer = nvml(
        machine,
        "m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0)\ns = n.nvmlGpmSampleAlloc()\n"
        "names = ('nvmlDeviceGetUtilizationRates', 'nvmlDeviceGetPowerUsage', 'nvmlDeviceGetTotalEnergyConsumption', 'nvmlDeviceGetTemperature')\n"
        "mine = [ask(getattr(n, x), m, *([0] if x.endswith('ture') else [])) for x in names]\n"
        "card = [ask(n.nvmlDeviceGetUtilizationRates, h), ask(n.nvmlDeviceGetProcessUtilization, h, 0), ask(n.nvmlDeviceGetSamples, h, 1, 0)]\n"
        "gpm = [ask(n.nvmlGpmSampleGet, h, s), ask(n.nvmlGpmMigSampleGet, h, 5, s), ask(n.nvmlGpmMigSampleGet, h, 0, s) == s]\n"
        "print(json.dumps([mine, card, gpm, n.nvmlDeviceGetPowerUsage(h) > 0]))",
    )
    # An instance has no power, no energy and no temperature of its own.
    assert answer == [[2, 2, 2, 2], [3, 3, 3], [3, 6, True], True]


def test_a_handle_of_a_destroyed_instance_is_refused(make_machine: MakeMachine) -> None:
    machine = make_machine("h200x4")
    machine.mig(0, "1g.18gb")
    source = "import pynvml as n\nn.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0); m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0)\n"
    source += "print('have', flush=True); input()\n"
    source += "try: n.nvmlDeviceGetUUID(m)\nexcept n.NVMLError as e: print(e.value)"
    child = subprocess.Popen(
        [sys.executable, "-c", source], env=machine.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "have\n"
    machine.mig(0)
    assert child.communicate("\n", timeout=30)[0] == "2\n"


def test_a_process_counts_for_its_instance(make_machine: MakeMachine) -> None:
    machine = make_machine("h200x4")
    machine.mig(0, "3g.71gb", "1g.18gb")
    child = start_tenant(machine, kernel_us=1000, seconds=30, allocate=1 << 30)
    try:
        source = (
            WALK.replace("found = []", "found = []\nimport time")
            + "m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 1)\nend = time.time() + 20\n"
            + "while n.nvmlDeviceGetMemoryInfo(m).used < 1 << 30 and time.time() < end: time.sleep(0.05)\n"
            + "ps = n.nvmlDeviceGetComputeRunningProcesses(h)\n"
            + "a, b = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()\nn.nvmlGpmMigSampleGet(h, 2, a); time.sleep(0.3); n.nvmlGpmMigSampleGet(h, 2, b)\n"
            + "g = n.c_nvmlGpmMetricsGet_t(); g.version = 1; g.numMetrics = 2; g.sample1 = a; g.sample2 = b\n"
            + "g.metrics[0].metricId = 1; g.metrics[1].metricId = 10; n.nvmlGpmMetricsGet(g)\n"
            + "print(json.dumps([[[p.pid, p.gpuInstanceId, p.computeInstanceId] for p in ps],"
            + " len(n.nvmlDeviceGetComputeRunningProcesses(m)), len(n.nvmlDeviceGetComputeRunningProcesses(n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0))),"
            + " g.metrics[0].value, g.metrics[1].nvmlReturn]))"
        )
        import time

        deadline = time.monotonic() + 20
        while not any(truth.memory for truth in machine.truth()) and time.monotonic() < deadline:
            time.sleep(0.02)
        machine.assign(child.pid, 0, 1)
        listed, mine, others, busy, bandwidth = nvml(machine, source)
    finally:
        child.kill()
        child.communicate()
    assert listed == [[child.pid, 2, 0]] and (mine, others) == (1, 0)
    assert busy > 50 and bandwidth == 3  # of an instance, only the time it worked


def test_under_mps_only_the_server_is_told_of(make_machine: MakeMachine) -> None:
    machine = make_machine("t4x2", clock="virtual")
    machine.set("mps_server", 4242, device=0)
    source = """
import time
from poolmeter.simulator.driver import Driver
cu = Driver(); cu.open(); f, s = cu.function(), cu.stream()
cu.launch(f, 300_000_000, s); cu("cuStreamSynchronize", s); cu.sleep(200_000_000)
import os
kinds = (n.nvmlDeviceGetComputeRunningProcesses, n.nvmlDeviceGetMPSComputeRunningProcesses, n.nvmlDeviceGetGraphicsRunningProcesses)
print(json.dumps([os.getpid(), [[p.pid for p in k(h)] for k in kinds], [u.pid for u in n.nvmlDeviceGetProcessUtilization(h, 0)]]))
"""
    me, lists, used = nvml(machine, source)
    assert lists == [[4242, me], [me], []] and used == [4242]


def test_vgpus_of_a_host_and_the_licence_of_a_guest(make_machine: MakeMachine) -> None:
    machine = make_machine("vgpu-hostx1")
    source = (
        "v = n.nvmlDeviceGetActiveVgpus(h)\n"
        "u = n.nvmlDeviceGetVgpuUtilization(h, 0)\n"
        "t = n.nvmlVgpuInstanceGetType(v[0])\n"
        "print(json.dumps([len(v), n.nvmlVgpuTypeGetName(t), n.nvmlVgpuTypeGetFramebufferSize(t) >> 30, n.nvmlVgpuInstanceGetVmID(v[1])[0].decode()[-2:],"
        " [n.nvmlVgpuInstanceGetLicenseInfo(x).isLicensed for x in v], [x.smUtil.uiVal for x in u],"
        " ask(n.nvmlDeviceGetVgpuUtilization, h, u[0].timeStamp + 10**9), ask(n.nvmlVgpuInstanceGetUUID, 5)]))"
    )
    assert nvml(machine, source) == [2, "NVIDIA L40S-24C", 24, "02", [1, 0], [40, 10], 6, 6]
    machine.vgpus(0, VgpuConfig("NVIDIA L40S-8C", "vm", 8 << 30, busy_percent=7))
    assert nvml(machine, "print(json.dumps([x.smUtil.uiVal for x in n.nvmlDeviceGetVgpuUtilization(h, 0)]))") == [7]
    bare = make_machine("t4x2")
    answer = nvml(
        bare, "print(json.dumps([ask(n.nvmlDeviceGetActiveVgpus, h), n.nvmlDeviceGetGridLicensableFeatures(h).isGridLicenseSupported]))"
    )
    assert answer == [3, 0]


@pytest.mark.parametrize(("name", "cards", "layouts"), [("mig-a100x8", 8, {7}), ("mig-h200x8", 8, {7, 2, 0}), ("vgpu-hostx1", 1, {None})])
def test_known_partitioned_machines(name: str, cards: int, layouts: set[int | None]) -> None:
    machine = load_machine(name)
    assert len(machine.cards) == cards and {None if card.mig is None else len(card.mig) for card in machine.cards} == layouts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mig_capable=true\nmig=["8g.1gb"]', "MIG profile '8g.1gb'"),
        ('mig_capable=true\nmig=["4g.71gb", "4g.71gb"]', "8 compute and 8 memory slices"),
        ('mig=["1g.10gb"]', "not mig_capable"),
        ("mig_capable=true\nmig=3", "card 0.mig is 3"),
        ('virtualization="host"', "virtualization is 'host'"),
        ('[[card.vgpu]]\ntype="t"\nvm="v"\nframebuffer="1GiB"', "expected host_vgpu"),
        ('virtualization="host_vgpu"\n[[card.vgpu]]\ntype="t"\nvm="v"', "no framebuffer"),
        ('virtualization="host_vgpu"\n[[card.vgpu]]\ntype="t"\nvm="v"\nframebuffer="much"', "vgpu"),
    ],
)
def test_partitions_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_machine("[[card]]\n" + text + "\n", "m.toml")
    assert words in str(caught.value) and "m.toml" in str(caught.value)


@given(st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", ""]), max_size=8))
def test_instances_never_overlap(profiles: list[str]) -> None:
    try:
        layout = lay_out(profiles, "card")
    except BadInput:
        return
    slices = [place for item in layout for place in range(item.start, item.start + item.size)]
    assert len(set(slices)) == len(slices) and all(place <= SLICES for place in slices) and sum(item.slices for item in layout) <= SLICES
