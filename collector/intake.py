"""What of a checked batch is new to the store: known rows are dropped, rows of days whose minutes are gone go to quarantine."""

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poolmeter.collector.check import KEPT_PER_REASON, RECORD_LIMIT, Checked
from poolmeter.collector.sequences import Ranges
from poolmeter.collector.tables import MEASURES, SegmentKind
from poolmeter.model.units import DAY_US

if TYPE_CHECKING:
    import numpy as np
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
    """New rows of the wide table (None: no batch), new rows of quarantine, and how many rows were known."""

    rows: "pa.Table | None"
    quarantine: list[dict[str, Any]]
    known: int


def new_rows(batches: Sequence[Batch], sequences: dict[tuple[str, str], Ranges], closed: Collection[tuple[SegmentKind, int]]) -> New:
    """What of some batches is new; `sequences` takes it in.

    `closed` names (kind, number of the day) whose minute rows are gone while their hours or days are kept: rolled up anew from a late row
    alone, such a day would lose all the others.
    """
    import pyarrow as pa

    tables, quarantine, known = [], list[dict[str, Any]](), 0
    for _, together in itertools.groupby(batches, key=lambda batch: id(batch.checked.whole)):
        new = _new_of(list(together), sequences, closed)
        tables.append(new.rows)
        quarantine += new.quarantine
        known += new.known
    # In one piece: what follows costs as much for each piece as for a thousand rows.
    joined = pa.concat_tables(tables).combine_chunks() if len(tables) > 1 else tables[0] if tables else None
    return New(joined, quarantine, known)


def _new_of(batches: Sequence[Batch], sequences: dict[tuple[str, str], Ranges], closed: Collection[tuple[SegmentKind, int]]) -> New:
    """The same of batches that were checked together: their good rows are parts of one table, which often is new as a whole."""
    import numpy as np
    import pyarrow as pa

    whole = batches[0].checked.whole
    found = whole.column("sequence").to_numpy()
    late = _late(whole, closed)
    fresh = np.zeros(len(found), bool)
    quarantine: list[dict[str, Any]] = []
    known = 0
    for batch in batches:
        checked, key = batch.checked, (batch.node, batch.epoch)
        ranges = sequences.get(key, Ranges())
        mine = slice(checked.start, checked.stop)
        own, new = found[mine], ~ranges.known(found[mine])
        known += len(own) - int(np.count_nonzero(new))
        if checked.bad:
            quarantine += _new_bad(batch, ranges)
            own = np.concatenate([own, np.array(checked.bad_sequences, np.int64)])
        if late is not None and (new & late[mine]).any():
            quarantine += _too_late(batch, checked.good.filter(pa.array(new & late[mine])))
            new &= ~late[mine]
        fresh[mine] = new
        sequences[key] = ranges.including(own)
    return New(whole if fresh.all() else whole.filter(pa.array(fresh)), quarantine, known)


def _new_bad(batch: Batch, ranges: Ranges) -> list[dict[str, Any]]:
    """Rows of quarantine for what broke a rule and is not there already."""
    import numpy as np

    found = np.array(batch.checked.bad_sequences, np.int64)
    known = set(found[ranges.known(found)].tolist()) if len(found) else set()
    again = len(found) > 0 and len(known) == len(set(found.tolist()))
    head = {"node": batch.node, "epoch": batch.epoch, "received_us": batch.received_us}
    return [
        head | {"sequence": row.sequence, "minute_us": row.minute_us, "reason": row.reason, "rows": row.rows, "record": row.record}
        for row in batch.checked.bad
        if row.sequence not in known and not (row.sequence is None and again)
    ]


def _late(table: "pa.Table", closed: Collection[tuple[SegmentKind, int]]) -> "np.ndarray[Any, Any] | None":
    """Where rows are of closed days; None: nowhere."""
    import numpy as np
    import pyarrow.compute as pc

    if not closed or not table.num_rows:
        return None
    days = table.column("minute_us").to_numpy() // DAY_US
    if days.min() > max(day for _, day in closed):
        return None
    late = np.zeros(table.num_rows, bool)
    for kind in MEASURES:
        of_kind = pc.equal(table.column("kind"), kind.value).to_numpy()
        late |= of_kind & np.isin(days, [day for found, day in closed if found is kind])
    return late if late.any() else None


def _too_late(batch: Batch, rows: "pa.Table") -> list[dict[str, Any]]:
    """Rows of quarantine for good ones that came after their day was closed."""
    head = {"node": batch.node, "epoch": batch.epoch, "received_us": batch.received_us}
    head |= {"reason": "the minutes of its day are kept no more, expected a row of a day that still has them"}
    out: list[dict[str, Any]] = []
    for row in rows.slice(0, KEPT_PER_REASON).to_pylist():
        text = json.dumps({name: value for name, value in row.items() if value is not None}, ensure_ascii=False)[:RECORD_LIMIT]
        out.append(head | {"sequence": row["sequence"], "minute_us": row["minute_us"], "rows": 1, "record": text})
    if rows.num_rows > len(out):
        out.append(head | {"sequence": None, "minute_us": None, "rows": rows.num_rows - len(out), "record": None})
    return out
