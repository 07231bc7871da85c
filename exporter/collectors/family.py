"""A metric family: what it is called, and the samples it draws from a page."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Generic, Literal, TypeVar

from poolmeter.model.snapshot import Snapshot

Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the exporter knows of itself: starts of the sampler, whether the cards are released, the last reload, what became of pushes of
    OTLP (`pushes_*`) and of records (`push_*`)."""

    sampler_restarts: int | None = None
    released: bool | None = None
    reload_ok: bool | None = None
    pushes_ok: int | None = None
    pushes_failed: int | None = None
    push_ok: int | None = None
    push_refused: int | None = None
    push_failed: int | None = None
    push_last_us: int | None = None
    push_waiting: int | None = None


@dataclass(frozen=True)
class Page:
    """What a page is made from: the snapshot, how many records wait in the spool, and the snapshot before it (None: it is the first).

    `unattributed_us`: device time of programs for which nobody could name a holder, by device.
    """

    snapshot: Snapshot
    spool_records: int
    version: str
    before: Snapshot | None = None
    outputs: Outputs = field(default_factory=Outputs)
    unattributed_us: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """A family whose series hang on one object each (a device, a slice), so that what did not change need not be written again.

    `of` gives the objects in order; `key` what their series' labels follow from; `value` what else the series follow from, None for an
    object without series; `series` the samples of a key and a value. Equal keys and values give equal samples.
    """

    of: Callable[[Page], Sequence[Any]]
    key: Callable[[Any], Hashable]
    value: Callable[[Any], Hashable]
    series: Callable[[Any, Any], Samples]


@dataclass(frozen=True)
class Family:
    """`name` as on the page (a counter's with `_total`); `labels` in alphabetical order; `samples` give label values and a value.

    A value that does not exist gives no sample. HELP ends with unit and source. `rows` says the same as `samples`, object by object.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Page], Samples]
    rows: Rows | None = None

    def __post_init__(self) -> None:
        if list(self.labels) != sorted(self.labels):
            raise ValueError(f"labels of {self.name} are not in alphabetical order")


def by_rows(name: str, kind: Literal["gauge", "counter"], text: str, labels: tuple[str, ...], rows: Rows) -> Family:
    """A family whose samples follow from its rows."""

    def samples(page: Page) -> Samples:
        for item in rows.of(page):
            found = rows.value(item)
            if found is not None:
                yield from rows.series(rows.key(item), found)

    return Family(name, kind, text, labels, samples, rows)


def scaled(scale: Callable[[int], float]) -> Callable[[Any, Any], Samples]:
    """The one sample of an object: its key as labels, its value in the unit of the page."""

    def series(key: Any, value: Any) -> Samples:
        return ((key, scale(value)),)

    return series


T = TypeVar("T")


class PerPage(Generic[T]):
    """What several families need of a page, worked out once: `make`'s result for the page asked for last."""

    def __init__(self, make: Callable[[Page], T]) -> None:
        self._make = make
        self._last: tuple[Page, T] | None = None

    def __call__(self, page: Page) -> T:
        last = self._last  # read once: another thread may ask for another page
        if last is None or last[0] is not page:
            last = self._last = (page, self._make(page))
        return last[1]


def seconds(us: int) -> float:
    """Seconds of microseconds, the nearest float."""
    return us / 1_000_000


def ratio(ppm: int) -> float:
    """0 to 1 of parts per million."""
    return float(Decimal(ppm) / 1_000_000)
