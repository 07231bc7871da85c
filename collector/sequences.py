"""Which sequences of a spool are stored already: ranges, so that batches may come in any order and any number of times."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# An honest spool has one range, or a few after gaps. Past this the oldest holes count as known, which bounds memory.
MAX_RANGES = 256


@dataclass(frozen=True)
class Ranges:
    """Closed, disjoint, ascending ranges that do not touch."""

    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def last(self) -> int | None:
        """The highest known sequence."""
        return self.ranges[-1][1] if self.ranges else None

    def known(self, sequences: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Where `sequences` (int64) are known."""
        import numpy as np

        if not self.ranges:
            return np.zeros(len(sequences), bool)
        if len(self.ranges) == 1:  # an honest spool
            return (sequences >= self.ranges[0][0]) & (sequences <= self.ranges[0][1])
        firsts = np.array([first for first, _ in self.ranges], np.int64)
        lasts = np.array([last for _, last in self.ranges], np.int64)
        at = np.searchsorted(firsts, sequences, side="right") - 1
        return (at >= 0) & (sequences <= lasts[np.maximum(at, 0)])

    def including(self, sequences: "np.ndarray[Any, Any]") -> "Ranges":
        """These ranges and `sequences`."""
        import numpy as np

        if not len(sequences):
            return self
        if int(sequences[-1]) - int(sequences[0]) == len(sequences) - 1 and (np.diff(sequences) == 1).all():
            found = [(int(sequences[0]), int(sequences[-1]))]
        else:
            new = np.unique(sequences)
            cuts = np.nonzero(np.diff(new) > 1)[0]
            firsts = new[np.concatenate(([0], cuts + 1))]
            lasts = new[np.concatenate((cuts, [len(new) - 1]))]
            found = [(int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, *found]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        if len(merged) > MAX_RANGES:
            excess = len(merged) - MAX_RANGES
            merged[: excess + 1] = [(merged[0][0], merged[excess][1])]
        return Ranges(tuple(merged))
