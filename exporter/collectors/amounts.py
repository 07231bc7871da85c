"""Amounts beside device time: where a slice's number comes from, memory by hook and by NVML, CPU and memory of the node."""

from collections.abc import Callable

from poolmeter.exporter.collectors.device import per_device
from poolmeter.exporter.collectors.family import Family, Page, Samples
from poolmeter.model.snapshot import HostSnapshot, SliceSnapshot
from poolmeter.model.usage import UsedBasis


def _bases(page: Page) -> Samples:
    for part in page.snapshot.slices:
        for basis in UsedBasis:
            yield (part.allocation_id, basis.value, part.device_uuid), 1.0 if part.used_basis == basis.value else 0.0


def _slice(name: str, text: str, value: Callable[[SliceSnapshot], int | None]) -> Family:
    def samples(page: Page) -> Samples:
        for part in page.snapshot.slices:
            found = value(part)
            if found is not None:
                yield (part.allocation_id, part.device_uuid), float(found)

    return Family(f"poolmeter_slice_{name}", "gauge", text, ("allocation", "uuid"), samples)


def _host(name: str, text: str, value: Callable[[HostSnapshot], int | None], scale: Callable[[int], float] = float) -> Family:
    def samples(page: Page) -> Samples:
        found = value(page.snapshot.host) if page.snapshot.host is not None else None
        if found is not None:
            yield (), scale(found)

    return Family(f"poolmeter_pool_{name}", "gauge", text, (), samples)


def _cores(milli: int) -> float:
    return milli / 1000


FAMILIES: tuple[Family, ...] = (
    Family(
        "poolmeter_slice_used_basis",
        "gauge",
        "Where a slice's device time comes from, 1 for the one that holds: hook, accounting, sampled (NVML), allocated: not known, mixed.",
        ("allocation", "basis", "uuid"),
        _bases,
    ),
    _slice(
        "nvml_memory_bytes",
        "Memory that the card says the slice's processes hold, contexts and all, in bytes (NVML).",
        lambda s: s.nvml_memory_bytes,
    ),
    _slice(
        "memory_difference_bytes",
        "What the card says less what the hook says, in bytes: contexts and other overhead, or what no hook saw (NVML minus hook).",
        lambda s: s.memory_difference_bytes,
    ),
    per_device("hooked_memory_bytes", "Memory that all slices hold in bytes (hook).", lambda d: d.hooked_memory_bytes),
    per_device(
        "memory_difference_bytes",
        "Memory in use that is neither hooked nor of a program without the hook, in bytes: contexts and other overhead (NVML minus hook).",
        lambda d: d.memory_difference_bytes,
    ),
    _host("cpu_cores", "CPUs of this node, in cores (kernel).", lambda h: h.cpu_milli, _cores),
    _host(
        "cpu_requested_cores",
        "CPU that running allocations asked for, in cores; absent while one of them does not say (allocations).",
        lambda h: h.cpu_requested_milli,
        _cores,
    ),
    _host("host_memory_total_bytes", "Memory of this node in bytes (kernel).", lambda h: h.memory_bytes),
    _host(
        "host_memory_requested_bytes",
        "Memory of the node that running allocations asked for in bytes; absent while one of them does not say (allocations).",
        lambda h: h.memory_requested_bytes,
    ),
)
