"""What an exporter says of its records and of now, to whoever asks and to whom it pushes: headers and a body of Arrow streams."""

from dataclasses import dataclass
from typing import Protocol

from poolmeter.exporter.scrape import Watched, newest
from poolmeter.exporter.spool import Batch, Spool


class Source(Watched, Protocol):
    """What answers are made of: the part of the agent that they need."""

    @property
    def spool(self) -> Spool:
        """Records that wait."""
        ...


@dataclass(frozen=True)
class UsageAnswer:
    """Records of the spool, as they travel."""

    batch: Batch
    headers: dict[str, str]
    body: bytes


def usage_answer(source: Source, node: str, epoch: str | None, sequence: int, limit: int, snapshot: bool) -> UsageAnswer:
    """At most `limit` records after a position, as an Arrow stream.

    With `snapshot` the newest one stands behind it as another stream, from byte X-Poolmeter-Snapshot on (nothing before the first look).
    """
    from poolmeter import arrow, now

    spool = source.spool
    batch = spool.read(epoch, sequence, limit)
    headers = {
        "X-Poolmeter-Node": node,
        "X-Poolmeter-Epoch": spool.epoch,
        "X-Poolmeter-Last-Sequence": str(batch.last),
        "X-Poolmeter-More": "true" if batch.more else "false",
    }
    body = arrow.to_bytes(arrow.to_table(batch.records))
    if snapshot:
        headers["X-Poolmeter-Snapshot"] = str(len(body))
        page = newest(source)
        body += b"" if page is None else now.to_bytes(now.now_tables(page.snapshot))
    return UsageAnswer(batch, headers, body)
