"""The exporter itself: whether each source gave data, when, how long it took, and what waits in the spool."""

from poolmeter.exporter.collectors.family import Family, Page, Samples, seconds


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
    Family("poolmeter_spool_records", "gauge", "Usage records that some consumer has not acknowledged yet.", (), _spool),
    Family("poolmeter_build_info", "gauge", "The exporter's version, always 1.", ("version",), _build),
)
