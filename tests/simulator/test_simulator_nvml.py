"""nvidia-ml-py, unchanged, over the simulated libnvidia-ml."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poolmeter.native import native_path
from poolmeter.simulator.configuration import parse_machine
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, run_tenant

from .conftest import MakeMachine, start_tenant

EVERY_CALL = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex({index})
found = {{}}
def ask(name, *arguments):
    try:
        value = getattr(n, name)(*arguments)
        found[name] = type(value).__name__
    except n.NVMLError as error:
        found[name] = type(error).__name__
for name in {plain!r}:
    ask(name, h)
ask("nvmlSystemGetDriverVersion"); ask("nvmlSystemGetNVMLVersion"); ask("nvmlSystemGetCudaDriverVersion"); ask("nvmlDeviceGetCount")
ask("nvmlDeviceGetHandleByUUID", n.nvmlDeviceGetUUID(h)); ask("nvmlDeviceGetTemperature", h, 0); ask("nvmlDeviceGetClockInfo", h, 1)
ask("nvmlDeviceGetPcieThroughput", h, 0); ask("nvmlDeviceGetTotalEccErrors", h, 0, 0); ask("nvmlDeviceGetProcessUtilization", h, 0)
ask("nvmlDeviceGetProcessesUtilizationInfo", h, 0); ask("nvmlDeviceGetMigDeviceHandleByIndex", h, 0); ask("nvmlDeviceGetAccountingStats", h, 1)
ask("nvmlDeviceGetAccountingStats_v2", h, 1); ask("nvmlDeviceGetSamples", h, 1, 0); ask("nvmlDeviceGetFieldValues", h, [83, 185])
print(json.dumps(found))
"""
PLAIN = [
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetAccountingMode",
    "nvmlDeviceGetAccountingPids",
    "nvmlDeviceGetAccountingBufferSize",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetAttributes",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetVirtualizationMode",
]


