"""Shares held by our hook: what the hook charged is what was used."""

from poolmeter.model.allocation import Mode
from poolmeter.model.usage import UsedBasis
from poolmeter.sharing.rule import UsedNumbers


class HookSharing:
    """Used time is the meter's; without a meter it is what the driver says of the slice's own processes, else unknown (the card's own
    number is never copied to a sharer)."""

    mode = Mode.HOOK

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        return numbers.own
