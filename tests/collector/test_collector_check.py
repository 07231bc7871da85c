"""Ingestion rules: each rule by example, and all of them against a row-by-row restatement on random rows."""

import json
import uuid
from typing import Any

import pyarrow as pa
import pytest
from collector_fakes import CARD, device, event, process, records, slice_
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector.check import KEPT_PER_REASON, RECORD_LIMIT, RULES, Checked, Expected, check_epoch, check_together, check_usage
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import UsageRecord

NOW = 1_800_000_000_000_000 // MINUTE_US * MINUTE_US
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
BIG = (1 << 63) - 1


def expected(last: int = 1_000_000) -> Expected:
    return Expected("n1", EPOCH, last, NOW)


def rows(*changed: UsageRecord) -> pa.Table:
    return arrow.to_table(changed)


def reasons(*changed: UsageRecord, last: int = 1_000_000) -> list[str]:
    return [row.reason for row in check_usage(rows(*changed), expected(last)).bad]


def test_good_rows_of_every_kind_pass_and_are_acknowledged_to_the_last() -> None:
    checked = check_usage(rows(*records("n1", EPOCH, 1, 40, NOW - 60 * MINUTE_US)), expected())
    assert checked.bad == () and checked.good.num_rows == 40 and checked.through == 40


def test_an_empty_answer_acknowledges_nothing() -> None:
    checked = check_usage(rows(), expected())
    assert checked.through is None and checked.good.num_rows == 0 and checked.bad == ()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (device("n2", EPOCH, 1, NOW), "node is 'n2', expected 'n1'"),
        (device("n1", str(uuid.UUID(int=5)), 1, NOW), f"epoch is '{uuid.UUID(int=5)}', expected {EPOCH}"),
        (device("n1", EPOCH, 2_000_000, NOW), "sequence is 2000000, expected at most 1000000"),
        (device("n1", EPOCH, 1, NOW, energy_uj=-1), "energy_uj is -1, expected 0 or more"),
        (device("n1", EPOCH, 1, NOW + 1), f"minute_us is {NOW + 1}, expected a multiple"),
        (device("n1", EPOCH, 1, NOW + 6 * MINUTE_US), f"minute_us is {NOW + 6 * MINUTE_US}, expected at most"),
        (device("n1", EPOCH, 1, NOW, span_us=2 * MINUTE_US), "span_us is 120000000, expected at most 61000000"),
        (device("n1", EPOCH, 1, NOW, completeness_ppm=1_000_001), "completeness_ppm is 1000001"),
        (device("n1", EPOCH, 1, NOW, down_us=1), "is 60000001, expected span_us 60000000"),
        (device("n1", EPOCH, 1, NOW, allocated_us=BIG, unallocated_us=BIG), "expected span_us 60000000"),
        (device("n1", EPOCH, 1, NOW, busy_us=BIG), f"busy_us is {BIG}, expected at most"),
        (device("n1", EPOCH, 1, NOW, hooked_us=128 * MINUTE_US + 120_000_001), "hooked_us is 7800000001, expected at most 7800000000"),
        (slice_("n1", EPOCH, 1, NOW, used_us=62_000_001), "used_us is 62000001, expected at most 62000000 in a span of 60000000"),
        (device("n1", EPOCH, 1, NOW, energy_uj=BIG), "energy_uj is"),
        (device("n1", EPOCH, 1, NOW, memory_used_kib_us=BIG), "memory_used_kib_us is"),
        (slice_("n1", EPOCH, 1, NOW, used_us=BIG), "used_us is"),
        (slice_("n1", EPOCH, 1, NOW, promised_us=MINUTE_US + 1), "promised_us, allocated_us, suspended_us are 60000001"),
        (slice_("n1", EPOCH, 1, NOW, used_basis="guess"), "used_basis is 'guess', expected one of hook"),
        (slice_("n1", EPOCH, 1, NOW, tenant=""), "slice row lacks tenant"),
        (slice_("n1", EPOCH, 1, NOW, project="t" * 5000), "project has 5000 bytes, expected at most 4096"),
        (event("n1", EPOCH, 1, NOW, detail="x" * 70_000), "detail has 70000 bytes"),
        (process("n1", EPOCH, 1, NOW, pid=-4), "pid is -4"),
    ],
)
def test_a_broken_row_is_named_kept_and_acknowledged(record: UsageRecord, reason: str) -> None:
    good = slice_("n1", EPOCH, 7, NOW)
    checked = check_usage(rows(record, good), expected())
    assert len(checked.bad) == 1 and reason in checked.bad[0].reason
    text = checked.bad[0].record or ""
    assert len(text) == RECORD_LIMIT or json.loads(text)["sequence"] == record.sequence
    assert checked.good.column("sequence").to_pylist() == [7]
    assert checked.through == 7


def test_an_unknown_kind_and_a_row_without_its_fields_are_bad() -> None:
    table = rows(device("n1", EPOCH, 1, NOW), device("n1", EPOCH, 2, NOW))
    table = table.set_column(0, table.schema.field(0), pa.array(["gadget", "slice"]))
    found = [row.reason for row in check_usage(table, expected()).bad]
    assert found == ["kind is 'gadget', expected one of device, slice, process, event", "slice row lacks allocation_id"]


def test_sequences_must_grow_and_a_lie_does_not_bury_the_honest_rows_behind_it() -> None:
    made = [device("n1", EPOCH, n, NOW) for n in (1, 3, 3, 2, 999, 4)]
    checked = check_usage(rows(*made), expected(last=4))
    assert checked.good.column("sequence").to_pylist() == [1, 3, 4]
    assert [row.reason.split(",")[0] for row in checked.bad] == ["sequence is 3", "sequence is 2", "sequence is 999"]
    assert checked.through == 4
    assert checked.bad_sequences == (3, 2)


