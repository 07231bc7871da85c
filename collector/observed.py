"""What the collector counts of its own HTTP face: requests by route and status, their time, questions to the store, what was turned away."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

PREFIX = "poolmeter_collector"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Reasons of `http_rejected_total`: rate (429), token (401), role (403), crowd and time (503).
REASONS = ("rate", "token", "role", "crowd", "time")


class Observed:
    """Counters of one application, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series of each, which says when the first began
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(f"{PREFIX}_http_requests", "Requests answered.", ("route", "method", "status"), registry=registry)
        self.seconds = Histogram(
            f"{PREFIX}_http_request_seconds", "Time until an answer was sent.", ("route",), buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge(f"{PREFIX}_http_in_flight", "Requests that are being answered.", registry=registry)
        self.rejected = Counter(f"{PREFIX}_http_rejected", "Requests turned away.", ("reason",), registry=registry)
        self.queries = Histogram(
            f"{PREFIX}_query_seconds", "Time of questions to the store, without their wait.", buckets=_SECONDS, registry=registry
        )
        for reason in REASONS:
            self.rejected.labels(reason)
