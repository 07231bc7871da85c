"""Where decisions are kept: the books, written through a running collector's API, else in their file.

`open_store` chooses. Both are the same books: the API's handlers are the collector's own writer.
"""

import urllib.parse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from poolmeter.accounting.collector_api import fetch, served_or_own
from poolmeter.books.writer import Booked, Books
from poolmeter.config import CollectorSection
from poolmeter.errors import BadInput, DataError
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.web.trust import SYSTEM, Trust

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


class ApiStore:
    """The books behind a running collector."""

    served = True

    def __init__(self, url: str, token: str | None = None, trust: Trust = SYSTEM) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._trust = trust

    def add(self, decisions: Sequence[Decision]) -> Sequence[Booked]:
        return self._ask("/v1/decisions", {"decisions": [to_plain(decision) for decision in decisions], "by": RECOMMENDER})

    def get(self, decision_id: str) -> Booked:
        found = [entry for entry in self.list() if entry.decision.id == decision_id]
        if not found:
            raise BadInput(f"decision {decision_id!r} is not in the books, expected an id of poolmeter history")
        return found[0]

    def list(self) -> Sequence[Booked]:
        found: list[Booked] = []
        query = ""
        while True:
            answer = self._fetch("/v1/decisions" + query)
            found += self._rows(answer, len(found))
            after = answer.get("after")
            if not isinstance(after, str) or query.endswith(urllib.parse.quote(after, safe="")):
                return found
            query = f"?after={urllib.parse.quote(after, safe='')}"

    def move(self, decision_id: str, state: DecisionState, by: str, reason: str | None = None) -> Booked:
        verb = {DecisionState.APPROVED: "approve", DecisionState.REJECTED: "reject"}[state]
        return self._ask(f"/v1/decisions/{urllib.parse.quote(decision_id, safe='')}/{verb}", {"by": by, "reason": reason})[0]

    def _ask(self, path: str, body: object = None) -> Sequence[Booked]:
        return self._rows(self._fetch(path, body))

    def _fetch(self, path: str, body: object = None) -> dict[str, object]:
        return fetch(self._url + path, self._token, body, self._trust)

    def _rows(self, answer: dict[str, object], first: int = 0) -> Sequence[Booked]:
        rows = answer.get("rows")
        if not isinstance(rows, list):
            raise DataError(f"decisions of {self._url} are {answer!r:.60}, expected an object with rows")
        return [_booked(row, f"decision {first + index}") for index, row in enumerate(rows)]


def _booked(row: object, what: str) -> Booked:
    decision = from_plain(Decision, row, what)
    assert isinstance(row, dict)
    return from_plain(Booked, {**row, "decision": to_plain(decision)}, what)


def open_store(data: Path, collector: CollectorSection) -> AbstractContextManager[DecisionStore]:
    """The decisions of a data folder, as a context. Raises Unavailable or BadInput when its books cannot be opened."""

    def served(url: str, token: str | None, trust: Trust) -> DecisionStore:
        return ApiStore(url, token, trust)

    return served_or_own(data, collector, served, FileStore)
