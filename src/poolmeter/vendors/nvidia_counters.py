"""A card's own counters: time held down by reason, bytes over PCIe and NVLink, errors of its memory.

Field values come in one call. Byte counters are used, never PcieThroughput, which blocks for 20 ms a direction. The PCIe counters of some
drivers have 32 bits and wrap several times a second on a busy link: there the rates of GPM say how often, and without GPM the bytes
are not known, so absent.
"""

from dataclasses import dataclass, field
from typing import Any

from poolmeter.vendors.nvml import UINT32_MAX, Nvml, number, wide

_WRAP = UINT32_MAX + 1
# Field, name of the reason, its bit among the clock event reasons (0: none).
_HELD: tuple[tuple[int | None, str, int], ...] = (
    (74, "sw_power_cap", 0x4),
    (75, "thermal", 0),
    (76, "sync_boost", 0x10),
    (77, "board_limit", 0),
    (79, "reliability", 0),
    (269, "sw_thermal", 0x20),
    (270, "hw_thermal", 0x40),
    (271, "hw_power_brake", 0x80),
    (None, "hw_slowdown", 0x8),
)
_MEMORY_TEMPERATURE, _NVLINK_TX, _NVLINK_RX, _PCIE_TX, _PCIE_RX = 82, 138, 139, 197, 198
_ALL_LINKS = UINT32_MAX
_FIELDS: list[Any] = [
    *(identifier for identifier, _, _ in _HELD if identifier is not None),
    _MEMORY_TEMPERATURE,
    (_NVLINK_TX, _ALL_LINKS),
    (_NVLINK_RX, _ALL_LINKS),
    _PCIE_TX,
    _PCIE_RX,
]


@dataclass
class _Bytes:
    """A byte counter that may wrap at 32 bits."""

    total: int | None = None
    raw: int | None = None