def test_far_too_many_bad_rows_are_counted_not_kept() -> None:
    made = [device("n1", EPOCH, n + 1, NOW, down_us=1) for n in range(KEPT_PER_REASON + 25)]
    checked = check_usage(rows(*made), expected())
    assert len(checked.bad) == KEPT_PER_REASON + 1
    assert checked.bad[-1].rows == 25 and checked.bad[-1].record is None
    assert sum(row.rows for row in checked.bad) == KEPT_PER_REASON + 25


@pytest.mark.parametrize(("text", "good"), [(EPOCH, True), (EPOCH.upper(), True), ("", False), ("1" * 36, False), (EPOCH + "0", False)])
def test_an_epoch_is_a_uuid(text: str, good: bool) -> None:
    assert check_epoch(text) is good


def plainly_broken(row: dict[str, Any], before: int, last: int) -> bool:
    """Every rule once more, one row at a time, in Python's own numbers."""
    kind = row["kind"]
    if kind not in ("device", "slice", "process", "event") or row["node"] != "n1" or row["epoch"] != EPOCH:
        return True
    if any(type(value) is int and value < 0 for value in row.values()) or not before < row["sequence"] <= last:
        return True
    needed = {
        "device": ["device_uuid", "device_model", *["allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us"]],
        "slice": [
            "device_uuid",
            "device_model",
            "allocation_id",
            "tenant",
            "mode",
            "state",
            "used_basis",
            "promised_us",
            "allocated_us",
            "suspended_us",
        ],
        "process": ["device_uuid", "device_model", "pid", "start_ticks", "hooked"],
        "event": ["event", "at_us"],
    }[kind]
    if any(row[name] is None or row[name] == "" for name in needed):
        return True
    if any(isinstance(value, str) and len(value.encode()) > (65_536 if name == "detail" else 4096) for name, value in row.items()):
        return True
    span, minute = row["span_us"], row["minute_us"]
    if minute <= 0 or minute % MINUTE_US or minute > NOW + 5 * MINUTE_US or span > 61_000_000 or row["completeness_ppm"] > 1_000_000:
        return True
    if row["used_basis"] not in (None, "hook", "accounting", "sampled", "allocated", "mixed"):
        return True
    parts = ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us")
    if kind == "device" and sum(row[name] for name in parts) != span:
        return True
    if kind == "slice" and max(row["promised_us"], row["allocated_us"], row["suspended_us"]) > span:
        return True
    summed = ("hooked_us", "unaccounted_us", "switch_overhead_us")
    if any((row[name] or 0) > span + 2_000_000 for name in ("used_us", "busy_us")):
        return True
    if any((row[name] or 0) > 128 * span + 120_000_000 for name in summed) or (row["energy_uj"] or 0) > 100_000 * span + 1_000_000_000:
        return True
    return kind == "device" and (row["memory_used_kib_us"] or 0) * 1024 * 100 > row["memory_total_bytes"] * span * 110 + (1 << 50)


numbers = st.sampled_from(
    [
        -1,
        0,
        1,
        30_000_000,
        MINUTE_US,
        MINUTE_US + 1,
        62_000_000,
        62_000_001,
        7_800_000_000,
        7_800_000_001,
        NOW,
        NOW + 6 * MINUTE_US,
        CARD,
        BIG,
        -BIG,
    ]
)
texts = st.sampled_from(["", "n1", "n2", "t1", EPOCH, "hook", "guess", "x" * 5000])


@st.composite
def random_record(draw: st.DrawFn) -> UsageRecord:
    make = draw(st.sampled_from([device, slice_, process, event]))
    record = make("n1", EPOCH, draw(st.integers(1, 30)), NOW - draw(st.integers(0, 5)) * MINUTE_US)
    changes: dict[str, object] = {}
    for name in draw(st.lists(st.sampled_from(sorted(vars(record))), max_size=2)):
        value = getattr(record, name)
        changes[name] = draw(texts if isinstance(value, str) else numbers) if not isinstance(value, bool) else draw(st.booleans())
        if value is None:
            changes.pop(name)
    return type(record)(**{**vars(record), **changes})


@given(st.lists(random_record(), max_size=12), st.integers(1, 30))
def test_the_rules_agree_with_their_plain_restatement(made: list[UsageRecord], last: int) -> None:
    checked = check_usage(rows(*made), expected(last))
    before, good = -1, []
    for row in rows(*made).to_pylist():
        if not plainly_broken(row, before, last):
            good.append(row)
        if 0 <= row["sequence"] <= last:
            before = max(before, row["sequence"])
    assert checked.good.to_pylist() == good
    assert sum(row.rows for row in checked.bad) == len(made) - len(good)
    claimed = [record.sequence for record in made if 0 <= record.sequence <= last]
    assert checked.through == (max(claimed) if claimed else None)


def outcome(checked: Checked) -> tuple[object, ...]:
    return checked.good.to_pylist(), checked.bad, checked.bad_sequences, checked.through


@given(st.lists(st.tuples(st.lists(random_record(), max_size=8), st.sampled_from(["n1", "n2"]), st.integers(1, 30)), max_size=6))
def test_answers_that_are_checked_together_come_out_as_each_alone(answers: list[tuple[list[UsageRecord], str, int]]) -> None:
    given_: list[tuple[pa.Table, Expected]] = [(rows(*made), Expected(node, EPOCH, last, NOW)) for made, node, last in answers]
    assert [outcome(found) for found in check_together(given_)] == [outcome(check_usage(*one)) for one in given_]


def test_every_rule_has_its_own_name() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
