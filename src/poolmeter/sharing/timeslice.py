"""Shares by the driver's own time slicing: kernels of one program at a time, so the parts of a card's time add up by themselves."""

from poolmeter.model.allocation import Mode
from poolmeter.model.usage import UsedBasis
from poolmeter.sharing.rule import UsedNumbers


class TimesliceSharing:
    """As under the hook; a slice whose processes nobody knows has no number, for the card's is everybody's."""

    mode = Mode.TIMESLICE

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        return numbers.own
