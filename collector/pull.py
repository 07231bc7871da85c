"""Pulling one exporter: ask, check, publish, acknowledge; forever, at its own pace, whatever the others do."""

import asyncio
import json
import logging
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp

from poolmeter.clock import Clock
from poolmeter.collector.bodies import SNAPSHOT_LIMIT, USAGE_LIMIT, Answer, parse_answer, parse_snapshot
from poolmeter.collector.fetch import bounded
from poolmeter.collector.intake import Claim, Intake, Outcomes
from poolmeter.collector.now import Newest, newest
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.state import NodeRow
from poolmeter.errors import PoolmeterError, Refused, Unavailable

_log = logging.getLogger("poolmeter.collector")
ROUNDS = 64  # answers taken in one pull before the node waits its turn again
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
                warning = await self._pull()
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
            answer = await self._ask()
            self._intake.admit(answer.node)
            found: Newest | None = None
            if turn == 0:
                try:
                    found = await self._snapshot(answer.node)
                except (PoolmeterError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    warning = f"no snapshot: {str(error) or type(error).__name__}"
            through = await self._intake.take(answer, found, warning)
            if through is not None:
                await self._acknowledge(answer.epoch, through)
            if not answer.more or through is None:
                break
        return warning

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
        async with self._request("GET", "/v1/usage", params=query) as response:
            body = await bounded(response, USAGE_LIMIT)
            headers = dict(_titled(response))
        return await asyncio.to_thread(parse_answer, headers, body)

    async def _snapshot(self, node: str) -> Newest:
        async with self._request("GET", "/v1/snapshot") as response:
            body = await bounded(response, SNAPSHOT_LIMIT)
        return await asyncio.to_thread(lambda: newest(parse_snapshot(body, node)))

    async def _acknowledge(self, epoch: str, sequence: int) -> None:
        body = json.dumps({"consumer": self._settings.consumer, "epoch": epoch, "seq": sequence})
        async with self._request("POST", "/v1/ack", body=body) as response:
            answer = await bounded(response, 65_536, accept=range(200, 600))
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
