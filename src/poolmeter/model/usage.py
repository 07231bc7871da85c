"""Usage: the records an exporter closes at each UTC minute, of four kinds.

Quantities are integers: device time in microseconds, energy in microjoules, memory integrated over time in KiB x microseconds
(byte x microsecond of one large card overflows 64 bits within a minute). A quantity that could not be measured is None, never 0.
The key of a record is (node, epoch, sequence); one sequence runs over all kinds.
"""

from dataclasses import dataclass
from enum import StrEnum


class RecordKind(StrEnum):
    """Kinds of record; all are spooled and acknowledged alike."""

    DEVICE = "device"
    SLICE = "slice"
    PROCESS = "process"
    EVENT = "event"


class UsedBasis(StrEnum):
    """Where a used quantity comes from, best first."""

    HOOK = "hook"
    ACCOUNTING = "accounting"
    SAMPLED = "sampled"
    ALLOCATED = "allocated"
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record carries.

    `minute_us` is the UTC minute (epoch microseconds, a multiple of 60,000,000); `start_us` the first moment watched in it;
    `span_us` how long it was watched, from monotonic time. `completeness_ppm` is the part of the span for which the used
    quantities were measured.
    """

    node: str
    epoch: str
    sequence: int
    minute_us: int
    start_us: int
    span_us: int
    pool: str | None = None
    completeness_ppm: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DeviceRecord(Record):
    """One device, one minute.

    allocated + reserved_unused + unallocated + suspended + down = span, exactly. `busy_us` is the card's own busy time (any
    process), `hooked_us` the part the hook accounts for, `switch_overhead_us` the cost of switching between contexts,
    `unaccounted_us` use by programs without the hook. `energy_uj` is the increase of the board counter.
    """

    device_uuid: str
    device_model: str
    allocated_us: int
    reserved_unused_us: int
    unallocated_us: int
    suspended_us: int
    down_us: int
    memory_total_bytes: int
    busy_us: int | None = None
    hooked_us: int | None = None
    switch_overhead_us: int | None = None
    unaccounted_us: int | None = None
    memory_allocated_kib_us: int | None = None
    memory_used_kib_us: int | None = None
    memory_peak_bytes: int | None = None
    unaccounted_memory_kib_us: int | None = None
    energy_uj: int | None = None


@dataclass(frozen=True, kw_only=True)
class SliceRecord(Record):
    """One allocation's part of one device, one minute.

    `allocated_us` is the promise over the time it stood, scaled down pro rata on an over-committed card, so that the slices of
    a device sum to its `allocated_us`; `promised_us` is the promise unscaled. The limits are those in force at the end.
    """

    device_uuid: str
    device_model: str
    allocation_id: str
    tenant: str
    mode: str
    state: str
    used_basis: str
    generation: int
    promised_us: int
    allocated_us: int
    suspended_us: int
    memory_allocated_kib_us: int
    project: str | None = None
    user: str | None = None
    workload: str | None = None
    workload_class: str | None = None
    environment: str | None = None
    promise_ppm: int | None = None
    compute_limit_ppm: int | None = None
    memory_limit_bytes: int | None = None
    decision_id: str | None = None
    used_us: int | None = None
    memory_used_kib_us: int | None = None
    memory_peak_bytes: int | None = None
    energy_uj: int | None = None
    launches: int | None = None
    graph_launches: int | None = None
    throttled_us: int | None = None
    denied_allocations: int | None = None
    denied_bytes: int | None = None
    last_activity_us: int | None = None
    hook_faults: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessRecord(Record):
    """One process on one device, one minute.

    A process is (node, pid in the host namespace, start time in clock ticks since boot). `hooked` false: seen by NVML only, and
    counted as unaccounted; `allocation_id` and `tenant` are then None unless attribution found them another way.
    """

    device_uuid: str
    device_model: str
    pid: int
    start_ticks: int
    command: str | None
    hooked: bool
    used_basis: str | None = None
    allocation_id: str | None = None
    tenant: str | None = None
    used_us: int | None = None
    memory_used_kib_us: int | None = None
    memory_peak_bytes: int | None = None
    launches: int | None = None
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class EventRecord(Record):
    """One line of the enforcement journal, or an exporter's own event (gap, tampered page), carried as usage is.

    `event` is the JournalEvent kind, or gap | tampered; `at_us` its own time; `detail` the whole event as canonical JSON.
    """

    event: str
    at_us: int
    device_uuid: str | None = None
    allocation_id: str | None = None
    tenant: str | None = None
    decision_id: str | None = None
    outcome: str | None = None
    reason: str | None = None
    detail: str | None = None


UsageRecord = DeviceRecord | SliceRecord | ProcessRecord | EventRecord
RECORD_TYPES: dict[RecordKind, type[UsageRecord]] = {
    RecordKind.DEVICE: DeviceRecord,
    RecordKind.SLICE: SliceRecord,
    RecordKind.PROCESS: ProcessRecord,
    RecordKind.EVENT: EventRecord,
}


def kind_of(record: UsageRecord) -> RecordKind:
    """The kind of a record."""
    for kind, record_type in RECORD_TYPES.items():
        if isinstance(record, record_type):
            return kind
    raise TypeError(f"{type(record).__name__} is no usage record")
