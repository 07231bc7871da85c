"""Group commit: whatever has arrived while the last publication was written goes into the next one."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poolmeter.collector.check import Expected, check_together
from poolmeter.collector.now import Newest
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch, Store
from poolmeter.collector.tracing import span
from poolmeter.errors import DataError, PoolmeterError

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("poolmeter.collector")
GAP_SHARE = 20  # a publication that takes long is followed by so many times its length without one, so that it costs a twentieth of a core
GAP_MOST_S = 2.0
NOW_SHARE = 30  # the same for the writing of newest snapshots
NOW_MOST_S = 15.0
TOGETHER_BYTES = 1 << 18  # records of up to so many bytes are copied to be checked with others
DOUBTS = 3  # so many members of a failed group fail alone before the rest is not tried


@dataclass(frozen=True)
class Received:
    """Records as they came (a wide table), and what is expected of them."""

    table: "pa.Table"
    expected: Expected


@dataclass(frozen=True)
class Update:
    """What one pull of one node brought; `urgent`: more is waiting behind it."""

    node: NodeRow
    records: Received | None = None
    newest: Newest | None = None
    urgent: bool = False


@dataclass(frozen=True)
class Stored:
    """What became of an update: the node's row as stored, and its records after the rules (None: it brought none)."""

    node: NodeRow
    batch: Batch | None


