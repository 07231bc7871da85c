"""Parts that the hardware itself makes of a card: MIG instances, vGPUs, MPS, and functions of the bus that the library does not list."""

from collections.abc import Callable, Iterator

from poolmeter.exporter.collectors.family import Family, Page, Samples, ratio, seconds
from poolmeter.model.hardware import MigInstance, Vgpu


def _instances(page: Page) -> Iterator[tuple[tuple[str, str, str], MigInstance]]:
    for device in page.snapshot.devices:
        for part in (device.hardware.instances if device.hardware and device.up else None) or ():
            yield (str(part.gpu_instance_id), part.uuid, device.uuid), part


def _per_instance(
    name: str, text: str, value: Callable[[MigInstance], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    def samples(page: Page) -> Samples:
        for labels, part in _instances(page):
            found = value(part)
            if found is not None:
                yield labels, scale(found)

    kind = "counter" if counter else "gauge"
    return Family(f"poolmeter_mig_{name}", kind, text, ("gpu_instance_id", "instance", "uuid"), samples)  # type: ignore[arg-type]


def _instance_info(page: Page) -> Samples:
    for (gpu_instance, instance, uuid), part in _instances(page):
        placement = "" if part.placement_start is None else f"{part.placement_start}+{part.placement_size}"
        yield (str(part.compute_instance_id), gpu_instance, instance, placement, part.profile or "", uuid), 1.0


def _instance_count(page: Page) -> Samples:
    for device in page.snapshot.devices:
        if device.up and device.hardware is not None and device.hardware.instances is not None:
            yield (device.uuid,), float(len(device.hardware.instances))


def _activity(name: str, text: str, attribute: str) -> Family:
    return _per_instance(
        name,
        text + " of the GPU instance, 0 to 1; Hopper and newer (GPM).",
        lambda part: getattr(part.activity, attribute) if part.activity is not None else None,
        ratio,
    )


def _vgpus(page: Page) -> Iterator[tuple[tuple[str, str], Vgpu]]:
    for device in page.snapshot.devices:
        for part in (device.hardware.vgpus if device.hardware and device.up else None) or ():
            yield (device.uuid, part.uuid), part


def _per_vgpu(
    name: str, text: str, value: Callable[[Vgpu], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    def samples(page: Page) -> Samples:
        for labels, part in _vgpus(page):
            found = value(part)
            if found is not None:
                yield labels, scale(found)

    return Family(f"poolmeter_vgpu_{name}", "counter" if counter else "gauge", text, ("uuid", "vgpu"), samples)


def _vgpu_info(page: Page) -> Samples:
    for (uuid, vgpu), part in _vgpus(page):
        yield (part.type_name or "", uuid, vgpu, part.vm_id or ""), 1.0


def _mps_servers(page: Page) -> Samples:
    for device in page.snapshot.devices:
        if device.up and device.hardware is not None and device.hardware.mps_server_pid is not None:
            yield (device.uuid,), 1.0


def _functions(page: Page) -> Samples:
    for part in page.snapshot.functions:
        labels = (part.pci_bus_id, part.device_id, part.driver, part.uuid, part.parent, part.profile, part.state)
        yield tuple(label or "" for label in labels), 1.0


FAMILIES: tuple[Family, ...] = (
    Family("poolmeter_mig_instances", "gauge", "MIG devices of a card; absent: MIG is off (NVML).", ("uuid",), _instance_count),
    Family(
        "poolmeter_mig_info",
        "gauge",
        "Identity of a MIG device, always 1; placement is its first memory slice and how many (NVML).",
        ("compute_instance_id", "gpu_instance_id", "instance", "placement", "profile", "uuid"),
        _instance_info,
    ),
    _per_instance("memory_total_bytes", "Memory of the GPU instance in bytes (NVML).", lambda part: part.memory_total_bytes),
    _per_instance("memory_used_bytes", "Memory in use on the GPU instance in bytes (NVML).", lambda part: part.memory_used_bytes),
    _per_instance("processes", "Processes with a context on the MIG device (NVML).", lambda part: part.processes),
    _per_instance(
        "busy_seconds_total",
        "Time in which the GPU instance worked in seconds; Hopper and newer (GPM graphics activity, integrated).",
        lambda part: part.busy_us_total,
        seconds,
        counter=True,
    ),
    _activity("sm_active_ratio", "Part of the SMs that were busy", "sm_active_ppm"),
    _activity("sm_occupancy_ratio", "Part of the warps that were resident", "sm_occupancy_ppm"),
    _activity("tensor_active_ratio", "Time in which tensor cores worked", "tensor_ppm"),
    _activity("dram_active_ratio", "Part of the memory bandwidth in use", "dram_ppm"),
    Family("poolmeter_vgpu_info", "gauge", "Identity of an active vGPU, always 1 (NVML).", ("type", "uuid", "vgpu", "vm_id"), _vgpu_info),
    _per_vgpu("framebuffer_total_bytes", "Framebuffer of the vGPU's type in bytes (NVML).", lambda part: part.framebuffer_total_bytes),
    _per_vgpu("framebuffer_used_bytes", "Framebuffer in use in bytes (NVML).", lambda part: part.framebuffer_used_bytes),
    _per_vgpu(
        "licensed",
        "Whether the guest has its licence, 1 or 0 (NVML).",
        lambda part: None if part.licensed is None else int(part.licensed),
    ),
    _per_vgpu("utilization_ratio", "Use of the card by the vGPU, 0 to 1 (NVML vGPU samples).", lambda part: part.utilization_ppm, ratio),
    _per_vgpu(
        "busy_seconds_total",
        "Use of the card by the vGPU in seconds (NVML vGPU samples, integrated).",
        lambda part: part.busy_us_total,
        seconds,
        counter=True,
    ),
    Family("poolmeter_mps_server", "gauge", "An MPS server is on the device, always 1 (NVML process lists).", ("uuid",), _mps_servers),
    Family(
        "poolmeter_bus_function_info",
        "gauge",
        "A card or a part of one that the library does not list, always 1; its use is unknown (sysfs).",
        ("bus_id", "device_id", "driver", "mdev", "parent", "profile", "state"),
        _functions,
    ),
)
