"""The one way to write the books: decisions and their states, tokens, and the log of who changed what, when and why.

Several processes may open the same books; every call is one transaction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, Select, Table, and_, func, or_, select

from poolmeter.books.assets import Assets
from poolmeter.books.backup import backup
from poolmeter.books.database import Database
from poolmeter.books.ledger import Change, Row, Writing, changes, fit, is_text
from poolmeter.books.models import DecisionRow
from poolmeter.books.states import OUTCOMES, check_transition, outcome_moves
from poolmeter.books.tokens import Tokens
from poolmeter.clock import Clock, SystemClock
from poolmeter.errors import BadInput, Refused
from poolmeter.model.decision import Decision, DecisionState

# How long after its expiry an approved decision may still be answered by the enforcer before it is given up.
ANSWER_US = 3600 * 1_000_000


class NotInBooks(BadInput):
    """A decision id that the books do not know."""


@dataclass(frozen=True)
class Booked:
    """A decision as it stands in the books. `outcome` is the enforcer's word: applied, refused or expired."""

    decision: Decision
    state_reason: str | None
    decided_by: str | None
    decided_at_us: int | None
    outcome: str | None
    outcome_reason: str | None
    outcome_at_us: int | None


@dataclass(frozen=True)
class LogEntry:
    """One change of a decision, as its log tells it: `number` is its place among all changes of the books."""

    number: int
    decision_id: str
    at_us: int
    by: str
    from_state: str | None
    to_state: str
    reason: str | None


_FIELDS = tuple(field.name for field in fields(Decision))
_decisions = cast(Table, DecisionRow.__table__)


class Books:
    """The books at a path (SQLite) or a URL (PostgreSQL); their tables are made when missing. A context manager.

    Books of an older revision are brought up with `upgrade` and refused without. Raises BadInput (another revision, a network file
    system, a URL with a password), DataError (no SQLite file), Unavailable (no permission, no server, no driver).
    """

    def __init__(self, where: Path | str, clock: Clock | None = None, upgrade: bool = False) -> None:
        self._where = where
        self._clock = clock or SystemClock()
        self._database = Database(where, self._clock, upgrade)
        self.name = self._database.name
        self.tokens = Tokens(self._database, self._clock)
        self.assets = Assets(self._database)

    def __enter__(self) -> "Books":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file or the server."""
        self._database.close()

    def backup_to(self, path: Path) -> None:
        """A copy of the books as they are at one moment, in a new file, beside whoever writes. Raises BadInput for PostgreSQL's."""
        backup(self._where, path)

    def add_decisions(self, decisions: Sequence[Decision], by: str = "recommender") -> Sequence[Booked]:
        """Enter proposals, all or none. A sequence of 0 is replaced by the node's next; the same decision again changes nothing.

        Raises Refused when an id is taken by another decision, a sequence by another id, or a decision is not `proposed`.
        """
        return self._database.write(lambda writing: [_add(writing, decision, by) for decision in decisions])

    def get(self, decision_id: str) -> Booked:
        """One decision. Raises NotInBooks."""
        return self._database.read(lambda connection: _find(connection, decision_id))

    def list(
        self, state: DecisionState | None = None, node: str | None = None, after: str | None = None, limit: int | None = None
    ) -> Sequence[Booked]:
        """Decisions by node and sequence: those behind the one with the id `after`, `limit` at most. Raises NotInBooks for another id."""
        wanted = select(_decisions)
        if state is not None:
            wanted = wanted.where(_decisions.c.state == state.value)
        if node is not None:
            if not is_text(node):
                return []
            wanted = wanted.where(_decisions.c.node == node)
        return self._database.read(lambda connection: _page(connection, wanted, after, limit))

    def log(self, decision_id: str | None = None) -> Sequence[LogEntry]:
        """Changes of decisions, oldest first."""
        return [_entry(change) for change in self.changes(_decisions.name, decision_id)]

    def changes(
        self,
        subject: str | None = None,
        key: str | None = None,
        start_us: int | None = None,
        end_us: int | None = None,
        after_number: int = 0,
        limit: int | None = None,
    ) -> Sequence[Change]:
        """All changes, oldest first: of a table, of one row of it, made in [start, end), after a number, so many at most."""
        if not all(is_text(text) for text in (subject, key) if text is not None):
            return []
        return self._database.read(lambda connection: changes(connection, subject, key, start_us, end_us, after_number, limit))

    def next_sequence(self, node: str) -> int:
        """The sequence that the node's next decision gets; 1 for the first."""
        return self._database.read(lambda connection: _next_sequence(connection, node))

    def transition(self, decision_id: str, to_state: DecisionState, by: str, reason: str | None = None) -> Booked:
        """Move a decision. Raises NotInBooks, and Refused when the state machine forbids it or the approval comes after the expiry."""

        def move(writing: Writing) -> Booked:
            now = writing.now_us
            found = _find(writing.connection, decision_id).decision
            check_transition(decision_id, found.state, to_state)
            if to_state is DecisionState.APPROVED and found.expires_us <= now:
                raise Refused(f"decision {decision_id} expired at {found.expires_us} us, expected an approval before that; now is {now}")
            values = {"state": to_state.value, "state_reason": reason, "decided_by": by, "decided_at_us": now}
            return _booked(writing.change(_decisions, decision_id, values, by, reason))

        return self._database.write(move)

    def record_outcome(self, decision_id: str, node: str, outcome: str, reason: str | None, at_us: int) -> bool:
        """Take in the enforcer's word on a decision of `node`; False when that changes nothing (told before, unknown, another node's).

        The outcome is kept even where the state may not follow it; the log then says so.
        """
        if outcome not in {state.value for state in OUTCOMES} or not is_text(decision_id):
            return False
        wanted = DecisionState(outcome)
        # It comes from a node: what the books cannot hold must not keep the rest of its records waiting.
        said = None if reason is None else "".join(character if is_text(character) else "\ufffd" for character in reason)

        def take(writing: Writing) -> bool:
            row = _row(writing.connection, decision_id)
            if row is None or row["node"] != node or row["outcome"] == outcome:
                return False
            found = DecisionState(row["state"])
            moves = outcome_moves(found, wanted)
            values: dict[str, object] = {"outcome": outcome, "outcome_reason": said, "outcome_at_us": at_us}
            if moves:
                values |= {"state": outcome, "state_reason": said}
            late = f"{outcome} by the enforcer although {found.value}: {said or 'no reason given'}"
            writing.change(_decisions, decision_id, values, f"enforcer@{node}", said if moves or found is wanted else late)
            return True

        return self._database.write(take)

    def expire_due(self) -> int:
        """Expire what nobody approved in time, and what was approved and never answered; how many."""
        proposed, approved = DecisionState.PROPOSED, DecisionState.APPROVED

        def expire(writing: Writing) -> int:
            due = ((_decisions.c.state == proposed.value) & (_decisions.c.expires_us <= writing.now_us)) | (
                (_decisions.c.state == approved.value) & (_decisions.c.expires_us <= writing.now_us - ANSWER_US)
            )
            rows = writing.connection.execute(select(_decisions.c.id, _decisions.c.state).where(due)).all()
            for decision_id, state in sorted(tuple(row) for row in rows):
                reason = "not approved in time" if state == proposed.value else "no answer of the enforcer"
                values = {"state": DecisionState.EXPIRED.value, "state_reason": reason}
                writing.change(_decisions, decision_id, values, "collector", reason)
            return len(rows)

        return self._database.write(expire)


