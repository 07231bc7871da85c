"""Writers beside each other: whatever they do, the books are such as one after the other would have left them, and each was told so."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from books_decisions import NOW, decision
from books_places import Places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poolmeter.books.tokens import Role
from poolmeter.books.upgrade import upgrade
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.errors import PoolmeterError
from poolmeter.model.decision import DecisionState

Operation = tuple[Any, ...]
# Half of the decisions are due already, so that expiring them meets approvals and outcomes.
ADD = st.tuples(st.just("add"), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from(["n1", "n2"]))
MOVE = st.tuples(st.just("move"), st.integers(0, 4), st.sampled_from([DecisionState.APPROVED, DecisionState.REJECTED]))
OUTCOME = st.tuples(st.just("outcome"), st.integers(0, 4), st.sampled_from(["applied", "refused"]))
TOKEN = st.tuples(st.just("token"), st.integers(0, 1))
OPERATION = st.one_of(ADD, ADD, MOVE, OUTCOME, TOKEN)
# Only the first writer expires: that operation leaves no mark in the log that says whose it was.
WRITERS = st.tuples(
    st.lists(st.one_of(OPERATION, st.just(("expire",))), max_size=4), st.lists(OPERATION, max_size=4), st.lists(OPERATION, max_size=4)
)


def act(books: Books, operation: Operation, mark: str) -> Any:
    """What the caller is told, an error's sentence included. `mark` ends up in the log."""
    verb = operation[0]
    try:
        if verb == "add":
            wanted = [decision(number, operation[2], expires_us=NOW - number % 2) for number in operation[1]]
            return [(booked.decision.sequence, booked.decision.state) for booked in books.add_decisions(wanted, by=mark)]
        if verb == "move":
            return books.transition(f"d{operation[1]}", operation[2], mark)
        if verb == "outcome":
            return books.record_outcome(f"d{operation[1]}", "n1", operation[2], mark, NOW)
        if verb == "token":
            return books.tokens.add(f"t{operation[1]}", Role.ADMIN, mark)[0].name
        return books.expire_due()
    except PoolmeterError as error:
        return f"{type(error).__name__}: {error}"


def said(books: Books) -> list[tuple[Any, ...]]:
    """The log without what is different each time: transactions and the ids of tokens."""
    return [
        (
            change.number,
            change.at_us,
            change.by,
            change.subject,
            change.reason,
            {**(change.before or {}), "id": 0},
            {**change.after, "id": 0},
        )
        for change in books.changes()
    ]


def order_of(books: Books) -> list[str]:
    """The marks of the transactions that wrote, in the order in which they did."""
    found: dict[str, str] = {}
    for change in books.changes():
        mark = "expire" if change.by == "collector" else change.by
        if change.by.startswith("enforcer@"):
            mark = str(change.reason).rpartition(" ")[2]
        found.setdefault(change.transaction_id, mark)
    return list(found.values())


@settings(max_examples=settings().max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(writers=WRITERS)
def test_any_interleaving_is_some_serial_order(places: Places, tmp_path: Path, writers: tuple[list[Operation], ...]) -> None:
    place, clock = places.ready(), ManualClock(NOW - 1)
    gate = threading.Barrier(len(writers))

    def run(writer: int) -> list[Any]:
        with Books(place, clock) as own:
            gate.wait()
            return [act(own, operation, f"w{writer}.{index}") for index, operation in enumerate(writers[writer])]

    with ThreadPoolExecutor(len(writers)) as pool:
        told = list(pool.map(run, range(len(writers))))
    with Books(place, clock) as books:
        order, after = order_of(books), said(books)
    serial = tmp_path / "serial.sqlite"
    serial.unlink(missing_ok=True)
    upgrade(serial)

    def tried(operation: Operation, mark: str) -> tuple[Any, int]:
        """What would be told now, and how many changes that would make; on a copy."""
        copy = tmp_path / "copy.sqlite"
        shutil.copyfile(serial, copy)
        with Books(copy, clock) as books:
            before = len(books.changes())
            return act(books, operation, mark), len(books.changes()) - before

    position = [0] * len(writers)

    def pass_by() -> None:
        """Let every writer go past what changed nothing, as soon as it may."""
        for writer, operations in enumerate(writers):
            while position[writer] < len(operations):
                operation, mark = operations[position[writer]], f"w{writer}.{position[writer]}"
                if mark in order or (operation == ("expire",) and told[writer][position[writer]] != 0):
                    break
                if tried(operation, mark) != (told[writer][position[writer]], 0):
                    break
                position[writer] += 1

    pass_by()
    for mark in order:
        waiting = [writer for writer, operations in enumerate(writers) if position[writer] < len(operations)]
        writer = next(
            writer
            for writer in waiting
            if f"w{writer}.{position[writer]}" == mark or (mark == "expire" and writers[writer][position[writer]] == ("expire",))
        )
        with Books(serial, clock) as books:
            assert act(books, writers[writer][position[writer]], mark) == told[writer][position[writer]]
        position[writer] += 1
        pass_by()
    assert position == [len(operations) for operations in writers]
    with Books(serial, clock) as books:
        assert said(books) == after
