"""`/metrics` as text: a reference by prometheus_client, and the page that is served, which is the same bytes faster."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from poolmeter.exporter.collectors import FAMILIES, Family
from poolmeter.exporter.collectors.family import Page

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CACHE_LIMIT = 200_000


class ReferenceCollector:
    """A prometheus_client collector over one page."""

    def __init__(self, page: Page, families: Sequence[Family] = FAMILIES) -> None:
        self._page = page
        self._families = families

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._families:
            metric_type = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = metric_type(family.name, family.help, labels=family.labels)
            for values, number in family.samples(self._page):
                metric.add_metric(values, number)
            if metric.samples:
                yield metric


def render_reference(page: Page) -> bytes:
    """The page by prometheus_client."""
    from prometheus_client import generate_latest

    return generate_latest(ReferenceCollector(page))


class Renderer:
    """The page with label text cached from tick to tick; a label set that left the page leaves the cache with it."""

    def __init__(self, families: Sequence[Family] = FAMILIES) -> None:
        self._families = families
        self._labels: dict[tuple[int, tuple[str, ...]], str] = {}
        self._heads = [f"# HELP {f.name} {_escape_help(f.help)}\n# TYPE {f.name} {f.kind}\n" for f in families]

    def render(self, page: Page) -> bytes:
        """The whole page. A family without samples is left out."""
        out: list[str] = []
        fresh: dict[tuple[int, tuple[str, ...]], str] = {}
        for index, family in enumerate(self._families):
            first = True
            for values, number in family.samples(page):
                if first:
                    out.append(self._heads[index])
                    first = False
                key = (index, values)
                text = self._labels.get(key)
                if text is None:
                    text = family.name + _label_text(family.labels, values)
                fresh[key] = text
                out.append(f"{text} {_number(number)}\n")
        self._labels = fresh if len(fresh) <= _CACHE_LIMIT else {}
        return "".join(out).encode("utf-8")


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    # As Go prints floats, which is what prometheus_client does too: an exponent from 1e+06 on.
    if value == 0.0:
        return "0.0" if math.copysign(1.0, value) > 0 else "-0.0"
    if value == 1.0:
        return "1.0"
    from prometheus_client.utils import floatToGoString

    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
