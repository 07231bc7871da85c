"""The exporters asked now: each with a task of its own, added and removed while the collector runs."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import aiohttp

from poolmeter.clock import Clock
from poolmeter.collector.publisher import Publisher, Update
from poolmeter.collector.pull import NodePuller, PullSettings
from poolmeter.collector.reception import NodeStatus, Outcomes
from poolmeter.collector.state import NodeRow
from poolmeter.errors import Unavailable

SPREAD_ABOVE = 8  # so many new nodes are asked at once; more are spread over the interval


class Names:
    """Which URL may answer as which node: as before, and no two alike."""

    def __init__(self, rows: Mapping[str, NodeRow]) -> None:
        self._node_of = {url: row.node for url, row in rows.items() if row.node is not None}
        self._url_of = {node: url for url, node in self._node_of.items()}

    def claim(self, url: str, node: str) -> str | None:
        """None when `url` may answer as `node`, else why not."""
        before = self._node_of.get(url)
        if before is not None and before != node:
            return f"{url} answers as node {node!r}, expected {before!r} as before"
        other = self._url_of.get(node, url)
        if other != url:
            return f"{url} answers as node {node!r}, which {other} already does; expected one exporter per node"
        self._node_of[url], self._url_of[node] = node, url
        return None

    def release(self, url: str) -> None:
        """`url` is asked no more: its node may come back at another one."""
        node = self._node_of.pop(url, None)
        if node is not None and self._url_of.get(node) == url:
            del self._url_of[node]


class Pullers:
    """Pulls the assigned exporters, each at its own pace. Methods belong to the event loop's thread.

    `known` are the store's rows: a node that it knows goes on under its name. Of the assigned exporters those that are `mine` are asked.
    """

    def __init__(
        self,
        known: Mapping[str, NodeRow],
        session: aiohttp.ClientSession,
        publisher: Publisher,
        settings: PullSettings,
        clock: Clock,
        outcomes: Outcomes,
        mine: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._mine = mine
        self._assigned: tuple[str, ...] = ()
        self._assigning = asyncio.Lock()
        self._known = dict(known)
        self._session = session
        self._publisher = publisher
        self._settings = settings
        self._clock = clock
        self._outcomes = outcomes
        self.names = Names({})
        self._pullers: dict[str, NodePuller] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def urls(self) -> frozenset[str]:
        """Who is asked now."""
        return frozenset(self._pullers)

    def statuses(self) -> list[NodeStatus]:
        """The state of every exporter that is asked now."""
        return [puller.status for puller in self._pullers.values()]

    async def assign(self, urls: Collection[str], gone: str | None = None) -> None:
        """Ask exactly `urls` from now on, as far as they are ours. Many new ones are spread over the interval; for `gone` see `remove`."""
        async with self._assigning:  # sources and peers change at the same time
            await self._assign(urls, gone)

    async def _assign(self, urls: Collection[str], gone: str | None) -> None:
        self._assigned = tuple(dict.fromkeys(urls))
        wanted = dict.fromkeys(url for url in self._assigned if self._mine(url))
        await asyncio.gather(*(self.remove(url, gone) for url in self._pullers if url not in wanted))
        new = [url for url in wanted if url not in self._pullers]
        for url in new:
            # All names that the store knows are taken before the first answer comes.
            row = self._known.get(url)
            if row is not None and row.node is not None:
                self.names.claim(url, row.node)
        spread = self._settings.interval_s / len(new) if len(new) > SPREAD_ABOVE else 0.0
        for number, url in enumerate(new):
            self.add(url, spread * number)

    async def share_anew(self) -> None:
        """Take and let go of exporters after what is `mine` has changed."""
        await self.assign(self._assigned)

    def add(self, url: str, first_delay_s: float = 0.0) -> None:
        """Ask one more exporter; nothing changes when it is asked already."""
        if url in self._pullers:
            return
        row = self._known.get(url) or NodeRow(url, None, None, None, "new")
        if row.node is not None:
            self.names.claim(url, row.node)
        puller = NodePuller(row, self._session, self._publisher, self._settings, self._clock, self.names.claim, self._outcomes)
        self._pullers[url] = puller
        self._publisher.keep(url)
        self._tasks[url] = asyncio.create_task(puller.run(first_delay_s))

    async def remove(self, url: str, gone: str | None = None) -> None:
        """Ask an exporter no more; a pull under way ends, what it has not acknowledged waits in the spool.

        Its rows stay. With `gone` its line on the health page stays too, in state `gone` with that reason, if it ever answered; without, it
        is forgotten.
        """
        puller, task = self._pullers.pop(url, None), self._tasks.pop(url, None)
        if puller is None or task is None:
            return
        await cancel([task])
        self.names.release(url)
        if gone is None or puller.status.row.node is None:
            self._known.pop(url, None)
            self._publisher.forget(url)
            return
        self._known[url] = replace(puller.status.row, state="gone", reason=gone[:1000])
        with contextlib.suppress(Unavailable):  # the health page says so, and the row is only a word on a node
            await self._publisher.publish(Update(self._known[url]))

    def forget_gone(self, before_us: int, most: int) -> None:
        """Forget nodes that are gone and were pulled last before `before_us`, and the oldest beyond `most`; their rows stay."""
        gone = sorted((row for row in self._known.values() if row.state == "gone"), key=lambda row: row.last_pull_us or 0)
        for number, row in enumerate(gone):
            if row.url not in self._pullers and ((row.last_pull_us or 0) < before_us or number < len(gone) - most):
                del self._known[row.url]
                self._publisher.forget(row.url)

    async def last_pulls(self, limit_s: float) -> None:
        """Every node once more, as far as the time goes: what is acknowledged is stored, the rest waits in the spools."""
        pulls = [asyncio.create_task(puller.pull()) for puller in self._pullers.values()]
        if pulls:
            _, late = await asyncio.wait(pulls, timeout=limit_s)
            await cancel(list(late))

    async def stop(self) -> None:
        """End every task; who was asked stays known, for `last_pulls`."""
        await cancel(list(self._tasks.values()))


async def cancel(tasks: Collection["asyncio.Task[object]"]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