def ask(machine: Machine, source: str) -> Any:
    """Runs Python source with pynvml on the machine; its last line of JSON."""
    done = subprocess.run([sys.executable, "-c", source], env=machine.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def nvml(machine: Machine, source: str) -> Any:
    return ask(machine, "import json, time\nimport pynvml as n\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n" + source)


def test_every_call_answers_with_its_own_type(make_machine: MakeMachine) -> None:
    found = ask(make_machine("h200x4"), EVERY_CALL.format(index=3, plain=PLAIN))
    assert found["nvmlDeviceGetSamples"] == "tuple"  # the driver has sampled the idle card since it was loaded
    refused = {name: kind for name, kind in found.items() if kind.startswith("NVMLError")}
    assert refused == {
        "nvmlDeviceGetAccountingStats": "NVMLError_NotFound",
        "nvmlDeviceGetAccountingStats_v2": "NVMLError_FunctionNotFound",
        "nvmlDeviceGetGpuInstanceId": "NVMLError_InvalidArgument",
        "nvmlDeviceGetComputeInstanceId": "NVMLError_InvalidArgument",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "NVMLError_InvalidArgument",
        "nvmlDeviceGetAttributes": "NVMLError_NotSupported",
        "nvmlDeviceGetMigDeviceHandleByIndex": "NVMLError_NotFound",
        # Nothing has run: nothing to tell, which is neither an empty list nor 0 %.
        "nvmlDeviceGetProcessUtilization": "NVMLError_NotFound",
        "nvmlDeviceGetProcessesUtilizationInfo": "NVMLError_NotFound",
    }
    assert len(found) == len(PLAIN) + 16


def test_small_cards_lack_what_small_cards_lack(make_machine: MakeMachine) -> None:
    found = ask(make_machine("t4x2"), EVERY_CALL.format(index=0, plain=PLAIN))
    for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetRemappedRows"):
        assert found[name] == "NVMLError_NotSupported"


def test_every_symbol_that_nvidia_ml_py_resolves_is_there(make_machine: MakeMachine) -> None:
    import re

    import pynvml

    library = ctypes.CDLL(str(native_path("sim/libnvidia-ml.so.1")))
    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', Path(pynvml.__file__).read_text()))
    assert len(names) > 300
    assert [name for name in names if not hasattr(library, name)] == []


def test_in_process_by_soname(make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    machine = make_machine("t4x2")
    monkeypatch.setenv("POOLMETER_SIM_MACHINE", str(machine.file))
    ctypes.CDLL(str(native_path("sim/libnvidia-ml.so.1")))
    pynvml.nvmlInit()
    try:
        assert pynvml.nvmlDeviceGetCount() == 2
        handle = pynvml.nvmlDeviceGetHandleByUUID(machine.uuid(1))
        assert pynvml.nvmlDeviceGetIndex(handle) == 1
        machine.lose(1)
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            pynvml.nvmlDeviceGetName(handle)
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            pynvml.nvmlDeviceGetHandleByIndex(1)
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)) == "Tesla T4"
        machine.lose(1, lost=False)
        assert pynvml.nvmlDeviceGetName(handle) == "Tesla T4"
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(2)
    finally:
        pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_memory_and_processes(make_machine: MakeMachine) -> None:
    machine = make_machine()
    tenant = start_tenant(machine, kernels=0, seconds=0, allocate=3 << 30)
    import time

    deadline = time.monotonic() + 20
    while not any(record.memory for record in machine.truth()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    answer = nvml(
        machine,
        "m, m2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)\n"
        "p = n.nvmlDeviceGetComputeRunningProcesses(h)\n"
        "print(json.dumps([m.total, m.free, m.used, m2.total, m2.reserved, m2.free, m2.used, [[x.pid, x.usedGpuMemory, x.gpuInstanceId] for x in p]]))",
    )
    tenant.terminate()
    tenant.communicate(timeout=20)
    overhead, reserved = 400 << 20, 512 << 20
    used = (3 << 30) + overhead
    assert answer[:3] == [16 << 30, (16 << 30) - reserved - used, used + reserved]
    assert answer[3:7] == [16 << 30, reserved, (16 << 30) - reserved - used, used]
    assert answer[7] == [[tenant.pid, used, 0xFFFFFFFF]]
    assert nvml(machine, "print(json.dumps(n.nvmlDeviceGetComputeRunningProcesses(h)))") == []


def test_utilisation_energy_and_samples_follow_the_truth(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="virtual")
    report = run_tenant(TenantPlan(kernel_us=1000, gap_us=2000, seconds=2), machine.file)
    truth = machine.device_truth(0)
    assert report["share"] == pytest.approx(0.5, abs=0.02)  # 1 ms in each 2 ms of its own clock
    answer = nvml(
        machine,
        "s = n.nvmlDeviceGetSamples(h, 1, 0)[1]\n"
        "u = n.nvmlDeviceGetProcessUtilization(h, 0)\n"
        "def newer():\n"
        "    try: return len(n.nvmlDeviceGetProcessUtilization(h, u[0].timeStamp))\n"
        "    except n.NVMLError_NotFound: return None\n"
        "print(json.dumps([n.nvmlDeviceGetUtilizationRates(h).gpu, [x.sampleValue.uiVal for x in s], [[x.pid, x.smUtil] for x in u], newer(),"
        " n.nvmlDeviceGetTotalEnergyConsumption(h), n.nvmlDeviceGetPowerUsage(h)]))",
    )
    rate, samples, processes, newer, energy, power = answer
    assert rate == pytest.approx(50, abs=3)
    assert all(value == pytest.approx(50, abs=4) for value in samples[-9:])
    assert processes == [[report["pids"][0], pytest.approx(50, abs=4)]]
    assert newer is None
    seconds = truth.time_ns / 1e9
    assert energy == pytest.approx((70 * seconds + 330 * truth.busy_ns / 1e9) * 1000, rel=1e-3)
    assert power == pytest.approx((70 + 330 * 0.5) * 1000, rel=0.05)


def test_an_idle_hour_is_cheap_and_reads_as_idle(make_machine: MakeMachine) -> None:
    machine = make_machine(clock="manual")
    machine.advance(3_600_000_000_000)
    answer = nvml(
        machine,
        "print(json.dumps([n.nvmlDeviceGetUtilizationRates(h).gpu, n.nvmlDeviceGetTotalEnergyConsumption(h), len(n.nvmlDeviceGetSamples(h, 1, 0)[1])]))",
    )
    assert answer == [0, 70 * 3600 * 1000, 72]


def test_accounting_keeps_ended_processes(make_machine: MakeMachine) -> None:
    config = parse_machine('[machine]\nname="new"\ndriver_version="615.10"\nclock="virtual"\n[[card]]\naccounting=true\n', "new.toml")
    machine = make_machine(config)
    report = run_tenant(TenantPlan(kernel_us=1000, seconds=1, allocate=1 << 30), machine.file)
    answer = nvml(
        machine,
        "p = n.nvmlDeviceGetAccountingPids(h)\ns = n.nvmlDeviceGetAccountingStats(h, p[0])\nv = n.nvmlDeviceGetAccountingStats_v2(h, p[0])\n"
        "print(json.dumps([p, s.gpuUtilization, s.maxMemoryUsage, s.time, s.isRunning, v.sampleCount, v.sumGpuUtil, v.time]))",
    )
    pids, utilisation, memory, time_ms, running, samples, total, _ = answer
    assert pids == report["pids"]
    assert utilisation >= 99 and running == 0
    assert memory == (1 << 30) + (400 << 20)
    assert time_ms == pytest.approx(1000, rel=0.05)
    assert samples in (4, 5) and total == pytest.approx(samples * 10_000, rel=0.01)


def test_xids_are_told_once_and_from_registration_on(make_machine: MakeMachine) -> None:
    machine = make_machine("t4x2")
    machine.xid(1, 31)
    script = (
        "e = n.nvmlEventSetCreate()\n"
        "for i in (0, 1): n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(i), n.nvmlEventTypeXidCriticalError, e)\n"
        "print('ready', flush=True)\ndata = n.nvmlEventSetWait_v2(e, 20000)\n"
        "try: n.nvmlEventSetWait_v2(e, 10); again = True\n"
        "except n.NVMLError_Timeout: again = False\n"
        "print(json.dumps([n.nvmlDeviceGetIndex(data.device), data.eventData, data.eventType, again]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "import json, pynvml as n\nn.nvmlInit()\n" + script],
        env=machine.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    machine.xid(1, 79)
    output, _ = process.communicate(timeout=30)
    assert json.loads(output) == [1, 79, 8, False]


def test_gpm_metrics_between_two_samples(make_machine: MakeMachine) -> None:
    source = """
import json, pynvml as n
from poolmeter.simulator.driver import Driver
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)
cu = Driver(); cu.open(); f, s = cu.function(), cu.stream()
a, b = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
n.nvmlGpmSampleGet(h, a)
cu.launch(f, 300_000_000, s, 32); cu("cuStreamSynchronize", s); cu.sleep(100_000_000)
n.nvmlGpmSampleGet(h, b)
m = n.c_nvmlGpmMetricsGet_t(); m.version = 1; m.numMetrics = 5; m.sample1 = a; m.sample2 = b
for i, k in enumerate((1, 2, 3, 5, 11)): m.metrics[i].metricId = k
n.nvmlGpmMetricsGet(m)
n.nvmlGpmSampleFree(a); n.nvmlGpmSampleFree(b)
print(json.dumps([[m.metrics[i].nvmlReturn, m.metrics[i].value] for i in range(5)]))
"""
    busy, sm, occupancy, tensor, fp64 = ask(make_machine(clock="virtual"), source)
    assert busy == [0, pytest.approx(75)]
    assert sm == [0, pytest.approx(75 * 32 / 64)]
    assert occupancy == [0, pytest.approx(75 * 32 * 128 / (64 * 2048), rel=1e-3)]
    assert tensor == [0, 0.0]
    assert fp64[0] == 3  # what a kernel's instructions are, the simulator does not know


def test_unknown_machines_are_a_driver_that_is_not_loaded(make_machine: MakeMachine, tmp_path: Path) -> None:
    environment = make_machine().environment() | {"POOLMETER_SIM_MACHINE": str(tmp_path / "none")}
    source = "import pynvml as n\ntry: n.nvmlInit()\nexcept n.NVMLError_DriverNotLoaded: print('not loaded')"
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=20)
    assert done.stdout == "not loaded\n"
    assert "none cannot be opened" in done.stderr


def test_process_samples_as_a_580_driver_gives_them(make_machine: MakeMachine) -> None:
    """Seen on an H200: periods of 0.2 s, an entry of 0 while a context idles, the mean since the time asked for, entries that outlive the process."""
    machine = make_machine(clock="virtual")
    source = """
import ctypes, json, pynvml as n
from poolmeter.simulator.driver import Driver
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)
cu = Driver(); cu.open(); f, s = cu.function(), cu.stream()
def ask(since=0):
    try: (entry,) = n.nvmlDeviceGetProcessUtilization(h, since); return [entry.smUtil, entry.timeStamp]
    except n.NVMLError_NotFound: return None
answers = [ask()]
cu.launch(f, 400_000_000, s); cu("cuStreamSynchronize", s); cu.sleep(5_000_000); answers.append(ask())
since = answers[-1][1]
answers.append(ask(since))
cu.sleep(400_000_000); answers += [ask(), ask(since)]
cu.launch(f, 100_000_000, s); cu("cuStreamSynchronize", s); cu.sleep(110_000_000); answers.append(ask(answers[-1][1]))
print(json.dumps(answers))
"""
    fresh, busy, nothing_new, mean, idle, half = ask(machine, source)
    assert fresh is None and nothing_new is None
    assert busy[0] == 100
    assert mean[0] == 50 and idle[0] == 0
    assert half[0] == 50
    assert idle[1] - busy[1] == 400_000
    outlived = nvml(machine, "print(json.dumps([x.timeStamp for x in n.nvmlDeviceGetProcessUtilization(h, 0)]))")
    assert outlived == [half[1]]
    machine.advance(20_000_000_000)
    gone = nvml(machine, "try: n.nvmlDeviceGetProcessUtilization(h, 0); print('true')\nexcept n.NVMLError_NotFound: print('false')")
    assert gone is False
