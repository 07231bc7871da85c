"""What usage can be grouped and filtered by, and how whole UTC minutes fall into days and hours of a time zone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta

from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, HOUR_US, MICROSECONDS, MINUTE_US
from poolmeter.period import Period, rfc3339

# The field of --by, and the column of `slice_minutes` behind it; `day` and `hour` are computed.
COLUMNS: dict[str, str] = {
    "tenant": "tenant",
    "project": "project",
    "user": "user",
    "class": "workload_class",
    "environment": "environment",
    "model": "device_model",
    "pool": "pool",
    "node": "node",
    "device": "device_uuid",
    "mode": "mode",
    "workload": "workload",
}
BY: tuple[str, ...] = (*COLUMNS, "day", "hour")
CHARGE_BY: tuple[str, ...] = (*BY, "part")  # of a line: `poolmeter.accounting.parts`
DEVICE_FIELDS = frozenset({"model", "pool", "node", "device"})  # what a device has by itself, allocated or not
LABEL_FIELDS = frozenset(COLUMNS) - DEVICE_FIELDS - {"tenant"}  # what an allocation says of itself


@dataclass(frozen=True)
class Filters:
    """Values that rows must have; empty tuples filter nothing.

    `private`: the tenant itself asks. Of others, and of what is the pool's, nothing is told then: no total, no warning, no name of a node where
    it has nothing, and no word on whether a value of a filter is there.
    """

    tenant: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    pool: tuple[str, ...] = ()
    private: bool = False

    def chosen(self) -> dict[str, tuple[str, ...]]:
        """The fields that filter, with the values asked for."""
        return {name: values for name in ("tenant", "node", "pool") if (values := getattr(self, name))}

    def told(self, fields: Collection[str]) -> frozenset[str]:
        """By what of `fields` cost that is shared may be told apart: a tenant's comes from devices that are none of its."""
        wanted = frozenset({*fields, *self.chosen()})
        return wanted - DEVICE_FIELDS if self.private else wanted


EVERYTHING = Filters()


def own(filters: Filters, tenant: str | None) -> Filters:
    """The filters of a question that a tenant asks itself: its own rows, none where it asks for others' alone. None: as they are."""
    if tenant is None:
        return filters
    wanted = tenant if not filters.tenant or tenant in filters.tenant else "\0"  # which no tenant is called
    return replace(filters, tenant=(wanted,), private=True)


def parse_by(text: str, known: Sequence[str] = BY) -> tuple[str, ...]:
    """The fields of `--by`, in the order given. Raises BadInput on one that is not among `known`, or is there twice."""
    names = tuple(part.strip() for part in text.split(","))
    for index, name in enumerate(names):
        if name not in known:
            raise BadInput(f"--by is {name!r}, expected one or several of {', '.join(known)}")
        if name in names[:index]:
            raise BadInput(f"--by names {name!r} twice, expected each field once")
    return names


@dataclass(frozen=True)
class Calendar:
    """Days and hours of one period. `offsets` are (from this moment on, offset of local time), epoch microseconds, ascending.

    A day is named by its local date, an hour by the UTC instant it begins at; a day of a clock change has 23 or 25 hours.
    """

    period: Period
    offsets: tuple[tuple[int, int], ...] = field(default=())

    @classmethod
    def of(cls, period: Period, needed: Period | None = None) -> "Calendar":
        """The calendar of a period in its zone; right in the part `needed` of it alone where that is given (`source.stored_part`)."""
        return cls(period, _offsets(needed or period))

    def local_sql(self) -> str:
        """SQL for the local time of `minute_us`, as BIGINT microseconds."""
        if len(self.offsets) == 1:
            return f"(minute_us + {self.offsets[0][1]})"
        cases = " ".join(f"WHEN minute_us >= {start} THEN {offset}" for start, offset in reversed(self.offsets))
        return f"(minute_us + CASE {cases} END)"

    def day_sql(self) -> str:
        """SQL for the number of the local day since 1970-01-01."""
        return f"({self.local_sql()} // {DAY_US})"

    def hour_sql(self) -> str:
        """SQL for the UTC microsecond at which the local hour of `minute_us` begins."""
        return f"(minute_us - {self.local_sql()} % {HOUR_US})"


def day_text(day: int) -> str:
    """`2026-11-30` of a day number."""
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def hour_text(hour_us: int) -> str:
    """`2026-11-30T13:00:00Z` of the moment an hour begins."""
    return rfc3339(hour_us)


def _offsets(period: Period) -> tuple[tuple[int, int], ...]:
    """Where the zone's offset changes in the period, to the minute (tz data has no finer changes since 1972)."""

    def offset(us: int) -> int:
        delta = datetime.fromtimestamp(us // MICROSECONDS, UTC).astimezone(period.zone).utcoffset() or timedelta()
        seconds = delta.days * 86_400 + delta.seconds
        return (seconds - seconds % 60) * MICROSECONDS

    found = [(period.start_us, offset(period.start_us))]
    step = 6 * HOUR_US  # no zone has changed its offset twice within this
    at = period.start_us
    while at < period.end_us:
        until = min(at + step, period.end_us)
        if offset(until) != found[-1][1]:
            low, high = at // MINUTE_US, until // MINUTE_US
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if offset(middle * MINUTE_US) != found[-1][1] else (middle, high)
            found.append((high * MINUTE_US, offset(high * MINUTE_US)))
        at = until
    return tuple(found)


def sort_key(values: Sequence[object]) -> tuple[tuple[bool, str], ...]:
    """Order of rows by their --by values: as text, absent last; days and hours sort by time this way."""
    return tuple((value is None, "" if value is None else str(value)) for value in values)
