"""OpenCost's `/allocation/compute`, answered from the bill: the same amounts as chargeback in the shape that OpenCost's clients read.

A pool is a cluster, a tenant a namespace, a workload a controller, an allocation a pod; what else an allocation says of itself is labels.
What nobody used is `__idle__`. Only device time is charged, so all other costs are 0; quantities that we do not measure (CPU, RAM, disks,
network) are left out. docs/reference/opencost.md lists parameters and fields.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting.chargeback import chosen, chosen_plan, level_of, rated, value_of
from poolmeter.accounting.dimensions import LABEL_FIELDS, Filters, own
from poolmeter.accounting.measures import hours, quotient
from poolmeter.accounting.parts import OWN
from poolmeter.accounting.plans import PricePlan
from poolmeter.accounting.policies import share_out
from poolmeter.accounting.rating import Charge, money
from poolmeter.accounting.shares import LABELS
from poolmeter.accounting.source import ask
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, HOUR_US, MICROSECONDS, MINUTE_US
from poolmeter.period import Period, epoch_us, rfc3339, time_zone

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    import duckdb

IDLE, NOBODY = "__idle__", "__unallocated__"
STEPS_MOST = 800
# OpenCost's word -> ours; an allocation is the finest that a pod or container can be.
_PROPERTIES = {
    "cluster": "pool",
    "node": "node",
    "namespace": "tenant",
    "controller": "workload",
    "deployment": "workload",
    "statefulset": "workload",
    "daemonset": "workload",
    "job": "workload",
    "pod": "allocation",
    "container": "allocation",
    "environment": "environment",
}
PARAMETERS = (
    "accumulate", "accumulateBy", "aggregate", "filter", "filterClusters", "filterNamespaces", "filterNodes", "includeIdle", "shareIdle",
    "step", "window",
)  # fmt: skip
_LABELS = ("project", "user", "workload", "class", "environment", "mode", "model", "tenant", "device")
_DEFAULT = ("cluster", "node", "namespace", "pod", "container")
_FILTERS = {"namespace": "tenant", "node": "node", "cluster": "pool"}
_COSTS = (
    "cpuCost", "cpuCostAdjustment", "cpuCostIdle", "gpuCostAdjustment", "gpuCostIdle", "networkCost", "networkCrossZoneCost",
    "networkCrossRegionCost", "networkInternetCost", "networkCostAdjustment", "loadBalancerCost", "loadBalancerCostAdjustment", "pvCost",
    "pvCostAdjustment", "ramCost", "ramCostAdjustment", "ramCostIdle", "externalCost",
)  # fmt: skip
_AMOUNT = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": MINUTE_US, "h": HOUR_US, "d": DAY_US, "w": 7 * DAY_US}
_UNIX = re.compile(r"(\d{1,11})[,-](\d{1,11})")
_TERM = re.compile(r'\s*(\w+)\s*:\s*("[^"]*"(?:\s*,\s*"[^"]*")*)\s*')


@dataclass(frozen=True)
class Question:
    """A request in our terms: periods (one answer each), properties to group by, filters, and whether `__idle__` is wanted."""

    periods: tuple[Period, ...]
    by: tuple[str, ...]
    filters: Filters
    idle: bool


def parse_question(values: Mapping[str, str], zone: "ZoneInfo", now_us: int, only: str | None = None) -> Question:
    """The question of a request's parameters, of the tenant `only` where it asks itself. Raises BadInput naming the parameter."""
    if _flag(values, "shareIdle"):
        raise BadInput("shareIdle is true, expected false: what idle costs is shared by the price plan's policies, for all reports alike")
    whole = parse_window(values.get("window", ""), zone, now_us)
    accumulate = values.get("accumulateBy") or values.get("accumulate") or "false"
    steps = {"hour": HOUR_US, "day": DAY_US, "week": 7 * DAY_US}
    if accumulate in ("true", "all"):
        step_us = whole.end_us - whole.start_us
    elif accumulate in steps:
        step_us = steps[accumulate]
    elif accumulate in ("false", "none"):
        step_us = _duration(values["step"], "step") if values.get("step") else whole.end_us - whole.start_us
    else:
        raise BadInput(f"accumulate is {accumulate!r:.40}, expected true, false, hour, day or week")
    edges = _edges(whole, step_us)
    if len(edges) > STEPS_MOST + 1:
        raise BadInput(f"step makes more than {STEPS_MOST} answers of this window, expected a longer one")
    periods = tuple(Period(start, end, zone) for start, end in itertools.pairwise(edges))
    filters = own(parse_filters(values), only)
    return Question(periods, parse_aggregate(values.get("aggregate", "")), filters, _flag(values, "includeIdle") and not filters.private)


