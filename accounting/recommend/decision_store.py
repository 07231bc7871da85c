"""Where decisions are kept: the books, written through a running collector's API, else in their file.

`open_store` chooses. Both are the same books: the API's handlers are the collector's own writer.
"""

import getpass
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from poolmeter.books.writer import Booked, Books
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.places import CollectorData

TIMEOUT_S = 10.0
SUPERSEDED = "superseded by "
RECOMMENDER = "recommender"


class DecisionStore(Protocol):
    """What the commands need of the books."""

    served: bool  # whether a collector serves them, so that enforcers see what is approved

    def add(self, decisions: Sequence[Decision]) -> Sequence[Booked]:
        """Enter proposals, all or none; a sequence of 0 becomes the node's next. Raises Refused."""
        ...

    def get(self, decision_id: str) -> Booked:
        """One decision. Raises BadInput when there is none."""
        ...

    def list(self) -> Sequence[Booked]:
        """All decisions, by node and sequence."""
        ...

    def move(self, decision_id: str, state: DecisionState, by: str, reason: str | None = None) -> Booked:
        """Approve or reject. Raises BadInput for an unknown id, Refused when its state forbids it."""
        ...


class FileStore:
    """The books' file, for a data folder whose collector does not run."""

    served = False

    def __init__(self, books: Books) -> None:
        self._books = books

    def add(self, decisions: Sequence[Decision]) -> Sequence[Booked]:
        return self._books.add_decisions(decisions, RECOMMENDER)

    def get(self, decision_id: str) -> Booked:
        return self._books.get(decision_id)

    def list(self) -> Sequence[Booked]:
        self._books.expire_due()
        return self._books.list()

    def move(self, decision_id: str, state: DecisionState, by: str, reason: str | None = None) -> Booked:
        return self._books.transition(decision_id, state, by, reason)


@contextmanager
def open_store(data: Path) -> "Iterator[DecisionStore]":
    """The decisions of a data folder. Raises Unavailable or BadInput when its books cannot be opened."""
    url = collector_url(data)
    if url is not None:
        yield ApiStore(url)
        return
    with Books(CollectorData(data).books) as books:
        yield FileStore(books)


def user_name() -> str:
    """Who decides, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
