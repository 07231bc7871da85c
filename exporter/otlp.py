"""OTLP push: the newest snapshot, every interval, by HTTP and protobuf, from a thread of its own that no turn waits for.

A push that may succeed later is tried again with growing pauses, with what is newest then: counters are cumulative, so nothing is lost, and
no old gauge is sent. `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_EXPORTER_OTLP_CERTIFICATE` are honoured, as by every OTLP exporter.
"""

import gzip
import http.client
import logging
import os
import random
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poolmeter.errors import BadInput
from poolmeter.exporter.scrape import Watched, newest

if TYPE_CHECKING:
    from poolmeter.exporter.collectors.family import Page

_LOG = logging.getLogger("poolmeter.exporter")
_PATH = "/v1/metrics"
_RETRYABLE = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_ANSWER_LIMIT = 65_536


def endpoint_of(text: str) -> str:
    """The address to post to: the path of metrics is added where it is not there. Raises BadInput."""
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        good = False
    if not good:
        raise BadInput(f"--otlp-endpoint is {text!r:.80}, expected a URL such as http://127.0.0.1:4318")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(_PATH) else path + _PATH, fragment="").geturl()


def headers_of(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded, as OpenTelemetry's environment variables write headers. Raises BadInput."""
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        value = urllib.parse.unquote(value.strip())
        if not equals or not name.strip().isascii() or not value.isprintable():
            raise BadInput("OTEL_EXPORTER_OTLP_HEADERS has an item that is no name=value")
        found[name.strip()] = value
    return found


@dataclass(frozen=True)
class _Outcome:
    """`retry` whether to try again soon; `after_s` what the receiver asked to wait."""

    trouble: str | None = None
    retry: bool = False
    after_s: float | None = None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A post is not sent on elsewhere."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


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
        self._endpoint, self._interval_s, self._agent, self._timeout_s = endpoint_of(endpoint), interval_s, agent, timeout_s
        self._first_pause_s = first_pause_s
        self._headers = headers_of(environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        authority = environment.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or None
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise BadInput(f"OTEL_EXPORTER_OTLP_CERTIFICATE {authority} cannot be used: {error.strerror or error}") from None
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)
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
                outcome = _Outcome(f"internal error: {type(error).__name__}: {error}")
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
            _LOG.warning("OTLP push to %s failed: %s", self._endpoint, trouble)
        elif trouble is None and self._said is not None:
            _LOG.info("OTLP push to %s succeeds again", self._endpoint)
        self._said = trouble

    def push(self, page: "Page") -> _Outcome:
        """Send one page."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        from poolmeter.exporter.otlp_points import request_of

        body = gzip.compress(request_of(page).SerializeToString(), 1)
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip", "User-Agent": f"poolmeter/{page.version}"}
        request = urllib.request.Request(self._endpoint, body, {**headers, **self._headers}, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = ExportMetricsServiceResponse.FromString(response.read(_ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            with error:
                return _Outcome(f"status {error.code}", error.code in _RETRYABLE, _seconds(error.headers.get("Retry-After")))
        except (OSError, http.client.HTTPException) as error:
            return _Outcome(str(getattr(error, "reason", None) or error), retry=True)
        except Exception as error:  # an answer that is no protobuf: the points were taken
            _LOG.debug("OTLP answer cannot be read: %s", error)
            return _Outcome()
        partial = answer.partial_success
        if partial.rejected_data_points:
            return _Outcome(f"{partial.rejected_data_points} points were rejected: {partial.error_message:.200}")
        return _Outcome()


def _seconds(text: str | None) -> float | None:
    """What Retry-After asks for in seconds, at most the longest pause; a date, or nothing, is None."""
    return min(LONGEST_PAUSE_S, float(text)) if text is not None and text.isascii() and text.isdigit() else None
