"""Holders: the container, pod, job, unit or user that processes on a device belong to, by whatever source says so; and how the sources agree."""

from collections import Counter
from collections.abc import Callable

from poolmeter.exporter.collectors.family import Family, Page, Samples, seconds
from poolmeter.model.snapshot import HolderSnapshot

LABELS = ("holder", "uuid")


def _per_holder(
    name: str, text: str, value: Callable[[HolderSnapshot], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    def samples(page: Page) -> Samples:
        for part in page.snapshot.holders:
            found = value(part)
            if found is not None:
                yield (part.id, part.device_uuid), scale(found)

    return Family(f"poolmeter_holder_{name}", "counter" if counter else "gauge", text, LABELS, samples)


def _info(page: Page) -> Samples:
    for h in page.snapshot.holders:
        yield (
            (
                h.container or "",
                h.id,
                h.job or "",
                h.namespace or "",
                h.pod or "",
                h.source,
                h.tenant or "",
                h.unit or "",
                h.user or "",
                h.device_uuid,
            ),
            1.0,
        )


def _allocations(page: Page) -> Samples:
    for holder in page.snapshot.holders:
        for allocation in holder.allocation_ids:
            yield (allocation, holder.id, holder.device_uuid), 1.0


def _processes(page: Page) -> Samples:
    for holder in page.snapshot.holders:
        yield (holder.id, "true", holder.device_uuid), float(holder.hooked_processes)
        yield (holder.id, "false", holder.device_uuid), float(holder.processes - holder.hooked_processes)


def _attributed(page: Page) -> Samples:
    counts = Counter(item.source or "none" for item in page.snapshot.attributions)
    for source, count in sorted(counts.items()):
        yield (source,), float(count)


def _disagreements(page: Page) -> Samples:
    counts = Counter((d.field, d.other, d.source) for item in page.snapshot.attributions for d in item.disagreements)
    for labels, count in sorted(counts.items()):
        yield labels, float(count)


def _faults(page: Page) -> Samples:
    for fault in page.snapshot.attribution_faults:
        yield (fault.kind, fault.source), float(fault.count)


def _frameworks(page: Page) -> Samples:
    framework = {(item.pid, item.start_ticks): item.framework for item in page.snapshot.attributions}
    found = ((framework.get((process.pid, process.start_ticks)), process.device_uuid) for process in page.snapshot.processes)
    for (name, uuid), count in sorted(Counter((name, uuid) for name, uuid in found if name is not None).items()):
        yield (name, uuid), float(count)


FAMILIES: tuple[Family, ...] = (
    Family(
        "poolmeter_holder_info",
        "gauge",
        "Who has processes on a device, or was given it, always 1 (the source that names the tenant).",
        ("container", "holder", "job", "namespace", "pod", "source", "tenant", "unit", "user", "uuid"),
        _info,
    ),
    Family(
        "poolmeter_holder_allocation_info",
        "gauge",
        "Allocation that processes of the holder belong to, always 1 (allocation).",
        ("allocation", "holder", "uuid"),
        _allocations,
    ),
    _per_holder("assigned", "Whether the device was given to the holder, 1 or 0 (kubelet, job mapping).", lambda h: int(h.assigned)),
    Family(
        "poolmeter_holder_processes",
        "gauge",
        "Processes of the holder on the device, under the hook or not (NVML and hook).",
        ("holder", "hooked", "uuid"),
        _processes,
    ),
    _per_holder(
        "unaccounted_memory_bytes",
        "Memory held by the holder's processes without the hook in bytes (NVML).",
        lambda h: h.unaccounted_memory_bytes,
    ),
    _per_holder(
        "unaccounted_busy_seconds_total",
        "Device time of the holder's processes without the hook in seconds (NVML process utilisation, integrated).",
        lambda h: h.unaccounted_us_total,
        seconds,
        counter=True,
    ),
    Family(
        "poolmeter_framework_processes",
        "gauge",
        "Processes on the device by framework: cuda, cann, dtk, rocm (libraries in their memory maps).",
        ("framework", "uuid"),
        _frameworks,
    ),
    Family(
        "poolmeter_attributed_processes",
        "gauge",
        "Processes by the source that names their tenant, none for no source.",
        ("source",),
        _attributed,
    ),
    Family(
        "poolmeter_attribution_disagreements",
        "gauge",
        "Processes of which one source says something else than the source that is believed, by what.",
        ("field", "other", "source"),
        _disagreements,
    ),
    Family(
        "poolmeter_attribution_faults",
        "gauge",
        "Lines and names of a source that could not be used at its last look, by kind.",
        ("kind", "source"),
        _faults,
    ),
)
