"""What a scrape gets: the newest page in the format and encoding that were asked for, made once a snapshot however many ask."""

import gzip
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from poolmeter.exporter.collectors import FAMILIES, Family
from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.render import CONTENT_TYPE, OPENMETRICS_TYPE, Renderer
from poolmeter.model.snapshot import Snapshot, SourceHealth

_LEVEL = 1  # a page shrinks to a 25th; more effort takes three times as long for a tenth less


class Watched(Protocol):
    """What scrapes need of the agent."""

    def page(self) -> Page | None: ...

    def age_us(self) -> int | None:
        """Time since the newest page was made, None without one."""
        ...

    @property
    def stalled_us(self) -> int:
        """How old a page may be before the agent is taken for stuck."""
        ...


def newest(agent: Watched) -> Page | None:
    """The newest page; one that is older than the agent's `stalled_us` without its values, and with a source `agent` that says why.

    An agent that no longer turns has no values of now, and old ones are worse than none.
    """
    page, age = agent.page(), agent.age_us()
    if page is None or age is None or age <= agent.stalled_us:
        return page
    last = page.snapshot
    stalled = SourceHealth(
        source="agent",
        ok=False,
        at_us=last.taken_us,
        duration_us=None,
        reason=f"the exporter has not looked for {age // 1_000_000} s, so that no value is of now",
        since_us=last.taken_us,
    )
    # What stays is named, not what goes: a field that comes later is a value as well.
    bare = Snapshot(
        node=last.node,
        epoch=last.epoch,
        sequence=last.sequence,
        taken_us=last.taken_us,
        simulated=last.simulated,
        pool=last.pool,
        sources=(*last.sources, stalled),
    )
    return replace(page, snapshot=bare, before=None)


@dataclass(frozen=True)
class Answer:
    """A body with what its headers must say."""

    body: bytes
    content_type: str
    encoded: bool

    @property
    def headers(self) -> Mapping[str, str]:
        """Content type, encoding, and what the answer depended on."""
        found = {"Content-Type": self.content_type, "Vary": "Accept, Accept-Encoding"}
        return {**found, "Content-Encoding": "gzip"} if self.encoded else found


class Scrapes:
    """The pages of one set of families. Any thread may ask."""

    def __init__(self, families: Sequence[Family] = FAMILIES) -> None:
        self._renderer = Renderer(families)
        self._mutex = threading.Lock()
        self._page: Page | None = None
        self._blocks: list[str] = []
        self._made: dict[tuple[bool, bool], bytes] = {}
        self.renders = 0

    @property
    def failed(self) -> Mapping[str, str]:
        """Families that could not be written at the last render, and why."""
        return self._renderer.failed

    def answer(self, page: Page, accept: str, accept_encoding: str) -> Answer:
        """The page as the two request headers ask for it."""
        openmetrics, encoded = wants_openmetrics(accept), wants_gzip(accept_encoding)
        with self._mutex:
            if self._page is None or not same(self._page, page):
                self._blocks = self._renderer.blocks(page)
                self._page, self._made = page, {}
                self.renders += 1
            body = self._made.get((openmetrics, encoded))
            if body is None:
                body = self._made.get((openmetrics, False)) or self._renderer.joined(self._blocks, openmetrics)
                self._made[(openmetrics, False)] = body
                if encoded:
                    body = self._made[(openmetrics, True)] = gzip.compress(body, _LEVEL, mtime=0)
        return Answer(body, OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE, encoded)


def same(one: Page, other: Page) -> bool:
    """Whether two pages say the same, which those of one turn do."""
    return one is other or (one.snapshot.taken_us == other.snapshot.taken_us and one == other)


def _weights(header: str) -> list[tuple[str, dict[str, str], float]]:
    """Items of an Accept-like header: name, parameters, weight. What cannot be read as a weight is 0."""
    found = []
    for item in header.split(","):
        name, *rest = (part.strip() for part in item.split(";"))
        parameters = {key.strip().lower(): value.strip().strip('"') for key, _, value in (part.partition("=") for part in rest)}
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        if name:
            found.append((name.lower(), parameters, weight if 0 <= weight <= 1 else 0.0))
    return found


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1.0 is asked for, and not less than Prometheus text."""
    openmetrics = text = 0.0
    for name, parameters, weight in _weights(accept):
        if name == "application/openmetrics-text" and parameters.get("version", "1.0.0") in ("1.0.0", "0.0.1"):
            openmetrics = max(openmetrics, weight)
        elif name == "text/plain" and parameters.get("version", "0.0.4") == "0.0.4":
            text = max(text, weight)
    return openmetrics > 0 and openmetrics >= text


def wants_gzip(accept_encoding: str) -> bool:
    """Whether gzip is accepted; a weight of 0 refuses it."""
    named = {name: weight for name, _, weight in _weights(accept_encoding)}
    return named.get("gzip", named.get("*", 0.0)) > 0
