"""Where the register is: the books, written through a running collector's API, else in their own place. As for decisions."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from poolmeter.accounting.collector_api import fetch, served_or_own
from poolmeter.books.assets import Entered, Row
from poolmeter.books.writer import Books
from poolmeter.config import CollectorSection
from poolmeter.errors import DataError
from poolmeter.web.trust import SYSTEM, Trust

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
        match totals:
            case {"added": list(added), "changed": list(changed), "unchanged": list(unchanged)}:
                return Entered(tuple(added), tuple(changed), tuple(unchanged))
        raise DataError(f"answer of {self._url} is {totals!r:.60}, expected what was entered")


def open_assets(data: Path, collector: CollectorSection) -> AbstractContextManager[AssetStore]:
    """The register of a data folder, as a context. Raises Unavailable or BadInput when its books cannot be opened."""

    def served(url: str, token: str | None, trust: Trust) -> AssetStore:
        return ApiAssets(url, token, trust)

    def own(books: Books) -> AssetStore:
        return books.assets

    return served_or_own(data, collector, served, own)
