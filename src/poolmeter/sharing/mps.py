"""Shares by MPS: kernels of several clients run at the same time, each on its part of the threads.

A client's own span says how long it had kernels on the card, not how much of the card it had: what several had at the same time is divided
by active-thread share before it comes here (exporter: the card's time is handed out once). The driver names only the server, with the sum;
a slice's part of that is divided as well, and then its basis is `mixed`.
"""

from fractions import Fraction

from poolmeter.model.allocation import Mode
from poolmeter.model.units import FULL_SHARE_PPM
from poolmeter.model.usage import UsedBasis
from poolmeter.sharing.rule import UsedNumbers


class MpsSharing:
    """Used time is the slice's part of the card, by hook or divided."""

    mode = Mode.MPS

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        return numbers.own


def thread_fraction(active_thread_percentage: int) -> Fraction:
    """The part of a card that a client's active-thread percentage (1 to 100) is. Raises ValueError outside of it."""
    if not 1 <= active_thread_percentage <= 100:
        raise ValueError(f"active thread percentage is {active_thread_percentage}, expected 1 to 100")
    return Fraction(active_thread_percentage, 100)


def thread_ppm(active_thread_percentage: int) -> int:
    """The same in parts per million, exactly."""
    return int(thread_fraction(active_thread_percentage) * FULL_SHARE_PPM)