def _add(writing: Writing, decision: Decision, by: str) -> Booked:
    if decision.state is not DecisionState.PROPOSED:
        raise Refused(f"decision {decision.id} is {decision.state.value}, expected proposed")
    if not decision.id or not decision.node:
        raise BadInput(f"decision id and node are {decision.id!r} and {decision.node!r}, expected text")
    fit({name: getattr(decision, name) for name in _FIELDS})  # before anything is looked up by it
    connection = writing.connection
    row = _row(connection, decision.id)
    if row is not None:
        known = _booked(row)
        if replace(known.decision, state=decision.state, sequence=decision.sequence or known.decision.sequence) == replace(
            decision, sequence=decision.sequence or known.decision.sequence
        ):
            return known
        raise Refused(f"decision {decision.id} is in the books with other content, expected a new id")
    numbered = decision if decision.sequence > 0 else replace(decision, sequence=_next_sequence(connection, decision.node))
    values: Mapping[str, object] = {name: getattr(numbered, name) for name in _FIELDS} | {"state": numbered.state.value}
    taken = select(_decisions.c.id).where(_decisions.c.node == numbered.node, _decisions.c.sequence == numbered.sequence)
    if connection.execute(taken).first() is not None:
        expected = _next_sequence(connection, numbered.node)
        raise Refused(f"sequence {numbered.sequence} of node {numbered.node} is taken, expected {expected}")
    return _booked(writing.add(_decisions, values, by, numbered.reason))


def _next_sequence(connection: Connection, node: str) -> int:
    return (
        int(connection.execute(select(func.coalesce(func.max(_decisions.c.sequence), 0)).where(_decisions.c.node == node)).scalar_one()) + 1
    )


def _row(connection: Connection, decision_id: str) -> Row | None:
    return connection.execute(select(_decisions).where(_decisions.c.id == decision_id)).mappings().first()


def _page(connection: Connection, wanted: Select[Any], after: str | None, limit: int | None) -> list[Booked]:
    # By code points everywhere: PostgreSQL's own order of text depends on its locale.
    node = _decisions.c.node.collate("C") if connection.dialect.name == "postgresql" else _decisions.c.node
    if after is not None:
        last = _find(connection, after).decision
        wanted = wanted.where(or_(node > last.node, and_(_decisions.c.node == last.node, _decisions.c.sequence > last.sequence)))
    return [_booked(row) for row in connection.execute(wanted.order_by(node, _decisions.c.sequence).limit(limit)).mappings()]


def _find(connection: Connection, decision_id: str) -> Booked:
    row = _row(connection, decision_id) if is_text(decision_id) else None
    if row is None:
        raise NotInBooks(f"decision {decision_id!r} is not in the books, expected an id of poolmeter history")
    return _booked(row)


def _booked(row: Row) -> Booked:
    values = dict(row)
    decision = Decision(**{name: values.pop(name) for name in _FIELDS if name != "state"}, state=DecisionState(values.pop("state")))
    return Booked(decision, **values)


def _entry(change: Change) -> LogEntry:
    found = None if change.before is None else str(change.before["state"])
    return LogEntry(change.number, change.key, change.at_us, change.by, found, str(change.after["state"]), change.reason)
