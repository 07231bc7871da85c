"""What a sharing mode decides."""

from dataclasses import dataclass
from typing import Protocol

from poolmeter.model.allocation import Mode
from poolmeter.model.usage import UsedBasis


@dataclass(frozen=True)
class UsedNumbers:
    """What is known of a slice's device time over a span, in us: by the hook, by the card (any process; less what others were given), how
    many slices share it, and by the driver's numbers of the slice's own processes (`shared_us`, with the basis they have)."""

    hooked_us: int | None
    device_busy_us: int | None
    sharers: int
    shared_us: int | None = None
    shared_basis: UsedBasis | None = None

    @property
    def own(self) -> tuple[int | None, UsedBasis]:
        """The best number of the slice itself: its meter's, else its processes'; never the card's."""
        if self.hooked_us is not None:
            return self.hooked_us, UsedBasis.HOOK
        if self.shared_us is not None and self.shared_basis is not None:
            return self.shared_us, self.shared_basis
        return None, UsedBasis.ALLOCATED


class Sharing(Protocol):
    """The rules of one mode."""

    @property
    def mode(self) -> Mode: ...

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        """Used device time and where it comes from. None: unknown, and then the basis is `allocated` (only the promise is known)."""
        ...
