"""What a sharing mode decides."""

from dataclasses import dataclass
from typing import Protocol

from poolmeter.model.allocation import Mode
from poolmeter.model.usage import UsedBasis


@dataclass(frozen=True)
class UsedNumbers:
    """What is known of a slice's device time over a span, in us: by the hook, by the card (any process), and who shares it."""

    hooked_us: int | None
    device_busy_us: int | None
    sharers: int


class Sharing(Protocol):
    """The rules of one mode."""

    @property
    def mode(self) -> Mode: ...

    def used(self, numbers: UsedNumbers) -> tuple[int | None, UsedBasis]:
        """Used device time and where it comes from. None: unknown, and then the basis is `allocated` (only the promise is known)."""
        ...