class Publisher:
    """Checks and publishes updates in groups; `publish` returns when the update is durable and visible.

    `gap_s` is the least time between two publications (a catalog costs the same for one node as for a thousand), unless one is urgent;
    where publications take long it grows, to `GAP_MOST_S` at most.
    """

    def __init__(self, store: Store, forget: Collection[str] = (), gap_s: float = 0.0) -> None:
        self.publications = 0
        self.failures = 0
        self.seconds = 0.0
        self.recent: deque[float] = deque(maxlen=1000)  # seconds that the last publications took
        self._store = store
        self._forgotten = set(forget)
        self._leaving = False  # somebody forgotten is still in the store
        self._gap_s = gap_s
        self._urgent = asyncio.Event()
        self._waiting: list[tuple[Update, asyncio.Future[Stored]]] = []
        self._wake = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_at = 0.0

    async def publish(self, update: Update) -> Stored:
        """What became of it. Raises Unavailable when the store could not take the update; nothing of it is stored then."""
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._waiting.append((update, done))
        if update.urgent:
            self._urgent.set()
        self._wake.set()
        return await done

    async def run(self) -> None:
        """Publish until cancelled."""
        ended = -self._gap_s
        while True:
            await self._wake.wait()
            # One turn of the loop at least lets pulls that end together share a publication.
            await asyncio.sleep(0)
            rest = ended + self._gap() - time.monotonic()
            if rest > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), rest)
            self._urgent.clear()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            ended = await self._group(waiting)
            self._refresh(ended)

    def _gap(self) -> float:
        return max(self._gap_s, min(GAP_SHARE * (self.recent[-1] if self.recent else 0.0), GAP_MOST_S)) if self._gap_s else 0.0

    def _refresh(self, now_s: float) -> None:
        """Write newest snapshots that a publication left out: beside the pulls, and seldom enough."""
        if self._store.now_waits and now_s >= self._refresh_at and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._write_now())

    async def _write_now(self) -> None:
        started = time.monotonic()
        try:
            await asyncio.to_thread(self._store.refresh_now)
        except PoolmeterError as error:
            _log.error("newest snapshots: %s", error)
        ended = time.monotonic()
        self._refresh_at = ended + min(NOW_SHARE * (ended - started), NOW_MOST_S)

    def recent_ms(self, part: float) -> float | None:
        """So long the given part (0 to 1) of the last thousand publications took at most; None before the first."""
        took = sorted(self.recent)
        return round(took[min(len(took) - 1, int(part * len(took)))] * 1e3, 1) if took else None

    def forget(self, url: str) -> None:
        """Leave an exporter out of the store's nodes, with the next publication; its rows stay."""
        self._forgotten.add(url)
        self._leaving = True
        self._wake.set()

    def keep(self, url: str) -> None:
        """Undo `forget`: the exporter is asked again."""
        self._forgotten.discard(url)

    def hurry(self) -> None:
        """Leave out the gap from now on: the daemon is ending."""
        self._gap_s = 0.0
        self._urgent.set()

    async def _group(self, waiting: list[tuple[Update, "asyncio.Future[Stored]"]]) -> float:
        """Publish a group and answer its members; when it ended (monotonic)."""
        try:
            due, self._leaving = bool(waiting) or self._leaving, False
            done = await asyncio.to_thread(self._write, [update for update, _ in waiting]) if due else []
            if not isinstance(done, PoolmeterError):
                self._answer(waiting, done)
            elif len(waiting) == 1:
                self._refuse(waiting, done)
            else:
                await self._one_by_one(waiting)
        except asyncio.CancelledError:
            for _, answer in waiting:
                answer.cancel()
            raise
        return time.monotonic()

    async def _one_by_one(self, waiting: list[tuple[Update, "asyncio.Future[Stored]"]]) -> None:
        """So that what one node sent cannot keep the others' records out; a disk that takes nothing is found out soon."""
        failures = 0
        for number, member in enumerate(waiting):
            done = await asyncio.to_thread(self._write, [member[0]])
            if not isinstance(done, PoolmeterError):
                self._answer([member], done)
                continue
            failures += 1
            self._refuse([member] if failures < DOUBTS else waiting[number:], done)
            if failures >= DOUBTS:
                return

    def _answer(self, members: list[tuple[Update, "asyncio.Future[Stored]"]], batches: list[Batch | None]) -> None:
        rows = self._store.state.nodes
        for (update, answer), batch in zip(members, batches, strict=True):
            if not answer.done():
                answer.set_result(Stored(rows[update.node.url], batch))

    def _refuse(self, members: list[tuple[Update, "asyncio.Future[Stored]"]], failure: PoolmeterError) -> None:
        for _, done in members:
            if not done.done():
                done.set_exception(failure)

    def _write(self, updates: list[Update]) -> "list[Batch | None] | PoolmeterError":
        """The records of each update after the rules, once they are stored; why nothing is, otherwise."""
        started = time.perf_counter()
        forgotten = frozenset(self._forgotten)
        try:
            with span("publish", attributes={"poolmeter.nodes": len(updates)}):
                batches = _checked(updates)
                self._store.publish(
                    [batch for batch in batches if batch is not None],
                    [update.newest for update in updates if update.newest is not None],
                    [update.node for update in updates],
                    forget=forgotten,
                )
        except PoolmeterError as error:
            self.failures += 1
            return error
        took = time.perf_counter() - started
        self.seconds += took
        self.recent.append(took)
        self.publications += 1
        # What is forgotten need not be said again, except of an exporter whose last word came with this publication.
        self._forgotten -= forgotten - {update.node.url for update in updates}
        self._store.sweep()
        return batches


def _checked(updates: Sequence[Update]) -> list[Batch | None]:
    """The records of each update after the rules: small ones together, since a rule costs as much for one of them as for all."""
    out: list[Batch | None] = [None] * len(updates)
    brought = [(number, update.records) for number, update in enumerate(updates) if update.records is not None]
    small = [(number, records) for number, records in brought if records.table.nbytes <= TOGETHER_BYTES]
    large = [[(number, records)] for number, records in brought if records.table.nbytes > TOGETHER_BYTES]
    for together in [small, *large]:
        try:
            found = check_together([(records.table, records.expected) for _, records in together])
        except Exception as error:  # whatever they are: the others' records must not be kept out by them
            _log.exception("records of %s cannot be checked", ", ".join(records.expected.node for _, records in together[:5]))
            raise DataError(f"records cannot be checked: {type(error).__name__}: {str(error)[:120]!r}") from error
        for (number, records), checked in zip(together, found, strict=True):
            expected = records.expected
            out[number] = Batch(expected.node, expected.epoch, checked, expected.now_us)
    return out
