"""Which exporters are asked: what is configured and what the sources say, followed while the collector runs.

A source that fails, or says what cannot be, keeps its last answer. Until every source has answered once, the exporters that the store
knows from before go on being asked: a collector that starts while a source is down loses sight of nobody.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from poolmeter.clock import Clock
from poolmeter.collector.discovery.source import Answer, Source
from poolmeter.errors import DataError, PoolmeterError

_log = logging.getLogger("poolmeter.collector")
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
FAILURES = (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError)

# Ask exactly these from now on; the second is why those that are asked no more are gone.
Assign = Callable[[Collection[str], str], Awaitable[None]]


@dataclass
class SourceStatus:
    """What the health page says of a source. state: new | up | failing; `reason` also says what part of an answer could not be read."""

    name: str
    state: str = "new"
    reason: str | None = None
    urls: frozenset[str] | None = None  # None: it has not answered yet
    last_success_us: int | None = None
    failures: int = 0
    failures_in_a_row: int = field(default=0, repr=False)


class Discovery:
    """Follows sources and assigns what they name. `fixed` are the configured URLs, `before` those that the store knows from before."""

    def __init__(
        self, sources: Sequence[Source], fixed: Iterable[str], before: Iterable[str], assign: Assign, limit: int, clock: Clock
    ) -> None:
        self.statuses = [SourceStatus(source.name) for source in sources]
        self._sources = tuple(sources)
        self._fixed = tuple(dict.fromkeys(fixed))
        self._before = tuple(dict.fromkeys(before)) if sources else ()
        self._assign = assign
        self._limit = limit
        self._clock = clock
        self._busy = asyncio.Lock()

    def wanted(self) -> list[str]:
        """Every exporter to ask now, each once."""
        named = dict.fromkeys(self._fixed)
        for status in self.statuses:
            named |= dict.fromkeys(sorted(status.urls or ()))
        if any(status.urls is None for status in self.statuses):
            named |= dict.fromkeys(self._before)
        return list(named)

    async def start(self) -> None:
        """Assign what is known before any source has answered."""
        await self._assign(self.wanted(), "no longer configured")

    async def run(self) -> None:
        """Follow every source until cancelled."""
        # A session of their own: what a source costs is no connection of a pull.
        async with aiohttp.ClientSession(auto_decompress=False, trust_env=False) as session, asyncio.TaskGroup() as group:
            for source, status in zip(self._sources, self.statuses, strict=True):
                group.create_task(self._follow(session, source, status))

    async def _follow(self, session: aiohttp.ClientSession, source: Source, status: SourceStatus) -> None:
        while True:
            try:
                async with contextlib.aclosing(source.answers(session)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        await self._take(status, answer)
            except FAILURES as error:
                self._failed(status, str(error) or type(error).__name__)
            except Exception as error:
                # One source's surprise must not end the others.
                _log.exception("discovery %s failed", status.name)
                self._failed(status, f"internal error: {type(error).__name__}: {error}")
            pause = min(FIRST_PAUSE_S * 2.0 ** min(status.failures_in_a_row, 10), LONGEST_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _take(self, status: SourceStatus, answer: Answer) -> None:
        async with self._busy:
            before = status.urls
            others = {url for other in self.statuses if other is not status for url in other.urls or ()}
            if len(others | answer.urls) > self._limit:
                count = f"{len(answer.urls)} targets, {len(others | answer.urls)} with those of other sources"
                raise DataError(f"{count}, expected at most {self._limit} (collector.discovery_limit)")
            status.urls = answer.urls
            if before != answer.urls:
                _log.info("discovery %s names %d exporters", status.name, len(answer.urls))
                await self._assign(self.wanted(), f"discovery {status.name} names it no more")
        if answer.trouble is not None and answer.trouble != status.reason:
            _log.warning("discovery %s: %s; what that part said before stands", status.name, answer.trouble)
        status.state, status.reason = "up" if answer.trouble is None else "failing", answer.trouble and answer.trouble[:1000]
        status.failures += answer.trouble is not None
        status.failures_in_a_row = 0
        status.last_success_us = self._clock.wall_us()

    def _failed(self, status: SourceStatus, reason: str) -> None:
        status.failures += 1
        status.failures_in_a_row += 1
        if status.reason != reason:
            _log.warning("discovery %s: %s; its last answer stands", status.name, reason)
        status.state, status.reason = "failing", reason[:1000]
