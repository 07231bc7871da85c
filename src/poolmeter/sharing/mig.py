"""Shares by MIG: an instance has its compute slices and its memory for itself.

Three fractions of the card, which differ. What an instance *occupies* goes by placement (of 8 memory slices on Ampere and newer: 1g.10gb
occupies one, 3g.40gb four), because that is what nobody else can have: it is what is allocated. What it can *use* goes by compute slices
(of 7): an instance that is busy all hour used 3/7 of a device-hour. Memory has its own.
"""

from fractions import Fraction

from poolmeter.model.allocation import Mode
from poolmeter.model.units import FULL_SHARE_PPM
from poolmeter.model.usage import UsedBasis
from poolmeter.sharing.rule import UsedNumbers


class MigSharing:
    """Used time is the meter's or the processes', already as a part of the card; a card in MIG mode has no number of its own to fall back on."""

    mode = Mode.MIG

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        return numbers.own


def compute_fraction(compute_slices: int, of: int) -> Fraction:
    """The part of the card's compute that an instance has. Raises ValueError when it has none or more than the card."""
    if not 0 < compute_slices <= of:
        raise ValueError(f"an instance has {compute_slices} compute slices, expected 1 to {of}")
    return Fraction(compute_slices, of)


def placement_ppm(start: int, size: int, of: int) -> int:
    """The part of the card that [start, start + size) of `of` placement slots occupies, in parts per million.

    Cut from the card like a ruler, so that placements side by side sum to exactly what they cover together, and a full card to a million,
    also where a slot is no whole number of parts. Raises ValueError when it does not lie on the card.
    """
    if start < 0 or size <= 0 or start + size > of:
        raise ValueError(f"a placement is [{start}, {start + size}), expected a part of [0, {of})")
    return FULL_SHARE_PPM * (start + size) // of - FULL_SHARE_PPM * start // of


def of_the_card(busy_us: int, compute_slices: int, of: int) -> int:
    """Device time of the card that an instance used which was busy for `busy_us`, rounded down: instances together never exceed the card."""
    fraction = compute_fraction(compute_slices, of)
    return busy_us * fraction.numerator // fraction.denominator
