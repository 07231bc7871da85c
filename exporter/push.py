"""Push to a collector that cannot reach this node: records and snapshot are posted, the acknowledgement is the answer.

A thread of its own that no turn waits for. It sends what is not acknowledged yet, page by page, and frees it as a collector's POST would;
what was sent and not answered goes out again, and the collector knows it. After a failure it waits longer and longer, by chance spread.
"""

import contextlib
import gzip
import http.client
import json
import logging
import random
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolmeter import __version__
from poolmeter.errors import BadInput, PoolmeterError
from poolmeter.exporter.answer import Source, usage_answer
from poolmeter.tokens import read_token
from poolmeter.web.trust import Trust

_LOG = logging.getLogger("poolmeter.exporter")
_PATH = "/v1/push"
PAGE = 20_000  # records in a request; half as many when the collector finds it too large
GROW_AFTER = 16  # pages that are taken before twice as many are tried again; twice as long after each time that it was too early
LONGEST_GROW = 4096
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LAST_S = 5.0  # for what waits at the end; the rest goes out after the next start
JITTER = 0.1
_ANSWER_LIMIT = 65_536


@dataclass(frozen=True)
class PushPlan:
    """Where to push, as whom, how often. The token's file is read for each request, so that a new token needs no restart."""

    url: str
    token_file: Path
    ca_file: Path | None
    interval_s: float
    timeout_s: float = 30.0

    def trusted(self) -> ssl.SSLContext:
        """How the collector's certificate is checked. Raises BadInput."""
        return Trust(self.ca_file).context("push_ca_file")


def push_plan(url: str | None, token_file: Path | None, ca_file: Path | None, interval_s: float) -> PushPlan | None:
    """The checked plan, None when nothing is pushed. Raises BadInput: an address that is none, no token, unusable certificates."""
    if url is None:
        return None
    if token_file is None:
        raise BadInput("--push is given without a token, expected --push-token-file, or push_token_file in [exporter]")
    read_token(token_file)
    plan = PushPlan(endpoint_of(url), token_file, ca_file, interval_s)
    plan.trusted()
    return plan


def endpoint_of(text: str) -> str:
    """The address to post to, from the collector's base URL. Raises BadInput."""
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        good = False
    if not good or "@" in parts.netloc or parts.query or parts.fragment:
        raise BadInput(f"--push is {text!r:.80}, expected the collector's URL such as https://collector:9878")
    return parts._replace(path=parts.path.rstrip("/").removesuffix(_PATH) + _PATH).geturl()


