"""The names of HAMi's monitor: those it has now (`hami_*`), and the ones before, which most dashboards still ask for.

Its units are kept with its names, so a `_ratio` of HAMi runs to 100. A slice is what HAMi calls a container's virtual device; one whose pod
is not known goes by its allocation and its tenant. What HAMi's scheduler tells of promises is told per device as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from poolmeter.exporter.collectors.family import Family, Page, PerPage, Samples
from poolmeter.exporter.owners import NOBODY, slice_owners
from poolmeter.model.snapshot import DeviceSnapshot, SliceSnapshot

ZONE = "vGPU"
_DEVICE_LABELS = ("device_index", "device_type", "device_uuid", "node", "zone")
_OLD_DEVICE_LABELS = ("deviceidx", "devicetype", "deviceuuid", "nodeid", "zone")
_SLICE_LABELS = ("container", "device_uuid", "namespace", "pod", "vdevice_index", "zone")
_OLD_SLICE_LABELS = ("ctrname", "deviceuuid", "podname", "podnamespace", "vdeviceid", "zone")


def _devices(names: tuple[str, str], text: str, value: Callable[[DeviceSnapshot], float | int | None]) -> tuple[Family, ...]:
    """A family under its name of now, and under the one before."""

    def samples(page: Page) -> Samples:
        for d in page.snapshot.devices:
            found = value(d)
            if found is not None:
                yield (str(d.index), f"{d.vendor.upper()}-{d.model}", d.uuid, page.snapshot.node, ZONE), float(found)

    now, before = names
    return Family(now, "gauge", text, _DEVICE_LABELS, samples), Family(before, "gauge", text, _OLD_DEVICE_LABELS, samples)


@dataclass(frozen=True)
class _Part:
    """A slice with its names, its place among the devices of its allocation, and what it was on the page before."""

    slice: SliceSnapshot
    names: tuple[str, str, str]
    place: str
    before: SliceSnapshot | None


def _parts(page: Page) -> list[_Part]:
    owners = slice_owners(page.snapshot)
    old = {(s.allocation_id, s.device_uuid, s.origin): s for s in page.before.slices} if page.before is not None else {}
    seen: dict[str, int] = {}
    found = []
    for s in page.snapshot.slices:
        place = seen.get(s.allocation_id, 0)
        seen[s.allocation_id] = place + 1
        owner = owners.get((s.allocation_id, s.device_uuid), NOBODY)
        names = (owner.container, owner.namespace, owner.pod) if owner.pod else (s.workload or "", s.tenant, s.allocation_id)
        found.append(_Part(s, names, str(place), old.get((s.allocation_id, s.device_uuid, s.origin))))
    return found


_PARTS = PerPage(_parts)


def _slices(names: tuple[str, str], text: str, value: Callable[[Page, _Part], float | int | None]) -> tuple[Family, ...]:
    """A family under its name of now, and under the one before."""

    def numbers(page: Page) -> list[tuple[_Part, float]]:
        return [(part, float(found)) for part in _PARTS(page) if (found := value(page, part)) is not None]

    shared = PerPage(numbers)

    def now(page: Page) -> Samples:
        for part, number in shared(page):
            container, namespace, pod = part.names
            yield (container, part.slice.device_uuid, namespace, pod, part.place, ZONE), number

    def before(page: Page) -> Samples:
        for part, number in shared(page):
            container, namespace, pod = part.names
            yield (container, part.slice.device_uuid, pod, namespace, part.place, ZONE), number

    return Family(names[0], "gauge", text, _SLICE_LABELS, now), Family(names[1], "gauge", text, _OLD_SLICE_LABELS, before)


def _utilization(page: Page, part: _Part) -> float | None:
    """Per cent of the device's time since the page before, from the counter; absent where there is no page before."""
    old, busy = part.before, part.slice.busy_us_total
    if page.before is None or old is None or old.busy_us_total is None or busy is None:
        return None
    span = page.snapshot.taken_us - page.before.taken_us
    return min(100.0, max(0.0, 100.0 * (busy - old.busy_us_total) / span)) if span > 0 else None


def _since_kernel(page: Page, part: _Part) -> float | None:
    last = part.slice.last_activity_us
    return None if last is None else max(0, page.snapshot.taken_us - last) // 1_000_000


def _percent(ppm: int | None) -> float | None:
    return None if ppm is None else ppm / 10_000


FAMILIES: tuple[Family, ...] = (
    *_devices(("hami_host_gpu_memory_used_bytes", "HostGPUMemoryUsage"), "Memory in use on the device.", lambda d: d.memory_used_bytes),
    *_devices(
        ("hami_host_gpu_utilization_ratio", "HostCoreUtilization"),
        "Utilisation of the device, 0 to 100.",
        lambda d: _percent(d.utilization_ppm),
    ),
    *_devices(("hami_gpu_memory_limit_bytes", "GPUDeviceMemoryLimit"), "Memory of the device.", lambda d: d.memory_total_bytes),
    *_devices(
        ("hami_gpu_memory_allocated_bytes", "GPUDeviceMemoryAllocated"),
        "Memory promised on the device.",
        lambda d: d.memory_allocated_bytes,
    ),
    *_devices(
        ("hami_gpu_core_allocated_ratio", "GPUDeviceCoreAllocated"), "Device time promised, 0 to 100.", lambda d: _percent(d.allocated_ppm)
    ),
    *_slices(
        ("hami_vgpu_memory_used_bytes", "vGPU_device_memory_usage_in_bytes"),
        "Memory that the slice holds.",
        lambda _, part: part.slice.memory_used_bytes,
    ),
    *_slices(
        ("hami_vgpu_memory_limit_bytes", "vGPU_device_memory_limit_in_bytes"),
        "Memory limit in force.",
        lambda _, part: part.slice.memory_limit_bytes,
    ),
    *_slices(
        ("hami_container_device_memory_bytes", "Device_memory_desc_of_container"),
        "Memory that the slice holds.",
        lambda _, part: part.slice.memory_used_bytes,
    ),
    *_slices(
        ("hami_container_device_utilization_ratio", "Device_utilization_desc_of_container"),
        "Part of the device's time that the slice used since the page before, 0 to 100.",
        _utilization,
    ),
    *_slices(
        ("hami_container_last_kernel_elapsed_seconds", "Device_last_kernel_of_container"),
        "Time since the slice's last kernel or copy in seconds.",
        _since_kernel,
    ),
)
