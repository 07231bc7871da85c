"""Whole cards: with a meter as under the hook, else the card's busy time, as long as nobody else shares it."""

from poolmeter.model.allocation import Mode
from poolmeter.model.usage import UsedBasis
from poolmeter.sharing.rule import UsedNumbers


class WholeSharing:
    """The only mode in which the card's busy time is a slice's."""

    mode = Mode.WHOLE

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        own, basis = numbers.own
        if basis in (UsedBasis.HOOK, UsedBasis.ACCOUNTING):
            return own, basis
        if numbers.device_busy_us is not None and numbers.sharers == 1:
            return numbers.device_busy_us, UsedBasis.SAMPLED
        return own, basis
