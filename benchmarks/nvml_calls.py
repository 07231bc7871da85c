"""Calls NVML as the exporter does and prints, per call, the type of the answer or the code of the error. One JSON line.

Run it on a card and on the simulated library: the two lines must agree (`make hardware`, section nvml).
"""

import json
from collections.abc import Callable
from typing import Any

import pynvml as n


def shape(value: Any) -> str:
    """The type of an answer, fields and all, without its value."""
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, list):
        return f"list[{shape(value[0])}]" if value else "list"
    if isinstance(value, tuple):
        return f"tuple[{', '.join(shape(item) for item in value)}]"
    fields = getattr(value, "_fields_", None)
    if fields:
        return f"{type(value).__name__}({', '.join(f'{field[0]}:{field[1].__name__}' for field in fields)})"
    return type(value).__name__


def code(call: Callable[[], Any]) -> str:
    """What a call answers: its type, or the error's code."""
    try:
        return shape(call())
    except n.NVMLError as error:
        return f"error {error.value}"
    except Exception as error:
        return type(error).__name__


def main() -> None:
    found: dict[str, str] = {"before init": code(n.nvmlDeviceGetCount), "nvmlInit": code(n.nvmlInit)}
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetCount"):
        found[name] = code(getattr(n, name))
    found["handle of index 999"] = code(lambda: n.nvmlDeviceGetHandleByIndex(999))
    found["handle of an unknown uuid"] = code(lambda: n.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000"))
    handle = n.nvmlDeviceGetHandleByIndex(0)
    found["handle by uuid"] = code(lambda: n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(handle)).contents is not None)
    plain = (
        "UUID Name Index MinorNumber Serial PciInfo MemoryInfo UtilizationRates EncoderUtilization DecoderUtilization PowerUsage "
        "EnforcedPowerLimit TotalEnergyConsumption CurrentClocksEventReasons ComputeRunningProcesses GraphicsRunningProcesses "
        "MPSComputeRunningProcesses MigMode MaxMigDeviceCount PersistenceMode ComputeMode VirtualizationMode AccountingMode "
        "AccountingBufferSize AccountingPids SupportedEventTypes RemappedRows CudaComputeCapability"
    )
    for name in plain.split():
        function = getattr(n, f"nvmlDeviceGet{name}")
        found[name] = code(lambda function=function: function(handle))
    found["MemoryInfo v2"] = code(lambda: n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2))
    found["Temperature"] = code(lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))
    for clock in ("SM", "MEM"):
        found[f"ClockInfo {clock}"] = code(lambda clock=clock: n.nvmlDeviceGetClockInfo(handle, getattr(n, f"NVML_CLOCK_{clock}")))
    found["ProcessUtilization of an idle card"] = code(lambda: n.nvmlDeviceGetProcessUtilization(handle, 2**62))
    found["Samples utilization"] = code(lambda: n.nvmlDeviceGetSamples(handle, n.NVML_GPU_UTILIZATION_SAMPLES, 0))
    found["Samples power"] = code(lambda: n.nvmlDeviceGetSamples(handle, n.NVML_TOTAL_POWER_SAMPLES, 0))
    found["MigDeviceHandleByIndex"] = code(lambda: n.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0))
    found["GpuInstanceId"] = code(lambda: n.nvmlDeviceGetGpuInstanceId(handle))
    found["TotalEccErrors"] = code(lambda: n.nvmlDeviceGetTotalEccErrors(handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC))
    found["FieldValues"] = code(lambda: n.nvmlDeviceGetFieldValues(handle, [n.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION]))
    found["AccountingStats of an unknown pid"] = code(lambda: n.nvmlDeviceGetAccountingStats(handle, 999_999_999))
    found["nvmlShutdown"] = code(n.nvmlShutdown)
    found["after shutdown"] = code(lambda: n.nvmlDeviceGetName(handle))
    print(json.dumps(found))


main()