def _edges(whole: Period, step_us: int) -> list[int]:
    """Where the answers of a window begin, and the last one ends. Steps of days are days of the zone, of 23 or 25 hours at times."""
    if step_us % DAY_US:
        return [*itertools.islice(range(whole.start_us, whole.end_us, step_us), STEPS_MOST + 1), whole.end_us]
    at = datetime.fromtimestamp(whole.start_us // MICROSECONDS, UTC).astimezone(whole.zone).replace(tzinfo=None)
    edges = [whole.start_us]
    while len(edges) <= STEPS_MOST + 1:
        at += timedelta(microseconds=step_us)
        if (next_us := _us(at, whole.zone)) >= whole.end_us:
            break
        edges.append(next_us)
    return [*edges, whole.end_us]


def parse_window(text: str, zone: "ZoneInfo", now_us: int) -> Period:
    """OpenCost's window: today, yesterday, week, lastweek, month, lastmonth, 90m, 24h, 7d, 2w, two unix seconds or two RFC 3339 times.

    Days and weeks are whole days of the zone, today the last of them, as OpenCost has it. Raises BadInput.
    """
    now = datetime.fromtimestamp(now_us // MICROSECONDS, UTC).astimezone(zone)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    monday, first = today - timedelta(days=(today.weekday() + 1) % 7), today.replace(day=1)  # its weeks begin on Sunday
    day, week = timedelta(days=1), timedelta(days=7)
    named = {
        "today": (today, today + day),
        "yesterday": (today - day, today),
        "week": (monday, monday + week),
        "lastweek": (monday - week, monday),
        "month": (first, (first + timedelta(days=32)).replace(day=1)),
        "lastmonth": ((first - day).replace(day=1), first),
    }
    if text in named:
        start, end = named[text]
        return _period(_us(start, zone), _us(end, zone), zone, text)
    if found := _AMOUNT.fullmatch(text):
        number, unit = int(found[1]), found[2]
        if unit in "dw":
            end = today + day
            try:
                start = end - number * (day if unit == "d" else week)
            except OverflowError:
                raise BadInput(f"window is {text!r:.60}, expected one that begins after the year 1") from None
            return _period(_us(start, zone), _us(end, zone), zone, text)
        end_us = now_us - now_us % MINUTE_US + MINUTE_US
        return _period(end_us - number * _UNITS[unit], end_us, zone, text)
    if found := _UNIX.fullmatch(text):
        return _period(int(found[1]) * MICROSECONDS, int(found[2]) * MICROSECONDS, zone, text)
    start_text, comma, end_text = text.partition(",")
    try:
        moments = [datetime.fromisoformat(part) for part in (start_text, end_text)] if comma else []
    except ValueError:
        moments = []
    if not moments:
        expected = "expected one such as today, yesterday, lastweek, month, 24h, 7d, or a start and an end as unix seconds or RFC 3339"
        raise BadInput(f"window is {text!r:.60}, {expected}")
    start_us, end_us = (_us(moment, zone) for moment in moments)
    return _period(start_us, end_us, zone, text)


def _period(start_us: int, end_us: int, zone: "ZoneInfo", text: str) -> Period:
    start_us, end_us = start_us - start_us % MINUTE_US, end_us + -end_us % MINUTE_US
    if not 0 <= start_us < end_us:
        raise BadInput(f"window is {text!r:.60}, expected an end after its start, both after 1970")
    return Period(start_us, end_us, zone)


def _us(moment: datetime, zone: "ZoneInfo") -> int:
    try:
        return epoch_us(moment if moment.tzinfo else moment.replace(tzinfo=zone))
    except OverflowError:
        raise BadInput(f"window has the time {moment.isoformat()}, expected one in the years 1 to 9999") from None


def _duration(text: str, name: str) -> int:
    found = _AMOUNT.fullmatch(text)
    if not found or not int(found[1]):
        raise BadInput(f"{name} is {text!r:.40}, expected a length such as 1h or 1d")
    return int(found[1]) * _UNITS[found[2]]


def _flag(values: Mapping[str, str], name: str) -> bool:
    text = values.get(name, "false").lower()
    if text not in ("true", "false", "1", "0", "t", "f", ""):
        raise BadInput(f"{name} is {text!r:.40}, expected true or false")
    return text in ("true", "1", "t")


def parse_aggregate(text: str) -> tuple[str, ...]:
    """The properties of `aggregate`; OpenCost's own default without one. Raises BadInput on one that we do not have."""
    if text == "all":
        return ()
    names = tuple(part.strip() for part in text.split(",") if part.strip()) or _DEFAULT
    for name in names:
        label = name.removeprefix("label:")
        if (label not in _LABELS) if label != name else (name not in _PROPERTIES):
            known = ", ".join([*_PROPERTIES, *(f"label:{label}" for label in _LABELS)])
            raise BadInput(f"aggregate names {name!r:.60}, expected of all or {known}")
    return names


def parse_filters(values: Mapping[str, str]) -> Filters:
    """`filter` (terms such as `namespace:"a","b"` joined by +) and the older filterNamespaces, filterNodes, filterClusters. Raises BadInput."""
    wanted: dict[str, tuple[str, ...]] = {}
    for name, ours in (("filterNamespaces", "tenant"), ("filterNodes", "node"), ("filterClusters", "pool")):
        found = tuple(part.strip() for part in values.get(name, "").split(",") if part.strip())
        if found:
            wanted[ours] = found
    text = values.get("filter", "")
    for term in text.split("+") if text.strip() else ():
        found_term = _TERM.fullmatch(term)
        if found_term is None or found_term[1] not in _FILTERS:
            raise BadInput(f'filter has the term {term!r:.60}, expected such as namespace:"a","b", of {", ".join(_FILTERS)}, joined by +')
        ours = _FILTERS[found_term[1]]
        if ours in wanted:
            raise BadInput(f"filter names {found_term[1]} twice, expected each once")
        wanted[ours] = tuple(re.findall(r'"([^"]*)"', found_term[2]))
    return Filters(wanted.get("tenant", ()), wanted.get("node", ()), wanted.get("pool", ()))


def allocation_sets(connection: "duckdb.DuckDBPyConnection", question: Question, plan: PricePlan) -> list[dict[str, object]]:
    """An answer for each period: allocations by name. Raises what chargeback raises."""
    return [_set(connection, period, question, plan) for period in question.periods]


def _set(connection: "duckdb.DuckDBPyConnection", period: Period, question: Question, plan: PricePlan) -> dict[str, object]:
    ours = {_of(name) for name in question.by}
    level = max(2, level_of(tuple(ours - {"allocation"}), question.filters))
    _, every = rated(connection, period, plan, level, question.filters, plan.basis)
    fields = ours - {"allocation"} | (LABEL_FIELDS | {"allocation_id"} if "allocation" in ours else set())
    charges = share_out(every, plan.policies, question.filters.told(fields)).charges
    groups: dict[str, list[Charge]] = {}
    for charge in charges:
        if not chosen(charge, question.filters) or not (charge.us or charge.amount or charge.shared or charge.share.line == "usage"):
            continue
        if charge.share.line != "usage" and not question.idle:
            continue
        groups.setdefault(_name(charge, question.by), []).append(charge)
    return {name: _allocation(name, members, period, plan) for name, members in sorted(groups.items())}


def _of(name: str) -> str:
    return name.removeprefix("label:") if name.startswith("label:") else _PROPERTIES[name]


def _value(charge: Charge, name: str) -> str | None:
    if name == "allocation":
        return charge.share.labels[LABELS.index("allocation_id")] if charge.share.labels else None
    return value_of(charge, name)


def _name(charge: Charge, by: Sequence[str]) -> str:
    if charge.share.line != "usage":
        # Idle is of a card, so it can be told apart by what a card has.
        places = [_value(charge, _of(name)) or NOBODY for name in by if _of(name) in ("pool", "node", "model", "device")]
        return "/".join([*places, IDLE])
    return "/".join(_value(charge, _of(name)) or NOBODY for name in by) or "all"


def _allocation(name: str, charges: list[Charge], period: Period, plan: PricePlan) -> dict[str, object]:
    us = sum(charge.us for charge in charges)
    length_us = period.end_us - period.start_us
    cost = money(sum(charge.amount for charge in charges), plan.minor_digits)
    shared = money(sum(sum(charge.shared.values()) for charge in charges), plan.minor_digits)
    start, end = rfc3339(period.start_us), rfc3339(period.end_us)
    own = [charge for charge in charges if charge.share.part == OWN]  # what policies add has been measured of nobody
    measured = [charge.measures for charge in own if charge.measures is not None]
    out: dict[str, object] = {
        "name": name,
        "properties": _properties([charge for charge in charges if charge.us] or charges),
        "window": {"start": start, "end": end},
        "start": start,
        "end": end,
        "minutes": Decimal(length_us // MINUTE_US),
        "gpuCount": quotient(us, length_us),
        "gpuHours": hours(us),
        "gpuCost": cost,
        "sharedCost": shared,
        "totalCost": cost + shared,
        **dict.fromkeys(_COSTS, Decimal(0)),
        "pvs": {},
        "lbAllocations": {},
    }
    # A part of unknown use would make the others' efficiency everybody's.
    if measured and len(measured) == len(own) and all(one.used_us is not None for one in measured):
        allocated = sum(one.allocated_us for one in measured)
        used = sum(one.used_us or 0 for one in measured)
        if allocated:
            out["gpuEfficiency"] = out["totalEfficiency"] = quotient(used, allocated)
        out["gpuAllocation"] = _gpu(own, allocated, used, length_us)
    return out


def _gpu(charges: list[Charge], allocated: int, used: int, length_us: int) -> dict[str, object]:
    devices = {charge.share.device for charge in charges}
    models = {charge.share.model for charge in charges}
    found: dict[str, object] = {
        "isGPUShared": allocated < length_us * len(devices) if all(devices) else None,
        "gpuModel": next(iter(models)) if len(models) == 1 else None,
        "gpuUUID": _common(charges, "device"),
        "gpuRequestAverage": quotient(allocated, length_us),
        "gpuUsageAverage": quotient(used, length_us),
    }
    return {name: value for name, value in found.items() if value is not None}


def _properties(charges: list[Charge]) -> dict[str, object]:
    """What all of the charges agree on."""
    names = {
        "cluster": "pool",
        "node": "node",
        "namespace": "tenant",
        "controller": "workload",
        "pod": "allocation",
        "container": "allocation",
    }
    out: dict[str, object] = {theirs: found for theirs, ours in names.items() if (found := _common(charges, ours)) is not None}
    labels = {
        name: found
        for name in ("project", "user", "class", "environment", "mode", "model")
        if (found := _common(charges, name)) is not None
    }
    return out | ({"labels": labels} if labels else {})


def _common(charges: Iterable[Charge], name: str) -> str | None:
    values = {_value(charge, name) for charge in charges}
    return next(iter(values)) if len(values) == 1 else None


def compute(
    root: Path, values: Mapping[str, str], zone: str, configured: Path | None, now_us: int, only: str | None = None
) -> dict[str, object]:
    """The whole answer to a request's parameters, with the currency, which OpenCost has no place for. Raises what `chargeback_for` raises."""
    plan, _ = chosen_plan(root, None, configured)
    question = parse_question(values, plan.zone or time_zone(zone), now_us, only)
    sets = ask(root, lambda connection: allocation_sets(connection, question, plan))
    return {"code": 200, "status": "success", "data": sets, "message": "", "currency": plan.currency}
