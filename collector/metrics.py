"""The collector's own metrics: what it pulled, what it stores, what is wrong."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from poolmeter.collector.tables import SegmentKind
from poolmeter.model.units import MICROSECONDS
from poolmeter.web.protocol import PatientProtocol

if TYPE_CHECKING:
    from poolmeter.collector.api import ApiState

__all__ = ["CONTENT_TYPE", "render"]
_PREFIX = "poolmeter_collector"


def render(state: "ApiState") -> bytes:
    """The page in Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Own(state))
    return generate_latest(registry) + generate_latest(state.observed.registry)


class _Own(Collector):
    def __init__(self, state: "ApiState") -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._nodes()
        yield from self._discovery()
        yield from self._store()
        yield from self._own()

    def _nodes(self) -> Iterator[Metric]:
        labels = ["url"]
        counters = {
            "pulls": CounterMetricFamily(f"{_PREFIX}_pulls", "Pulls of an exporter.", labels=labels),
            "failures": CounterMetricFamily(f"{_PREFIX}_pull_failures", "Pulls that failed or were refused.", labels=labels),
            "rows": CounterMetricFamily(f"{_PREFIX}_received_rows", "Good usage rows received, known ones included.", labels=labels),
            "quarantined": CounterMetricFamily(f"{_PREFIX}_quarantined_rows", "Rows received that broke a rule.", labels=labels),
        }
        up = GaugeMetricFamily(f"{_PREFIX}_node_up", "1 when the last pull of the exporter succeeded.", labels=labels)
        lag = GaugeMetricFamily(f"{_PREFIX}_node_lag_seconds", "Age of the newest minute when it was received.", labels=labels)
        for status in self._state.statuses():
            for name, family in counters.items():
                family.add_metric([status.row.url], getattr(status, name))
            up.add_metric([status.row.url], 1 if status.row.state == "up" else 0)
            if status.lag_us is not None:
                lag.add_metric([status.row.url], status.lag_us / MICROSECONDS)
        yield from (*counters.values(), up, lag)

    def _discovery(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{_PREFIX}_discovery_up", "1 when all of the source's last answer could be read.", labels=["source"])
        targets = GaugeMetricFamily(f"{_PREFIX}_discovery_targets", "Exporters that the source names.", labels=["source"])
        for status in self._state.discovery():
            up.add_metric([status.name], 1 if status.state == "up" else 0)
            if status.urls is not None:
                targets.add_metric([status.name], len(status.urls))
        yield from (up, targets)

    def _store(self) -> Iterator[Metric]:
        state = self._state.store.state
        yield GaugeMetricFamily(f"{_PREFIX}_store_generation", "Number of the newest catalog.", state.generation)
        published = state.published_us / MICROSECONDS
        yield GaugeMetricFamily(f"{_PREFIX}_store_published_timestamp_seconds", "When it was published.", published)
        yield GaugeMetricFamily(f"{_PREFIX}_store_writable", "0 when the last publication failed.", 0 if self._state.store.trouble else 1)
        count = GaugeMetricFamily(f"{_PREFIX}_store_segments", "Live segments.", labels=["kind"])
        size = GaugeMetricFamily(f"{_PREFIX}_store_bytes", "Bytes of live segments.", labels=["kind"])
        rows = GaugeMetricFamily(f"{_PREFIX}_store_rows", "Rows of live segments.", labels=["kind"])
        for kind in SegmentKind:
            own = [segment for segment in state.segments.values() if segment.kind is kind]
            count.add_metric([kind.value], len(own))
            size.add_metric([kind.value], sum(segment.bytes for segment in own))
            rows.add_metric([kind.value], sum(segment.rows for segment in own))
        yield from (count, size, rows)
        publisher = self._state.publisher
        if publisher is not None:
            spent = SummaryMetricFamily(f"{_PREFIX}_publish_seconds", "Time that publications took.")
            spent.add_metric([], publisher.publications, publisher.seconds)
            yield spent
            yield CounterMetricFamily(f"{_PREFIX}_publish_failures", "Publications that failed.", publisher.failures)

    def _own(self) -> Iterator[Metric]:
        queries, tracer = self._state.queries, self._state.tracer
        if queries is not None:
            yield GaugeMetricFamily(f"{_PREFIX}_queries_running", "Questions to the store that run.", queries.running)
            yield GaugeMetricFamily(f"{_PREFIX}_queries_waiting", "Questions that wait for their turn.", queries.waiting)
        dropped = CounterMetricFamily(
            f"{_PREFIX}_connections_dropped",
            "Connections that were cut: of peers too slow to wait for, and beyond what one address or all may hold.",
            labels=["reason"],
        )
        for reason, number in PatientProtocol.dropped.items():
            dropped.add_metric([reason], number)
        yield dropped
        reloaded = self._state.reload_ok()
        if reloaded is not None:
            text = "Whether the last SIGHUP was honoured; absent before the first."
            yield GaugeMetricFamily(f"{_PREFIX}_config_last_reload_success", text, int(reloaded))
        if tracer is not None:
            spans = CounterMetricFamily(f"{_PREFIX}_spans", "Spans of traces, by what became of them.", labels=["result"])
            spans.add_metric(["sent"], tracer.sent)
            spans.add_metric(["dropped"], tracer.dropped)
            yield spans
