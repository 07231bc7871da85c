"""Spreading what a counter gained over the minutes it was gained in, exactly."""

from collections.abc import Callable, Iterable

from poolmeter.model.units import MINUTE_US, split_exactly


def minutes_between(start_us: int, end_us: int) -> list[tuple[int, int]]:
    """[start, end) cut at whole minutes; empty when it is empty."""
    pieces = []
    at = start_us
    while at < end_us:
        stop = min(end_us, at - at % MINUTE_US + MINUTE_US)
        pieces.append((at, stop))
        at = stop
    return pieces


def spread(amount: int, lengths: list[int]) -> list[int]:
    """`amount` over pieces of these lengths, pro rata, exactly."""
    return [amount] if len(lengths) == 1 else split_exactly(amount, lengths)


def spread_time(amount: int, lengths: list[int], spare: int) -> list[int]:
    """Device time over pieces, none getting more than its length; the first may also take `spare`, what its minute has not used yet.

    What does not fit is left out: the caller counts it later (the sum of the answer says how much was counted).
    """
    rooms = [lengths[0] + max(0, spare), *lengths[1:]]
    amount = min(amount, sum(rooms))
    parts = spread(amount, lengths)
    if any(part > room for part, room in zip(parts, rooms, strict=True)):
        parts = split_exactly(amount, rooms)
    return parts


class Gains:
    """What was gained between two ticks, by piece."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self.lengths = [end - start for start, end in pieces]
        self.add: list[list[Callable[[], None]]] = [[] for _ in pieces]

    def of(self, target: object, name: str, parts: Iterable[int]) -> None:
        """Note that `parts` are to be added to an attribute (None counts as 0), piece by piece."""
        for index, part in enumerate(parts):
            self.add[index].append(lambda part=part: setattr(target, name, (getattr(target, name) or 0) + part))  # type: ignore[misc]
