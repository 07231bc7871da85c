"""A snapshot: one node at one instant, immutable; data and the health of its sources are separate fields.

An absent value is None. Cumulative counters (`*_total`) carry `origin`: they start anew only when it changes.
"""

from dataclasses import dataclass, field

from poolmeter.model.hardware import BusFunction, Hardware


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
    hooked_memory_bytes: int | None = None
    memory_difference_bytes: int | None = None
    hardware: Hardware | None = None


@dataclass(frozen=True, kw_only=True)
class SliceSnapshot:
    """An allocation's part of a device, with the limits really in force (read back from the grant page).

    `busy_us_total` is by `used_basis`. `nvml_memory_bytes` is what the card says that the slice's processes hold, and
    `memory_difference_bytes` that less what the hook says: contexts and other overhead, or memory that no hook saw; it may be negative.
    `energy_divided`: `energy_uj_total` is a part of the board's counter, divided by use and allocation; no card tells it of a share or a
    MIG instance.
    """

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
    nvml_memory_bytes: int | None = None
    memory_difference_bytes: int | None = None
    energy_divided: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """A process on a device; `hooked` False means that the card alone sees it.

    `tenant` and `allocation_id` are then what attribution says of it, and its use is unaccounted unless a slice without a meter is billed for it.
    """

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
class Claim:
    """What one source says of a process. `firm` False: `tenant` stands in for one that nobody names, and is no reason to disagree.

    `device_uuids` are the devices that the source gave to pod, container or job; None: it does not say.
    """

    source: str
    tenant: str | None = None
    firm: bool = True
    allocation_id: str | None = None
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None
    container: str | None = None
    container_id: str | None = None
    image: str | None = None
    job: str | None = None
    unit: str | None = None
    user: str | None = None
    device_uuids: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Two sources that say different things of a process: `source` is the one that is believed, and says `value`; `other` says `other_value`."""

    field: str
    source: str
    value: str
    other: str
    other_value: str


@dataclass(frozen=True, kw_only=True)
class AttributionSnapshot:
    """Whose a process is and who says so. `source` is whose word for the tenant is taken; `claims` are all of them, the most trusted first."""

    pid: int
    start_ticks: int
    tenant: str | None = None
    source: str | None = None
    holder: str | None = None
    framework: str | None = None
    namespace_pid: int | None = None
    claims: tuple[Claim, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HolderSnapshot:
    """A container, pod, job, unit or user that has processes on a device, or to which the device was given (`assigned`).

    It ends when the last process has ended and the device is not assigned to it. `unaccounted_*` is use by its processes without the
    hook, since `origin`; what its hooked processes use is in the slices of `allocation_ids`.
    """

    id: str
    device_uuid: str
    origin: str
    source: str
    assigned: bool
    processes: int
    hooked_processes: int
    tenant: str | None = None
    allocation_ids: tuple[str, ...] = ()
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None
    container: str | None = None
    container_id: str | None = None
    image: str | None = None
    job: str | None = None
    unit: str | None = None
    user: str | None = None
    unaccounted_memory_bytes: int | None = None
    unaccounted_us_total: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttributionFault:
    """How many lines or names of a source could not be used at the last look, by kind (`duplicate`, `half-written`, `unknown-device`, ...)."""

    source: str
    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class HostRequest:
    """What a running allocation asked for of its node; None: it did not say."""

    allocation_id: str
    cpu_milli: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """CPU (thousandths of a core) and memory of the node. A `requested` sum is None while one of `requests` is not known."""

    cpu_milli: int | None = None
    memory_bytes: int | None = None
    cpu_requested_milli: int | None = None
    memory_requested_bytes: int | None = None
    requests: tuple[HostRequest, ...] = ()


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
    attributions: tuple[AttributionSnapshot, ...] = ()
    holders: tuple[HolderSnapshot, ...] = ()
    attribution_faults: tuple[AttributionFault, ...] = ()
    host: HostSnapshot | None = None
    functions: tuple[BusFunction, ...] = ()
