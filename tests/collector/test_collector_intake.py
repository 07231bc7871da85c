"""What of checked answers is new: the same whether they were checked together or each alone, in whatever order they come again."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from collector_fakes import DAY, EPOCH, NOW, device, event, slice_
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector.check import Expected, check_together
from poolmeter.collector.intake import Batch, new_rows
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.tables import SegmentKind
from poolmeter.model.units import DAY_US
from poolmeter.model.usage import UsageRecord

Sent = tuple[str, list[UsageRecord]]
CLOSED = [(SegmentKind.SLICE, DAY // DAY_US), (SegmentKind.DEVICE, DAY // DAY_US - 1)]


def sent(node: str, numbers: Sequence[int], days: int, wrong: bool) -> Sent:
    """An answer of a node: some sequences, on the day or days before it, some of them with a row that breaks a rule."""
    made: list[UsageRecord] = []
    for number in numbers:
        make = (device, slice_, event)[number % 3]
        broken = {"down_us": 7} if wrong and make is device else {}
        made.append(make(node, EPOCH, number, DAY - (number % (days + 1)) * DAY_US, **broken))
    return node, made


answers = st.builds(
    sent,
    st.sampled_from(["n1", "n2", "n3"]),
    st.lists(st.integers(1, 40), max_size=8, unique=True).map(sorted),
    st.integers(0, 2),
    st.booleans(),
)


def taken(groups: Sequence[Sequence[Sent]]) -> tuple[list[Any], list[Any], int, dict[tuple[str, str], Ranges]]:
    """What is new of groups of answers, each group checked together, all of them published at once."""
    batches = []
    for group in groups:
        expected = [Expected(node, EPOCH, 1000, NOW) for node, _ in group]
        found = check_together([(arrow.to_table(made), one) for (_, made), one in zip(group, expected, strict=True)])
        batches += [Batch(one.node, EPOCH, checked, NOW) for one, checked in zip(expected, found, strict=True)]
    sequences: dict[tuple[str, str], Ranges] = {("n1", EPOCH): Ranges(((10, 20),))}
    new = new_rows(batches, sequences, CLOSED)
    return new.rows.to_pylist() if new.rows is not None else [], new.quarantine, new.known, sequences


@given(st.lists(answers, max_size=6), st.lists(st.integers(0, 5), max_size=3))
def test_what_is_new_does_not_depend_on_what_was_checked_together(made: list[Sent], cuts: list[int]) -> None:
    edges = sorted({0, len(made), *(cut for cut in cuts if cut < len(made))})
    groups = [made[first:last] for first, last in itertools.pairwise(edges)]
    rows, quarantine, known, sequences = taken(groups)
    assert (rows, quarantine, known, sequences) == taken([[one] for one in made])
    # Nothing is counted twice, and nothing vanishes.
    assert len({(row["node"], row["sequence"]) for row in rows}) == len(rows)
    assert len(rows) + known + sum(row["rows"] for row in quarantine) <= sum(len(records) for _, records in made)
    for node, records in made:
        assert sequences.get((node, EPOCH), Ranges()).known(_numbers(records)).all()


def test_a_part_of_what_was_checked_together_is_stored_alone() -> None:
    group = [sent("n1", [1, 2, 3], 0, False), sent("n2", [1, 2], 0, False), sent("n3", [], 0, False)]
    expected = [Expected(node, EPOCH, 1000, NOW) for node, _ in group]
    found = check_together([(arrow.to_table(made), one) for (_, made), one in zip(group, expected, strict=True)])
    sequences: dict[tuple[str, str], Ranges] = {}
    new = new_rows([Batch("n2", EPOCH, found[1], NOW)], sequences, [])
    assert new.rows is not None and new.rows.column("node").to_pylist() == ["n2", "n2"] and sequences == {("n2", EPOCH): Ranges(((1, 2),))}


def _numbers(records: Sequence[UsageRecord]) -> Any:
    return np.array([record.sequence for record in records], np.int64)
