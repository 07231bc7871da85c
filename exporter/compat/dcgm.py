"""The names, units and labels of dcgm-exporter's page, for dashboards and rules made for it (Grafana dashboard 12239 among them).

The old names (`DCGM_FI_DEV_GPU_UTIL`, in percent), which is what those dashboards ask for. One series a device, never a copy to each
sharer: namespace, pod and container are those of whoever has the device alone. What is not known is not on the page.
"""

from collections.abc import Callable

from poolmeter.exporter.collectors.family import Family, Page, PerPage, Samples
from poolmeter.exporter.owners import NOBODY, Owner, device_owners
from poolmeter.model.snapshot import DeviceSnapshot

_MIB = 1 << 20
LABELS = (
    "DCGM_FI_DRIVER_VERSION",
    "Hostname",
    "UUID",
    "container",
    "device",
    "gpu",
    "hostname",
    "modelName",
    "namespace",
    "pci_bus_id",
    "pod",
)


_OWNERS = PerPage(lambda page: device_owners(page.snapshot))


def _labels(page: Page, device: DeviceSnapshot, owner: Owner) -> tuple[str, ...]:
    node = page.snapshot.node
    return (
        device.driver_version or "",
        node,
        device.uuid,
        owner.container,
        f"nvidia{device.minor}" if device.minor is not None else f"nvidia{device.index}",
        str(device.index),
        node,
        device.model,
        owner.namespace,
        device.pci_bus_id or "",
        owner.pod,
    )


def _device(name: str, text: str, value: Callable[[DeviceSnapshot], float | int | None], counter: bool = False) -> Family:
    def samples(page: Page) -> Samples:
        owners = _OWNERS(page)
        for device in page.snapshot.devices:
            found = value(device) if device.vendor == "nvidia" else None
            if found is not None:
                yield _labels(page, device, owners.get(device.uuid, NOBODY)), float(found)

    return Family(name, "counter" if counter else "gauge", text, LABELS, samples)


def _mib(value: int | None) -> int | None:
    return None if value is None else value // _MIB


def _free(d: DeviceSnapshot) -> int | None:
    if d.memory_used_bytes is None or not d.up:
        return None
    return _mib(max(0, d.memory_total_bytes - d.memory_used_bytes - (d.memory_reserved_bytes or 0)))


def _per(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _activity(name: str) -> Callable[[DeviceSnapshot], float | None]:
    """A ratio that only cards with performance monitoring give."""

    def value(device: DeviceSnapshot) -> float | None:
        activity = device.hardware.activity if device.hardware else None
        return _per(getattr(activity, name, None), 1_000_000)

    return value


FAMILIES: tuple[Family, ...] = (
    _device("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda d: _per(d.sm_clock_hz, 1_000_000)),
    _device("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", lambda d: _per(d.memory_clock_hz, 1_000_000)),
    _device("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda d: d.temperature_celsius),
    _device("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda d: _per(d.power_mw, 1000)),
    _device(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy that the board drew since the exporter's records began (in mJ).",
        lambda d: _per(d.energy_uj_total, 1000),
        counter=True,
    ),
    _device("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda d: _per(d.utilization_ppm, 10_000)),
    _device("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free),
    _device("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", lambda d: _mib(d.memory_used_bytes)),
    _device("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", lambda d: _mib(d.memory_reserved_bytes)),
    _device("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", _activity("graphics_ppm")),
    _device("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.", _activity("tensor_ppm")),
    _device("DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface moves data.", _activity("dram_ppm")),
)
