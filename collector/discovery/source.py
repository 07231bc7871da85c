"""What a source of discovery is, and the plain kind that is asked now and then."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import aiohttp

JITTER = 0.1


@dataclass(frozen=True)
class Answer:
    """All exporters that a source names now; `trouble` says what part of it could not be read and is as it was before."""

    urls: frozenset[str]
    trouble: str | None = None


class Source(Protocol):
    """One source. `name` is what the health page calls it."""

    @property
    def name(self) -> str:
        """Kind and place."""

    def answers(self, session: aiohttp.ClientSession) -> AsyncIterator[Answer]:
        """Answers as they change or are asked for, without end; `session` is for those that ask by HTTP. Raises PoolmeterError, OSError, TimeoutError, aiohttp.ClientError
        when the source fails: it is then asked anew, later."""


class Asked(Protocol):
    """A source that answers when asked."""

    @property
    def name(self) -> str:
        """Kind and place."""

    async def ask(self, session: aiohttp.ClientSession) -> Answer:
        """All exporters that it names now. Raises as `Source.answers`."""


class Polled:
    """A source made of one that answers when asked: asked every `every_s`, give or take a tenth."""

    def __init__(self, asked: Asked, every_s: float) -> None:
        self._asked = asked
        self._every_s = every_s

    @property
    def name(self) -> str:
        """That of what is asked."""
        return self._asked.name

    async def answers(self, session: aiohttp.ClientSession) -> AsyncIterator[Answer]:
        """One answer an interval."""
        while True:
            yield await self._asked.ask(session)
            await asyncio.sleep(self._every_s * (1 + random.uniform(-JITTER, JITTER)))
