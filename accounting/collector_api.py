"""A running collector's API as accounting's commands ask it, and the choice between it and the books in their own place."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from poolmeter.books.place import place
from poolmeter.books.writer import Books
from poolmeter.collector.catalog import current_name, generation_of
from poolmeter.config import CollectorSection
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.places import CollectorData
from poolmeter.tokens import client_token
from poolmeter.web.trust import SYSTEM, Trust, trust_of

TIMEOUT_S = 10.0
T = TypeVar("T")


@contextmanager
def served_or_own(
    data: Path, collector: CollectorSection, served: Callable[[str, str | None, Trust], T], own: Callable[[Books], T]
) -> Iterator[T]:
    """What a data folder's books are reached by: `served` with the running collector's URL, token and trust, else `own` with the books.

    Raises Unavailable or BadInput when they cannot be opened.
    """
    token, trust = client_token(collector.api_token_file, data), trust_of(collector)
    url = collector_url(data, collector, token)
    if url is not None:
        yield served(url, token, trust)
        return
    path = CollectorData(data).books
    if collector.books is None and not path.exists() and current_name(CollectorData(data).store) is None:
        # A mistyped folder is not an empty history, and nothing is made of it.
        raise Unavailable(f"books {path} are not there, expected the data folder of a collector that has run")
    with Books(place(collector.books, path)) as books:
        yield own(books)


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
