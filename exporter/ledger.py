"""What the exporter has counted so far: baselines of every counter, totals, and the open minute; saved with the records it explains.

`raw` and `base_*` are what a source said when it was last counted; `m_*` belong to the open minute; `*_total` grow since the epoch.
Hook time is counted in whole microseconds of the cumulative counter, so that rounding never adds up.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from poolmeter.errors import DataError
from poolmeter.exporter.timeline import PlainAllocations, Timeline, timeline_from
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import from_plain
from poolmeter.rules.capacity import Parts

VERSION = 1


@dataclass
class DeviceLedger:
    """One device. Memory integrals (`*_bus`) are byte x us."""

    uuid: str
    index: int
    model: str
    vendor: str
    memory_total_bytes: int
    up: bool = True
    busy_origin: str | None = None
    busy_raw: int = 0
    unmeasured_raw: int = 0  # of the same origin
    energy_raw: int | None = None
    energy_at_us: int | None = None  # the cursor when it was read
    busy_us_total: int | None = None
    energy_uj_total: int | None = None
    hooked_us_total: int = 0
    unaccounted_us_total: int | None = None
    unattributed_us_total: int = 0  # of it, of programs for which nobody could name a holder
    overhead_us_total: int | None = None
    # busy - hooked - unaccounted over the time in which all three were measured; its running maximum is the switch overhead.
    overhead_difference_us: int = 0
    m_start_us: int | None = None
    m_measured_us: int = 0
    m_busy_us: int | None = None
    m_hooked_us: int = 0
    m_hooked_known: bool = True
    m_unaccounted_us: int | None = None
    m_shared_us: int = 0  # of programs without the hook that belong to slices without a meter
    m_unaccounted_memory_bus: int | None = None
    m_memory_used_bus: int | None = None
    m_memory_peak: int | None = None
    m_memory_allocated_bus: int = 0
    m_energy_uj: int | None = None
    m_energy_before_uj: int = 0  # of it, drawn before the minute began: no slice of it is known to have drawn it
    parts: Parts = field(default_factory=Parts)

    @property
    def handed_us(self) -> int:
        """Device time of the open minute that somebody was given."""
        return self.m_hooked_us + self.m_shared_us + (self.m_unaccounted_us or 0)

    def new_minute(self) -> None:
        """Forget the open minute."""
        self.m_start_us = None
        self.m_measured_us = self.m_hooked_us = self.m_shared_us = self.m_memory_allocated_bus = self.m_energy_before_uj = 0
        self.m_hooked_known = True
        self.m_busy_us = self.m_unaccounted_us = self.m_unaccounted_memory_bus = None
        self.m_memory_used_bus = self.m_memory_peak = self.m_energy_uj = None
        self.parts = Parts()


@dataclass
class SliceLedger:
    """An allocation's part of a device. `page` identifies the meter page that the baselines belong to (None: none read yet)."""

    device_uuid: str
    allocation_id: str
    page: int | None = None
    base_busy_us: int = 0
    base_launches: int = 0
    base_graph_launches: int = 0
    base_throttled_us: int = 0
    base_denied: int = 0
    base_denied_bytes: int = 0
    base_faults: int = 0
    base_memory_peak: int = 0
    base_retired_busy_us: int = 0
    base_retired_launches: int = 0
    energy_uj_total: int | None = None
    last_activity_us: int | None = None
    utilised_us: int | None = None  # the last utilisation sample of its own above zero
    gpm_us: int | None = None  # the last hardware activity of its own above zero
    limit_ppm: int | None = None  # in force, read back from the grant page
    limit_bytes: int | None = None
    backlog_us: int = 0
    given_up_us: int = 0  # what the meter counted and the card had no room for
    # Device time of processes without the hook, while the slice has no meter, and where it comes from.
    shared_us_total: int | None = None
    shared_basis: str | None = None
    whole_us_total: int | None = None  # the card's own busy time, where it counts for the slice
    m_seen: bool = False
    m_unmeasured_us: int = 0
    m_metered: bool = False
    m_used_us: int = 0
    m_whole_us: int = 0  # of the open minute, in `whole_us_total` already
    m_shared_us: int | None = None
    m_shared_basis: str | None = None
    m_memory_used_bus: int | None = None
    m_memory_allocated_bus: int = 0
    m_memory_peak: int | None = None
    m_launches: int = 0
    m_graph_launches: int = 0
    m_throttled_us: int = 0
    m_denied: int = 0
    m_denied_bytes: int = 0
    m_faults: int = 0

    def new_minute(self) -> None:
        """Forget the open minute."""
        self.m_seen = self.m_metered = False
        self.m_unmeasured_us = self.m_used_us = self.m_memory_allocated_bus = self.m_launches = self.m_graph_launches = 0
        self.m_whole_us = self.m_throttled_us = self.m_denied = self.m_denied_bytes = self.m_faults = 0
        self.m_memory_used_bus = self.m_memory_peak = self.m_shared_us = self.m_shared_basis = None


