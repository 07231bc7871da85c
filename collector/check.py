"""Ingestion rules: which received rows may be stored, as pure functions of a table and of what was expected of it.

A row that breaks a rule goes to quarantine with the first rule it breaks; it stops no other row and is acknowledged like them, since
asking again would bring the same row.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import RecordKind, UsedBasis
from poolmeter.model.wire import columns_of, wire_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Array: TypeAlias = "np.ndarray[Any, Any]"
SPAN_SLACK_US = 1_000_000  # a minute is closed by a 1 Hz loop: it may be late by one turn
FUTURE_US = 5 * MINUTE_US  # how far a node's clock may run ahead of ours
# One user of a device, or the device itself, is busy at most all the time; the slack is two turns of a 1 Hz loop.
USED_SLACK_US = 2_000_000
# Sums over the users of a device may pass its span (concurrent ones; samples that run ahead): beyond this it is a counter gone wrong.
SUM_BOUND = 128
SUM_SLACK_US = 2 * MINUTE_US
MEMORY_SLACK_PERCENT = 10
WATTS_BOUND = 100_000  # per device: 1 W is 1 uJ/us
ENERGY_SLACK_UJ = 1_000_000_000
TEXT_LIMIT = 4096
DETAIL_LIMIT = 65_536
RECORD_LIMIT = 4096
KEPT_PER_REASON = 1000
_KINDS = list(RecordKind)
_UUID = re.compile(r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", re.IGNORECASE)


@dataclass(frozen=True)
class Expected:
    """What a response said of itself, and our clock when it came."""

    node: str
    epoch: str
    last_sequence: int
    now_us: int


@dataclass(frozen=True)
class BadRow:
    """A row for quarantine: `rows` counts those it stands for; `record` is its JSON, cut to `RECORD_LIMIT`, None when it stands for many."""

    sequence: int | None
    minute_us: int | None
    reason: str
    rows: int
    record: str | None


@dataclass(frozen=True)
class Checked:
    """A response after the rules: `bad` are the rows that broke one, `through` the last sequence to acknowledge (None: nothing).

    `whole` holds the good rows of all responses that were checked with this one, of which its own are [start, stop).
    """

    whole: "pa.Table"
    start: int
    stop: int
    bad: tuple[BadRow, ...]
    bad_sequences: tuple[int, ...]
    through: int | None

    @property
    def good(self) -> "pa.Table":
        """Its own good rows, a wide table."""
        return self.whole.slice(self.start, self.stop - self.start)


class _Rows:
    """A wide table as numpy columns, and what was expected of it. Most columns of small answers are empty or full: those cost nothing.

    `answers` holds what was expected of each answer, `starts` where its rows begin, and at last where all end.
    """

    def __init__(self, table: "pa.Table", answers: Sequence[Expected], starts: Array) -> None:
        import numpy as np

        self.count = table.num_rows
        self.answers = answers
        self.starts = starts
        self.answer = np.repeat(np.arange(len(answers)), np.diff(starts))  # of each row
        self.last_sequence = np.array([expected.last_sequence for expected in answers], np.int64)[self.answer]
        self.now_us = np.array([expected.now_us for expected in answers], np.int64)[self.answer]
        batches = table.to_batches()
        self._arrays = dict(zip(table.column_names, batches[0].columns, strict=True)) if batches else {}
        self._cache: dict[str, Any] = {}
        self._zeros = np.zeros(self.count, np.int64)
        self._none = np.zeros(self.count, bool)
        self._all = np.ones(self.count, bool)

    def empty(self, name: str) -> bool:
        """Whether no row has a value in the column."""
        return not self.count or bool(self._arrays[name].null_count == self.count)

    def known(self, name: str) -> Array:
        """Where the column has a value."""
        if self.empty(name):
            return self._none
        array = self._arrays[name]
        return self._kept(f"?{name}", lambda: _numpy(array.is_valid())) if array.null_count else self._all

    def ints(self, name: str) -> Array:
        """The column as int64, 0 where it has no value."""
        if self.empty(name):
            return self._zeros
        array = self._arrays[name]
        return self._kept(name, lambda: _numpy(array.fill_null(0) if array.null_count else array))

    def lengths(self, name: str) -> Array:
        """Bytes of a text column, 0 where it has no value."""
        import pyarrow.compute as pc

        if self.empty(name):
            return self._zeros
        array = self._arrays[name]
        return self._kept(f"#{name}", lambda: _numpy(pc.binary_length(array.fill_null("") if array.null_count else array)))

    def isin(self, name: str, values: list[str]) -> Array:
        """Where the text column has one of `values`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.empty(name):
            return self._none
        array = self._arrays[name]
        if len(values) == 1:
            same = pc.equal(array, values[0])
            return _numpy(same.fill_null(False) if same.null_count else same)
        return _numpy(pc.is_in(array, value_set=pa.array(values, pa.utf8())))

    def same(self, name: str, values: list[str]) -> Array:
        """Where the text column has the value of the row's answer; `values` holds one for each answer."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if len(set(values)) == 1:
            return self.isin(name, values[:1])
        if self.empty(name):
            return self._none
        same = pc.equal(self._arrays[name], pa.array(values, pa.utf8()).take(pa.array(self.answer)))
        return _numpy(same.fill_null(False) if same.null_count else same)

    def of(self, *kinds: RecordKind) -> Array:
        """Where the row is of one of `kinds`."""
        import numpy as np

        chosen = np.zeros(len(_KINDS) + 1, bool)
        chosen[[_KINDS.index(kind) for kind in kinds]] = True
        return cast(Array, chosen[self._kept("kind number", self._kinds)])

    def _kinds(self) -> Array:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.count:
            return np.zeros(0, np.int64)
        found = pc.index_in(self._arrays["kind"], value_set=pa.array(_KINDS, pa.utf8()))
        return _numpy(found.fill_null(-1))

    def _kept(self, key: str, make: Callable[[], Any]) -> Array:
        if key not in self._cache:
            self._cache[key] = make()
        return cast(Array, self._cache[key])


def _numpy(array: "pa.Array") -> Array:
    return cast(Array, array.to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class Rule:
    """One rule: where `broken` is true, `reason` says why (it gets the row as a dict)."""

    name: str
    broken: Callable[["_Rows"], Array]
    reason: Callable[[dict[str, Any], Expected], str]


def _not_increasing(rows: _Rows) -> Array:
    import numpy as np

    sequence = rows.ints("sequence")
    # A sequence beyond what the response claims must not push the bar up for the honest rows behind it.
    claimed = np.where((sequence >= 0) & (sequence <= rows.last_sequence), sequence, -1)
    broken = np.zeros(rows.count, bool)
    before = np.concatenate(([-1], claimed[:-1]))
    before[rows.starts[:-1][rows.starts[:-1] < rows.count]] = -1
    # Of an answer that grows from row to row, and honest ones do, nothing more need be asked.
    for number in np.unique(rows.answer[claimed <= before]):
        mine = slice(int(rows.starts[number]), int(rows.starts[number + 1]))
        highest = np.concatenate(([-1], np.maximum.accumulate(claimed[mine])[:-1]))
        broken[mine] = sequence[mine] <= highest
    return broken


def _lacks(rows: _Rows) -> Array:
    import numpy as np

    broken = np.zeros(rows.count, bool)
    missing: dict[str, Array | None] = {}
    for kind in RecordKind:
        own = rows.of(kind)
        if not own.any():
            continue
        for column in columns_of(kind):
            if not column.nullable:
                if column.name not in missing:
                    # An absent text has no length either.
                    absent = rows.lengths(column.name) == 0 if column.type == "utf8" else ~rows.known(column.name)
                    missing[column.name] = absent if absent.any() else None
                if (absent_there := missing[column.name]) is not None:
                    broken |= own & absent_there
    return broken


def _lacking(row: dict[str, Any], _: Expected) -> str:
    missing = [column.name for column in columns_of(RecordKind(row["kind"])) if not column.nullable and row[column.name] in (None, "")]
    return f"{row['kind']} row lacks {missing[0]}"


def _negative(rows: _Rows) -> Array:
    import numpy as np

    broken = np.zeros(rows.count, bool)
    for column in wire_columns():
        if column.type == "int64" and not rows.empty(column.name):
            broken |= rows.ints(column.name) < 0
    return broken


def _negative_name(row: dict[str, Any], _: Expected) -> str:
    name = next(name for name, value in row.items() if type(value) is int and value < 0)
    return f"{name} is {row[name]}, expected 0 or more"


def _long_text(rows: _Rows) -> Array:
    import numpy as np

    broken = np.zeros(rows.count, bool)
    for column in wire_columns():
        if column.type == "utf8" and not rows.empty(column.name):
            broken |= rows.lengths(column.name) > _text_limit(column.name)
    return broken


def _text_limit(name: str) -> int:
    return DETAIL_LIMIT if name == "detail" else TEXT_LIMIT


def _long_name(row: dict[str, Any], _: Expected) -> str:
    sizes = {name: len(value.encode()) for name, value in row.items() if isinstance(value, str)}
    name = next(name for name, size in sizes.items() if size > _text_limit(name))
    return f"{name} has {sizes[name]} bytes, expected at most {_text_limit(name)}"


PARTS = ("allocated_us", "reserved_unused_us", "unallocated_us", "suspended_us", "down_us")
USED = ("used_us", "busy_us")
SUMMED = ("hooked_us", "unaccounted_us", "switch_overhead_us")


def _no_identity(rows: _Rows) -> Array:
    import numpy as np

    # No part may pass the span, which is bounded: so the sum cannot wrap around 2^63.
    span = rows.ints("span_us")
    total = np.zeros(rows.count, np.int64)
    broken = np.zeros(rows.count, bool)
    for name in PARTS:
        broken |= rows.ints(name) > span
        total += np.minimum(rows.ints(name), span)
    return cast(Array, rows.of(RecordKind.DEVICE) & (broken | (total != span)))


def _identity_sum(row: dict[str, Any], _: Expected) -> str:
    return f"{' + '.join(PARTS)} is {sum(row[name] for name in PARTS)}, expected span_us {row['span_us']}"


def used_limit(name: str, span_us: Any) -> Any:
    """The most device time that a column may hold; `span_us` is a number or an array of them."""
    return span_us + USED_SLACK_US if name in USED else SUM_BOUND * span_us + SUM_SLACK_US


def _overused(rows: _Rows) -> Array:
    import numpy as np

    broken = np.zeros(rows.count, bool)
    span = rows.ints("span_us")
    for name in (*USED, *SUMMED):
        if rows.empty(name):
            continue
        # The span of a row that an earlier rule has named may be anything: bounded, the limit cannot wrap around 2^63.
        broken |= rows.ints(name) > used_limit(name, np.minimum(span, 2 * MINUTE_US))
    return broken


def _overused_name(row: dict[str, Any], _: Expected) -> str:
    name = next(name for name in (*USED, *SUMMED) if (row[name] or 0) > used_limit(name, row["span_us"]))
    return f"{name} is {row[name]}, expected at most {used_limit(name, row['span_us'])} in a span of {row['span_us']}"


def _overpromised(rows: _Rows) -> Array:
    span = rows.ints("span_us")
    over = (rows.ints("promised_us") > span) | (rows.ints("allocated_us") > span) | (rows.ints("suspended_us") > span)
    return rows.of(RecordKind.SLICE) & over


def _overpowered(rows: _Rows) -> Array:
    return rows.ints("energy_uj") > WATTS_BOUND * rows.ints("span_us") + ENERGY_SLACK_UJ


def _overfull(rows: _Rows) -> Array:
    import numpy as np

    # In floating point: kilobytes x microseconds of a hostile row pass 2^63; the slack is far above the rounding.
    most = rows.ints("memory_total_bytes").astype(np.float64) / 1024 * rows.ints("span_us") * (100 + MEMORY_SLACK_PERCENT) / 100
    return cast(Array, rows.of(RecordKind.DEVICE) & (rows.ints("memory_used_kib_us").astype(np.float64) > most))


# Order matters: a later rule may rely on what an earlier one has ruled out.
RULES: tuple[Rule, ...] = (
    Rule(
        "kind",
        lambda rows: ~rows.of(*RecordKind),
        lambda row, _: f"kind is {row['kind']!r:.40}, expected one of {', '.join(RecordKind)}",
    ),
    Rule(
        "node",
        lambda rows: ~rows.same("node", [expected.node for expected in rows.answers]),
        lambda row, expected: f"node is {row['node']!r:.80}, expected {expected.node!r}",
    ),
    Rule(
        "epoch",
        lambda rows: ~rows.same("epoch", [expected.epoch for expected in rows.answers]),
        lambda row, expected: f"epoch is {row['epoch']!r:.80}, expected {expected.epoch}",
    ),
    Rule(
        "sequence",
        lambda rows: rows.ints("sequence") > rows.last_sequence,
        lambda row, expected: f"sequence is {row['sequence']}, expected at most {expected.last_sequence}",
    ),
    Rule("negative", _negative, _negative_name),
    Rule(
        "order",
        _not_increasing,
        lambda row, _: f"sequence is {row['sequence']}, expected one above every sequence before it",
    ),
    Rule("missing", _lacks, _lacking),
    Rule("text", _long_text, _long_name),
    Rule(
        "minute",
        lambda rows: (rows.ints("minute_us") % MINUTE_US != 0) | (rows.ints("minute_us") == 0),
        lambda row, _: f"minute_us is {row['minute_us']}, expected a multiple of {MINUTE_US} above 0",
    ),
    Rule(
        "future",
        lambda rows: rows.ints("minute_us") > rows.now_us + FUTURE_US,
        lambda row, expected: f"minute_us is {row['minute_us']}, expected at most {FUTURE_US} after now, which is {expected.now_us}",
    ),
    Rule(
        "span",
        lambda rows: rows.ints("span_us") > MINUTE_US + SPAN_SLACK_US,
        lambda row, _: f"span_us is {row['span_us']}, expected at most {MINUTE_US + SPAN_SLACK_US}",
    ),
    Rule(
        "completeness",
        lambda rows: rows.ints("completeness_ppm") > 1_000_000,
        lambda row, _: f"completeness_ppm is {row['completeness_ppm']}, expected at most 1000000",
    ),
    Rule(
        "basis",
        lambda rows: rows.known("used_basis") & ~rows.isin("used_basis", list(UsedBasis)),
        lambda row, _: f"used_basis is {row['used_basis']!r:.40}, expected one of {', '.join(UsedBasis)}",
    ),
    Rule("identity", _no_identity, _identity_sum),
    Rule(
        "promise",
        _overpromised,
        lambda row, _: (
            f"promised_us, allocated_us, suspended_us are {row['promised_us']}, {row['allocated_us']}, {row['suspended_us']}, "
            f"expected at most span_us {row['span_us']}"
        ),
    ),
    Rule("used", _overused, _overused_name),
    Rule(
        "energy",
        _overpowered,
        lambda row, _: f"energy_uj is {row['energy_uj']} in a span of {row['span_us']}, expected at most {WATTS_BOUND} W",
    ),
    Rule(
        "memory",
        _overfull,
        lambda row, _: f"memory_used_kib_us is {row['memory_used_kib_us']}, expected at most memory_total_bytes over span_us",
    ),
)


def check_epoch(epoch: str) -> bool:
    """Whether an epoch is a UUID."""
    return _UUID.match(epoch) is not None


def check_usage(table: "pa.Table", expected: Expected) -> Checked:
    """Sort the rows of a response (a wide table, schema of poolmeter.arrow) into good and bad."""
    return check_together([(table, expected)])[0]


def check_together(answers: Sequence[tuple["pa.Table", Expected]]) -> list[Checked]:
    """Several responses at once, in their order, each by its own: a rule costs as much for one of them as for a hundred small ones."""
    import numpy as np
    import pyarrow as pa

    if not answers:
        return []
    tables, expected = [table for table, _ in answers], [found for _, found in answers]
    table = (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).combine_chunks()
    starts = np.cumsum([0, *(found.num_rows for found in tables)])
    rows = _Rows(table, expected, starts)
    broken = np.full(rows.count, -1, np.int64)
    for number, rule in enumerate(RULES):
        broken[(broken < 0) & rule.broken(rows)] = number
    sequence = rows.ints("sequence")
    # A bad row still fills its place in the spool it came from: sent again, it is known and not quarantined twice.
    placed = (sequence >= 0) & (sequence <= rows.last_sequence)
    claimed = np.where(placed, sequence, -1)
    bad = broken >= 0
    good = table.filter(_mask(~bad)) if bad.any() else table
    # How many good rows lie before each answer's first.
    ends = np.concatenate(([0], np.cumsum(~bad)))[starts].tolist()
    out = []
    for number, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        through = int(claimed[first:last].max()) if last > first else -1
        wrong: tuple[BadRow, ...] = ()
        wrong_sequences: tuple[int, ...] = ()
        if ends[number + 1] - ends[number] < last - first:
            at = np.nonzero(bad[first:last])[0]
            wrong = _bad_rows(tables[number], broken[first:last], at, expected[number])
            wrong_sequences = tuple(sequence[first:last][bad[first:last] & placed[first:last]].tolist())
        out.append(Checked(good, ends[number], ends[number + 1], wrong, wrong_sequences, through if through >= 0 else None))
    return out


def _mask(where: Array) -> "pa.Array":
    import pyarrow as pa

    return pa.array(where)


def _bad_rows(table: "pa.Table", broken: Array, at: Array, expected: Expected) -> tuple[BadRow, ...]:
    out = []
    kept: dict[int, int] = {}
    for index in at:
        number = int(broken[index])
        kept[number] = kept.get(number, 0) + 1
        if kept[number] > KEPT_PER_REASON:
            continue
        row = table.slice(int(index), 1).to_pylist()[0]
        text = json.dumps({name: value for name, value in row.items() if value is not None}, ensure_ascii=False)
        out.append(BadRow(row["sequence"], row["minute_us"], RULES[number].reason(row, expected), 1, text[:RECORD_LIMIT]))
    for number, count in kept.items():
        if count > KEPT_PER_REASON:
            out.append(BadRow(None, None, f"rule {RULES[number].name} broken by more rows of one response", count - KEPT_PER_REASON, None))
    return tuple(out)
