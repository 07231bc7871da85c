"""Generated pools with a plan that prices them, for properties of the bill."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import duckdb
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from poolmeter.accounting.parts import METHODS, OWN_LINE, PARTS
from poolmeter.accounting.plans import PricePlan, parse_plan
from poolmeter.model.units import HOUR_US, MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord
from poolmeter.period import Period, parse_period

Stores = Callable[[Sequence[UsageRecord]], AbstractContextManager[duckdb.DuckDBPyConnection]]
MODELS = ("Sim H200", "Sim A100", "Sim L4")
TENANTS = ("acme", "beta", "coyote", "delta")
# Five minutes across midnight in Vienna (and an hour's edge in UTC).
FIRST_US = 1_790_027_880_000_000 - 1_790_027_880_000_000 % HOUR_US + HOUR_US - 3 * MINUTE_US
PERIOD = Period(FIRST_US, FIRST_US + 6 * MINUTE_US, parse_period("2026-01-01", "2026-01-02", "Europe/Vienna", 0).zone)
PLAN = """
schema = "poolmeter.plan/1"
name = "generated"
version = 1
currency = "{currency}"
basis = "{basis}"
time_zone = "Europe/Vienna"
[policy]
{policy}
[[prices]]
from = 2026-01-01
to = {edge}
device_hour = {{ "Sim H*" = {price}, "Sim H200" = "7.123456789", "*" = "3.07" }}
{bands}
[[prices]]
from = {edge}
device_hour = {{ "Sim H*" = "1", "*" = {price} }}
"""
BANDS = """[[prices.bands]]
name = "late"
days = "mon"
hours = "23:58-00:01"
factor = 3
[[prices.bands]]
name = "early"
hours = ["00:01-00:02"]
device_hour = { "Sim A*" = "0.01" }
factor = 0
"""
QUICK = settings(
    max_examples=settings.default.max_examples if os.environ.get("POOLMETER_LONG") == "1" else 7,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Pool:
    """Generated records with the plan that prices them."""

    records: tuple[UsageRecord, ...]
    plan: PricePlan


def _split(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    cuts = sorted(draw(st.integers(0, total)) for _ in range(parts - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """A small pool: what is on each card changes from minute to minute, some use is unknown, some claims exceed the card."""
    records: list[UsageRecord] = []
    sequence = 0
    allocations = [
        (f"a{index}", draw(st.sampled_from(TENANTS)), draw(st.sampled_from(("p1", "p2", None)))) for index in range(draw(st.integers(0, 4)))
    ]
    for number in range(draw(st.integers(1, 3))):
        node, uuid, model = f"n{number % 2 + 1}", f"GPU-{number}", draw(st.sampled_from(MODELS))
        for minute in range(draw(st.integers(1, 6))):
            sequence += 1
            span = draw(st.sampled_from((MINUTE_US, MINUTE_US, 59_999_999, 1, 17_000_003)))
            allocated, reserved, unallocated, suspended, down = _split(draw, span, 5) if draw(st.booleans()) else (span, 0, 0, 0, 0)
            on_card = [allocation for allocation in allocations if draw(st.booleans())]
            if not on_card:
                allocated, unallocated = 0, allocated + unallocated
            key = {"node": node, "epoch": "e", "pool": "main", "minute_us": FIRST_US + minute * MINUTE_US, "start_us": FIRST_US + minute * MINUTE_US, "span_us": span, "device_uuid": uuid, "device_model": model}  # fmt: skip
            records.append(
                DeviceRecord(
                    **key,
                    sequence=sequence,
                    allocated_us=allocated,
                    reserved_unused_us=reserved,
                    unallocated_us=unallocated,
                    suspended_us=suspended,
                    down_us=down,
                    memory_total_bytes=1 << 33,
                    switch_overhead_us=draw(st.one_of(st.none(), st.integers(0, span // 4))),
                    unaccounted_us=draw(st.one_of(st.none(), st.integers(0, span))),
                )
            )
            for (allocation, tenant, project), promise in zip(on_card, _split(draw, allocated, max(1, len(on_card))), strict=False):
                sequence += 1
                if draw(st.sampled_from((False,) * 6 + (True,))):
                    continue  # its record is lost: a promise of which nothing tells whose it was
                used = draw(st.one_of(st.none(), st.integers(0, promise), st.integers(0, span)))
                records.append(
                    SliceRecord(
                        **key,
                        sequence=sequence,
                        allocation_id=allocation,
                        tenant=tenant,
                        project=project,
                        mode="hook",
                        state="active",
                        used_basis="allocated" if used is None else "hook",
                        generation=1,
                        promised_us=promise,
                        allocated_us=promise,
                        suspended_us=0,
                        memory_allocated_kib_us=draw(st.integers(0, 10**15)),
                        used_us=used,
                        memory_peak_bytes=draw(st.one_of(st.none(), st.integers(0, 1 << 33))),
                        denied_allocations=draw(st.one_of(st.none(), st.integers(0, 3))),
                        completeness_ppm=draw(st.sampled_from((1_000_000, 999_999, 0))),
                    )
                )
    text = PLAN.format(
        currency=draw(st.sampled_from(("EUR", "JPY", "KWD"))),
        basis=draw(st.sampled_from(("allocated", "used"))),
        price=draw(st.sampled_from(('"0"', '"36.00"', '"1999.999999999"', '"0.000000001"'))),
        edge="2026-09-21T22:01:00Z" if draw(st.booleans()) else "2030-01-01",
        bands=BANDS if draw(st.booleans()) else "",
        policy="\n".join(f'{part} = "{draw(st.sampled_from((OWN_LINE, *METHODS)))}"' for part in PARTS) if draw(st.booleans()) else "",
    )
    return Pool(tuple(records), parse_plan(text.encode(), "generated.toml"))
