"""What the hardware of a device tells beside its use: instances, counters, activity, modes. Shared by readings and snapshots.

Absent (None, or a missing key) is what a card does not tell.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Hardware activity over the window between two samples (GPM, Hopper and newer), in parts per million; None: not told."""

    window_us: int
    graphics_ppm: int | None = None
    sm_active_ppm: int | None = None
    sm_occupancy_ppm: int | None = None
    tensor_ppm: int | None = None
    dram_ppm: int | None = None


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """A MIG device of a card: one compute instance of a GPU instance, whose memory and activity are the GPU instance's.

    `placement` is (first memory slice, slices). `busy_us_total` integrates activity where the card tells it (Hopper and newer); an A100
    tells nothing, so it is None there.
    """

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: str | None = None
    placement_start: int | None = None
    placement_size: int | None = None
    compute_slices: int | None = None
    multiprocessors: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: int | None = None
    activity: Activity | None = None
    busy_us_total: int | None = None


@dataclass(frozen=True, kw_only=True)
class Vgpu:
    """An active vGPU of a host. Utilisation is the mean of the samples since the last reading; None: none came."""

    uuid: str
    type_name: str | None = None
    vm_id: str | None = None
    framebuffer_total_bytes: int | None = None
    framebuffer_used_bytes: int | None = None
    licensed: bool | None = None
    utilization_ppm: int | None = None
    busy_us_total: int | None = None


@dataclass(frozen=True, kw_only=True)
class XidCount:
    """How often an Xid was told since the sampler registered for it, and when last (wall clock)."""

    xid: int
    count: int
    last_us: int


@dataclass(frozen=True, kw_only=True)
class BusFunction:
    """A display or compute function on the PCI bus that the library does not list: passed through, handed out as a vGPU, or not up.

    `state` is `passed_through` (whole, bound to vfio-pci), `virtual_function`, `mediated` (mdev), `not_up` (bound to the vendor's driver and
    not listed), `other_driver` or `unbound`. `parent` is the physical function of a virtual one. Its use is unknown.
    """

    pci_bus_id: str
    state: str
    driver: str | None = None
    device_id: str | None = None
    parent: str | None = None
    profile: str | None = None
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Everything else of one device. `at_us`: when its values were read (wall clock); `stale`: not at this reading, for a call has not come
    back. Counters start anew only when `origin` changes; those in maps are `throttle_us_total` by reason, `ecc_errors_total` by `corrected`
    and `uncorrected`, `remapped_rows_total` by cause. `bytes_per_s` is over the time between the last two readings of the byte counters, by
    `pcie_tx`, `pcie_rx`, `nvlink_tx`, `nvlink_rx`. `instances` None: MIG is off or not told; empty: on, without an instance.
    """

    origin: str | None = None
    at_us: int | None = None
    stale: bool = False
    compute_mode: str | None = None
    persistence: bool | None = None
    accounting: bool | None = None
    ecc: bool | None = None
    virtualization: str | None = None
    licensed: bool | None = None
    license_product: str | None = None
    power_limit_mw: int | None = None
    memory_temperature_celsius: int | None = None
    graphics_clock_hz: int | None = None
    video_clock_hz: int | None = None
    throttle_us_total: dict[str, int] = field(default_factory=dict)
    ecc_errors_total: dict[str, int] = field(default_factory=dict)
    remapped_rows_total: dict[str, int] = field(default_factory=dict)
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    xids: tuple[XidCount, ...] = ()
    pcie_tx_bytes_total: int | None = None
    pcie_rx_bytes_total: int | None = None
    nvlink_tx_bytes_total: int | None = None
    nvlink_rx_bytes_total: int | None = None
    bytes_per_s: dict[str, int] = field(default_factory=dict)
    activity: Activity | None = None
    instances: tuple[MigInstance, ...] | None = None
    vgpus: tuple[Vgpu, ...] | None = None
    mps_server_pid: int | None = None
