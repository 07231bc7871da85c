"""What one request may take: requests a second by caller, questions to the store at a time, their time and their memory."""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poolmeter.collector.auth import Caller, Role
from poolmeter.collector.tables import literal
from poolmeter.errors import Unavailable

if TYPE_CHECKING:
    import duckdb

_CALLERS = 4096
_HEAVY = frozenset({"/v1/usage", "/v1/reports/usage", "/v1/reports/chargeback", "/v1/reports/focus", "/allocation/compute", "/allocation"})


def asks_store(template: str, caller: Caller) -> bool:
    """Whether a request asks the store, and so waits for the others that do: of a tenant, its decisions are found there."""
    return template in _HEAVY or (template == "/v1/decisions" and caller.role is Role.TENANT)


@dataclass(frozen=True)
class Limits:
    """`requests_per_s` of one token or address, with twice that at once (0: no limit); `queries_at_once` run and eight times that wait."""

    requests_per_s: float = 0.0
    queries_at_once: int = 4
    query_timeout_s: float = 30.0
    query_memory_mib: int = 1024

    @property
    def queries_waiting(self) -> int:
        """How many questions wait at most."""
        return 8 * self.queries_at_once


class Rates:
    """A token bucket per caller; the longest unseen of over 4,096 are forgotten."""

    def __init__(self, per_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str) -> float | None:
        """None when one more request of `key` is within the rate, which it then counts; else the seconds until it would be."""
        if self.per_s <= 0:
            return None
        now, most = self._monotonic(), max(1.0, 2 * self.per_s)
        left, at = self._buckets.pop(key, (most, now))
        left = min(most, left + (now - at) * self.per_s)
        granted = left >= 1
        self._buckets[key] = (left - 1 if granted else left, now)
        if len(self._buckets) > _CALLERS:
            self._buckets.popitem(last=False)
        return None if granted else (1 - left) / self.per_s


class Overtime(Unavailable):
    """A question that took longer than it may."""


class Crowded(Unavailable):
    """More questions than may wait."""


@dataclass
class Question:
    """The connections of one request to the store: each is bounded as it is opened, all are interrupted when its time is over."""

    memory_mib: int
    spill: str
    over: bool = False
    _connections: "list[duckdb.DuckDBPyConnection]" = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, connection: "duckdb.DuckDBPyConnection") -> None:
        """Bound a connection. Raises Overtime when the time is over already."""
        import duckdb

        connection.execute(f"SET memory_limit = '{self.memory_mib}MiB'")
        # Not beside the catalog: a question must not fill the store's disk, nor leave files in the store when the process is killed. All
        # connections of one catalog share it, and once used it cannot be set again.
        with contextlib.suppress(duckdb.Error):
            connection.execute(f"SET temp_directory = {literal(self.spill)}")
        connection.execute(f"SET max_temp_directory_size = '{4 * self.memory_mib}MiB'")
        with self._mutex:
            if self.over:
                raise Overtime("the question took too long")
            self._connections.append(connection)

    def end(self) -> None:
        """The time is over."""
        with self._mutex:
            self.over = True
            for connection in self._connections:
                with contextlib.suppress(Exception):  # closed since
                    connection.interrupt()


class Queries:
    """Lets so many questions run at a time; more wait their turn, and too many are turned away."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.waiting = 0
        self._turns = asyncio.Semaphore(limits.queries_at_once)
        self._spill = tempfile.TemporaryDirectory(prefix="poolmeter-")

    def question(self) -> Question:
        """A request's question, not yet asked."""
        return Question(self.limits.query_memory_mib, self._spill.name)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn. Raises Crowded when too many wait already."""
        if self._turns.locked() and self.waiting >= self.limits.queries_waiting:
            raise Crowded(f"as many questions wait as may, expected at most {self.limits.queries_waiting} waiting; ask again later")
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._turns.release()
