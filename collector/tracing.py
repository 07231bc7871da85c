"""Traces of the collector's own work, pushed by OTLP: a request, a question, a pull, a publication, with what each is part of.

Off unless a tracer is in force. A span costs some microseconds and never waits: what has ended stands in a bounded queue that a thread of
its own empties; what does not fit is counted and gone.
"""

import contextlib
import logging
import queue
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from poolmeter import __version__
from poolmeter.web.otlp import LONGEST_PAUSE_S, Outcome

_LOG = logging.getLogger("poolmeter.collector")
INTERNAL, SERVER, CLIENT = 1, 2, 3  # opentelemetry.proto.trace.v1.Span.SpanKind
QUEUE = 4096
BATCH = 512
INTERVAL_S = 2.0
TRIES = 4
_PARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$")

Value = str | int | float | bool


@dataclass
class Span:
    """One piece of work. `trace_id` has 16 bytes, `span_id` and `parent_id` 8; times are wall clock in nanoseconds."""

    name: str
    kind: int
    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    start_ns: int = 0
    end_ns: int = 0
    failed: bool = False
    message: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)

    def set(self, name: str, value: Value | None) -> None:
        """Say something of it; None is not said."""
        if value is not None:
            self.attributes[name] = value

    @staticmethod
    def parse(traceparent: str) -> "Span":
        """The caller's span, of a `traceparent` header (W3C Trace Context). Raises ValueError."""
        found = _PARENT.match(traceparent)
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            raise ValueError("no traceparent")
        return Span("", 0, bytes.fromhex(found[1]), bytes.fromhex(found[2]))


class Posts(Protocol):
    """Where spans are sent: `poolmeter.web.otlp.Poster`."""

    endpoint: str

    def post(self, message: bytes) -> Outcome:
        """Send one serialized request."""
        ...


class Tracer:
    """Takes spans that have ended and posts them from a thread. `sent`, `dropped` count spans."""

    def __init__(self, poster: Posts, instance: str, interval_s: float = INTERVAL_S) -> None:
        self.sent = 0
        self.dropped = 0
        self._poster = poster
        self._instance = instance
        self._interval_s = interval_s
        self._ended: queue.Queue[Span] = queue.Queue(QUEUE)
        self._stop = threading.Event()
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        """Begin to post."""
        self._thread.start()

    def stop(self) -> None:
        """Post what is there, as far as a second goes."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def take(self, ended: Span) -> None:
        """A span that has ended; never waits."""
        try:
            self._ended.put_nowait(ended)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while batch := self._batch():
            try:
                self._post(batch)
            except Exception:  # a thread that ended would post no more, and nobody would know
                self.dropped += len(batch)
                _LOG.exception("spans could not be posted")

    def _batch(self) -> list[Span]:
        found: list[Span] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < BATCH:
                found.append(self._ended.get_nowait())
        return found

    def _post(self, batch: list[Span]) -> None:
        message = request_of(batch, self._instance)
        for turn in range(TRIES):
            outcome = self._poster.post(message)
            if outcome.trouble is None or not outcome.retry or turn == TRIES - 1:
                break
            pause = outcome.after_s if outcome.after_s is not None else min(LONGEST_PAUSE_S, 2.0**turn * random.uniform(0.5, 1.0))
            if self._stop.wait(pause):
                break
        if outcome.trouble is None:
            self.sent += len(batch)
        else:
            self.dropped += len(batch)
        if outcome.trouble != self._said:
            _LOG.log(
                logging.WARNING if outcome.trouble else logging.INFO,
                "traces to %s: %s",
                self._poster.endpoint,
                outcome.trouble or "taken again",
            )
        self._said = outcome.trouble


def request_of(spans: list[Span], instance: str) -> bytes:
    """A serialized ExportTraceServiceRequest."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for name, text in (("service.name", "poolmeter-collector"), ("service.version", __version__), ("service.instance.id", instance)):
        resource.resource.attributes.add(key=name).value.string_value = text
    scope = resource.scope_spans.add()
    scope.scope.name, scope.scope.version = "poolmeter", __version__
    for span_ in spans:
        made = scope.spans.add(
            name=span_.name,
            kind=span_.kind,
            trace_id=span_.trace_id,
            span_id=span_.span_id,
            parent_span_id=span_.parent_id,
            start_time_unix_nano=span_.start_ns,
            end_time_unix_nano=span_.end_ns,
        )
        for name, value in span_.attributes.items():
            _put(made.attributes.add(key=name).value, value)
        if span_.failed:
            made.status.code = 2  # STATUS_CODE_ERROR
            made.status.message = span_.message
    return bytes(request.SerializeToString())


def _put(target: Any, value: Value) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        target.string_value = value[:1000]


tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
_current: ContextVar[Span | None] = ContextVar("span", default=None)


@contextlib.contextmanager
def span(name: str, kind: int = INTERNAL, attributes: Mapping[str, Value] | None = None, parent: Span | None = None) -> Iterator[Span]:
    """The work inside, as a child of the span that this is called in, else of `parent`, else a trace of its own.

    Coroutines and threads that are started inside with their context (`asyncio.to_thread`) belong to it.
    """
    taker = tracer.get()
    if taker is None:
        yield Span("", 0, b"", b"")
        return
    above = _current.get() or parent
    made = Span(
        name,
        kind,
        above.trace_id if above is not None else random.randbytes(16),
        random.randbytes(8),
        above.span_id if above is not None else b"",
        time.time_ns(),
        attributes=dict(attributes or {}),
    )
    started = time.perf_counter_ns()
    token = _current.set(made)
    try:
        yield made
    except BaseException as error:
        made.failed, made.message = True, f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        _current.reset(token)
        made.end_ns = made.start_ns + time.perf_counter_ns() - started
        taker.take(made)
