"""Asking, keeping, and making frames of what is kept: what both the live view and `--once` stand on."""

from poolmeter.clock import Clock, SystemClock
from poolmeter.exporter.top.feed import Feed
from poolmeter.exporter.top.history import Histories
from poolmeter.exporter.top.host import Host
from poolmeter.exporter.top.rows import Frame, build


class Watch:
    """One feed and what came of it. `poll` blocks for the network; `frame` does not."""

    def __init__(self, feed: Feed, host: Host | None = None, clock: Clock | None = None) -> None:
        self._feed = feed
        self._host = host or Host()
        self._clock = clock or SystemClock()
        self.histories = Histories()

    def poll(self) -> None:
        """Ask every address once."""
        answers = self._feed.poll()
        near = [address.url for address in self._feed.addresses if address.loopback]
        self.histories.take(answers, near, self._clock.monotonic_us(), self._clock.wall_us())

    def moved(self) -> bool:
        """Whether every node that answers has sent a second snapshot, so that there are rates."""
        return all(node.moved or node.gone_since_us is not None for node in self.histories.nodes.values())

    def frame(self) -> Frame:
        """Everything known now."""
        made = build(self.histories, self._host.look, self._clock.monotonic_us(), self._clock.wall_us())
        self._host.forget_but({row.process.pid for row in made.processes})
        return made

    def close(self) -> None:
        """Let go of the connections."""
        self._feed.close()
