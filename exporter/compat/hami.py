"""The names of HAMi's monitor: those it has now (`hami_*`), and the ones before, which most dashboards still ask for.

Its units are kept with its names, so a `_ratio` of HAMi runs to 100. A slice is what HAMi calls a container's virtual device; one whose pod
is not known goes by its allocation and its tenant. What HAMi's scheduler tells of promises is told per device as well.
"""

from collections.abc import Callable, Mapping, Sequence

from poolmeter.exporter.collectors.family import Family, Page, Samples
from poolmeter.exporter.owners import NOBODY, Owner, slice_owners
from poolmeter.model.snapshot import DeviceSnapshot, SliceSnapshot, Snapshot

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


def _places(snapshot: Snapshot) -> Mapping[tuple[str, str], int]:
    """The place of each slice's device among those of its allocation."""
    seen: dict[str, int] = {}
    places = {}
    for part in snapshot.slices:
        places[(part.allocation_id, part.device_uuid)] = seen.get(part.allocation_id, 0)
        seen[part.allocation_id] = seen.get(part.allocation_id, 0) + 1
    return places


def _slices(names: Sequence[str], text: str, value: Callable[[Page, SliceSnapshot], float | int | None]) -> tuple[Family, ...]:
    """A family under its name of now, and, where there is one, under the one before."""

    def rows(page: Page) -> Samples:
        owners, places = slice_owners(page.snapshot), _places(page.snapshot)
        for s in page.snapshot.slices:
            found = value(page, s)
            if found is not None:
                key = (s.allocation_id, s.device_uuid)
                owner = owners.get(key, NOBODY)
                yield (*_names(s, owner), str(places[key])), float(found)

    def now(page: Page) -> Samples:
        for (container, namespace, pod, uuid, place), number in rows(page):
            yield (container, uuid, namespace, pod, place, ZONE), number

    def before(page: Page) -> Samples:
        for (container, namespace, pod, uuid, place), number in rows(page):
            yield (container, uuid, pod, namespace, place, ZONE), number

    found = (Family(names[0], "gauge", text, _SLICE_LABELS, now),)
    return (*found, *(Family(name, "gauge", text, _OLD_SLICE_LABELS, before) for name in names[1:]))


def _names(s: SliceSnapshot, owner: Owner) -> tuple[str, str, str, str]:
    if owner.pod:
        return owner.container, owner.namespace, owner.pod, s.device_uuid
    return s.workload or "", s.tenant, s.allocation_id, s.device_uuid


def _utilization(page: Page, s: SliceSnapshot) -> float | None:
    """Per cent of the device's time since the page before, from the counter; absent where there is no page before."""
    if page.before is None or s.busy_us_total is None:
        return None
    span = page.snapshot.taken_us - page.before.taken_us
    for old in page.before.slices:
        if (old.allocation_id, old.device_uuid, old.origin) == (s.allocation_id, s.device_uuid, s.origin):
            if old.busy_us_total is None or span <= 0:
                return None
            return min(100.0, max(0.0, 100.0 * (s.busy_us_total - old.busy_us_total) / span))
    return None


def _since_kernel(page: Page, s: SliceSnapshot) -> float | None:
    return None if s.last_activity_us is None else max(0, page.snapshot.taken_us - s.last_activity_us) // 1_000_000


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
        lambda _, s: s.memory_used_bytes,
    ),
    *_slices(
        ("hami_vgpu_memory_limit_bytes", "vGPU_device_memory_limit_in_bytes"), "Memory limit in force.", lambda _, s: s.memory_limit_bytes
    ),
    *_slices(
        ("hami_container_device_memory_bytes", "Device_memory_desc_of_container"),
        "Memory that the slice holds.",
        lambda _, s: s.memory_used_bytes,
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
