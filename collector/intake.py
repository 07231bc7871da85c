"""What of a checked batch is new to the store: known rows are dropped, rows of days whose minutes are gone go to quarantine."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poolmeter.collector.check import KEPT_PER_REASON, RECORD_LIMIT, Checked
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.tables import MEASURES, SegmentKind
from poolmeter.model.units import DAY_US

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Batch:
    """One checked response of one node's spool."""

    node: str
    epoch: str
    checked: Checked
    received_us: int


@dataclass(frozen=True)
class New:
    """New rows of the wide table, new rows of quarantine, and how many rows were known."""

    rows: "pa.Table"
    quarantine: list[dict[str, Any]]
    known: int


def new_rows(batch: Batch, sequences: dict[tuple[str, str], Ranges], closed: Collection[tuple[SegmentKind, int]]) -> New:
    """What of a batch is new; `sequences` takes it in.

    `closed` names (kind, number of the day) whose minute rows are gone while their hours or days are kept: rolled up anew from a late row
    alone, such a day would lose all the others.
    """
    import numpy as np
    import pyarrow as pa

    ranges = sequences.get((batch.node, batch.epoch), Ranges())
    found = batch.checked.good.column("sequence").to_numpy()
    known = ranges.known(found)
    table = batch.checked.good.filter(pa.array(~known)) if known.any() else batch.checked.good
    bad_found = np.array(batch.checked.bad_sequences, np.int64)
    bad_known = set(bad_found[ranges.known(bad_found)].tolist()) if len(bad_found) else set()
    again = len(bad_found) > 0 and len(bad_known) == len(set(bad_found.tolist()))
    head = {"node": batch.node, "epoch": batch.epoch, "received_us": batch.received_us}
    bad = [
        head | {"sequence": row.sequence, "minute_us": row.minute_us, "reason": row.reason, "rows": row.rows, "record": row.record}
        for row in batch.checked.bad
        if row.sequence not in bad_known and not (row.sequence is None and again)
    ]
    sequences[(batch.node, batch.epoch)] = ranges.including(np.concatenate([found, bad_found]) if len(bad_found) else found)
    table, late = _split_late(table, closed)
    return New(table, bad + [head | row for row in late], int(known.sum()))


def _split_late(table: "pa.Table", closed: Collection[tuple[SegmentKind, int]]) -> tuple["pa.Table", list[dict[str, Any]]]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not closed or not table.num_rows:
        return table, []
    days = table.column("minute_us").to_numpy() // DAY_US
    if days.min() > max(day for _, day in closed):
        return table, []
    late = np.zeros(table.num_rows, bool)
    for kind in MEASURES:
        of_kind = pc.equal(table.column("kind"), kind.value).to_numpy()
        late |= of_kind & np.isin(days, [day for found, day in closed if found is kind])
    if not late.any():
        return table, []
    reason = "the minutes of its day are kept no more, expected a row of a day that still has them"
    rows = table.filter(pa.array(late))
    out = []
    for row in rows.slice(0, KEPT_PER_REASON).to_pylist():
        text = json.dumps({name: value for name, value in row.items() if value is not None}, ensure_ascii=False)[:RECORD_LIMIT]
        out.append({"sequence": row["sequence"], "minute_us": row["minute_us"], "reason": reason, "rows": 1, "record": text})
    if rows.num_rows > len(out):
        out.append({"sequence": None, "minute_us": None, "reason": reason, "rows": rows.num_rows - len(out), "record": None})
    return table.filter(pa.array(~late)), out
