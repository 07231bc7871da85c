"""A card's time is handed out once: whatever several sources say was used in a stretch of time, together it is never more than the stretch.

What the hook counted goes first, then what the driver's accounting counted, then sampled utilisation: a worse number only gets the room
that better ones left. Within a rank everybody gets the same part of what they ask, so a card's time is divided among its sharers and
never given to each of them. All in whole microseconds, exactly.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

from poolmeter.model.units import split_exactly


class Rank(IntEnum):
    """Whose number is believed first."""

    HOOK = 0
    ACCOUNTING = 1
    SAMPLED = 2


def fill(total: int, wants: Sequence[int], weights: Sequence[int] | None = None) -> list[int]:
    """`total` (at most what is wanted in sum) by want x weight, nobody above his want, exactly; what a full one leaves goes to the others."""
    granted = [0] * len(wants)
    left = min(total, sum(wants))
    while left:
        open_ = [index for index, want in enumerate(wants) if want > granted[index]]
        measures = [wants[index] * (weights[index] if weights else 1) for index in open_]
        if not any(measures):
            measures = [wants[index] for index in open_]
        parts = [min(part, wants[index] - granted[index]) for index, part in zip(open_, split_exactly(left, measures), strict=True)]
        for index, part in zip(open_, parts, strict=True):
            granted[index] += part
        left -= sum(parts)
    return granted


def share_out(rooms: Sequence[int], lengths: Sequence[int], granted: Sequence[int]) -> list[list[int]]:
    """Each one's `granted` over pieces of these lengths, pro rata where the rooms allow, so that each piece's sum stays within its room.

    Returns a row for each one. The grants in sum are at most the rooms in sum.
    """
    total = sum(granted)
    if len(rooms) == 1:
        return [[amount] for amount in granted]
    pieces = split_exactly(total, list(lengths))
    if sum(pieces) < total or any(piece > room for piece, room in zip(pieces, rooms, strict=True)):
        pieces = split_exactly(total, list(rooms))
    left, rows = list(granted), [[0] * len(pieces) for _ in granted]
    for index, piece in enumerate(pieces):
        for row, part in enumerate(split_exactly(piece, left)):
            rows[row][index] = part
            left[row] -= part
    return rows


class Room:
    """One device between two ticks: `lengths` of the pieces of time, `spare` what the open minute has not handed out yet."""

    def __init__(self, lengths: Sequence[int], spare: int) -> None:
        self._lengths = list(lengths)
        self._rooms = [lengths[0] + max(0, spare), *lengths[1:]]
        self._claims: dict[Rank, list[tuple[int, int, Callable[[list[int]], None]]]] = {rank: [] for rank in Rank}

    @property
    def left(self) -> int:
        """What is still to be had."""
        return sum(self._rooms)

    def claim(self, rank: Rank, wanted: int, take: Callable[[list[int]], None], weight: int = 1) -> None:
        """Ask for device time; `take` is called with what was granted, piece by piece, when the rank is settled."""
        self._claims[rank].append((wanted, weight, take))

    def settle(self, rank: Rank) -> None:
        """Hand out what this rank asked for, as far as there is room."""
        claims, self._claims[rank] = self._claims[rank], []
        wants = [wanted for wanted, _, _ in claims]
        weights = [weight for _, weight, _ in claims]
        granted = fill(min(sum(wants), self.left), wants, weights if len(set(weights)) > 1 else None)
        rows = share_out(self._rooms, self._lengths, granted)
        for (_, _, take), row in zip(claims, rows, strict=True):
            for index, part in enumerate(row):
                self._rooms[index] -= part
            take(row)


def within(pieces: Sequence[int], wants: Sequence[int]) -> list[list[int]]:
    """What processes of a slice wanted, cut so that piece by piece they sum to at most what the slice got: a row for each."""
    granted = fill(sum(pieces), wants)
    return share_out(pieces, pieces, granted)