@dataclass
class Counters:
    """What is kept of one card's counters between readings, and what they say now."""

    nvml: Nvml
    throttle_us: dict[str, int] = field(default_factory=dict)
    memory_celsius: int | None = None
    nvlink_tx: int | None = None
    nvlink_rx: int | None = None
    _pcie_tx: _Bytes = field(default_factory=_Bytes)
    _pcie_rx: _Bytes = field(default_factory=_Bytes)
    _held_us: dict[str, int] = field(default_factory=dict)  # of reasons without a counter
    _counted: set[str] = field(default_factory=set)  # reasons with one
    _counts: dict[str, int] = field(default_factory=dict)  # as last read
    _told: set[str] = field(default_factory=set)  # reasons of which the last reading said whether they have a counter
    bytes_per_s: dict[str, int] = field(default_factory=dict)
    _bytes: dict[str, int | None] = field(default_factory=dict)
    _reasons: int | None = None
    _at_us: int | None = None
    _read_us: int | None = None

    @property
    def pcie_tx(self) -> int | None:
        """Bytes sent since the counters were first read."""
        return self._pcie_tx.total

    @property
    def pcie_rx(self) -> int | None:
        """Bytes received since the counters were first read."""
        return self._pcie_rx.total

    def read(self, handle: Any, at_us: int, mib_per_s: tuple[float | None, float | None]) -> None:
        """Read everything. `at_us` is monotonic; `mib_per_s` the rates sent and received that GPM tells of the same time (None: no GPM)."""
        elapsed_us = max(0, at_us - self._read_us) if self._read_us is not None else 0
        self._read_us = at_us
        values, lacking = self._fields(handle)
        self._told = {name for identifier, name, _ in _HELD if identifier is None or identifier in lacking or identifier in values}
        counts = {name: _value(values.get(identifier)) for identifier, name, _ in _HELD if identifier is not None}
        self._counts = {name: ns // 1000 for name, ns in counts.items() if ns is not None}
        self.hold(handle, at_us)
        self.memory_celsius = _plausible(_value(values.get(_MEMORY_TEMPERATURE)))
        links = (_value(values.get(_NVLINK_TX)), _value(values.get(_NVLINK_RX)))
        self.nvlink_tx, self.nvlink_rx = (None if kib is None else kib * 1024 for kib in links)
        for counter, identifier, rate in ((self._pcie_tx, _PCIE_TX, mib_per_s[0]), (self._pcie_rx, _PCIE_RX, mib_per_s[1])):
            _count(counter, values.get(identifier), elapsed_us, rate)
        now = {"pcie_tx": self.pcie_tx, "pcie_rx": self.pcie_rx, "nvlink_tx": self.nvlink_tx, "nvlink_rx": self.nvlink_rx}
        gains = {name: bytes_ - was for name, bytes_ in now.items() if bytes_ is not None and (was := self._bytes.get(name)) is not None}
        self.bytes_per_s = {name: gain * 1_000_000 // elapsed_us for name, gain in gains.items() if gain >= 0 and elapsed_us > 0}
        self._bytes = now

    def hold(self, handle: Any, at_us: int) -> None:
        """Go on with what holds the clocks down: as counted at the last `read`, and for reasons without a counter as they are now."""
        elapsed_us = max(0, at_us - self._at_us) if self._at_us is not None else 0
        self._at_us = at_us
        reasons = self.nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self.nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        found: dict[str, int] = {}
        for _, name, bit in _HELD:
            if name in self._counts and name not in self._held_us:
                found[name] = self._counts[name]
                self._counted.add(name)
            elif bit and reasons is not None and name not in self._counted and (name in self._told or name in self._held_us):
                # No counter of its own: the time for which the bit was found set at both ends. The two never take turns, for whoever
                # reads would take the lower one for a counter that began anew.
                held = elapsed_us if self._reasons is not None and reasons & self._reasons & bit else 0
                self._held_us[name] = found[name] = self._held_us.get(name, 0) + held
        self._reasons = reasons
        self.throttle_us = found

    def _fields(self, handle: Any) -> tuple[dict[int, Any], set[int]]:
        """Answers by field, and the fields that the card says it lacks; one in neither could not be asked now."""
        nvml = self.nvml.binding
        never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)
        try:
            answers = self.nvml.call("nvmlDeviceGetFieldValues", handle, _FIELDS)
        except nvml.NVMLError as fault:
            wanted = {identifier for identifier, _, _ in _HELD if identifier is not None}
            return {}, wanted if self.nvml.code(fault) in never else set()
        lacking = {int(item.fieldId) for item in answers if item.nvmlReturn in never}
        return {int(item.fieldId): item for item in answers if item.nvmlReturn == nvml.NVML_SUCCESS}, lacking


def _value(item: Any) -> int | None:
    """A field value by its type; None for sentinels."""
    if item is None:
        return None
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    name = kinds.get(int(item.valueType))
    if name is None:
        return None
    return wide(getattr(item.value, name)) if name in ("ulVal", "ullVal", "sllVal") else number(getattr(item.value, name))


def _plausible(celsius: int | None) -> int | None:
    return celsius if celsius is not None and 0 < celsius < 200 else None


def _count(counter: _Bytes, item: Any, elapsed_us: int, mib_per_s: float | None) -> None:
    # A 32-bit counter passes 2**32 - 1 like any other value.
    if item is None:
        counter.total = counter.raw = None
        return
    if int(item.valueType) in (2, 3):
        counter.total = wide(item.value.ullVal)
        return
    raw = int(item.value.uiVal)
    if counter.raw is not None and mib_per_s is not None:
        gained = (raw - counter.raw) % _WRAP
        gained += max(0, round((mib_per_s * 1_048_576 * elapsed_us / 1_000_000 - gained) / _WRAP)) * _WRAP
        counter.total = (counter.total or 0) + gained
    elif mib_per_s is None:
        counter.total = None
    counter.raw = raw


@dataclass
class Health:
    """Errors of a card's memory and its modes, which change seldom; read now and then."""

    nvml: Nvml
    ecc_errors: dict[str, int] = field(default_factory=dict)
    remapped: dict[str, int] = field(default_factory=dict)
    pending: bool | None = None
    failed: bool | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    accounting: bool | None = None
    compute_mode: str | None = None
    virtualization: str | None = None
    power_limit_mw: int | None = None

    def read(self, handle: Any) -> None:
        """Read everything; nothing is ever set."""
        ask, nvml = self.nvml.ask, self.nvml.binding
        errors: dict[str, int] = {}
        for name, kind in (("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED), ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)):
            count = wide(ask("nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_AGGREGATE_ECC))
            if count is not None:
                errors[name] = count
        self.ecc_errors = errors
        rows = ask("nvmlDeviceGetRemappedRows", handle)
        causes = zip(("correctable", "uncorrectable"), rows[:2], strict=True) if rows is not None else ()
        self.remapped = {name: count for name, raw in causes if (count := number(raw)) is not None}
        self.pending, self.failed = (bool(rows[2]), bool(rows[3])) if rows is not None else (None, None)
        mode = ask("nvmlDeviceGetEccMode", handle)
        self.ecc = None if mode is None else bool(mode[0])
        self.persistence = _flag(ask("nvmlDeviceGetPersistenceMode", handle))
        self.accounting = _flag(ask("nvmlDeviceGetAccountingMode", handle))
        self.compute_mode = _COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode", handle))
        self.virtualization = _VIRTUALIZATION.get(ask("nvmlDeviceGetVirtualizationMode", handle))
        self.power_limit_mw = number(ask("nvmlDeviceGetEnforcedPowerLimit", handle))


_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga"}


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
