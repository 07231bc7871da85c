"""Several collectors, each with a root of its own and a part of the nodes: who asks whom, by rendezvous hashing over those that live.

A node belongs to the living collector whose name scores highest with its URL, so that all agree without talking, and a collector that dies or
returns moves its own nodes alone. Two may ask one node for a while (each takes the other for dead, a hand-back under way): nothing is lost,
since a record is acknowledged once it is durable in some root, and what both stored counts once in `open_catalogs`.
"""

import asyncio
import hashlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import aiohttp

from poolmeter.web.trust import SYSTEM, Trust

_log = logging.getLogger("poolmeter.collector")


@dataclass(frozen=True)
class PeerSettings:
    """This collector's name among `members` (name to base URL, itself included), and after how long without an answer one counts as dead.

    `trust` is how it knows the others where they speak TLS.
    """

    member: str
    members: Mapping[str, str]
    timeout_s: float = 60.0
    trust: Trust = SYSTEM


@dataclass
class Peers:
    """Which collectors live. Without settings, or before `run`, every member does. Raises BadInput (files of `trust`)."""

    settings: PeerSettings | None
    clock: Callable[[], float] = time.monotonic
    _answered: dict[str, float] = field(default_factory=dict)
    _dead: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        tls = self.settings is not None and any(url.startswith("https:") for url in self.settings.members.values())
        self._context = self.settings.trust.context() if self.settings is not None and tls else True

    def mine(self, url: str) -> bool:
        """Whether this collector is to ask the exporter at `url`."""
        return self.settings is None or owner(url, self.living()) == self.settings.member

    def living(self) -> frozenset[str]:
        """The names of those that live; this one always does."""
        return frozenset() if self.settings is None else frozenset(self.settings.members) - self._dead

    def reasons(self) -> list[str]:
        """A sentence for each that counts as dead."""
        if self.settings is None:
            return []
        return [
            f"collector {name} at {self.settings.members[name]} does not answer, its nodes are asked here or by others"
            for name in sorted(self._dead)
        ]

    async def run(self, session: aiohttp.ClientSession, changed: Callable[[], Awaitable[None]]) -> None:
        """Ask the others whether they live until cancelled; `changed` is called when the living are others than before."""
        if self.settings is None:
            return
        others = {name: url for name, url in self.settings.members.items() if name != self.settings.member}
        # One that has not been asked yet counts as alive: who starts takes nobody's nodes away.
        self._answered = dict.fromkeys(others, self.clock())
        every = self.settings.timeout_s / 5
        while True:
            answers = await asyncio.gather(*(_lives(session, url, every, self._context) for url in others.values()))
            now = self.clock()
            self._answered |= {name: now for name, lives in zip(others, answers, strict=True) if lives}
            dead = frozenset(name for name, at in self._answered.items() if now - at > self.settings.timeout_s)
            if dead != self._dead:
                for name in dead ^ self._dead:
                    _log.warning("collector %s at %s %s", name, others[name], "does not answer" if name in dead else "answers again")
                self._dead = dead
                await changed()
            await asyncio.sleep(every)


async def _lives(session: aiohttp.ClientSession, url: str, timeout_s: float, context: ssl.SSLContext | bool) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url.rstrip('/')}/healthz", timeout=timeout, allow_redirects=False, ssl=context) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def owner(url: str, members: Collection[str]) -> str:
    """The member to which an exporter belongs: the highest of a hash over both names. Order of `members` changes nothing."""
    return max(sorted(members), key=lambda member: hashlib.sha256(f"{member}\0{url}".encode()).digest())
