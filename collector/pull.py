"""Pulling one exporter: ask, check, publish, acknowledge; forever, at its own pace, whatever the others do."""

import asyncio
import json
import logging
import math
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp

from poolmeter.clock import Clock
from poolmeter.collector.bodies import SNAPSHOT_LIMIT, USAGE_LIMIT, parse_snapshot
from poolmeter.collector.fetch import bounded
from poolmeter.collector.now import Newest, newest
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.reception import Claim, Got, Intake, Outcomes, aside, parsed
from poolmeter.collector.state import NodeRow
from poolmeter.collector.tracing import CLIENT, span
from poolmeter.errors import PoolmeterError, Refused, Unavailable

_log = logging.getLogger("poolmeter.collector")
ROUNDS = 64  # answers taken in one pull before the node waits its turn again
BACK_OFF = 8  # a failing node is asked at most this many times less often
BACK_OFF_S = 60.0
JITTER = 0.1
GRID_S = 0.5


@dataclass(frozen=True)
class PullSettings:
    """How to pull: consumer name, bearer token (None: none), interval and time limit of one request."""

    consumer: str
    token: str | None
    interval_s: float
    timeout_s: float


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
        self._intake = Intake(row, publisher, clock, claim, outcomes)
        self.status = self._intake.status
        self._base = row.url.rstrip("/")
        self._session = session
        self._settings = settings
        self._busy = asyncio.Lock()
        self._acknowledged: tuple[str, int] | None = None

    async def run(self, first_delay_s: float) -> None:
        """Pull until cancelled."""
        if first_delay_s:
            await self._sleep_until(asyncio.get_running_loop().time() + first_delay_s)
        while True:
            started = asyncio.get_running_loop().time()
            await self.pull()
            wait = self._settings.interval_s
            if self.status.failures_in_a_row:
                slow = min(2.0 ** min(self.status.failures_in_a_row, 10), BACK_OFF)
                wait = max(wait, min(wait * slow, BACK_OFF_S))
            wait *= 1 + random.uniform(-JITTER, JITTER)
            await self._sleep_until(started + wait)

    async def _sleep_until(self, at_s: float) -> None:
        """Sleep to a moment that is the same for the pulls around it: woken together they cost half of what each costs alone."""
        grid = min(GRID_S, self._settings.interval_s / 30)
        await asyncio.sleep(max(0.0, math.ceil(at_s / grid) * grid - asyncio.get_running_loop().time()))

    async def pull(self) -> bool:
        """One pull: everything that waits in the exporter's spool, and its snapshot. Never raises; False when it failed."""
        async with self._busy:
            self.status.pulls += 1
            try:
                with span("pull", attributes={"url.full": self._base}) as traced:
                    warning = await self._pull()
                    traced.set("poolmeter.node", self.status.row.node)
            except Refused as error:
                await self._intake.failed("refused", str(error))
                return False
            except (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError) as error:
                await self._intake.failed("failing", str(error) or type(error).__name__)
                return False
            except Exception as error:
                # One node's surprise must not end its task, let alone the others'.
                _log.exception("pull of %s failed", self._base)
                await self._intake.failed("failing", f"internal error: {type(error).__name__}: {error}")
                return False
            self._intake.succeeded()
            if warning:
                _log.debug("node %s: %s", self.status.row.node, warning)
            return True

    async def _pull(self) -> str | None:
        warning: str | None = None
        for turn in range(ROUNDS):
            got = await self._ask(with_snapshot=turn == 0)
            answer, found = got.answer, got.newest
            self._intake.admit(answer.node)
            if turn == 0:
                warning = got.warning
                if answer.snapshot is None:
                    found, warning = await self._json_snapshot(answer.node)
            through = await self._intake.take(answer, found, warning)
            if through is not None:
                await self._acknowledge(answer.epoch, through)
            if not answer.more or through is None:
                break
        return warning

    async def _ask(self, with_snapshot: bool) -> Got:
        # Asked after what is acknowledged, not after what is stored: a record whose acknowledgement failed comes again, is dropped as
        # known, and its event reaches the books even if the last collector died before it got there.
        got = await self._usage(self._acknowledged, with_snapshot)
        if self._acknowledged is not None and got.answer.epoch != self._acknowledged[0]:
            # Another spool than the one asked after: its beginning must not be missed.
            self._acknowledged = None
            got = await self._usage(None, with_snapshot)
        return got

    async def _usage(self, after: tuple[str, int] | None, with_snapshot: bool) -> Got:
        query = ([f"after={quote(after[0])},{after[1]}"] if after else []) + (["snapshot=arrow"] if with_snapshot else [])
        with span("GET /v1/usage", CLIENT):
            async with self._request("GET", "/v1/usage" + ("?" + "&".join(query) if query else "")) as response:
                body = await bounded(response, USAGE_LIMIT)
                headers = response.headers
        return await aside(len(body), lambda: parsed(headers, body))

    async def _json_snapshot(self, node: str) -> tuple[Newest | None, str | None]:
        """The snapshot of an exporter that knows it as a page of its own alone, or why there is none."""
        try:
            async with self._request("GET", "/v1/snapshot") as response:
                body = await bounded(response, SNAPSHOT_LIMIT)
            return await asyncio.to_thread(lambda: newest(parse_snapshot(body, node))), None
        except (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError) as error:
            return None, f"no snapshot: {str(error) or type(error).__name__}"

    async def _acknowledge(self, epoch: str, sequence: int) -> None:
        body = json.dumps({"consumer": self._settings.consumer, "epoch": epoch, "seq": sequence})
        async with self._request("POST", "/v1/ack", body=body) as response:
            answer = await bounded(response, 65_536, accept=range(200, 600))
            if not 200 <= response.status < 300:
                said = answer.decode("utf-8", "replace").strip()[:200]
                raise Unavailable(f"{self._base}/v1/ack answered {response.status}, expected 200: {said}")

        self._acknowledged = (epoch, sequence)

    def _request(self, method: str, path: str, body: str | None = None) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        return self._session.request(method, self._base + path, data=body, headers=headers, allow_redirects=False, timeout=timeout)
