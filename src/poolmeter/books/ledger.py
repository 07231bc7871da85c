"""The one way rows of the books change: each change is entered in the log, in the transaction that makes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Table, func, insert, select, update

from poolmeter.books.models import ChangeRow
from poolmeter.errors import BadInput

_log = cast(Table, ChangeRow.__table__)
# Columns that are not in the log: a hash that nobody needs there, and what is no change by anybody.
UNLOGGED = frozenset({"secret_sha256", "last_used_us"})
INT64 = 1 << 63

Row = Mapping[Any, Any]  # a row of a table by column, as the database gave it or as it was written


@dataclass(frozen=True)
class Change:
    """One row that was added (`before` is None) or changed. `before` and `after` are the row's columns.

    In the entries that books of version 1 had of decisions they are the state alone.
    """

    number: int
    transaction_id: str
    at_us: int
    by: str
    subject: str
    key: str
    reason: str | None
    before: Mapping[str, object] | None
    after: Mapping[str, object]


class Writing:
    """A transaction that writes: its connection, its name in the log, and when it began."""

    def __init__(self, connection: Connection, transaction: str, now_us: int) -> None:
        self.connection = connection
        self.transaction = transaction
        self.now_us = now_us
        self._number: int | None = None

    def add(self, table: Table, values: Mapping[str, object], by: str, reason: str | None) -> Row:
        """The row, inserted. `values` has its key `id`; what it leaves out is None."""
        row = {column.name: values.get(column.name) for column in table.columns}
        self.connection.execute(insert(table).values(**fit(row)))
        self._enter(table, by, reason, None, row)
        return row

    def change(self, table: Table, key: str, values: Mapping[str, object], by: str, reason: str | None) -> Row:
        """The row with `key`, which must be there, with `values` changed."""
        before = self.connection.execute(select(table).where(table.c.id == key)).mappings().one()
        self.connection.execute(update(table).where(table.c.id == key).values(**fit(values)))
        after = {**before, **values}
        self._enter(table, by, reason, before, after)
        return after

    def _enter(self, table: Table, by: str, reason: str | None, before: Row | None, after: Row) -> None:
        # Counted here, not by the database: a transaction that is undone leaves no gap. Nobody else writes meanwhile.
        if self._number is None:
            self._number = int(self.connection.execute(select(func.coalesce(func.max(_log.c.number), 0))).scalar_one())
        self._number += 1
        values = {"number": self._number, "transaction_id": self.transaction, "at_us": self.now_us, "by": by, "reason": reason}
        values |= {"subject": table.name, "key": after["id"], "before": before and _as_json(before), "after": _as_json(after)}
        self.connection.execute(insert(_log).values(**fit(values)))


def is_in_log(connection: Connection, transaction: str) -> bool:
    """Whether the log has an entry of this transaction."""
    return connection.execute(select(_log.c.number).where(_log.c.transaction_id == transaction).limit(1)).first() is not None


def changes(
    connection: Connection,
    subject: str | None = None,
    key: str | None = None,
    start_us: int | None = None,
    end_us: int | None = None,
    after_number: int = 0,
    limit: int | None = None,
) -> Sequence[Change]:
    """Entries of the log, oldest first: of a table, of one row of it, of [start, end), after a number, so many at most."""
    wanted = select(_log).where(_log.c.number > after_number).order_by(_log.c.number).limit(limit)
    if subject is not None:
        wanted = wanted.where(_log.c.subject == subject)
    if key is not None:
        wanted = wanted.where(_log.c.key == key)
    if start_us is not None:
        wanted = wanted.where(_log.c.at_us >= start_us)
    if end_us is not None:
        wanted = wanted.where(_log.c.at_us < end_us)
    return [_change(row) for row in connection.execute(wanted).mappings()]


def fit(values: Mapping[str, object]) -> Mapping[str, object]:
    """`values`, which every back end can hold. Raises BadInput on text with NUL or half a character, and on integers beyond 64 bits."""
    for name, value in values.items():
        if isinstance(value, str) and not is_text(value):
            raise BadInput(f"{name} is {value!r:.60}, expected text without NUL and lone surrogates")
        if isinstance(value, int) and not -INT64 <= value < INT64:
            raise BadInput(f"{name} is {value!r:.60}, expected an integer of 64 bits")
    return values


def is_text(value: str) -> bool:
    """Whether every back end can hold it."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _as_json(row: Row) -> str:
    kept = {name: value for name, value in row.items() if name not in UNLOGGED}
    return json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _change(row: Row) -> Change:
    values = dict(row)
    before, after = values.pop("before"), values.pop("after")
    return Change(**values, before=None if before is None else json.loads(before), after=json.loads(after))
