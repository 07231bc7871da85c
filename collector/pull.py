"""Pulling one exporter: ask, check, publish, acknowledge; forever, at its own pace, whatever the others do."""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp

from poolmeter.clock import Clock
from poolmeter.collector.bodies import SNAPSHOT_LIMIT, USAGE_LIMIT, Answer, parse_answer, parse_snapshot
from poolmeter.collector.check import Expected, check_usage
from poolmeter.collector.now import Newest, newest
from poolmeter.collector.publisher import Publisher, Update
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch
from poolmeter.collector.tracing import CLIENT, span
from poolmeter.errors import DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.units import DAY_US

_log = logging.getLogger("poolmeter.collector")
ROUNDS = 64  # answers taken in one pull before the node waits its turn again
DAYS_MOST = 400  # of one answer; a spool keeps a year at most
BACK_OFF = 8  # a failing node is asked at most this many times less often
BACK_OFF_S = 60.0
JITTER = 0.1


@dataclass(frozen=True)
class PullSettings:
    """How to pull: consumer name, bearer token (None: none), interval and time limit of one request."""

    consumer: str
    token: str | None
    interval_s: float
    timeout_s: float


@dataclass
class NodeStatus:
    """What the health page says of one exporter, since this collector started; `row` is what the store says."""

    row: NodeRow
    pulls: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    rows: int = 0
    quarantined: int = 0
    last_success_us: int | None = None
    lag_us: int | None = None


# Who owns a node's name: url -> error sentence, None when the url may use it.
Claim = Callable[[str, str], str | None]
Outcomes = Callable[[Batch], object]


