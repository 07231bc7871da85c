"""Where the register is: the books, written through a running collector's API, else in their own place. As for decisions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from poolmeter.accounting.recommend.decision_store import collector_url, fetch
from poolmeter.books.assets import Entered, Row
from poolmeter.books.place import place
from poolmeter.books.writer import Books
from poolmeter.collector.catalog import current_name
from poolmeter.config import CollectorSection
from poolmeter.errors import DataError, Unavailable
from poolmeter.places import CollectorData
from poolmeter.tokens import client_token
from poolmeter.web.trust import SYSTEM, Trust, trust_of

PATH = "/v1/books/assets"


class AssetStore(Protocol):
    """What the commands need of the register."""

    def list(self) -> Sequence[Row]:
        """All devices in it."""
        ...

    def enter(self, rows: Sequence[Row], by: str, reason: str, dry_run: bool = False) -> Entered:
        """`Assets.enter`."""
        ...


class ApiAssets:
    """The register behind a running collector."""

    def __init__(self, url: str, token: str | None = None, trust: Trust = SYSTEM) -> None:
        self._url, self._token, self._trust = url.rstrip("/") + PATH, token, trust

    def list(self) -> Sequence[Row]:
        answer = fetch(self._url, self._token, trust=self._trust)
        rows = answer.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("uuid"), str) for row in rows):
            raise DataError(f"assets of {self._url} are {answer!r:.60}, expected an object with rows")
        return rows

    def enter(self, rows: Sequence[Row], by: str, reason: str, dry_run: bool = False) -> Entered:
        body = {"assets": list(rows), "by": by, "reason": reason, "dry_run": dry_run}
        totals = fetch(self._url, self._token, body, self._trust).get("totals")
        try:
            assert isinstance(totals, dict)
            return Entered(tuple(totals["added"]), tuple(totals["changed"]), tuple(totals["unchanged"]))
        except (AssertionError, KeyError, TypeError):
            raise DataError(f"answer of {self._url} is {totals!r:.60}, expected what was entered") from None


@contextmanager
def open_assets(data: Path, collector: CollectorSection) -> "Iterator[AssetStore]":
    """The register of a data folder. Raises Unavailable or BadInput when its books cannot be opened."""
    token, trust = client_token(collector.api_token_file, data), trust_of(collector)
    url = collector_url(data, collector, token)
    if url is not None:
        yield ApiAssets(url, token, trust)
        return
    path = CollectorData(data).books
    if collector.books is None and not path.exists() and current_name(CollectorData(data).store) is None:
        raise Unavailable(f"books {path} are not there, expected the data folder of a collector that has run")
    with Books(place(collector.books, path)) as books:
        yield books.assets
