"""Slices: an allocation's part of a device. Who it is for is on the info series alone."""

from collections.abc import Callable

from poolmeter.exporter.collectors.family import Family, Page, Samples, ratio, seconds
from poolmeter.model.allocation import SliceState
from poolmeter.model.snapshot import SliceSnapshot

LABELS = ("allocation", "uuid")


def _per_slice(
    name: str, text: str, value: Callable[[SliceSnapshot], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    def samples(page: Page) -> Samples:
        for part in page.snapshot.slices:
            found = value(part)
            if found is not None:
                yield (part.allocation_id, part.device_uuid), scale(found)

    return Family(f"poolmeter_slice_{name}", "counter" if counter else "gauge", text, LABELS, samples)


def _info(page: Page) -> Samples:
    for s in page.snapshot.slices:
        yield (
            (
                s.allocation_id,
                s.workload_class or "",
                s.enforcement,
                s.environment or "",
                s.mode,
                s.pool or "",
                s.project or "",
                s.tenant,
                s.user or "",
                s.device_uuid,
                s.workload or "",
            ),
            1.0,
        )


def _states(page: Page) -> Samples:
    for part in page.snapshot.slices:
        for state in SliceState:
            yield (part.allocation_id, state.value, part.device_uuid), 1.0 if part.state == state.value else 0.0


FAMILIES: tuple[Family, ...] = (
    Family(
        "poolmeter_slice_info",
        "gauge",
        "Whose a slice is, always 1 (allocation).",
        ("allocation", "class", "enforcement", "environment", "mode", "pool", "project", "tenant", "user", "uuid", "workload"),
        _info,
    ),
    Family(
        "poolmeter_slice_state",
        "gauge",
        "State of a slice, 1 for the one it is in (hook and allocation).",
        ("allocation", "state", "uuid"),
        _states,
    ),
    _per_slice("promise_ratio", "Device time promised to the slice, 0 to 1 (allocation).", lambda s: s.promise_ppm, ratio),
    _per_slice("compute_limit_ratio", "Limit of device time in force, 0 to 1; absent: none (grant).", lambda s: s.compute_limit_ppm, ratio),
    _per_slice("memory_limit_bytes", "Memory limit in force in bytes; absent: none (grant).", lambda s: s.memory_limit_bytes),
    _per_slice("memory_used_bytes", "Memory that the slice's processes hold in bytes (hook).", lambda s: s.memory_used_bytes),
    _per_slice("memory_peak_bytes", "Most memory held since the allocation began in bytes (hook).", lambda s: s.memory_peak_bytes),
    _per_slice(
        "created_timestamp_seconds",
        "When the allocation was made, in seconds since the Unix epoch (allocation).",
        lambda s: s.created_us,
        seconds,
    ),
    _per_slice("processes", "Processes of the slice that are alive (hook).", lambda s: s.processes),
    _per_slice("busy_seconds_total", "Device time of the slice in seconds (hook).", lambda s: s.busy_us_total, seconds, counter=True),
    _per_slice("kernel_launches_total", "Kernels launched (hook).", lambda s: s.launches_total, counter=True),
    _per_slice("graph_launches_total", "Graphs launched (hook).", lambda s: s.graph_launches_total, counter=True),
    _per_slice(
        "throttled_seconds_total",
        "Time that threads waited for the compute limit in seconds (hook).",
        lambda s: s.throttled_us_total,
        seconds,
        counter=True,
    ),
    _per_slice(
        "allocations_denied_total",
        "Memory allocations refused, by the limit, the card or an unlisted device (hook).",
        lambda s: s.denied_allocations_total,
        counter=True,
    ),
    _per_slice(
        "energy_joules_total",
        "The slice's part of the board's energy as of the last closed minute in joules (NVML, split by use and allocation).",
        lambda s: s.energy_uj_total,
        seconds,
        counter=True,
    ),
    _per_slice(
        "last_activity_timestamp_seconds",
        "Time of the last kernel or copy in seconds since the Unix epoch; absent: none yet (hook).",
        lambda s: s.last_activity_us,
        seconds,
    ),
    _per_slice("hook_faults_total", "Faults of the hook itself; the program went on (hook).", lambda s: s.hook_faults_total, counter=True),
)