class NodePuller:
    """One exporter. `claim(url, node)` guards names; `outcomes(batch)` takes in what became of decisions, before it is acknowledged."""

    def __init__(
        self,
        row: NodeRow,
        session: aiohttp.ClientSession,
        publisher: Publisher,
        settings: PullSettings,
        clock: Clock,
        claim: Claim,
        outcomes: Outcomes,
    ) -> None:
        self.status = NodeStatus(row)
        self._base = row.url.rstrip("/")
        self._session = session
        self._publisher = publisher
        self._settings = settings
        self._clock = clock
        self._claim = claim
        self._outcomes = outcomes
        self._busy = asyncio.Lock()
        self._acknowledged: tuple[str, int] | None = None

    async def run(self, first_delay_s: float) -> None:
        """Pull until cancelled."""
        await asyncio.sleep(first_delay_s)
        while True:
            started = asyncio.get_running_loop().time()
            await self.pull()
            wait = self._settings.interval_s
            if self.status.failures_in_a_row:
                slow = min(2.0 ** min(self.status.failures_in_a_row, 10), BACK_OFF)
                wait = max(wait, min(wait * slow, BACK_OFF_S))
            wait *= 1 + random.uniform(-JITTER, JITTER)
            await asyncio.sleep(max(0.0, wait - (asyncio.get_running_loop().time() - started)))

    async def pull(self) -> bool:
        """One pull: everything that waits in the exporter's spool, and its snapshot. Never raises; False when it failed."""
        async with self._busy:
            self.status.pulls += 1
            try:
                with span("pull", attributes={"url.full": self._base}) as traced:
                    warning = await self._pull()
                    traced.set("poolmeter.node", self.status.row.node)
            except Refused as error:
                await self._failed("refused", str(error))
                return False
            except (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError) as error:
                await self._failed("failing", str(error) or type(error).__name__)
                return False
            except Exception as error:
                # One node's surprise must not end its task, let alone the others'.
                _log.exception("pull of %s failed", self._base)
                await self._failed("failing", f"internal error: {type(error).__name__}: {error}")
                return False
            if self.status.failures_in_a_row:
                _log.info("node %s at %s answers again", self.status.row.node, self._base)
            self.status.failures_in_a_row = 0
            self.status.last_success_us = self._clock.wall_us()
            if warning:
                _log.debug("node %s: %s", self.status.row.node, warning)
            return True

    async def _pull(self) -> str | None:
        warning: str | None = None
        for turn in range(ROUNDS):
            answer = await self._ask()
            reason = self._claim(self.status.row.url, answer.node)
            if reason is not None:
                raise Refused(reason)
            found: Newest | None = None
            if turn == 0:
                try:
                    found = await self._snapshot(answer.node)
                except (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    warning = f"no snapshot: {str(error) or type(error).__name__}"
            now = self._clock.wall_us()
            batch = await asyncio.to_thread(self._checked, answer, now) if answer.table.num_rows else None
            self._take_lag(answer, now)
            self.status.row = await self._publisher.publish(Update(self._row(answer, found, warning, now), batch, found, answer.more))
            if batch is not None:
                self.status.rows += batch.checked.good.num_rows
                self.status.quarantined += sum(row.rows for row in batch.checked.bad)
                if batch.checked.bad:
                    _log.warning("node %s: %d rows in quarantine: %s", answer.node, len(batch.checked.bad), batch.checked.bad[0].reason)
                await asyncio.to_thread(self._outcomes, batch)
                if batch.checked.through is not None:
                    await self._acknowledge(answer.epoch, batch.checked.through)
            if not answer.more or batch is None or batch.checked.through is None:
                break
        return warning

    def _checked(self, answer: Answer, now_us: int) -> Batch:
        import numpy as np
        import pyarrow.compute as pc

        days = len(np.unique(pc.fill_null(answer.table.column("minute_us"), 0).to_numpy() // DAY_US))
        if days > DAYS_MOST:
            # A segment is written for each: one answer must not make thousands of files.
            raise DataError(f"{self._base}/v1/usage answered with records of {days} days, expected at most {DAYS_MOST}")
        expected = Expected(answer.node, answer.epoch, answer.last_sequence, now_us)
        return Batch(answer.node, answer.epoch, check_usage(answer.table, expected), now_us)

    def _row(self, answer: Answer, found: Newest | None, warning: str | None, now_us: int) -> NodeRow:
        old = self.status.row
        pool, simulated = (found.snapshot.pool, found.snapshot.simulated) if found else (old.pool, old.simulated)
        return NodeRow(old.url, answer.node, answer.epoch, now_us, "up", warning, pool, simulated)

    def _take_lag(self, answer: Answer, now_us: int) -> None:
        if answer.table.num_rows:
            import pyarrow.compute as pc

            newest_us = pc.max(answer.table.column("minute_us")).as_py()
            self.status.lag_us = max(0, now_us - newest_us) if newest_us is not None else None

    async def _failed(self, state: str, reason: str) -> None:
        self.status.failures += 1
        self.status.failures_in_a_row += 1
        old = self.status.row
        if self.status.failures_in_a_row == 1 or old.reason != reason:
            _log.warning("node %s at %s: %s", old.node or "(unknown)", self._base, reason)
        row = NodeRow(
            old.url, old.node, old.epoch, self._clock.wall_us(), state, reason[:1000], old.pool, old.simulated, old.last_sequence
        )  # fmt: skip
        self.status.row = row
        try:
            self.status.row = await self._publisher.publish(Update(row))
        except Unavailable as error:
            _log.error("%s", error)

    async def _ask(self) -> Answer:
        # Asked after what is acknowledged, not after what is stored: a record whose acknowledgement failed comes again, is dropped as
        # known, and its event reaches the books even if the last collector died before it got there.
        answer = await self._usage(self._acknowledged)
        if self._acknowledged is not None and answer.epoch != self._acknowledged[0]:
            # Another spool than the one asked after: its beginning must not be missed.
            self._acknowledged = None
            answer = await self._usage(None)
        return answer

    async def _usage(self, after: tuple[str, int] | None) -> Answer:
        query = {"after": f"{after[0]},{after[1]}"} if after else {}
        with span("GET /v1/usage", CLIENT):
            async with self._request("GET", "/v1/usage", params=query) as response:
                body = await _bounded(response, USAGE_LIMIT)
                headers = dict(_titled(response))
        return await asyncio.to_thread(parse_answer, headers, body)

    async def _snapshot(self, node: str) -> Newest:
        async with self._request("GET", "/v1/snapshot") as response:
            body = await _bounded(response, SNAPSHOT_LIMIT)
        return await asyncio.to_thread(lambda: newest(parse_snapshot(body, node)))

    async def _acknowledge(self, epoch: str, sequence: int) -> None:
        body = json.dumps({"consumer": self._settings.consumer, "epoch": epoch, "seq": sequence})
        async with self._request("POST", "/v1/ack", body=body) as response:
            answer = await _bounded(response, 65_536, accept=range(200, 600))
            if not 200 <= response.status < 300:
                said = answer.decode("utf-8", "replace").strip()[:200]
                raise Unavailable(f"{self._base}/v1/ack answered {response.status}, expected 200: {said}")

        self._acknowledged = (epoch, sequence)

    def _request(
        self, method: str, path: str, params: dict[str, str] | None = None, body: str | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        return self._session.request(
            method, self._base + path, params=params, data=body, headers=headers, allow_redirects=False, timeout=timeout
        )


def _titled(response: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    return [("-".join(word.capitalize() for word in name.split("-")), value) for name, value in response.headers.items()]


async def _bounded(response: aiohttp.ClientResponse, limit: int, accept: range = range(200, 300)) -> bytes:
    """The body, at most `limit` bytes of it, never unpacked."""
    if response.status not in accept:
        raise Unavailable(f"{response.url.with_query(None)} answered {response.status}, expected 200")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise DataError(f"{response.url.with_query(None)} answered with Content-Encoding {encoding!r:.40}, expected identity")
    chunks, size = [], 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > limit:
            raise DataError(f"{response.url.with_query(None)} answered with more than {limit} bytes, expected at most that")
        chunks.append(chunk)
    return b"".join(chunks)
