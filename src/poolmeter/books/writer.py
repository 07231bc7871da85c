"""The one way to write the books: decisions, their states, and the log of who changed what, when and why.

SQLite in WAL mode. Several processes may open the same books; every call is one transaction.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from sqlalchemy import Connection, Engine, RowMapping, Table, create_engine, event, func, insert, inspect, select, update
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.pool import NullPool

from poolmeter.books.disk import refuse_network
from poolmeter.books.models import BOOKS_VERSION, Base, DecisionRow, LogRow, VersionRow
from poolmeter.books.states import OUTCOMES, check_transition, outcome_moves
from poolmeter.clock import Clock, SystemClock
from poolmeter.errors import BadInput, DataError, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState

BUSY_MS = 5000
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
    """One change of a decision."""

    number: int
    decision_id: str
    at_us: int
    by: str
    from_state: str | None
    to_state: str
    reason: str | None


_FIELDS = tuple(field.name for field in fields(Decision))
_decisions = cast(Table, DecisionRow.__table__)
_log = cast(Table, LogRow.__table__)


class Books:
    """The books at a path; created when missing. A context manager.

    Raises BadInput (network file system, another version), DataError (no SQLite file), Unavailable (no permission).
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or SystemClock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"books {path} cannot be written: {error.strerror}") from None
        refuse_network(path)
        self._engine = _engine(path)
        try:
            with self._transaction() as connection:
                _check_version(connection, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Books":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def add_decisions(self, decisions: Sequence[Decision], by: str = "recommender") -> Sequence[Booked]:
        """Enter proposals, all or none. A sequence of 0 is replaced by the node's next; the same decision again changes nothing.

        Raises Refused when an id is taken by another decision, a sequence by another id, or a decision is not `proposed`.
        """
        out = []
        with self._transaction() as connection:
            for decision in decisions:
                out.append(self._add(connection, decision, by))
        return out

    def get(self, decision_id: str) -> Booked:
        """One decision. Raises NotInBooks."""
        with self._transaction() as connection:
            return _find(connection, decision_id)

    def list(self, state: DecisionState | None = None, node: str | None = None) -> Sequence[Booked]:
        """Decisions by node and sequence."""
        wanted = select(_decisions).order_by(_decisions.c.node, _decisions.c.sequence)
        if state is not None:
            wanted = wanted.where(_decisions.c.state == state.value)
        if node is not None:
            wanted = wanted.where(_decisions.c.node == node)
        with self._transaction() as connection:
            return [_booked(row) for row in connection.execute(wanted).mappings()]

    def log(self, decision_id: str | None = None) -> Sequence[LogEntry]:
        """Changes, oldest first."""
        wanted = select(_log).order_by(_log.c.number)
        if decision_id is not None:
            wanted = wanted.where(_log.c.decision_id == decision_id)
        with self._transaction() as connection:
            return [LogEntry(**row) for row in connection.execute(wanted).mappings()]

    def next_sequence(self, node: str) -> int:
        """The sequence that the node's next decision gets; 1 for the first."""
        with self._transaction() as connection:
            return _next_sequence(connection, node)

    def transition(self, decision_id: str, to_state: DecisionState, by: str, reason: str | None = None) -> Booked:
        """Move a decision. Raises NotInBooks, and Refused when the state machine forbids it or the approval comes after the expiry."""
        now = self._clock.wall_us()
        with self._transaction() as connection:
            found = _find(connection, decision_id).decision
            check_transition(decision_id, found.state, to_state)
            if to_state is DecisionState.APPROVED and found.expires_us <= now:
                raise Refused(f"decision {decision_id} expired at {found.expires_us} us, expected an approval before that; now is {now}")
            values = {"state": to_state.value, "state_reason": reason, "decided_by": by, "decided_at_us": now}
            _change(connection, decision_id, values)
            _enter(connection, decision_id, now, by, found.state, to_state, reason)
            return _find(connection, decision_id)

    def record_outcome(self, decision_id: str, node: str, outcome: str, reason: str | None, at_us: int) -> bool:
        """Take in the enforcer's word on a decision of `node`; False when that changes nothing (told before, unknown, another node's).

        The outcome is kept even where the state may not follow it; the log then says so.
        """
        if outcome not in {state.value for state in OUTCOMES}:
            return False
        wanted = DecisionState(outcome)
        with self._transaction() as connection:
            row = connection.execute(select(_decisions).where(_decisions.c.id == decision_id)).mappings().first()
            if row is None or row["node"] != node or row["outcome"] == outcome:
                return False
            found = DecisionState(row["state"])
            moves = outcome_moves(found, wanted)
            values: dict[str, object] = {"outcome": outcome, "outcome_reason": reason, "outcome_at_us": at_us}
            if moves:
                values |= {"state": outcome, "state_reason": reason}
            _change(connection, decision_id, values)
            note = (
                reason if moves or found is wanted else f"{outcome} by the enforcer although {found.value}: {reason or 'no reason given'}"
            )
            _enter(connection, decision_id, at_us, f"enforcer@{node}", found, wanted if moves else found, note)
            return True

    def expire_due(self) -> int:
        """Expire what nobody approved in time, and what was approved and never answered; how many."""
        now = self._clock.wall_us()
        proposed, approved = DecisionState.PROPOSED, DecisionState.APPROVED
        due = ((_decisions.c.state == proposed.value) & (_decisions.c.expires_us <= now)) | (
            (_decisions.c.state == approved.value) & (_decisions.c.expires_us + ANSWER_US <= now)
        )
        with self._transaction() as connection:
            rows = connection.execute(select(_decisions.c.id, _decisions.c.state).where(due)).all()
            for decision_id, state in rows:
                reason = "not approved in time" if state == proposed.value else "no answer of the enforcer"
                _change(connection, decision_id, {"state": DecisionState.EXPIRED.value, "state_reason": reason})
                _enter(connection, decision_id, now, "collector", DecisionState(state), DecisionState.EXPIRED, reason)
            return len(rows)

    def _add(self, connection: Connection, decision: Decision, by: str) -> Booked:
        if decision.state is not DecisionState.PROPOSED:
            raise Refused(f"decision {decision.id} is {decision.state.value}, expected proposed")
        if not decision.id or not decision.node:
            raise BadInput(f"decision id and node are {decision.id!r} and {decision.node!r}, expected text")
        row = connection.execute(select(_decisions).where(_decisions.c.id == decision.id)).mappings().first()
        if row is not None:
            known = _booked(row)
            if replace(known.decision, state=decision.state, sequence=decision.sequence or known.decision.sequence) == replace(
                decision, sequence=decision.sequence or known.decision.sequence
            ):
                return known
            raise Refused(f"decision {decision.id} is in the books with other content, expected a new id")
        numbered = decision if decision.sequence > 0 else replace(decision, sequence=_next_sequence(connection, decision.node))
        values = {name: getattr(numbered, name) for name in _FIELDS} | {"state": numbered.state.value}
        try:
            connection.execute(insert(_decisions).values(**values))
        except IntegrityError:
            raise Refused(
                f"sequence {numbered.sequence} of node {numbered.node} is taken, expected {_next_sequence(connection, numbered.node)}"
            ) from None
        _enter(connection, numbered.id, self._clock.wall_us(), by, None, numbered.state, numbered.reason)
        return _find(connection, numbered.id)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except DatabaseError as error:
            text = str(error.orig)
            if "not a database" in text or "malformed" in text:
                raise DataError(f"books {self.path} are no SQLite database: {text}") from None
            raise Unavailable(f"books {self.path} cannot be used: {text}") from None


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": BUSY_MS / 1000, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: object, _: object) -> None:
        # SQLAlchemy's own BEGIN is deferred: two writers that have read first would deadlock instead of waiting.
        connection.isolation_level = None  # type: ignore[attr-defined]
        for pragma in (f"busy_timeout = {BUSY_MS}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")  # type: ignore[attr-defined]

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _check_version(connection: Connection, path: Path) -> None:
    tables = inspect(connection).get_table_names()
    if not tables:
        Base.metadata.create_all(connection)
        connection.execute(insert(VersionRow).values(version=BOOKS_VERSION))
        return
    found = connection.execute(select(VersionRow.version)).scalars().all() if VersionRow.__tablename__ in tables else []
    if list(found) != [BOOKS_VERSION]:
        text = found[0] if len(found) == 1 else "absent"
        raise BadInput(f"books {path} have version {text}, expected {BOOKS_VERSION}")


def _next_sequence(connection: Connection, node: str) -> int:
    return (
        int(connection.execute(select(func.coalesce(func.max(_decisions.c.sequence), 0)).where(_decisions.c.node == node)).scalar_one()) + 1
    )


def _find(connection: Connection, decision_id: str) -> Booked:
    row = connection.execute(select(_decisions).where(_decisions.c.id == decision_id)).mappings().first()
    if row is None:
        raise NotInBooks(f"decision {decision_id!r} is not in the books, expected an id of poolmeter history")
    return _booked(row)


def _booked(row: RowMapping) -> Booked:
    values = dict(row)
    decision = Decision(**{name: values.pop(name) for name in _FIELDS if name != "state"}, state=DecisionState(values.pop("state")))
    return Booked(decision, **values)


def _change(connection: Connection, decision_id: str, values: Mapping[str, object]) -> None:
    connection.execute(update(_decisions).where(_decisions.c.id == decision_id).values(**values))


def _enter(
    connection: Connection, decision_id: str, at_us: int, by: str, found: DecisionState | None, wanted: DecisionState, reason: str | None
) -> None:
    values = {"decision_id": decision_id, "at_us": at_us, "by": by, "to_state": wanted.value, "reason": reason}
    connection.execute(insert(_log).values(**values, from_state=found.value if found else None))
