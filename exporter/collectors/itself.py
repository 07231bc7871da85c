"""The exporter itself: whether each source gave data, when, how long it took, what waits in the spool, and what became of its outputs."""

from collections.abc import Callable

from poolmeter.exporter.collectors.family import Family, Outputs, Page, Samples, seconds


def _success(page: Page) -> Samples:
    for source in page.snapshot.sources:
        yield (source.source,), float(source.ok)


def _duration(page: Page) -> Samples:
    for source in page.snapshot.sources:
        if source.duration_us is not None:
            yield (source.source,), seconds(source.duration_us)


def _last(page: Page) -> Samples:
    for source in page.snapshot.sources:
        if source.at_us is not None:
            yield (source.source,), seconds(source.at_us)


def _build(page: Page) -> Samples:
    yield (page.version,), 1.0


def _spool(page: Page) -> Samples:
    yield (), float(page.spool_records)


def _taken(page: Page) -> Samples:
    yield (), seconds(page.snapshot.taken_us)


def _own(name: str, text: str, value: Callable[[Outputs], int | None], counter: bool = False) -> Family:
    def samples(page: Page) -> Samples:
        found = value(page.outputs)
        if found is not None:
            yield (), float(found)

    return Family(f"poolmeter_{name}", "counter" if counter else "gauge", text, (), samples)


def _pushes(page: Page) -> Samples:
    for outcome, count in (("failed", page.outputs.pushes_failed), ("ok", page.outputs.pushes_ok)):
        if count is not None:
            yield (outcome,), float(count)


def _record_pushes(page: Page) -> Samples:
    outputs = page.outputs
    for outcome, count in (("failed", outputs.push_failed), ("ok", outputs.push_ok), ("refused", outputs.push_refused)):
        if count is not None:
            yield (outcome,), float(count)


def _last_push(page: Page) -> Samples:
    if page.outputs.push_last_us is not None:
        yield (), seconds(page.outputs.push_last_us)


FAMILIES: tuple[Family, ...] = (
    Family("poolmeter_collect_success", "gauge", "Whether the source gave valid data at the last tick, 1 or 0.", ("source",), _success),
    Family("poolmeter_collect_duration_seconds", "gauge", "How long the source took in seconds.", ("source",), _duration),
    Family(
        "poolmeter_last_collect_timestamp_seconds",
        "gauge",
        "When the source last gave valid data, in seconds since the Unix epoch.",
        ("source",),
        _last,
    ),
    Family("poolmeter_snapshot_timestamp_seconds", "gauge", "When this page was made, in seconds since the Unix epoch.", (), _taken),
    Family("poolmeter_spool_records", "gauge", "Usage records that some consumer has not acknowledged yet.", (), _spool),
    Family("poolmeter_build_info", "gauge", "The exporter's version, always 1.", ("version",), _build),
    _own("sampler_restarts_total", "Times that the child which reads the cards was given up.", lambda o: o.sampler_restarts, counter=True),
    _own("cards_released", "Whether the cards are released for a reset, 1 or 0.", lambda o: o.released),
    _own("config_last_reload_success", "Whether the last reload was taken, 1 or 0; absent: none yet.", lambda o: o.reload_ok),
    Family("poolmeter_otlp_pushes_total", "counter", "OTLP pushes by outcome; absent: none are made.", ("outcome",), _pushes),
    Family(
        "poolmeter_pushes_total",
        "counter",
        "Pushes of records to the collector by outcome: ok, refused by its answer, failed without a right one; absent: none are made.",
        ("outcome",),
        _record_pushes,
    ),
    Family(
        "poolmeter_last_push_timestamp_seconds",
        "gauge",
        "When the collector last took a push of records, in seconds since the Unix epoch; absent: none was taken yet.",
        (),
        _last_push,
    ),
    _own("push_waiting_records", "Usage records that the collector has not acknowledged by a push.", lambda o: o.push_waiting),
)