@dataclass(frozen=True)
class Outcome:
    """What became of one request: `trouble` None when it was acknowledged, `more` when records wait behind it."""

    trouble: str | None = None
    more: bool = False
    after_s: float | None = None  # what the collector asked to wait
    refused: bool = False  # the collector answered, and took nothing
    too_large: bool = False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for this address alone."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class Push:
    """Pushes until it is stopped. `ok`, `refused` (by an answer) and `failed` count requests, `last_us` is when the last one was taken;
    `trouble` is what is wrong now, None when nothing is."""

    def __init__(self, plan: PushPlan, node: str, source: Source, first_pause_s: float = FIRST_PAUSE_S, page: int = PAGE) -> None:
        self.ok = 0
        self.refused = 0
        self.failed = 0
        self.last_us: int | None = None
        self.trouble: str | None = None
        self._plan, self._node, self._source, self._first_pause_s = plan, node, source, first_pause_s
        self._page = self._most = page
        self._taken, self._grow_after, self._trying = 0, GROW_AFTER, False
        self._acknowledged = 0
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=plan.trusted()), _NoRedirects)
        self._ending, self._ended = threading.Event(), threading.Event()
        self._until = 0.0
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)

    def start(self) -> None:
        """Begin to push."""
        if self._plan.url.startswith("http://"):
            _LOG.warning("push to %s is not encrypted: whoever is on the way reads the token", self._plan.url)
        self._thread.start()

    def finish(self, patience_s: float = 0.0) -> None:
        """Push what waits a last time, then no more; a failure is tried again for `patience_s`. Returns when that is done, or has
        taken too long."""
        self._until = time.monotonic() + patience_s
        self._ending.set()
        self._ended.wait(LAST_S + patience_s)

    def _run(self) -> None:
        pause = random.uniform(0, min(1.0, self._plan.interval_s))  # a pool that starts together does not push together
        failures = 0
        while True:
            ending = self._ending.wait(pause)
            outcome = self.once()
            self._say(outcome.trouble)
            failures = failures + 1 if outcome.trouble is not None else 0
            if outcome.trouble is None:
                pause = 0.0 if outcome.more else self._plan.interval_s * random.uniform(1 - JITTER, 1 + JITTER)
                if ending and not outcome.more:
                    break
            elif outcome.too_large and self._page > 1:
                pause = 0.0
                self._shrink()
            else:
                grown = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(failures - 1, 16))
                # Not sooner than the collector asked, and not all nodes at once.
                pause = grown * random.uniform(0.5, 1.0) if outcome.after_s is None else outcome.after_s * random.uniform(1.0, 1.5)
                if ending and time.monotonic() + pause >= self._until:
                    break
                if ending:
                    time.sleep(pause)
        self._ended.set()

    def once(self) -> Outcome:
        """One request, and what it frees. Never raises."""
        try:
            outcome = self._once()
        except PoolmeterError as error:
            outcome = Outcome(str(error))
        except Exception as error:  # a thread that ended would push no more, and nobody would know
            if not self._ending.is_set():  # else the spool may be closed under it
                _LOG.exception("push failed")
            outcome = Outcome(f"internal error: {type(error).__name__}: {error}")
        if outcome.trouble is None:
            self.ok += 1
            self.last_us = time.time_ns() // 1000
            self._grow()
        elif outcome.refused:
            self.refused += 1
        else:
            self.failed += 1
        return outcome

    @property
    def waiting(self) -> int:
        """Records that this collector has not acknowledged; after a start all that wait for anybody, until it has answered."""
        return self._source.spool.after(self._acknowledged)

    def _shrink(self) -> None:
        if self._trying:
            self._grow_after = min(LONGEST_GROW, 2 * self._grow_after)  # it was too early to try more
        self._page, self._taken, self._trying = max(1, self._page // 2), 0, False

    def _grow(self) -> None:
        """What a collector found too large once, it may take later: another limit, another proxy, smaller records."""
        self._taken, self._trying = self._taken + 1, False
        if self._page < self._most and self._taken >= self._grow_after:
            self._page, self._taken, self._trying = min(self._most, 2 * self._page), 0, True

    def _once(self) -> Outcome:
        spool = self._source.spool
        sent = usage_answer(self._source, self._node, spool.epoch, self._acknowledged, self._page, snapshot=True)
        headers = {
            **sent.headers,
            "Authorization": f"Bearer {read_token(self._plan.token_file)}",
            "Content-Type": "application/octet-stream",
            "Content-Encoding": "gzip",
            "User-Agent": f"poolmeter/{__version__}",
        }
        request = urllib.request.Request(self._plan.url, gzip.compress(sent.body, 1), headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._plan.timeout_s) as response:
                answer = parse_acknowledgement(response.read(_ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_ANSWER_LIMIT)
                after_s = _seconds(error.headers.get("Retry-After"))
            return Outcome(f"status {error.code}: {_sentence(said)}", after_s=after_s, refused=True, too_large=error.code == 413)
        except (OSError, http.client.HTTPException) as error:
            return Outcome(str(getattr(error, "reason", None) or error) or type(error).__name__)
        consumer, epoch, sequence = answer
        if epoch != spool.epoch:
            return Outcome(f"the acknowledgement is of epoch {epoch!r:.60}, expected {spool.epoch}")
        if sent.batch.records:
            if sequence is None or sequence != sent.batch.last:
                return Outcome(f"the acknowledgement is of sequence {sequence}, expected {sent.batch.last}")
            spool.acknowledge(consumer, epoch, sequence)
            self._acknowledged = sequence
        return Outcome(more=sent.batch.more)

    def _say(self, trouble: str | None) -> None:
        """Log a change, not every request."""
        if trouble is not None and trouble != self.trouble:
            _LOG.warning("push to %s failed: %s", self._plan.url, trouble)
        elif trouble is None and self.trouble is not None:
            _LOG.info("push to %s succeeds again", self._plan.url)
        self.trouble = trouble


def parse_acknowledgement(body: bytes) -> tuple[str, str, int | None]:
    """Consumer, epoch and sequence (None: nothing is acknowledged) of an answer. Raises BadInput."""
    try:
        values: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the answer to a push is no JSON: {error!s:.80}") from None
    found: Mapping[str, Any] = values if isinstance(values, dict) else {}
    consumer, epoch, sequence = (found.get(name) for name in ("consumer", "epoch", "seq"))
    if not isinstance(consumer, str) or not isinstance(epoch, str) or not (sequence is None or type(sequence) is int):
        raise BadInput(f"the answer to a push is {body[:80]!r}, expected consumer, epoch and seq")
    return consumer, epoch, sequence


def _sentence(body: bytes) -> str:
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body)
    said = found.get("error") if isinstance(found, dict) else None
    return " ".join(said.split())[:300] if isinstance(said, str) else "no reason given"


def _seconds(text: str | None) -> float | None:
    return min(LONGEST_PAUSE_S, float(text)) if text is not None and text.isascii() and text.isdigit() else None
