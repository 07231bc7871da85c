"""A progress bar for people at a terminal: one line on stderr that is drawn over, and nothing at all anywhere else."""

import sys
from types import TracebackType
from typing import Protocol

WIDTH = 30


class Terminal(Protocol):
    """What the bar is drawn on."""

    def isatty(self) -> bool:
        """Whether somebody looks at it."""
        ...

    def write(self, text: str, /) -> int:
        """Put text there."""
        ...

    def flush(self) -> None:
        """Show what was written."""
        ...


class Progress:
    """A bar of `total` seconds (or anything else that is counted), for use in a `with` block; its line is gone afterwards.

    On a stream that is no terminal nothing is written, so that logs and pipes hold no control characters.
    """

    def __init__(self, total: float, unit: str = "s", stream: Terminal | None = None) -> None:
        self._total = total
        self._unit = unit
        self._stream: Terminal = sys.stderr if stream is None else stream
        self._seen = self._stream.isatty()
        self._last = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def show(self, done: float) -> None:
        """Draw the bar at `done` of the total, where that looks different from before."""
        text = line(done, self._total, self._unit)
        if self._seen and text != self._last:
            self._last = text
            self._stream.write(f"\r{text}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        """Take the line away, so that something else can be said there."""
        if self._last:
            self._last = ""
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def line(done: float, total: float, unit: str) -> str:
    """The bar as text: `[#####     ] 5 of 10 s`, never beyond its ends."""
    inside = min(max(done, 0.0), total)
    filled = int(WIDTH * inside / total) if inside < total else WIDTH
    return f"[{'#' * filled}{' ' * (WIDTH - filled)}] {int(inside)} of {total:g} {unit}"
