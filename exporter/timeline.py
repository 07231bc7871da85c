"""Promises over time: piecewise constant, changed only by events of the journal (or, without one, by allocation.json)."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from poolmeter.errors import DataError
from poolmeter.model.allocation import Allocation, AllocationState
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import from_plain, to_plain


@dataclass(frozen=True)
class Segment:
    """[start_us, end_us) in which the same allocations stood."""

    start_us: int
    end_us: int
    allocations: tuple[Allocation, ...]


@dataclass
class Timeline:
    """The allocations that stand at the cursor, and changes that lie ahead of it."""

    standing: dict[str, Allocation] = field(default_factory=dict)
    pending: list[tuple[int, Allocation]] = field(default_factory=list)
    last_sequence: int = 0
    last_at_us: int = 0

    def place(self, where: Callable[[Allocation], Allocation]) -> None:
        """Put promises that name a part of a card on the card, also those that are still to come."""
        self.standing = {key: where(allocation) for key, allocation in self.standing.items()}
        self.pending = [(at, where(allocation)) for at, allocation in self.pending]

    def learn(self, events: Iterable[JournalEvent]) -> tuple[list[JournalEvent], list[str]]:
        """Queue changes; returns the events that are new and what was wrong with the others.

        A journal may be read again from its start, and a new one may begin at sequence 1: what is neither numbered nor dated later than
        the last event is known already.
        """
        fresh, faults = [], []
        for event in events:
            if event.sequence <= self.last_sequence and event.at_us <= self.last_at_us:
                continue
            self.last_sequence, self.last_at_us = event.sequence, max(event.at_us, self.last_at_us)
            fresh.append(event)
            if event.allocation is None:
                continue
            try:
                allocation = from_plain(Allocation, event.allocation, f"event {event.sequence}: allocation")
            except DataError as error:
                faults.append(str(error))
                continue
            if event.kind == "released":
                allocation = _released(allocation)
            self.pending.append((event.at_us, allocation))
        return fresh, faults

    def adopt(self, allocations: Iterable[Allocation]) -> None:
        """Take over what allocation.json says where it is newer than the journal: a promise must not depend on one file."""
        newest = {allocation.id: allocation for allocation in self.standing.values()}
        newest.update({allocation.id: allocation for _, allocation in self.pending})
        for allocation in allocations:
            known = newest.get(allocation.id)
            if known is None and allocation.state is not AllocationState.RELEASED:
                self.pending.append((allocation.created_us, allocation))
            elif known is not None and allocation.changed_us > known.changed_us:
                self.pending.append((allocation.changed_us, allocation))

    def advance(self, start_us: int, end_us: int) -> Iterator[Segment]:
        """Segments that cover [start_us, end_us) without a gap, applying changes on the way.

        A change that came to light late (before `start_us`) applies from `start_us`; one at or after `end_us` stays pending.
        """
        self.pending.sort(key=lambda change: change[0])
        at = start_us
        while self.pending and self.pending[0][0] < end_us:
            when, allocation = self.pending.pop(0)
            if when > at:
                yield Segment(at, when, tuple(self.standing.values()))
                at = when
            if allocation.state is AllocationState.RELEASED:
                self.standing.pop(allocation.id, None)
            else:
                self.standing[allocation.id] = allocation
        if end_us > at:
            yield Segment(at, end_us, tuple(self.standing.values()))

    def plain(self, allocations: "PlainAllocations") -> dict[str, object]:
        """As JSON values."""
        return {
            "standing": [allocations.of(allocation) for allocation in self.standing.values()],
            "pending": [[at, allocations.of(allocation)] for at, allocation in self.pending],
            "last_sequence": self.last_sequence,
            "last_at_us": self.last_at_us,
        }


def timeline_from(plain: dict[str, object]) -> Timeline:
    """The timeline that `plain()` wrote."""
    values = json.loads(json.dumps(plain))
    standing = [from_plain(Allocation, item) for item in values["standing"]]
    pending = [(int(at), from_plain(Allocation, item)) for at, item in values["pending"]]
    return Timeline(
        {allocation.id: allocation for allocation in standing}, pending, int(values["last_sequence"]), int(values["last_at_us"])
    )


def _released(allocation: Allocation) -> Allocation:
    return replace(allocation, state=AllocationState.RELEASED)


class PlainAllocations:
    """Allocations as JSON values, made once for as long as each is asked for; nobody writes to what is returned."""

    def __init__(self) -> None:
        self._made: dict[Allocation, object] = {}
        self._asked: dict[Allocation, object] = {}

    def of(self, allocation: Allocation) -> object:
        """One of them, of a record that does not change."""
        if allocation not in self._asked:
            self._asked[allocation] = self._made.get(allocation) or to_plain(allocation)
        return self._asked[allocation]

    def forget(self) -> None:
        """Keep what was asked for since the last call."""
        self._made, self._asked = self._asked, {}
