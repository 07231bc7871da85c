"""The node's part of the pool: what is promised, what is free, and what is free yet of no use to a whole-card request."""

from collections.abc import Callable

from poolmeter.exporter.collectors.family import Family, Page, Samples, ratio
from poolmeter.exporter.snapshots import allocated_ppm
from poolmeter.model.snapshot import DeviceSnapshot
from poolmeter.model.units import FULL_SHARE_PPM


def _sum(name: str, text: str, value: Callable[[DeviceSnapshot], int], scale: Callable[[int], float]) -> Family:
    def samples(page: Page) -> Samples:
        if page.snapshot.devices:  # none seen yet: not nothing, but nothing known
            yield (), scale(sum(value(device) for device in page.snapshot.devices))

    return Family(f"poolmeter_pool_{name}", "gauge", text, (), samples)


def _free(device: DeviceSnapshot) -> int:
    return FULL_SHARE_PPM - allocated_ppm(device) if device.up else 0


FAMILIES: tuple[Family, ...] = (
    _sum("devices", "Devices of this node, up or down.", lambda _: 1, float),
    _sum("allocated_devices", "Device time promised, in whole devices (allocations).", allocated_ppm, ratio),
    _sum("unallocated_devices", "Device time of devices that are up and not promised, in whole devices (allocations).", _free, ratio),
    _sum(
        "fragmented_devices",
        "The part of unallocated devices that lies on devices already shared, so that no whole device can be had of it (allocations).",
        lambda d: _free(d) if allocated_ppm(d) else 0,
        ratio,
    ),
    _sum(
        "overcommitted_devices",
        "Device time promised beyond what the devices have, in whole devices (allocations).",
        lambda d: (d.allocated_ppm or 0) - allocated_ppm(d),
        ratio,
    ),
    _sum("memory_allocated_bytes", "Device memory promised in bytes (allocations).", lambda d: d.memory_allocated_bytes or 0, float),
    _sum("memory_total_bytes", "Device memory in bytes (NVML).", lambda d: d.memory_total_bytes, float),
    _sum(
        "memory_unallocated_bytes",
        "Device memory of devices that are up and not promised in bytes (allocations).",
        lambda d: max(0, d.memory_total_bytes - (d.memory_allocated_bytes or 0)) if d.up else 0,
        float,
    ),
)
