"""Approved decisions, fetched from the collector and carried out once each: applied, refused or expired, and journalled.

The enforcer never answers the recommender: what became of a decision is an event in the journal. The collector is optional; while
it does not answer, everything else goes on.
"""

import asyncio
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from decimal import Decimal

from poolmeter.enforcer import allocations as disk
from poolmeter.enforcer.book import Book
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState, JournalEvent
from poolmeter.model.plain import from_plain
from poolmeter.model.units import FULL_SHARE_PPM, format_size
from poolmeter.web.trust import SYSTEM, Trust

log = logging.getLogger(__name__)

_PAGES = 100  # of a thousand decisions for one node
_MAX_BODY = 16 * 1024 * 1024
_TIMEOUT_S = 10.0

Fetch = Callable[[str], bytes]
Token = Callable[[], str | None]  # asked anew each time: a collector may make its token later than the enforcer starts


def parse_decisions(body: bytes) -> tuple[tuple[Decision, ...], str | None]:
    """The decisions of a collector's answer, and behind which one the next answer begins (None: it was the last). Raises DataError."""
    try:
        answer = json.loads(body)
        rows, after = answer["rows"], answer.get("after")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"decisions are {body[:60]!r}, expected an object with rows") from None
    if not isinstance(rows, list):
        raise DataError(f"rows of decisions are {rows!r:.60}, expected a list")
    if after is not None and not isinstance(after, str):
        raise DataError(f"after of decisions is {after!r:.60}, expected an id")
    return tuple(from_plain(Decision, row, f"decision {index}") for index, row in enumerate(rows)), after


def decide(book: Book, decision: Decision, node: str, margin: Decimal = Decimal("1.1")) -> JournalEvent | None:
    """Carries one decision out, or journals why not; None when it is not for this node or was decided before.

    `margin`: a memory limit is never lowered below what is in use times this. Raises Unavailable when nothing could be journalled
    or the devices could not be read: the decision is then still open.
    """
    if decision.node != node or decision.id in book.decided:
        return None
    now = book.clock.wall_us()
    if decision.state is not DecisionState.APPROVED:
        return None
    if now >= decision.expires_us:
        return book.decide(decision.id, decision.allocation_id, "expired", f"it expired at {decision.expires_us} us, now it is {now} us")
    try:
        allocation = book.get(decision.allocation_id)
        if allocation.generation != decision.generation:
            raise Refused(f"it was made against generation {decision.generation}, the grant has {allocation.generation}")
        if decision.device_uuid not in {item.device_uuid for item in allocation.slices}:
            raise Refused(f"allocation {allocation.id} has no share of device {decision.device_uuid}")
        _check_values(book, decision, margin)
        after = book.admitted(allocation, decision.compute_ppm, decision.memory_bytes, decision.device_uuid, decision.id)
        return book.decide(decision.id, allocation.id, "applied", decision.reason, after)
    except (Refused, BadInput) as refusal:
        return book.decide(decision.id, decision.allocation_id, "refused", str(refusal))


def _check_values(book: Book, decision: Decision, margin: Decimal) -> None:
    if decision.compute_ppm is None and decision.memory_bytes is None:
        raise Refused("it changes nothing, expected a new compute share or memory limit")
    if decision.compute_ppm is not None and not 0 < decision.compute_ppm <= FULL_SHARE_PPM:
        raise Refused(f"its compute share is {decision.compute_ppm} ppm, expected 1 to {FULL_SHARE_PPM}")
    if decision.memory_bytes is None:
        return
    if decision.memory_bytes <= 0:
        raise Refused(f"its memory limit is {decision.memory_bytes}, expected a positive number of bytes")
    used = disk.memory_in_use(disk.folder_of(book.run, decision.allocation_id)).get(decision.device_uuid)
    if used is not None and decision.memory_bytes < used * margin:
        raise Refused(
            f"its memory limit is {format_size(decision.memory_bytes)}, expected at least {format_size(int(used * margin))}:"
            f" {format_size(used)} is in use"
        )


class DecisionPoll:
    """Asks the collector for this node's approved decisions, again and again."""

    def __init__(
        self,
        book: Book,
        node: str,
        collector: str,
        interval_s: float,
        margin: Decimal = Decimal("1.1"),
        token: Token = lambda: None,
        fetch: Fetch | None = None,
        trust: Trust = SYSTEM,
    ) -> None:
        self.book = book
        self.node = node
        self.url = f"{collector.rstrip('/')}/v1/decisions?{urllib.parse.urlencode({'state': 'approved', 'node': node})}"
        self._interval_s = interval_s
        self._margin = margin
        self._fetch = fetch or (lambda url: fetch_url(url, token(), trust))
        self._silent = False

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.once)
            except PoolmeterError as error:
                # Said once, not every five seconds: a node may well have no collector.
                log.log(logging.DEBUG if self._silent else logging.WARNING, "%s", error)
                self._silent = True
            except Exception:
                log.exception("carrying out decisions failed")
            else:
                self._silent = False
            await asyncio.sleep(self._interval_s)

    def once(self) -> tuple[JournalEvent, ...]:
        """Carries out what is approved now; the events. Raises Unavailable (no collector) or DataError."""
        decisions, after = parse_decisions(self._fetch(self.url))
        for _ in range(_PAGES):
            if after is None:
                break
            more, after = parse_decisions(self._fetch(f"{self.url}&after={urllib.parse.quote(after, safe='')}"))
            decisions += more
        return self.carry_out(decisions)

    def carry_out(self, decisions: Iterable[Decision]) -> tuple[JournalEvent, ...]:
        """The events of these decisions, in the order of their sequence."""
        events = []
        for decision in sorted(decisions, key=lambda item: (item.sequence, item.id)):
            event = decide(self.book, decision, self.node, self._margin)
            if event is not None:
                log.info("decision %s: %s (%s)", event.decision_id, event.outcome, event.reason)
                events.append(event)
        return tuple(events)


def fetch_url(url: str, token: str | None = None, trust: Trust = SYSTEM) -> bytes:
    """The body behind a URL, asked with a bearer token where there is one. Raises Unavailable, and BadInput for files of `trust`."""
    opener = trust.opener(url)  # made anew each time, so that files that are rotated are in force
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_BODY + 1)
    except (OSError, ValueError) as error:  # URLError is an OSError
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if error.code == 403:
                reason = "the token that was sent has a role that may not ask, expected an operator's (--token-file, else collector.api_token_file)"
            if error.code == 401:
                found = "does not take the token that was sent" if token else "asks for a token and none was sent"
                reason = f"it {found}, expected the collector's own (--token-file, else collector.api_token_file)"
        raise Unavailable(f"collector at {url.split('?')[0]} gave no decisions: {reason}") from None
    if len(body) > _MAX_BODY:
        raise Unavailable(f"collector at {url.split('?')[0]} gave more than {_MAX_BODY} bytes of decisions, expected fewer")
    return body
