"""Slices: an allocation's part of a device. Who it is for is on the info series alone."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from poolmeter.exporter.collectors.family import Family, Page, Rows, Samples, by_rows, ratio, scaled, seconds
from poolmeter.model.allocation import SliceState
from poolmeter.model.snapshot import SliceSnapshot

LABELS = ("allocation", "uuid")


_KEY = attrgetter("allocation_id", "device_uuid")


def slices_of(page: Page) -> Sequence[SliceSnapshot]:
    """The slices of a page."""
    return page.snapshot.slices


def _per_slice(
    name: str, text: str, value: Callable[[SliceSnapshot], int | None], scale: Callable[[int], float] = float, counter: bool = False
) -> Family:
    rows = Rows(slices_of, _KEY, value, scaled(scale))
    return by_rows(f"poolmeter_slice_{name}", "counter" if counter else "gauge", text, LABELS, rows)


def _identity(s: SliceSnapshot) -> tuple[str, ...]:
    return (
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
    )


def _info(key: tuple[str, ...], identity: tuple[str, ...]) -> Samples:
    return ((identity, 1.0),)


def _states(key: tuple[str, str], found: str) -> Samples:
    return tuple(((key[0], state.value, key[1]), 1.0 if found == state.value else 0.0) for state in SliceState)


FAMILIES: tuple[Family, ...] = (
    by_rows(
        "poolmeter_slice_info",
        "gauge",
        "Whose a slice is, always 1 (allocation).",
        ("allocation", "class", "enforcement", "environment", "mode", "pool", "project", "tenant", "user", "uuid", "workload"),
        Rows(slices_of, _KEY, _identity, _info),
    ),
    by_rows(
        "poolmeter_slice_state",
        "gauge",
        "State of a slice, 1 for the one it is in (hook and allocation).",
        ("allocation", "state", "uuid"),
        Rows(slices_of, _KEY, attrgetter("state"), _states),
    ),
    _per_slice("promise_ratio", "Device time promised to the slice, 0 to 1 (allocation).", attrgetter("promise_ppm"), ratio),
    _per_slice(
        "compute_limit_ratio", "Limit of device time in force, 0 to 1; absent: none (grant).", attrgetter("compute_limit_ppm"), ratio
    ),
    _per_slice("memory_promise_bytes", "Memory promised to the slice in bytes (allocation).", attrgetter("memory_promise_bytes")),
    _per_slice("memory_limit_bytes", "Memory limit in force in bytes; absent: none (grant).", attrgetter("memory_limit_bytes")),
    _per_slice("memory_used_bytes", "Memory that the slice's processes hold in bytes (hook).", attrgetter("memory_used_bytes")),
    _per_slice("memory_peak_bytes", "Most memory held since the allocation began in bytes (hook).", attrgetter("memory_peak_bytes")),
    _per_slice(
        "created_timestamp_seconds",
        "When the allocation was made, in seconds since the Unix epoch (allocation).",
        attrgetter("created_us"),
        seconds,
    ),
    _per_slice("processes", "Processes of the slice that are alive (hook).", attrgetter("processes")),
    _per_slice(
        "busy_seconds_total",
        "Device time of the slice in seconds (by its basis: hook, accounting or NVML samples).",
        attrgetter("busy_us_total"),
        seconds,
        counter=True,
    ),
    _per_slice("kernel_launches_total", "Kernels launched (hook).", attrgetter("launches_total"), counter=True),
    _per_slice("graph_launches_total", "Graphs launched (hook).", attrgetter("graph_launches_total"), counter=True),
    _per_slice(
        "throttled_seconds_total",
        "Time that threads waited for the compute limit in seconds (hook).",
        attrgetter("throttled_us_total"),
        seconds,
        counter=True,
    ),
    _per_slice(
        "allocations_denied_total",
        "Memory allocations refused, by the limit, the card or an unlisted device (hook).",
        attrgetter("denied_allocations_total"),
        counter=True,
    ),
    _per_slice(
        "energy_joules_total",
        "The slice's part of the board's energy as of the last closed minute in joules (NVML, split by use and allocation).",
        attrgetter("energy_uj_total"),
        seconds,
        counter=True,
    ),
    _per_slice(
        "last_activity_timestamp_seconds",
        "Time of the last kernel or copy in seconds since the Unix epoch; absent: none yet (hook, else NVML utilisation above 0).",
        attrgetter("last_activity_us"),
        seconds,
    ),
    _per_slice(
        "hook_faults_total", "Faults of the hook itself; the program went on (hook).", attrgetter("hook_faults_total"), counter=True
    ),
)
