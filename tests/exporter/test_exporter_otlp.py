"""OTLP push: what a receiver gets, and what happens when it does not take it."""

import dataclasses
import gzip
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from exporter_fakes import CARD, GIB, OTHER, SECOND, Node, process
from exporter_holders import with_holders
from exporter_receiver import BaseReceiver
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric, NumberDataPoint

from poolmeter.errors import BadInput
from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.otlp import Pusher
from poolmeter.exporter.otlp_points import request_of
from poolmeter.model.allocation import Labels
from poolmeter.web.otlp import endpoint_of, headers_of


class Receiver(BaseReceiver):
    """An OTLP receiver in this process. `answers` are (status, headers) for the next requests; then all is taken."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.response = ExportMetricsServiceResponse()
        super().__init__()

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        assert handler.path == "/v1/metrics" and handler.headers["Content-Type"] == "application/x-protobuf"
        assert handler.headers["Content-Encoding"] == "gzip"
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        self.requests.append(ExportMetricsServiceRequest.FromString(gzip.decompress(body)))
        self.times.append(time.monotonic())
        self.hang.wait(30)
        status, headers = self.answers.pop(0) if self.answers else (200, {})
        answer = self.response.SerializeToString() if status == 200 else b""
        self.answer(handler, status, headers, answer)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, CARD, OTHER)
    made.create("a", ppm=700_000, labels=Labels("vision", project="p", user="u", workload="w", environment="prod"))
    made.create("b", ppm=200_000)
    made.meters["a"].attach()
    made.meters["a"].count(CARD, busy_ns=1_234_567_000, launches=12_345_678, memory=3 * GIB, last_activity_ns=made.clock.wall * 1000)
    made.sampler.change(CARD, busy_us_total=1_500_000, utilization_ppm=333_333, processes=(process(4_000_002, 9, 250_000, 2 * GIB),))
    made.sampler.change(OTHER, up=False, reason="lost")
    made.tick(turns=3)
    yield made
    made.close()


@pytest.fixture
def push(busy: Node) -> Iterator[Callable[..., Pusher]]:
    made: list[Pusher] = []

    def build(url: str, interval_s: float = 0.05, **options: object) -> Pusher:
        options = {"environment": {}, "first_pause_s": 0.02, "timeout_s": 5.0, **options}
        made.append(Pusher(url, interval_s, busy.agent, **options))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield build
    for pusher in made:
        pusher.stop()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def text_of(attributes: object) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for item in attributes:  # type: ignore[attr-defined]
        assert isinstance(item, KeyValue) and item.key not in found
        found[item.key] = getattr(item.value, str(item.value.WhichOneof("value")))
    return found


def metrics_of(request: ExportMetricsServiceRequest) -> dict[str, Metric]:
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    names = [metric.name for metric in scope.metrics]
    assert len(names) == len(set(names))
    return {metric.name: metric for metric in scope.metrics}


def points_of(metric: Metric) -> list[tuple[dict[str, str | int], float, NumberDataPoint]]:
    points = getattr(metric, str(metric.WhichOneof("data"))).data_points
    return [(text_of(p.attributes), getattr(p, str(p.WhichOneof("value"))), p) for p in points]


def page_of(node: Node) -> Page:
    page = node.agent.page()
    assert page is not None
    return page


def test_what_is_pushed(busy: Node, receiver: Receiver, push: Callable[..., Pusher]) -> None:
    pusher = push(receiver.url)
    until(lambda: pusher.ok >= 2, "two pushes")
    request = receiver.requests[0]
    (resource,) = request.resource_metrics
    assert text_of(resource.resource.attributes)["host.name"] == "node-a"
    found = metrics_of(request)
    card = [(value, text) for text, value, _ in points_of(found["hw.gpu.utilization"])]
    assert [value for value, _ in card] == [0.333333]  # the lost card has no point, rather than one of 0
    assert card[0][1] | {"hw.id": CARD, "hw.type": "gpu", "hw.gpu.task": "general", "hw.vendor": "nvidia"} == card[0][1]
    assert {(text["hw.id"], text["hw.state"]): value for text, value, _ in points_of(found["hw.status"])} == {
        (CARD, "ok"): 1,
        (OTHER, "ok"): 0,
        (CARD, "failed"): 0,
        (OTHER, "failed"): 1,
    }
    for name, unit, monotonic in (("hw.energy", "J", True), ("hw.gpu.memory.usage", "By", False), ("poolmeter.slice.busy.time", "s", True)):
        assert found[name].unit == unit and found[name].sum.is_monotonic is monotonic
        assert found[name].sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    for name in ("hw.power", "hw.temperature", "hw.gpu.memory.utilization", "poolmeter.slice.promise"):
        assert found[name].WhichOneof("data") == "gauge"
    slices = {text["poolmeter.allocation.id"]: (text, value, point) for text, value, point in points_of(found["poolmeter.slice.busy.time"])}
    text, value, point = slices["a"]
    assert value == 1.234567 and text["hw.id"] == CARD and text["poolmeter.tenant"] == "vision"
    assert text["deployment.environment.name"] == "prod" and 0 < point.start_time_unix_nano < point.time_unix_nano
    assert point.time_unix_nano == page_of(busy).snapshot.taken_us * 1000
    assert "poolmeter.workload" not in slices["b"][0]  # unknown is not empty text
    strangers = [text for text, _, _ in points_of(found["poolmeter.process.memory.usage"]) if text["process.pid"] == 4_000_002]
    assert strangers and strangers[0]["poolmeter.hooked"] == "false" and strangers[0]["process.executable.name"] == "cuda"


def test_pods_and_containers_are_attributes(busy: Node) -> None:
    page = page_of(busy)
    request = request_of(with_holders(page, ("a", CARD, "research", "train-0", "main")))
    text = next(text for text, _, _ in points_of(metrics_of(request)["poolmeter.slice.promise"]) if text["poolmeter.allocation.id"] == "a")
    assert text | {"k8s.namespace.name": "research", "k8s.pod.name": "train-0", "k8s.container.name": "main", "container.id": "c-a"} == text


def test_a_hostile_name_is_made_harmless(busy: Node) -> None:
    page = page_of(busy)
    part = dataclasses.replace(page.snapshot.slices[0], tenant="vi\udc80si\0on\n")
    request = request_of(dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=(part,))))
    text = points_of(metrics_of(ExportMetricsServiceRequest.FromString(request.SerializeToString()))["poolmeter.slice.promise"])[0][0]
    assert text["poolmeter.tenant"] == "vi?si\0on\n"


def test_two_thousand_attribute_sets_are_two_thousand_points(busy: Node) -> None:
    """The OpenTelemetry SDK folds what is beyond 2,000 sets into one point; nothing is folded here."""
    page = page_of(busy)
    part = page.snapshot.slices[0]
    many = tuple(dataclasses.replace(part, allocation_id=f"a-{number}") for number in range(5000))
    request = request_of(dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=many)))
    points = points_of(metrics_of(request)["poolmeter.slice.promise"])
    assert len({text["poolmeter.allocation.id"] for text, _, _ in points}) == 5000


def test_it_tries_again_with_growing_pauses(receiver: Receiver, push: Callable[..., Pusher]) -> None:
    receiver.answers = [(503, {}), (429, {}), (502, {}), (504, {})]
    pusher = push(receiver.url, interval_s=30.0, first_pause_s=0.2)
    until(lambda: pusher.ok == 1, "it is taken in the end")
    assert pusher.failed == 4 and len(receiver.requests) == 5
    pauses = [later - earlier for earlier, later in zip(receiver.times, receiver.times[1:], strict=False)]
    # Each pause is between half and the whole of 0.2, 0.4, 0.8, 1.6 s: the third is longer than the first could be.
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=True)), pauses


def test_what_is_tried_again_is_the_newest(busy: Node, receiver: Receiver, push: Callable[..., Pusher]) -> None:
    receiver.hang.clear()
    receiver.answers = [(503, {})]
    pusher = push(receiver.url, interval_s=30.0)
    until(lambda: receiver.requests, "the first try is under way")
    busy.meters["a"].count(CARD, busy_ns=2_500_000_000)
    busy.tick()
    receiver.hang.set()
    until(lambda: pusher.ok == 1, "it is taken")
    values = [
        value
        for request in receiver.requests
        for text, value, _ in points_of(metrics_of(request)["poolmeter.slice.busy.time"])
        if text["poolmeter.allocation.id"] == "a"
    ]
    assert values == [1.234567, 2.5]


def test_a_pause_that_the_receiver_asks_for(receiver: Receiver, push: Callable[..., Pusher]) -> None:
    receiver.answers = [(429, {"Retry-After": "1"})]
    pusher = push(receiver.url, interval_s=30.0, first_pause_s=0.001)
    until(lambda: pusher.ok == 1, "it is taken")
    assert receiver.times[1] - receiver.times[0] >= 1.0


@pytest.mark.parametrize("status", [400, 401, 404, 413, 301, 307, 500])
def test_what_will_not_be_taken_is_not_tried_again_at_once(receiver: Receiver, push: Callable[..., Pusher], status: int) -> None:
    receiver.answers = [(status, {"Location": receiver.url} if status < 400 else {})]
    pusher = push(receiver.url, interval_s=30.0, first_pause_s=0.001)
    until(lambda: pusher.failed == 1, "it failed")
    time.sleep(0.1)
    assert len(receiver.requests) == 1 and pusher.ok == 0


def test_points_that_were_rejected_are_said(receiver: Receiver, push: Callable[..., Pusher], caplog: pytest.LogCaptureFixture) -> None:
    receiver.response.partial_success.rejected_data_points = 7
    receiver.response.partial_success.error_message = "too many"
    pusher = push(receiver.url)
    until(lambda: pusher.failed >= 3, "it is counted")
    assert [record.message for record in caplog.records if "7 points were rejected: too many" in record.message] != []
    assert len(caplog.records) == 1  # once, not at every push


def test_nobody_listens(push: Callable[..., Pusher], receiver: Receiver) -> None:
    url = receiver.url
    receiver.close()
    pusher = push(url)
    until(lambda: pusher.failed >= 2, "it is tried again")
    assert pusher.ok == 0


def test_a_receiver_that_hangs_holds_up_neither_turns_nor_the_end(busy: Node, receiver: Receiver, push: Callable[..., Pusher]) -> None:
    receiver.hang.clear()
    pusher = push(receiver.url, timeout_s=30.0)
    until(lambda: receiver.requests, "a push hangs")
    taken = page_of(busy).snapshot.taken_us
    busy.tick(turns=20)
    assert page_of(busy).snapshot.taken_us == taken + 20 * SECOND
    began = time.monotonic()
    pusher.stop()
    assert time.monotonic() - began < 1.0


def test_values_of_an_exporter_that_no_longer_looks_are_not_pushed(busy: Node, receiver: Receiver, push: Callable[..., Pusher]) -> None:
    busy.clock.advance(busy.agent.stalled_us + SECOND)
    pusher = push(receiver.url)
    until(lambda: pusher.ok >= 1, "a push")
    assert all(not metrics_of(request) for request in receiver.requests)


def test_headers_of_the_environment(receiver: Receiver, push: Callable[..., Pusher]) -> None:
    pusher = push(receiver.url, environment={"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, tenant=lab"})
    until(lambda: pusher.ok >= 1, "a push")
    assert receiver.headers[0]["authorization"] == "Bearer x" and receiver.headers[0]["tenant"] == "lab"
    for text in ("nothing", "a=b,c"):
        with pytest.raises(BadInput, match="no name=value"):
            headers_of(text)
    with pytest.raises(BadInput, match="OTEL_EXPORTER_OTLP_CERTIFICATE /absent"):
        Pusher(receiver.url, 1, None, environment={"OTEL_EXPORTER_OTLP_CERTIFICATE": "/absent"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://h:4318", "http://h:4318/v1/metrics"),
        ("http://h:4318/", "http://h:4318/v1/metrics"),
        ("https://h/otlp", "https://h/otlp/v1/metrics"),
        ("https://h/otlp/v1/metrics", "https://h/otlp/v1/metrics"),
        ("http://[::1]:4318?x=1", "http://[::1]:4318/v1/metrics?x=1"),
    ],
)
def test_the_address_that_is_posted_to(text: str, found: str) -> None:
    assert endpoint_of(text) == found


@pytest.mark.parametrize("text", ["", "h:4318", "grpc://h", "http://", "http://h:99999", "http://h h", "http://[::1"])
def test_no_address(text: str) -> None:
    with pytest.raises(BadInput, match="--otlp-endpoint is"):
        endpoint_of(text)
