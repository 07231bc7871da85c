"""Where decisions are kept: the books, written through a running collector's API, else in their file.

`open_store` chooses. Both are the same books: the API's handlers are the collector's own writer.
"""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from poolmeter.books.place import place
from poolmeter.books.writer import Booked, Books
from poolmeter.collector.catalog import current_name, generation_of
from poolmeter.config import CollectorSection
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.places import CollectorData
from poolmeter.tokens import client_token
from poolmeter.web.trust import SYSTEM, Trust, trust_of

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


def fetch(url: str, token: str | None = None, body: object = None, trust: Trust = SYSTEM) -> dict[str, object]:
    """The JSON object of a collector's answer; a POST when there is a body.

    Raises what the collector refused with (BadInput, Refused), Unavailable when it does not answer, DataError on no JSON object.
    """
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    try:
        with trust.opener(url).open(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise _refusal(error, url) from None
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"collector {url} does not answer: {getattr(error, 'reason', error)}") from None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError(f"answer of {url} is {text[:60]!r}, expected a JSON object")
    return value


def _refusal(error: urllib.error.HTTPError, url: str) -> PoolmeterError:
    kinds: dict[int, type[PoolmeterError]] = {400: BadInput, 403: Refused, 404: BadInput, 409: Refused}
    with error:
        try:
            sentence = str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError, OSError):
            sentence = f"collector {url} answered with status {error.code}"
    return kinds.get(error.code, Unavailable)(sentence)


@contextmanager
def open_store(data: Path, collector: CollectorSection) -> "Iterator[DecisionStore]":
    """The decisions of a data folder. Raises Unavailable or BadInput when its books cannot be opened."""
    token = client_token(collector.api_token_file, data)
    trust = trust_of(collector)
    url = collector_url(data, collector, token)
    if url is not None:
        yield ApiStore(url, token, trust)
        return
    path = CollectorData(data).books
    if collector.books is None and not path.exists() and current_name(CollectorData(data).store) is None:
        # A mistyped folder is not an empty history, and nothing is made of it.
        raise Unavailable(f"books {path} are not there, expected the data folder of a collector that has run")
    with Books(place(collector.books, path)) as books:
        yield FileStore(books)


def collector_url(data: Path, collector: CollectorSection, token: str | None = None) -> str | None:
    """The collector that serves this data folder's books, if one answers.

    `poolmeter up` names its own in up.json. One that was started by itself is known by the configured address; it is taken only if
    the store it serves is this folder's, for another pool's collector may have that port.
    """
    trust = trust_of(collector)
    named = _named_in(data / "up.json")
    if named is not None and _answers(f"{named}/healthz", trust):
        return named
    # Which of the two it speaks is in a file that a client may not be allowed to read.
    for scheme in ("http", "https"):
        configured = f"{scheme}://{collector.host}:{collector.port}"
        if collector.port and _answers(f"{configured}/healthz", trust) and _serves(configured, CollectorData(data).store, token, trust):
            return configured
    return None


def _named_in(path: Path) -> str | None:
    try:
        url = json.loads(path.read_text("utf-8"))["urls"]["collector"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url.rstrip("/") if isinstance(url, str) else None


def _answers(url: str, trust: Trust) -> bool:
    try:
        with trust.opener(url).open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _serves(url: str, root: Path, token: str | None, trust: Trust) -> bool:
    """Whether a collector's published generation is the one this root's CURRENT names; asked thrice, for it may be publishing."""
    for _ in range(3):
        before = current_name(root)
        if before is None:
            return False
        store = fetch(f"{url}/v1/health", token, trust=trust).get("store")
        found = store.get("generation") if isinstance(store, dict) else None
        if found in (generation_of(before), generation_of(current_name(root) or "")):
            return True
    return False
