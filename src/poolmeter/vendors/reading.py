"""What a vendor's library says of its devices at one moment. Absent (None) is what it does not say; there are no sentinels."""

from dataclasses import dataclass, field
from typing import Protocol

from poolmeter.model.hardware import BusFunction, Hardware


@dataclass(frozen=True, kw_only=True)
class ProcessReading:
    """A process that holds a context on a device, or did device work since the last reading.

    `pid` is of the host namespace, `start_ticks` field 22 of its stat (None: it has ended). `busy_us_total` integrates sampled
    utilisation since the reading's origin. `listed` False: known from utilisation samples alone. `accounted_us_total` is what the driver's
    accounting says of the process's whole life (None: accounting is off, or says nothing of it yet). `divided`: the use is a part of what
    the MPS server was seen to use, not measured. `mps` is `server` or `client`.
    """

    pid: int
    start_ticks: int | None = None
    command: str | None = None
    memory_bytes: int | None = None
    busy_us_total: int | None = None
    listed: bool = True
    divided: bool = False
    accounted_us_total: int | None = None
    mps: str | None = None
    active_thread_ppm: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """One device. `up` False: lost or in need of a reset, `reason` says which; then only its identity is known.

    `busy_us_total` integrates the device's utilisation since the reading's origin, `unmeasured_us_total` the time since then of which it
    knows nothing (holes between samples); `energy_uj_total` is the board's own counter.
    `errors` are (call, error) pairs of values that this card did not give.
    """

    uuid: str
    index: int
    model: str
    vendor: str
    up: bool
    memory_total_bytes: int
    reason: str | None = None
    pci_bus_id: str | None = None
    minor: int | None = None
    serial: str | None = None
    driver_version: str | None = None
    mig: bool | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    utilization_ppm: int | None = None
    busy_us_total: int | None = None
    unmeasured_us_total: int = 0
    energy_uj_total: int | None = None
    power_mw: int | None = None
    temperature_celsius: int | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    processes: tuple[ProcessReading, ...] = ()
    processes_known: bool = False
    errors: tuple[str, ...] = ()
    hardware: Hardware = field(default_factory=Hardware)


@dataclass(frozen=True, kw_only=True)
class VendorReading:
    """All devices of a vendor. `error`: the library as a whole does not answer, and `devices` is empty.

    `origin` changes whenever integration starts anew (a restarted sampler). `unidentified` counts devices that gave no UUID.
    `hung_us` is how long the oldest call that has not come back is under way; `replace`: this process's library is of no more use, a new
    process may do better (the driver was replaced under it).
    """

    vendor: str
    origin: str
    at_us: int
    duration_us: int
    devices: tuple[DeviceReading, ...] = ()
    error: str | None = None
    unidentified: int = 0
    hung_us: int = 0
    replace: bool = False
    functions: tuple[BusFunction, ...] = ()


class Vendor(Protocol):
    """A vendor's library, read once per call."""

    name: str

    def read(self, hooked: frozenset[tuple[int, int]] = frozenset()) -> VendorReading:
        """Everything at this moment. `hooked` are processes (pid, start ticks) whose device time their own hook tells. Never raises for what the library answers; may hang, so it is called in a child process."""
        ...
