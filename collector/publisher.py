"""Group commit: whatever has arrived while the last publication was written goes into the next one."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass

from poolmeter.collector.now import Newest
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch, Store
from poolmeter.collector.tracing import span
from poolmeter.errors import PoolmeterError

DOUBTS = 3  # so many members of a failed group fail alone before the rest is not tried


@dataclass(frozen=True)
class Update:
    """What one pull of one node brought; `urgent`: more is waiting behind it."""

    node: NodeRow
    batch: Batch | None = None
    newest: Newest | None = None
    urgent: bool = False


class Publisher:
    """Publishes updates in groups; `publish` returns when the update is durable and visible.

    `gap_s` is the least time between two publications (a catalog costs the same for one node as for a thousand), unless one is urgent.
    """

    def __init__(self, store: Store, forget: Collection[str] = (), gap_s: float = 0.0) -> None:
        self.publications = 0
        self.failures = 0
        self.seconds = 0.0
        self._store = store
        self._forget = forget
        self._gap_s = gap_s
        self._urgent = asyncio.Event()
        self._waiting: list[tuple[Update, asyncio.Future[NodeRow]]] = []
        self._wake = asyncio.Event()

    async def publish(self, update: Update) -> NodeRow:
        """The node's row as stored. Raises Unavailable when the store could not take the update; nothing of it is stored then."""
        done: asyncio.Future[NodeRow] = asyncio.get_running_loop().create_future()
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
            rest = ended + self._gap_s - time.monotonic()
            if rest > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), rest)
            self._urgent.clear()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            ended = await self._group(waiting)

    def hurry(self) -> None:
        """Leave out the gap from now on: the daemon is ending."""
        self._gap_s = 0.0
        self._urgent.set()

    async def _group(self, waiting: list[tuple[Update, "asyncio.Future[NodeRow]"]]) -> float:
        """Publish a group and answer its members; when it ended (monotonic)."""
        try:
            failure = await asyncio.to_thread(self._write, [update for update, _ in waiting]) if waiting else None
            if failure is None:
                self._answer(waiting)
            elif len(waiting) == 1:
                self._refuse(waiting, failure)
            else:
                await self._one_by_one(waiting)
        except asyncio.CancelledError:
            for _, done in waiting:
                done.cancel()
            raise
        return time.monotonic()

    async def _one_by_one(self, waiting: list[tuple[Update, "asyncio.Future[NodeRow]"]]) -> None:
        """So that what one node sent cannot keep the others' records out; a disk that takes nothing is found out soon."""
        failures = 0
        for number, member in enumerate(waiting):
            failure = await asyncio.to_thread(self._write, [member[0]])
            if failure is None:
                self._answer([member])
                continue
            failures += 1
            self._refuse([member] if failures < DOUBTS else waiting[number:], failure)
            if failures >= DOUBTS:
                return

    def _answer(self, members: list[tuple[Update, "asyncio.Future[NodeRow]"]]) -> None:
        rows = self._store.state.nodes
        for update, done in members:
            if not done.done():
                done.set_result(rows[update.node.url])

    def _refuse(self, members: list[tuple[Update, "asyncio.Future[NodeRow]"]], failure: PoolmeterError) -> None:
        for _, done in members:
            if not done.done():
                done.set_exception(failure)

    def _write(self, updates: list[Update]) -> PoolmeterError | None:
        started = time.perf_counter()
        try:
            with span("publish", attributes={"poolmeter.nodes": len(updates)}):
                self._store.publish(
                    [update.batch for update in updates if update.batch is not None],
                    [update.newest for update in updates if update.newest is not None],
                    [update.node for update in updates],
                    forget=self._forget,
                )
        except PoolmeterError as error:
            self.failures += 1
            return error
        self.seconds += time.perf_counter() - started
        self.publications += 1
        self._store.sweep()
        return None
