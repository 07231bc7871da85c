"""Prints the node's devices as JSON; run as a program of its own by poolmeter.enforcer.inventory, imports no part of poolmeter."""

import json
import sys


def main() -> int:
    """0, or 1 with the driver's error on stderr."""
    import pynvml

    try:
        pynvml.nvmlInit()
        rows: list[dict[str, object]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                row: dict[str, object] = {
                    "uuid": pynvml.nvmlDeviceGetUUID(handle),
                    "index": index,
                    "model": pynvml.nvmlDeviceGetName(handle),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                }
            except pynvml.NVMLError as error:
                # One lost card must not hide the others; without its UUID it cannot be named, let alone promised.
                sys.stderr.write(f"device {index}: {error}\n")
                continue
            try:
                if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
                    row["problem"] = "it is in MIG mode, which this version cannot share out"
            except pynvml.NVMLError:
                pass  # a card that has no MIG
            rows.append(row)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    json.dump(rows, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
