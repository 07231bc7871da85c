"""The quantities of a usage row: how SQL sums them (whole numbers only), and how they are shown.

Device time is in microseconds, memory over time in KiB x microseconds, energy in microjoules. Shown, hours and the like are decimals
with 9 places, rounded half to even once, when shown: totals of a report are sums of the whole numbers, never of what is shown.
"""

from dataclasses import dataclass
from decimal import Decimal

from poolmeter.model.units import EXACT, GIB, HOUR_US
from poolmeter.model.usage import UsedBasis

PLACES = 9
_KIB_PER_GIB = GIB // 1024
_UJ_PER_KWH = 3_600_000_000_000
_PPM = 1_000_000

# Sums over slice records. `complete` is span x completeness, nothing for a record whose used time is unknown.
SLICE_SQL = """
  SUM(allocated_us) AS allocated_us,
  SUM(used_us) AS used_us,
  SUM(memory_allocated_kib_us) AS memory_allocated_kib_us,
  SUM(memory_used_kib_us) AS memory_used_kib_us,
  MAX(memory_peak_bytes) AS memory_peak_bytes,
  SUM(energy_uj) AS energy_uj,
  SUM(throttled_us) AS throttled_us,
  SUM(denied_allocations) AS denied_allocations,
  SUM(CASE WHEN used_us IS NULL THEN 0 ELSE span_us * completeness_ppm END) AS complete,
  SUM(span_us) AS span_us,
  MIN(used_basis) AS basis_low,
  MAX(used_basis) AS basis_high"""
WIDTH = 12

COLUMNS = (
    "allocated_device_hours",
    "used_device_hours",
    "used_basis",
    "memory_allocated_gib_hours",
    "memory_used_gib_hours",
    "memory_peak_gib",
    "energy_kwh",
    "throttled_hours",
    "denied_allocations",
    "completeness",
)


@dataclass(frozen=True)
class Measures:
    """What `SLICE_SQL` returns, in its order; None where nothing was measured."""

    allocated_us: int
    used_us: int | None
    memory_allocated_kib_us: int
    memory_used_kib_us: int | None
    memory_peak_bytes: int | None
    energy_uj: int | None
    throttled_us: int | None
    denied_allocations: int | None
    complete: int
    span_us: int
    basis_low: str
    basis_high: str

    def plus(self, other: "Measures") -> "Measures":
        """Both together; exact, in any order."""
        return Measures(
            self.allocated_us + other.allocated_us,
            _sum(self.used_us, other.used_us),
            self.memory_allocated_kib_us + other.memory_allocated_kib_us,
            _sum(self.memory_used_kib_us, other.memory_used_kib_us),
            max((peak for peak in (self.memory_peak_bytes, other.memory_peak_bytes) if peak is not None), default=None),
            _sum(self.energy_uj, other.energy_uj),
            _sum(self.throttled_us, other.throttled_us),
            _sum(self.denied_allocations, other.denied_allocations),
            self.complete + other.complete,
            self.span_us + other.span_us,
            min(self.basis_low, other.basis_low),
            max(self.basis_high, other.basis_high),
        )

    def shown(self) -> dict[str, object]:
        """The row's fields in the contract's units; an unknown one is left out.

        A sum of which a part is unknown is the sum of the known part, and `completeness` is then below 1.
        """
        row = {
            "allocated_device_hours": hours(self.allocated_us),
            "used_device_hours": None if self.used_us is None else hours(self.used_us),
            "used_basis": self.basis_low if self.basis_low == self.basis_high else UsedBasis.MIXED.value,
            "memory_allocated_gib_hours": quotient(self.memory_allocated_kib_us, _KIB_PER_GIB * HOUR_US),
            "memory_used_gib_hours": _shown(self.memory_used_kib_us, _KIB_PER_GIB * HOUR_US),
            "memory_peak_gib": _shown(self.memory_peak_bytes, GIB),
            "energy_kwh": _shown(self.energy_uj, _UJ_PER_KWH),
            "throttled_hours": _shown(self.throttled_us, HOUR_US),
            "denied_allocations": self.denied_allocations,
            "completeness": _floor(self.complete, self.span_us * _PPM) if self.span_us else None,
        }
        return {name: value for name, value in row.items() if value is not None}


def hours(us: int) -> Decimal:
    """Device-hours of device-microseconds."""
    return quotient(us, HOUR_US)


def quotient(number: int, divisor: int) -> Decimal:
    """`number / divisor` with `PLACES` decimals, half to even, exact before it is rounded."""
    whole, rest = divmod(number * 10**PLACES, divisor)
    if 2 * rest > divisor or (2 * rest == divisor and whole % 2):
        whole += 1
    return Decimal(whole).scaleb(-PLACES, EXACT)


def _floor(number: int, divisor: int) -> Decimal:
    # Down, so that whatever is less than complete never shows as 1.
    return Decimal(number * 10**PLACES // divisor).scaleb(-PLACES, EXACT)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _shown(number: int | None, divisor: int) -> Decimal | None:
    return None if number is None else quotient(number, divisor)
