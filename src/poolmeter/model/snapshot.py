"""A snapshot: one node at one instant, immutable; data and the health of its sources are separate fields.

An absent value is None. Cumulative counters (`*_total`) carry `origin`: they start anew only when it changes.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SourceHealth:
    """One source of one snapshot: `nvml`, `hook`, `allocations`, `events`, `spool`, ...

    `at_us` is when its data was collected (None: never); `reason` says why it failed, in one sentence; `since_us` is when it began to
    be as it is, well or failing.
    """

    source: str
    ok: bool
    at_us: int | None
    duration_us: int | None
    reason: str | None = None
    since_us: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceSnapshot:
    """One device. `up` False: lost or not answering, and its gauges are None. Counters in us, uJ and bytes since `origin`."""

    uuid: str
    index: int
    model: str
    vendor: str
    up: bool
    memory_total_bytes: int
    origin: str
    pci_bus_id: str | None = None
    minor: int | None = None
    serial: str | None = None
    driver_version: str | None = None
    mig: bool | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    utilization_ppm: int | None = None
    power_mw: int | None = None
    temperature_celsius: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    busy_us_total: int | None = None
    energy_uj_total: int | None = None
    hooked_us_total: int | None = None
    switch_overhead_us_total: int | None = None
    unaccounted_us_total: int | None = None
    unaccounted_memory_bytes: int | None = None
    allocated_ppm: int | None = None
    memory_allocated_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class SliceSnapshot:
    """An allocation's part of a device, with the limits really in force (read back from the grant page)."""

    allocation_id: str
    device_uuid: str
    tenant: str
    mode: str
    state: str
    used_basis: str
    generation: int
    enforcement: str
    promise_ppm: int
    memory_promise_bytes: int
    created_us: int
    origin: str
    project: str | None = None
    user: str | None = None
    workload: str | None = None
    workload_class: str | None = None
    environment: str | None = None
    pool: str | None = None
    decision_id: str | None = None
    compute_limit_ppm: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    busy_us_total: int | None = None
    launches_total: int | None = None
    graph_launches_total: int | None = None
    throttled_us_total: int | None = None
    denied_allocations_total: int | None = None
    energy_uj_total: int | None = None
    last_activity_us: int | None = None
    hook_faults_total: int | None = None
    processes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """A process on a device; `hooked` False means NVML alone sees it (unaccounted)."""

    pid: int
    start_ticks: int
    device_uuid: str
    hooked: bool
    command: str | None = None
    allocation_id: str | None = None
    tenant: str | None = None
    used_basis: str | None = None
    busy_us_total: int | None = None
    memory_used_bytes: int | None = None
    nvml_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One node at one instant. `sequence` and `epoch` name the last record closed in the spool when it was taken."""

    node: str
    epoch: str
    sequence: int
    taken_us: int
    simulated: bool
    pool: str | None = None
    devices: tuple[DeviceSnapshot, ...] = ()
    slices: tuple[SliceSnapshot, ...] = ()
    processes: tuple[ProcessSnapshot, ...] = ()
    sources: tuple[SourceHealth, ...] = field(default=())
