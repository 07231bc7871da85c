"""Group commit: whatever has arrived while the last publication was written goes into the next one."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from poolmeter.collector.now import Newest
from poolmeter.collector.store import Batch, NodeRow, Store
from poolmeter.errors import PoolmeterError


@dataclass(frozen=True)
class Update:
    """What one pull of one node brought."""

    node: NodeRow
    batch: Batch | None = None
    newest: Newest | None = None


class Publisher:
    """Publishes updates in groups; `publish` returns when the update is durable and visible."""

    def __init__(self, store: Store, forget: Collection[str] = ()) -> None:
        self.publications = 0
        self.failures = 0
        self.seconds = 0.0
        self._store = store
        self._forget = forget
        self._waiting: list[tuple[Update, asyncio.Future[NodeRow]]] = []
        self._wake = asyncio.Event()

    async def publish(self, update: Update) -> NodeRow:
        """The node's row as stored. Raises Unavailable when the store could not take the update; nothing of it is stored then."""
        done: asyncio.Future[NodeRow] = asyncio.get_running_loop().create_future()
        self._waiting.append((update, done))
        self._wake.set()
        return await done

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # One turn of the loop lets pulls that end together share a publication.
            await asyncio.sleep(0)
            waiting, self._waiting = self._waiting, []
            if not waiting:
                continue
            updates = [update for update, _ in waiting]
            try:
                await asyncio.to_thread(self._write, updates)
            except asyncio.CancelledError:
                for _, done in waiting:
                    done.cancel()
                raise
            except PoolmeterError as error:
                self.failures += 1
                for _, done in waiting:
                    if not done.done():
                        done.set_exception(error)
                continue
            rows = self._store.state.nodes
            for update, done in waiting:
                if not done.done():
                    done.set_result(rows[update.node.url])

    def _write(self, updates: list[Update]) -> None:
        started = time.perf_counter()
        self._store.publish(
            [update.batch for update in updates if update.batch is not None],
            [update.newest for update in updates if update.newest is not None],
            [update.node for update in updates],
            forget=self._forget,
        )
        self.seconds += time.perf_counter() - started
        self.publications += 1
        self._store.sweep()
