# ruff: noqa: SIM905 - lists of names as words
"""NVML: getters, size protocols, samples, and a process on the card."""

import ctypes
import os
from ctypes import byref, c_uint, c_ulonglong
from typing import Any

from driver import Cuda


def group_nvml(cu: Cuda) -> None:
    import pynvml as n

    found = cu.found

    def kind(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, kind(value[0]) if value else None]
        return type(value).__name__

    def ask(name: str, *arguments: Any, question: str | None = None) -> None:
        try:
            found[question or name] = kind(getattr(n, name)(*arguments))
        except n.NVMLError as error:
            found[question or name] = f"{type(error).__name__} {error.value}"

    ask("nvmlDeviceGetCount", question="before init")
    n.nvmlInit()
    h = n.nvmlDeviceGetHandleByIndex(0)
    for name in (
        "nvmlDeviceGetUUID nvmlDeviceGetName nvmlDeviceGetIndex nvmlDeviceGetMinorNumber nvmlDeviceGetSerial nvmlDeviceGetPciInfo "
        "nvmlDeviceGetMemoryInfo nvmlDeviceGetUtilizationRates nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization "
        "nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetCurrentClocksEventReasons "
        "nvmlDeviceGetRemappedRows nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetGraphicsRunningProcesses "
        "nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingBufferSize nvmlDeviceGetMigMode "
        "nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetDeviceHandleFromMigDeviceHandle "
        "nvmlDeviceGetAttributes nvmlGpmQueryDeviceSupport nvmlDeviceGetSupportedEventTypes nvmlDeviceGetPersistenceMode "
        "nvmlDeviceGetComputeMode nvmlDeviceGetVirtualizationMode nvmlDeviceGetAccountingPids nvmlDeviceGetFanSpeed "
        "nvmlDeviceGetPowerManagementLimit nvmlDeviceGetEccMode nvmlDeviceGetCudaComputeCapability nvmlDeviceGetArchitecture "
        "nvmlDeviceGetPerformanceState nvmlDeviceGetBrand nvmlDeviceIsMigDeviceHandle"
    ).split():
        ask(name, h)
    found["running processes of an idle card"] = found.pop("nvmlDeviceGetComputeRunningProcesses")
    ask("nvmlDeviceGetMemoryInfo", h, n.nvmlMemory_v2, question="memory, second version")
    ask("nvmlDeviceGetHandleByIndex", 99)
    ask("nvmlDeviceGetHandleByUUID", "GPU-00000000-0000-0000-0000-000000000000", question="handle by unknown uuid")
    ask("nvmlDeviceGetHandleByUUID", "nonsense", question="handle by nonsense")
    ask("nvmlDeviceGetTemperature", h, 0)
    ask("nvmlDeviceGetTemperature", h, 9, question="temperature of no sensor")
    for domain in range(5):
        ask("nvmlDeviceGetClockInfo", h, domain, question=f"clock {domain}")
    for counter in range(3):
        ask("nvmlDeviceGetPcieThroughput", h, counter, question=f"pcie {counter}")
    for error in (0, 1):
        for counter in (0, 1):
            ask("nvmlDeviceGetTotalEccErrors", h, error, counter, question=f"ecc {error} {counter}")
    for sampling in range(10):
        ask("nvmlDeviceGetSamples", h, sampling, 0, question=f"samples {sampling}")
    ask("nvmlDeviceGetMigDeviceHandleByIndex", h, 0)
    ask("nvmlDeviceGetAccountingStats", h, os.getpid())
    ask("nvmlDeviceGetAccountingStats_v2", h, os.getpid())
    future = 2**63
    ask("nvmlDeviceGetProcessUtilization", h, future, question="process utilisation of the future")
    ask("nvmlDeviceGetProcessesUtilizationInfo", h, future, question="processes utilisation of the future")
    fields = [*range(74, 84), 94, 142, 143, 144, 145, *range(185, 193), 197, 198, 230, 269, 270, 271]
    for value in n.nvmlDeviceGetFieldValues(h, fields):
        found[f"field {value.fieldId}"] = [value.nvmlReturn, value.valueType if value.nvmlReturn == 0 else None]
    events = n.nvmlEventSetCreate()
    try:
        n.nvmlDeviceRegisterEvents(h, n.nvmlEventTypeXidCriticalError, events)
        n.nvmlEventSetWait_v2(events, 10)
    except n.NVMLError as error:
        found["wait for an event"] = f"{type(error).__name__} {error.value}"
    first, second = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
    n.nvmlGpmSampleGet(h, first)
    import time

    time.sleep(0.2)
    n.nvmlGpmSampleGet(h, second)
    ids = [1, 2, 3, 5, 10, 20, 21]
    request = n.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics, request.sample1, request.sample2 = 1, len(ids), first, second
    for index, number in enumerate(ids):
        request.metrics[index].metricId = number
    n.nvmlGpmMetricsGet(request)
    for index, number in enumerate(ids):
        metric = request.metrics[index]
        found[f"gpm {number}"] = [metric.nvmlReturn, (metric.metricInfo.unit or b"").decode() if metric.nvmlReturn == 0 else None]
    # Raw size protocols.
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    count = c_uint(0)
    found["raw running, idle, no room"] = [lib.nvmlDeviceGetComputeRunningProcesses_v3(h, byref(count), None), count.value]
    found["raw running, no count"] = lib.nvmlDeviceGetComputeRunningProcesses_v3(h, None, None)
    count = c_uint(0)
    found["raw utilisation, future, no room"] = [
        lib.nvmlDeviceGetProcessUtilization(h, None, byref(count), c_ulonglong(future)),
        count.value,
    ]
    found["raw uuid, no room"] = lib.nvmlDeviceGetUUID(h, ctypes.create_string_buffer(4), 4)
    found["raw name, nowhere"] = lib.nvmlDeviceGetName(h, None, 96)
    found["raw no device"] = lib.nvmlDeviceGetName(None, ctypes.create_string_buffer(96), 96)
    # With a process on the card.
    before = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    cu.context()
    mine = [p for p in n.nvmlDeviceGetComputeRunningProcesses(h) if p.pid == os.getpid()]
    found["this process is listed"] = len(mine)
    if mine:
        found["its memory is a number"] = isinstance(mine[0].usedGpuMemory, int)
        found["its instance"] = [mine[0].gpuInstanceId, mine[0].computeInstanceId]
    after = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    found["its context takes memory"] = after.used > before.used
    found["total = reserved + used + free"] = after.total == after.reserved + after.used + after.free
    old = n.nvmlDeviceGetMemoryInfo(h)
    found["first version: total = used + free"] = old.total == old.used + old.free
    count = c_uint(0)
    found["raw running, no room"] = [lib.nvmlDeviceGetComputeRunningProcesses_v3(h, byref(count), None), count.value > 0]
    f, s = cu.kernel(), cu.stream()
    for _ in range(25):
        cu.launch(f, 20_000_000, s)
    cu.must("cuStreamSynchronize", s)
    samples = [u for u in n.nvmlDeviceGetProcessUtilization(h, 0) if u.pid == os.getpid()]
    found["process utilisation lists it once"] = len(samples)
    found["its percentage is above 10"] = bool(samples) and samples[0].smUtil > 10
    count = c_uint(0)
    found["raw utilisation, no room"] = [lib.nvmlDeviceGetProcessUtilization(h, None, byref(count), c_ulonglong(0)), count.value > 0]
    ask("nvmlDeviceGetProcessesUtilizationInfo", h, 0)
    n.nvmlShutdown()
    ask("nvmlDeviceGetCount", question="after shutdown")
