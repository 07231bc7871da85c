"""OTLP push: the newest snapshot, every interval, by HTTP and protobuf, from a thread of its own that no turn waits for.

A push that may succeed later is tried again with growing pauses, with what is newest then: counters are cumulative, so nothing is lost, and
no old gauge is sent. `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_EXPORTER_OTLP_CERTIFICATE` are honoured, as by every OTLP exporter.
"""

import logging
import os
import random
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from poolmeter import __version__
from poolmeter.exporter.scrape import Watched, newest
from poolmeter.web.otlp import LONGEST_PAUSE_S, Outcome, Poster, endpoint_of

if TYPE_CHECKING:
    from poolmeter.exporter.collectors.family import Page

_LOG = logging.getLogger("poolmeter.exporter")
FIRST_PAUSE_S = 1.0


class Pusher:
    """Pushes until it is stopped. `ok` and `failed` count pushes."""

    def __init__(
        self,
        endpoint: str,
        interval_s: float,
        agent: Watched,
        timeout_s: float = 10.0,
        environment: Mapping[str, str] = os.environ,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.ok = 0
        self.failed = 0
        self._interval_s, self._agent = interval_s, agent
        self._first_pause_s = first_pause_s
        self._poster = Poster(endpoint_of(endpoint), f"poolmeter/{__version__}", timeout_s, environment)
        self._stop = threading.Event()
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begin to push."""
        self._thread.start()

    def stop(self) -> None:
        """Push no more. A push under way is left to end by itself: it must not hold up the exporter's end."""
        self._stop.set()
        self._thread.join(timeout=0.2)

    def _run(self) -> None:
        pause, attempts = 0.0, 0
        while not self._stop.wait(pause):
            page = newest(self._agent)
            if page is None:
                pause = min(1.0, self._interval_s)
                continue
            try:
                outcome = self.push(page)
            except Exception as error:  # a thread that ended would push no more, and nobody would know
                outcome = Outcome(f"internal error: {type(error).__name__}: {error}")
            if outcome.trouble is None:
                self.ok += 1
            else:
                self.failed += 1
            self._say(outcome.trouble)
            attempts = attempts + 1 if outcome.retry else 0
            pause = self._interval_s
            if outcome.retry:
                longest = max(LONGEST_PAUSE_S, self._interval_s)
                grown = min(longest, self._first_pause_s * 2 ** min(attempts - 1, 16))
                pause = outcome.after_s if outcome.after_s is not None else grown * random.uniform(0.5, 1.0)

    def _say(self, trouble: str | None) -> None:
        """Log a change, not every push."""
        if trouble is not None and trouble != self._said:
            _LOG.warning("OTLP push to %s failed: %s", self._poster.endpoint, trouble)
        elif trouble is None and self._said is not None:
            _LOG.info("OTLP push to %s succeeds again", self._poster.endpoint)
        self._said = trouble

    def push(self, page: "Page") -> Outcome:
        """Send one page."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        from poolmeter.exporter.otlp_points import request_of

        outcome = self._poster.post(request_of(page).SerializeToString())
        if outcome.trouble is not None:
            return outcome
        try:
            answer = ExportMetricsServiceResponse.FromString(outcome.answer)
        except Exception as error:  # an answer that is no protobuf: the points were taken
            _LOG.debug("OTLP answer cannot be read: %s", error)
            return Outcome()
        partial = answer.partial_success
        if partial.rejected_data_points:
            return Outcome(f"{partial.rejected_data_points} points were rejected: {partial.error_message:.200}")
        return Outcome()