@dataclass
class ProcessLedger:
    """A process on a device; `origin` identifies what `base_busy_us` was counted from (a slot's page, a sampler's life)."""

    device_uuid: str
    pid: int
    start_ticks: int
    command: str | None
    hooked: bool
    origin: str
    allocation_id: str | None = None
    tenant: str | None = None
    base_busy_us: int = 0
    base_launches: int = 0
    present: bool = True
    ended: bool = False
    waiting_us: int = 0  # device time gained before it was known whose the process is
    counted_us: int = 0  # since it was first seen, by whatever basis
    basis: str | None = None
    # What accounting said when it was first seen: used before anybody watched. None: it has not spoken yet.
    accounted_base_us: int | None = None
    m_seen: bool = False
    m_basis: str | None = None
    m_used_us: int | None = None
    m_memory_used_bus: int | None = None
    m_memory_peak: int | None = None
    m_launches: int | None = None

    def new_minute(self) -> None:
        """Forget the open minute."""
        self.m_seen = False
        self.m_used_us = self.m_memory_used_bus = self.m_memory_peak = self.m_launches = self.m_basis = None


@dataclass
class HolderLedger:
    """Device time of a holder's processes without the hook on a device; `seen_us`: the cursor when one was last there."""

    unaccounted_us_total: int = 0
    seen_us: int = 0


@dataclass
class Ledger:
    """Everything, at `cursor_us`: up to there all is counted. Keys: device uuid; `uuid|allocation`; `uuid|allocation|slot|generation` or `uuid|pid|start`; `uuid|holder`."""

    cursor_us: int
    monotonic_us: int
    boot_id: str
    journal_offset: int = 0
    journal_head: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    known: dict[str, Allocation] = field(default_factory=dict)
    devices: dict[str, DeviceLedger] = field(default_factory=dict)
    slices: dict[str, SliceLedger] = field(default_factory=dict)
    processes: dict[str, ProcessLedger] = field(default_factory=dict)
    holders: dict[str, HolderLedger] = field(default_factory=dict)
    # Device time of the card that is counted of each MIG instance.
    instances: dict[str, int] = field(default_factory=dict)
    # Retired allocations whose last record is closed: the sequence that must be acknowledged before their folder may go.
    settled: dict[str, int] = field(default_factory=dict)
    tampered: list[str] = field(default_factory=list)
    # Counters of the hardware, see hardware.py.
    hardware: dict[str, list[int]] = field(default_factory=dict)
    _plain: PlainAllocations = field(default_factory=PlainAllocations, repr=False, compare=False)

    def to_json(self) -> str:
        """As text for the spool."""
        written = json.dumps(
            {
                "version": VERSION,
                "cursor_us": self.cursor_us,
                "monotonic_us": self.monotonic_us,
                "boot_id": self.boot_id,
                "journal_offset": self.journal_offset,
                "journal_head": self.journal_head,
                "timeline": self.timeline.plain(self._plain),
                "known": [self._plain.of(allocation) for allocation in self.known.values()],
                "devices": [{**vars(device), "parts": vars(device.parts)} for device in self.devices.values()],
                "slices": [vars(part) for part in self.slices.values()],
                "processes": {key: vars(process) for key, process in self.processes.items()},
                "holders": {key: vars(holder) for key, holder in self.holders.items()},
                "instances": self.instances,
                "settled": self.settled,
                "tampered": self.tampered,
                "hardware": self.hardware,
            },
            separators=(",", ":"),
        )
        self._plain.forget()
        return written


def ledger_from(plain: dict[str, Any]) -> Ledger:
    """The ledger that `to_json` wrote. Raises DataError for one of another version."""
    if plain.get("version") != VERSION:
        raise DataError(f"the spool's ledger has version {plain.get('version')}, expected {VERSION}")
    known = [from_plain(Allocation, item) for item in plain["known"]]
    slices = [SliceLedger(**item) for item in plain["slices"]]
    return Ledger(
        cursor_us=plain["cursor_us"],
        monotonic_us=plain["monotonic_us"],
        boot_id=plain["boot_id"],
        journal_offset=plain["journal_offset"],
        journal_head=plain["journal_head"],
        timeline=timeline_from(plain["timeline"]),
        known={allocation.id: allocation for allocation in known},
        devices={item["uuid"]: DeviceLedger(**{**item, "parts": Parts(**item["parts"])}) for item in plain["devices"]},
        slices={f"{part.device_uuid}|{part.allocation_id}": part for part in slices},
        # An older exporter counted by `base_busy_us` alone.
        processes={key: ProcessLedger(**{"counted_us": item["base_busy_us"], **item}) for key, item in plain["processes"].items()},
        # Absent in what an exporter without attribution wrote.
        holders={key: HolderLedger(**item) for key, item in plain.get("holders", {}).items()},
        instances=plain.get("instances", {}),
        settled=plain["settled"],
        tampered=plain["tampered"],
        hardware=plain.get("hardware", {}),
    )
