"""Traces of the collector's own work: what is part of what, by OTLP, and never a wait."""

import http.server
import threading
import time
from pathlib import Path

import pytest
from collector_daemon import Daemon, exporters, until
from collector_fakes import DAY, EPOCH, NOW, FakeExporter, batch, records
from collector_served import client, collector
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from poolmeter.collector import tracing
from poolmeter.collector.tracing import BATCH, QUEUE, Span, Tracer, request_of, span
from poolmeter.model.units import MINUTE_US
from poolmeter.web.otlp import Outcome, Poster, endpoint_of

NOW_MINUTE = time.time_ns() // 1000 // MINUTE_US * MINUTE_US - 60 * MINUTE_US


class Kept:
    """A receiver that keeps what it is sent, or fails."""

    endpoint = "http://nowhere"

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.outcome = outcome or Outcome()
        self.spans: list[dict[str, object]] = []
        self.posts = 0

    def post(self, message: bytes) -> Outcome:
        self.posts += 1
        if self.outcome.trouble is None:
            self.spans += spans_of(message)
        return self.outcome


def spans_of(message: bytes) -> list[dict[str, object]]:
    found = MessageToDict(ExportTraceServiceRequest.FromString(message))
    return [item for resource in found["resourceSpans"] for scope in resource["scopeSpans"] for item in scope["spans"]]


async def test_a_request_is_part_of_its_callers_trace_and_its_question_part_of_it(tmp_path: Path) -> None:
    kept = Kept()
    tracer = Tracer(kept, "c1", interval_s=60.0)
    tracer.start()
    token = tracing.tracer.set(tracer)
    try:
        with collector(tmp_path) as state:
            state.store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
            async with client(state) as http:
                parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
                assert (await http.get("/v1/usage", headers={"traceparent": parent})).status_code == 200
                assert (await http.get("/v1/usage?kind=x", headers={"traceparent": "nonsense"})).status_code == 400
    finally:
        tracing.tracer.reset(token)
        tracer.stop()
    query, request, wrong = kept.spans
    assert (query["name"], request["name"], wrong["name"]) == ("query", "GET /v1/usage", "GET /v1/usage")
    assert query["parentSpanId"] == request["spanId"] and query["traceId"] == request["traceId"] != wrong["traceId"]
    assert request["kind"] == "SPAN_KIND_SERVER" and "parentSpanId" not in wrong and "status" not in wrong
    values = {item["key"]: item["value"] for item in request["attributes"]}  # type: ignore[attr-defined]
    assert values["http.route"] == {"stringValue": "/v1/usage"} and values["http.response.status_code"] == {"intValue": "200"}
    assert int(str(request["startTimeUnixNano"])) <= int(str(query["startTimeUnixNano"]))
    assert int(str(query["endTimeUnixNano"])) <= int(str(request["endTimeUnixNano"]))
    assert (tracer.sent, tracer.dropped) == (3, 0)


def test_nothing_is_traced_unless_somebody_takes_it(tmp_path: Path) -> None:
    with span("work") as made:
        made.set("a", 1)
    assert made.span_id == b""


@pytest.mark.parametrize(("outcome", "posts"), [(Outcome("no route", retry=True), 1), (Outcome("status 400"), 1)])
def test_what_cannot_be_sent_is_dropped_and_counted_and_nobody_waits(outcome: Outcome, posts: int) -> None:
    kept = Kept(outcome)
    tracer = Tracer(kept, "c1", interval_s=3600.0)
    token = tracing.tracer.set(tracer)
    try:
        for _ in range(QUEUE + 10):
            with span("work"):
                pass
    finally:
        tracing.tracer.reset(token)
    assert tracer.dropped == 10  # the queue is bounded although nobody empties it
    tracer.start()
    tracer.stop()
    tracer._thread.join(30)
    assert (tracer.sent, tracer.dropped) == (0, QUEUE + 10) and kept.posts == QUEUE // BATCH * posts


def test_a_failure_is_said_of_its_span() -> None:
    kept = Kept()
    tracer = Tracer(kept, "c1", interval_s=3600.0)
    token = tracing.tracer.set(tracer)
    try:
        with pytest.raises(ValueError), span("outer"), span("inner"):
            raise ValueError("broken")
    finally:
        tracing.tracer.reset(token)
    tracer.start()
    tracer.stop()
    inner, outer = kept.spans
    assert inner["status"] == outer["status"] == {"code": "STATUS_CODE_ERROR", "message": "ValueError: broken"}
    assert inner["parentSpanId"] == outer["spanId"]


@given(st.text(max_size=80))
def test_a_header_that_is_none_is_refused(text: str) -> None:
    try:
        found = Span.parse(text)
    except ValueError:
        return
    assert len(found.trace_id) == 16 and len(found.span_id) == 8


VALUES = st.one_of(st.text(max_size=2000), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.booleans())


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=5), st.text(max_size=30))
def test_any_attributes_can_be_sent(attributes: dict[str, tracing.Value], name: str) -> None:
    def encodes(text: object) -> bool:
        return not isinstance(text, str) or text == text.encode("utf-8", "ignore").decode()

    made = Span(name, 1, bytes(16), bytes(8), attributes=attributes)
    if all(map(encodes, (name, *attributes, *attributes.values()))):
        assert len(spans_of(request_of([made], "c1"))) == 1


class Receiver(http.server.BaseHTTPRequestHandler):
    """Takes traces over HTTP."""

    def do_POST(self) -> None:
        import gzip

        body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.spans += spans_of(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


async def test_the_daemon_traces_pulls_publications_and_requests(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.spans = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    async with exporters("n1") as (one,):
        assert isinstance(one, FakeExporter)
        one.add(records("n1", one.epoch, 1, 8, NOW_MINUTE))
        daemon = Daemon(tmp_path, one.url, "--otlp-endpoint", f"http://127.0.0.1:{server.server_port}")
        try:
            await daemon.url()
            await until(lambda: one.acked)
            assert await daemon.end() == 0
        finally:
            daemon.kill()
            server.shutdown()
            server.server_close()
    spans = server.spans  # type: ignore[attr-defined]
    by_id = {item["spanId"]: item for item in spans}
    assert {"pull", "publish", "GET /v1/usage"} <= {item["name"] for item in spans}
    asked = next(item for item in spans if item["name"] == "GET /v1/usage")
    assert by_id[asked["parentSpanId"]]["name"] == "pull"


def test_the_path_of_traces_is_added() -> None:
    assert endpoint_of("http://127.0.0.1:4318", "/v1/traces") == "http://127.0.0.1:4318/v1/traces"
    assert Poster("http://x/v1/traces", "poolmeter/0", environment={}).endpoint == "http://x/v1/traces"
