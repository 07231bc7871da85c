"""A metric family: what it is called, and the samples it draws from a page."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from poolmeter.model.snapshot import Snapshot

Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Page:
    """What a page is made from: the snapshot, and how many records wait in the spool."""

    snapshot: Snapshot
    spool_records: int
    version: str


@dataclass(frozen=True)
class Family:
    """`name` as on the page (a counter's with `_total`); `labels` in alphabetical order; `samples` give label values and a value.

    A value that does not exist gives no sample. HELP ends with unit and source.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Page], Samples]

    def __post_init__(self) -> None:
        if list(self.labels) != sorted(self.labels):
            raise ValueError(f"labels of {self.name} are not in alphabetical order")


def seconds(us: int) -> float:
    """Seconds of microseconds, the nearest float."""
    return us / 1_000_000


def ratio(ppm: int) -> float:
    """0 to 1 of parts per million."""
    return float(Decimal(ppm) / 1_000_000)
