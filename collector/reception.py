"""Taking in what one exporter sent, pulled or pushed: one path from a parsed answer through the rules to what is durable."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from poolmeter.clock import Clock
from poolmeter.collector.bodies import Answer, parse_answer, parse_now
from poolmeter.collector.check import Expected
from poolmeter.collector.events import has_outcomes
from poolmeter.collector.now import Newest
from poolmeter.collector.publisher import Publisher, Received, Update
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch
from poolmeter.errors import DataError, Refused, Unavailable
from poolmeter.model.units import DAY_US

_log = logging.getLogger("poolmeter.collector")
DAYS_MOST = 400  # of one answer; a spool keeps a year at most
INLINE_BYTES = 1 << 18  # some milliseconds of decoding
T = TypeVar("T")


@dataclass
class NodeStatus:
    """What the health page says of one exporter, since this collector started; `row` is what the store says."""

    row: NodeRow
    pulls: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    rows: int = 0
    quarantined: int = 0
    quarantine_reason: str | None = None  # of the last row that went there, and when
    quarantined_us: int | None = None
    last_success_us: int | None = None
    lag_us: int | None = None


@dataclass(frozen=True)
class Got:
    """An answer, and the snapshot in it; `warning` says why there is none."""

    answer: Answer
    newest: Newest | None
    warning: str | None


# Who owns a node's name: url -> error sentence, None when the url may use it.
Claim = Callable[[str, str], str | None]
Outcomes = Callable[[Batch], object]


class Intake:
    """One exporter's way into the store. `claim(url, node)` guards names; `outcomes(batch)` takes in what became of decisions.

    Whoever uses it asks or is asked by one exporter at a time, and acknowledges what `take` returns, never before.
    """

    def __init__(self, row: NodeRow, publisher: Publisher, clock: Clock, claim: Claim, outcomes: Outcomes) -> None:
        self.status = NodeStatus(row)
        self._publisher = publisher
        self._clock = clock
        self._claim = claim
        self._outcomes = outcomes

    def admit(self, node: str) -> None:
        """Raises Refused when this exporter may not answer as `node`."""
        reason = self._claim(self.status.row.url, node)
        if reason is not None:
            raise Refused(reason)

    async def take(self, answer: Answer, found: Newest | None, warning: str | None) -> int | None:
        """Check an answer and store it; the last sequence to acknowledge, None when there is none. On return all of it is durable.

        Raises DataError, Refused, Unavailable; nothing of it is stored then, unless what is told to the books failed: it comes again.
        """
        now = self._clock.wall_us()
        received = None
        if answer.table.num_rows:
            self._look_at_minutes(answer, now)
            received = Received(answer.table, Expected(answer.node, answer.epoch, answer.last_sequence, now))
        stored = await self._publisher.publish(Update(self._row(answer, found, warning, now), received, found, answer.more))
        self.status.row, batch = stored.node, stored.batch
        if batch is None:
            return None
        self.status.rows += batch.checked.good.num_rows
        self.status.quarantined += sum(row.rows for row in batch.checked.bad)
        if batch.checked.bad:
            self.status.quarantine_reason, self.status.quarantined_us = batch.checked.bad[0].reason, now
            _log.warning("node %s: %d rows in quarantine: %s", answer.node, len(batch.checked.bad), batch.checked.bad[0].reason)
        if has_outcomes(batch):
            await asyncio.to_thread(self._outcomes, batch)
        return batch.checked.through

    def succeeded(self) -> None:
        """Note that the exporter did what it should."""
        if self.status.failures_in_a_row:
            _log.info("node %s at %s answers again", self.status.row.node, self.status.row.url)
        self.status.failures_in_a_row = 0
        self.status.last_success_us = self._clock.wall_us()

    async def failed(self, state: str, reason: str) -> None:
        """Note that it did not, for the health page."""
        self.status.failures += 1
        self.status.failures_in_a_row += 1
        old = self.status.row
        if self.status.failures_in_a_row == 1 or old.reason != reason:
            _log.warning("node %s at %s: %s", old.node or "(unknown)", old.url, reason)
        row = NodeRow(
            old.url, old.node, old.epoch, self._clock.wall_us(), state, reason[:1000], old.pool, old.simulated, old.last_sequence
        )  # fmt: skip
        self.status.row = row
        try:
            self.status.row = (await self._publisher.publish(Update(row))).node
        except Unavailable as error:
            _log.error("%s", error)

    def _look_at_minutes(self, answer: Answer, now_us: int) -> None:
        """Take the lag; raises DataError on records of too many days."""
        import numpy as np
        import pyarrow.compute as pc

        column = answer.table.column("minute_us")
        bounds = pc.min_max(column).as_py()
        if bounds["max"] is None:
            self.status.lag_us = None
            return
        self.status.lag_us = max(0, now_us - bounds["max"])
        if bounds["max"] // DAY_US - bounds["min"] // DAY_US >= DAYS_MOST:
            days = len(np.unique(pc.fill_null(column, 0).to_numpy() // DAY_US))
            if days > DAYS_MOST:
                # A segment is written for each: one answer must not make thousands of files.
                raise DataError(f"{self.status.row.url} sent records of {days} days, expected at most {DAYS_MOST}")

    def _row(self, answer: Answer, found: Newest | None, warning: str | None, now_us: int) -> NodeRow:
        old = self.status.row
        pool, simulated = (found.pool, found.simulated) if found else (old.pool, old.simulated)
        return NodeRow(old.url, answer.node, answer.epoch, now_us, "up", warning, pool, simulated)


def parsed(headers: Mapping[str, str], body: bytes) -> Got:
    """An exporter's records and the snapshot behind them. Raises DataError; a wrong snapshot alone is only a warning."""
    answer = parse_answer(headers, body)
    try:
        return Got(answer, parse_now(answer, body), "no snapshot: none was taken yet" if answer.snapshot == len(body) else None)
    except DataError as error:  # records are not kept out by it
        return Got(answer, None, f"no snapshot: {error}")


async def aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` bytes: a thread is worth its price for what takes long alone."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)
