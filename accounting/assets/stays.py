"""Which node had a device from when to when, out of the moments at which the store saw it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sighting:
    """A node's records of a device cover [start_us, end_us), epoch microseconds."""

    node: str
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Stay:
    """A node had a device from `start_us` up to and without `end_us`, as far as it was seen there."""

    node: str
    start_us: int
    end_us: int


def stays_of(sightings: Iterable[Sighting]) -> tuple[Stay, ...]:
    """The stays of one device, oldest first, which never overlap and begin and end at sightings.

    Between two sightings on the same node the device is taken to have been there; between two nodes it was nowhere known. Where two
    nodes claim the same time, it is the one's that was seen there first, then by name: until it was last seen there in one piece.
    """
    stays: list[Stay] = []
    for seen in sorted(sightings, key=lambda seen: (seen.start_us, seen.node, seen.end_us)):
        last = stays[-1] if stays else None
        if last is not None and last.node == seen.node:
            stays[-1] = Stay(last.node, last.start_us, max(last.end_us, seen.end_us))
            continue
        start_us = seen.start_us if last is None else max(seen.start_us, last.end_us)
        if start_us < seen.end_us:
            stays.append(Stay(seen.node, start_us, seen.end_us))
    return tuple(stays)
