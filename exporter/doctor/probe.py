"""Asks the driver libraries and prints what they say as JSON; a program of its own, since a call can hang. Imports no part of poolmeter.

Reads alone: no setting is changed and no CUDA context is made (libcuda is loaded, not initialised). Arguments: `--wake` asks the cards
too, which starts one that nobody holds; without it only the libraries are looked at.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def loaded(name: str) -> dict[str, object]:
    """Whether the loader finds a library, and the file it found."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return {"error": str(error)}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            stem = name.split(".so")[0] + ".so"
            paths = {line.split(None, 5)[5].strip() for line in maps if "/" in line and stem in line}
    except OSError:
        paths = set()
    return {"file": sorted(os.path.realpath(path) for path in paths)[0]} if paths else {}


def value(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None when the driver has none."""
    import pynvml

    try:
        answer = call(*arguments)
    except (pynvml.NVMLError, TypeError):
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def card(index: int) -> dict[str, object]:
    """One card's modes."""
    import pynvml as nvml

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}
    mig = value(nvml.nvmlDeviceGetMigMode, handle)
    mps = value(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
    row: dict[str, object] = {
        "index": index,
        "uuid": value(nvml.nvmlDeviceGetUUID, handle),
        "model": value(nvml.nvmlDeviceGetName, handle),
        "minor": value(nvml.nvmlDeviceGetMinorNumber, handle),
        "persistence": value(nvml.nvmlDeviceGetPersistenceMode, handle),
        "accounting": value(nvml.nvmlDeviceGetAccountingMode, handle),
        "compute_mode": value(nvml.nvmlDeviceGetComputeMode, handle),
        "mig": list(mig) if mig is not None else None,
        "mps_clients": len(mps) if mps is not None else None,
    }
    if row["uuid"] is None:
        row["error"] = "it does not answer"
        try:
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            row["error"] = str(error)
    return row


def main(argv: list[str]) -> int:
    """0; what fails is in what is printed."""
    out: dict[str, Any] = {"nvml": loaded("libnvidia-ml.so.1"), "cuda": loaded("libcuda.so.1")}
    if "error" not in out["nvml"]:
        import pynvml as nvml

        try:
            nvml.nvmlInitWithFlags(2)  # NVML_INIT_FLAG_NO_ATTACH: the cards stay as they are
            out["driver"] = value(nvml.nvmlSystemGetDriverVersion)
            out["library"] = value(nvml.nvmlSystemGetNVMLVersion)
            out["count"] = value(nvml.nvmlDeviceGetCount)
            if "--wake" in argv and out["count"] is not None:
                out["cards"] = [card(index) for index in range(out["count"])]
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            out["init"] = {"error": str(error), "code": getattr(error, "value", None)}
    json.dump(out, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
