"""What somebody was promised: an allocation, its slices, and how its state is named."""

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How a card is shared; each has its rules in poolmeter.sharing."""

    WHOLE = "whole"
    MIG = "mig"
    MPS = "mps"
    TIMESLICE = "timeslice"
    HOOK = "hook"


class WorkloadClass(StrEnum):
    """What kind of work an allocation is for; sets idle windows and prices."""

    TRAINING = "training"
    INFERENCE = "inference"
    BATCH = "batch"
    NOTEBOOK = "notebook"


class Environment(StrEnum):
    """Where in its life the work stands."""

    PROD = "prod"
    TEST = "test"
    DEV = "dev"


class AllocationState(StrEnum):
    """Life of an allocation."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    RELEASED = "released"


class SliceState(StrEnum):
    """State of an allocation's part of a device (contract: States)."""

    UNALLOCATED = "unallocated"
    ALLOCATED = "allocated"
    HELD = "held"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Labels:
    """Who an allocation is for; every field but the tenant may be absent (None)."""

    tenant: str
    project: str | None = None
    user: str | None = None
    workload: str | None = None
    workload_class: str | None = None
    environment: str | None = None
    pool: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class SlicePromise:
    """What one device owes an allocation.

    `promise_ppm` is the device time that admission reserves and billing by allocation charges (parts per million of the card);
    `compute_limit_ppm` is what the hook holds the programs to, None for no limit. `memory_bytes` is promised and enforced.
    """

    device_uuid: str
    promise_ppm: int
    memory_bytes: int
    compute_limit_ppm: int | None = None
    soft: bool = False
    weight: int = 100


@dataclass(frozen=True)
class Allocation:
    """An allocation as the enforcer keeps it (allocation.json).

    `created_us` and `changed_us` are wall time in microseconds since the epoch; `generation` is that of the grant page: even,
    and larger with each change of the grant; `decision_id` names the decision that last changed it, if one did. `enforcement` is "root" (private mount
    namespace), "cooperative" (LD_PRELOAD) or "none" (a promise without a hook).
    """

    id: str
    labels: Labels
    mode: Mode
    slices: tuple[SlicePromise, ...]
    state: AllocationState
    generation: int
    created_us: int
    changed_us: int
    enforcement: str = "cooperative"
    pinned: bool = False
    cpu_milli: int | None = None
    host_memory_bytes: int | None = None
    decision_id: str | None = None
    on_fault: str = "refuse"
    charge_copies: bool = False
    # pid and start time of the program that `poolmeter run` started; the enforcer releases the allocation when it has ended.
    owner_pid: int | None = None
    owner_start_ticks: int | None = None
    # who asked for it (peer credentials of the enforcer's socket): with root and the enforcer's own user, who may change it.
    owner_uid: int | None = None


@dataclass(frozen=True)
class Demand:
    """The shape of a request, kept with a refusal so that fragmentation can count it."""

    devices: int
    promise_ppm: int
    memory_bytes: int
    mode: str
    models: tuple[str, ...] = ()
    cpu_milli: int | None = None
    host_memory_bytes: int | None = None
