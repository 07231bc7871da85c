"""Reconciliation: what the hook, the card and the difference between them say of a device's time and memory."""

from poolmeter.exporter.collectors.device import per_device
from poolmeter.exporter.collectors.family import Family, Page, Samples, seconds


def _unattributed(page: Page) -> Samples:
    for device in page.snapshot.devices:
        if device.unaccounted_us_total is not None and device.uuid in page.unattributed_us:
            yield (device.uuid,), seconds(page.unattributed_us[device.uuid])


FAMILIES: tuple[Family, ...] = (
    per_device(
        "hooked_busy_seconds_total",
        "Device time of all slices in seconds (hook).",
        lambda d: d.hooked_us_total,
        seconds,
        counter=True,
    ),
    per_device(
        "unaccounted_busy_seconds_total",
        "Device time of programs without the hook in seconds (NVML process utilisation, integrated).",
        lambda d: d.unaccounted_us_total,
        seconds,
        counter=True,
    ),
    Family(
        "poolmeter_device_unattributed_busy_seconds_total",
        "counter",
        "Of the device time of programs without the hook, in seconds, what no holder could be named for (NVML process utilisation, integrated).",
        ("uuid",),
        _unattributed,
    ),
    per_device(
        "unaccounted_memory_bytes", "Memory held by programs without the hook in bytes (NVML).", lambda d: d.unaccounted_memory_bytes
    ),
    per_device(
        "switch_overhead_seconds_total",
        "Busy time of the device that is neither hooked nor unaccounted, as of the last closed minute, in seconds (NVML minus hook).",
        lambda d: d.switch_overhead_us_total,
        seconds,
        counter=True,
    ),
)
