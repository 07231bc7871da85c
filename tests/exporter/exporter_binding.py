"""A binding to NVML that answers what a test says."""

import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as real
import pytest

from poolmeter.vendors.nvidia import NvidiaVendor
from poolmeter.vendors.reading import DeviceReading

DEFAULTS: dict[str, object] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetName": "H200",
    "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="0000:01:00.0"),
    "nvmlDeviceGetMinorNumber": 0,
    "nvmlDeviceGetSerial": "N/A",
    "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=30, memory=1),
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetTotalEnergyConsumption": 1234,
    "nvmlDeviceGetPowerUsage": 80_000,
    "nvmlDeviceGetTemperature": 40,
    "nvmlDeviceGetClockInfo": 1900,
    "nvmlDeviceGetComputeRunningProcesses_v3": [],
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
    "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
    "nvmlDeviceGetSamples": (1, []),
    "nvmlDeviceGetProcessUtilization": [],
}
Say = Callable[..., None]


def sample(at: int, value: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(timeStamp=at, sampleValue=types.SimpleNamespace(uiVal=value))


def use(at: int, pid: int, value: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(timeStamp=at, pid=pid, smUtil=value)


def holder(pid: int, memory: int | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=memory)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """`say(call=answer)`: an answer is a value, an NVML error code wrapped in an exception, or a function of the call's arguments."""
    answers = dict(DEFAULTS)
    binding = types.ModuleType("pynvml")
    for name in dir(real):
        if name.startswith(("NVML", "c_nvml", "nvmlEventType")) or name == "nvmlMemory_v2":
            setattr(binding, name, getattr(real, name))

    def answer(name: str, *arguments: Any) -> Any:
        value = answers[name]
        value = value(*arguments) if callable(value) else value
        if isinstance(value, Exception):
            raise value
        return value

    for name in DEFAULTS:
        setattr(binding, name, lambda *arguments, name=name: answer(name, *arguments))
    answers["nvmlDeviceGetHandleByIndex"] = lambda index: index
    answers["nvmlDeviceGetUUID"] = lambda handle: f"GPU-{handle}"
    answers["nvmlDeviceGetMemoryInfo"] = lambda *_: types.SimpleNamespace(total=1000, used=100, reserved=10)
    binding.nvmlDeviceGetHandleByIndex = lambda index: answer("nvmlDeviceGetHandleByIndex", index)  # type: ignore[attr-defined]
    binding.nvmlDeviceGetUUID = lambda handle: answer("nvmlDeviceGetUUID", handle)  # type: ignore[attr-defined]
    binding.nvmlDeviceGetMemoryInfo = lambda handle, version=None: (  # type: ignore[attr-defined]
        answer("nvmlDeviceGetMemoryInfo", handle) if version is None else answer("nvmlDeviceGetMemoryInfo", handle, version)
    )
    monkeypatch.setitem(sys.modules, "pynvml", binding)

    def tell(**values: object) -> None:
        answers.update(values)
        for name in values:
            if not hasattr(binding, name):
                setattr(binding, name, lambda *arguments, name=name: answer(name, *arguments))

    return tell


def error(code: int) -> Exception:
    return real.NVMLError(code)  # type: ignore[no-any-return]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Monotonic time in us, moved by the test; wall time goes with it."""
    now = [1_000_000_000]
    ahead = time.time_ns() // 10_000_000_000 * 10_000_000_000 - now[0] * 1000
    monkeypatch.setattr("poolmeter.vendors.nvidia_card.time.monotonic_ns", lambda: now[0] * 1000)
    monkeypatch.setattr("poolmeter.vendors.nvidia_card.time.time_ns", lambda: now[0] * 1000 + ahead)
    return now


def only(vendor: NvidiaVendor) -> DeviceReading:
    reading = vendor.read()
    assert reading.error is None
    (device,) = reading.devices
    return device


def vendor_of(tmp_path: Path, **options: object) -> NvidiaVendor:
    return NvidiaVendor(sysfs=tmp_path, **options)  # type: ignore[arg-type]
