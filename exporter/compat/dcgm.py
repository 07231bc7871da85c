"""The names, units and labels of dcgm-exporter's page, for dashboards and rules made for it (Grafana dashboard 12239 among them).

The old names (`DCGM_FI_DEV_GPU_UTIL`, in percent), which is what those dashboards ask for. One series a device, never a copy to each
sharer: namespace, pod and container are those of whoever has the device alone. A GPU instance of a card with MIG has series of its own
(`GPU_I_ID`), its memory in place of the card's. What is not known is not on the page.
"""

from collections.abc import Callable, Iterator

from poolmeter.exporter.collectors.family import Family, Page, PerPage, Samples
from poolmeter.exporter.owners import NOBODY, Owner, device_owners
from poolmeter.model.hardware import Activity, Hardware, MigInstance
from poolmeter.model.snapshot import DeviceSnapshot

_MIB = 1 << 20
LABELS = (
    "DCGM_FI_DRIVER_VERSION",
    "GPU_I_ID",
    "GPU_I_PROFILE",
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


def _labels(page: Page, device: DeviceSnapshot, owner: Owner, instance: MigInstance | None = None) -> tuple[str, ...]:
    node = page.snapshot.node
    return (
        device.driver_version or "",
        str(instance.gpu_instance_id) if instance is not None else "",
        (instance.profile or "") if instance is not None else "",
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


def _split(
    name: str, text: str, of_card: Callable[[DeviceSnapshot], float | int | None], of_instance: Callable[[MigInstance], float | int | None]
) -> Family:
    """Of the GPU instances where there are any that tell it, else of the card: never both, so that sums are right."""

    def samples(page: Page) -> Samples:
        owners = _OWNERS(page)
        for device in page.snapshot.devices:
            if device.vendor != "nvidia":
                continue
            parts = [(part, number) for part in _gpu_instances(device) if (number := of_instance(part)) is not None]
            for part, number in parts:
                yield _labels(page, device, NOBODY, part), float(number)
            found = of_card(device) if not parts else None
            if found is not None:
                yield _labels(page, device, owners.get(device.uuid, NOBODY)), float(found)

    return Family(name, "gauge", text, LABELS, samples)


def _gpu_instances(device: DeviceSnapshot) -> Iterator[MigInstance]:
    """One MIG device of each GPU instance: memory and activity are the GPU instance's."""
    seen: set[int] = set()
    for part in (device.hardware.instances if device.hardware and device.up else None) or ():
        if part.gpu_instance_id not in seen:
            seen.add(part.gpu_instance_id)
            yield part


def _mib(value: int | None) -> int | None:
    return None if value is None else value // _MIB


def _free(d: DeviceSnapshot) -> int | None:
    if d.memory_used_bytes is None or not d.up:
        return None
    return _mib(max(0, d.memory_total_bytes - d.memory_used_bytes - (d.memory_reserved_bytes or 0)))


def _free_of(part: MigInstance) -> int | None:
    if part.memory_total_bytes is None or part.memory_used_bytes is None:
        return None
    return _mib(max(0, part.memory_total_bytes - part.memory_used_bytes))


def _per(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _hardware(value: Callable[[Hardware], float | int | None], lost: bool = False) -> Callable[[DeviceSnapshot], float | int | None]:
    """`lost`: also of a card that does not answer."""
    return lambda device: value(device.hardware) if device.hardware is not None and (device.up or lost) else None


def _activity(name: str, text: str, value: Callable[[Activity], int | None]) -> Family:
    """A ratio that only cards with performance monitoring give."""

    def ratio(activity: Activity | None) -> float | None:
        return None if activity is None else _per(value(activity), 1_000_000)

    return _split(name, text, lambda d: ratio(d.hardware.activity if d.hardware else None), lambda part: ratio(part.activity))


def _rate(name: str, text: str, what: str) -> Family:
    return _device(name, text, _hardware(lambda hardware: hardware.bytes_per_s.get(what)))


def _last_xid(hardware: Hardware) -> int | None:
    return max(hardware.xids, key=lambda told: told.last_us).xid if hardware.xids else None


FAMILIES: tuple[Family, ...] = (
    _device("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda d: _per(d.sm_clock_hz, 1_000_000)),
    _device("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", lambda d: _per(d.memory_clock_hz, 1_000_000)),
    _device("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", _hardware(lambda h: h.memory_temperature_celsius)),
    _device("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda d: d.temperature_celsius),
    _device("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda d: _per(d.power_mw, 1000)),
    _device("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit in force (in W).", _hardware(lambda h: _per(h.power_limit_mw, 1000))),
    _device(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy that the board drew since the exporter's records began (in mJ).",
        lambda d: _per(d.energy_uj_total, 1000),
        counter=True,
    ),
    _device("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda d: _per(d.utilization_ppm, 10_000)),
    _device("DCGM_FI_DEV_XID_ERRORS", "The Xid told last; absent where none was told.", _hardware(_last_xid, lost=True)),
    _split("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free, _free_of),
    _split(
        "DCGM_FI_DEV_FB_USED",
        "Framebuffer memory used (in MiB).",
        lambda d: _mib(d.memory_used_bytes),
        lambda part: _mib(part.memory_used_bytes),
    ),
    _device("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", lambda d: _mib(d.memory_reserved_bytes)),
    _device(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for uncorrectable errors.",
        _hardware(lambda h: h.remapped_rows_total.get("uncorrectable")),
        counter=True,
    ),
    _device(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for correctable errors.",
        _hardware(lambda h: h.remapped_rows_total.get("correctable")),
        counter=True,
    ),
    _device("DCGM_FI_DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", _hardware(lambda h: h.row_remap_failed)),
    _device("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "Whether the vGPU guest has its licence.", _hardware(lambda h: h.licensed)),
    _activity("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", lambda a: a.graphics_ppm),
    _activity("DCGM_FI_PROF_SM_ACTIVE", "Ratio of cycles an SM has at least one warp assigned.", lambda a: a.sm_active_ppm),
    _activity("DCGM_FI_PROF_SM_OCCUPANCY", "Ratio of warps resident on an SM.", lambda a: a.sm_occupancy_ppm),
    _activity("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.", lambda a: a.tensor_ppm),
    _activity("DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface moves data.", lambda a: a.dram_ppm),
    _rate("DCGM_FI_PROF_PCIE_TX_BYTES", "Bytes sent over PCIe a second.", "pcie_tx"),
    _rate("DCGM_FI_PROF_PCIE_RX_BYTES", "Bytes received over PCIe a second.", "pcie_rx"),
    _rate("DCGM_FI_PROF_NVLINK_TX_BYTES", "Data bytes sent over all NVLinks a second.", "nvlink_tx"),
    _rate("DCGM_FI_PROF_NVLINK_RX_BYTES", "Data bytes received over all NVLinks a second.", "nvlink_rx"),
)
