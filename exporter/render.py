"""`/metrics` as text: a reference by prometheus_client, and the page that is served, which is the same bytes faster."""

import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from poolmeter.exporter.collectors import FAMILIES, Family
from poolmeter.exporter.collectors.family import Page, Rows

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LOG = logging.getLogger("poolmeter.exporter")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
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


def render_reference(page: Page, openmetrics: bool = False, families: Sequence[Family] = FAMILIES) -> bytes:
    """The page by prometheus_client."""
    if openmetrics:
        from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

        return bytes(generate_openmetrics(ReferenceCollector(page, families)))  # type: ignore[no-untyped-call]
    from prometheus_client import generate_latest

    return generate_latest(ReferenceCollector(page, families))


@dataclass
class _Written:
    """What was written of a family at the last page: per object its key, its value and its lines; and all lines together."""

    keys: list[Hashable] = field(default_factory=list)
    values: list[Hashable] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    block: str = ""


class Renderer:
    """The page, of which only what changed since the last one is written anew; what left the page is forgotten with it.

    Both formats share every line but the heads. `failed` names families that raised, and why: the page goes without them. Not for several
    threads at once.
    """

    def __init__(self, families: Sequence[Family] = FAMILIES) -> None:
        self._families = families
        self._labels: dict[tuple[int, tuple[str, ...]], str] = {}
        self._written = [_Written() for _ in families]
        self.failed: dict[str, str] = {}
        self._shared: dict[tuple[tuple[str, ...], Any], str] = {}  # label text by names and values, for the length of one page
        self._heads = [f"# HELP {f.name} {_escape_help(f.help)}\n# TYPE {f.name} {f.kind}\n" for f in families]
        self._open_heads = [_open_head(family) for family in families]

    def render(self, page: Page) -> bytes:
        """The whole page as Prometheus text. A family without samples is left out."""
        return self.joined(self.blocks(page), False)

    def render_openmetrics(self, page: Page) -> bytes:
        """The whole page as OpenMetrics."""
        return self.joined(self.blocks(page), True)

    def joined(self, blocks: Sequence[str], openmetrics: bool) -> bytes:
        """The lines of each family under the heads of a format."""
        parts: list[str] = []
        for head, block in zip(self._open_heads if openmetrics else self._heads, blocks, strict=True):
            if block:
                parts += (head, block)
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode("utf-8", "replace")  # a hostile name must not take the page away

    def blocks(self, page: Page) -> list[str]:
        """The lines of each family, without its head."""
        known, self._labels = self._labels, {}
        self._shared = {}
        keys: dict[tuple[Any, Any], list[Hashable]] = {}
        blocks = []
        for index, family in enumerate(self._families):
            try:
                if family.rows is not None:
                    blocks.append(self._by_rows(index, family, family.rows, page, keys))
                else:
                    blocks.append(self._by_samples(index, family, page, known))
                self.failed.pop(family.name, None)
            except Exception as error:  # a fault in one family must not take the others away
                if family.name not in self.failed:
                    _LOG.exception("metric family %s cannot be written; the page goes without it", family.name)
                self.failed[family.name] = f"{type(error).__name__}: {error}"
                self._written[index] = _Written()
                blocks.append("")
        self._shared = {}
        if len(self._labels) > _CACHE_LIMIT:
            self._labels = {}
        return blocks

    def _by_rows(self, index: int, family: Family, rows: Rows, page: Page, known: dict[tuple[Any, Any], list[Hashable]]) -> str:
        items = rows.of(page)
        keys = known.get((rows.of, rows.key))
        if keys is None:
            keys = known[(rows.of, rows.key)] = [rows.key(item) for item in items]
        values = list(map(rows.value, items))
        old = self._written[index]
        if old.keys == keys:
            if old.values == values:
                return old.block
            texts = old.texts
            for place, (value, before) in enumerate(zip(values, old.values, strict=True)):
                if value != before:
                    texts[place] = self._object(family, rows, keys[place], value, texts[place])
        else:
            # Objects came, went or changed places: what was written of those that stay is still good.
            kept = {key: (value, text) for key, value, text in zip(old.keys, old.values, old.texts, strict=True)}
            texts = []
            for key, value in zip(keys, values, strict=True):
                before, text = kept.get(key, (None, ""))
                texts.append(text if value == before else self._object(family, rows, key, value, text))
        block = "".join(texts)
        self._written[index] = _Written(keys, values, texts, block)
        return block

    def _object(self, family: Family, rows: Rows, key: Any, value: Any, before: str) -> str:
        if value is None:
            return ""
        samples = tuple(rows.series(key, value))
        if len(samples) == 1 and samples[0][0] is key:
            # The labels are the key: where it did not change, neither did the text up to the number; else other families have it perhaps.
            if before:
                return f"{before[: before.rindex(' ')]} {_number(samples[0][1])}\n"
            shared = (family.labels, key)
            text = self._shared.get(shared)
            if text is None:
                text = self._shared[shared] = _label_text(family.labels, key)
            return f"{family.name}{text} {_number(samples[0][1])}\n"
        return "".join(f"{family.name}{_label_text(family.labels, labels)} {_number(number)}\n" for labels, number in samples)

    def _by_samples(self, index: int, family: Family, page: Page, known: dict[tuple[int, tuple[str, ...]], str]) -> str:
        out = []
        for values, number in family.samples(page):
            key = (index, values)
            text = known.get(key)
            if text is None:
                text = family.name + _label_text(family.labels, values)
            self._labels[key] = text
            out.append(f"{text} {_number(number)}\n")
        return "".join(out)


def _open_head(family: Family) -> str:
    # A counter of OpenMetrics ends in `_total`; one that must not (another exporter's name) can only be of an unknown kind there.
    counted = family.kind == "counter" and family.name.endswith("_total")
    name = family.name.removesuffix("_total") if counted else family.name
    kind = "unknown" if family.kind == "counter" and not counted else family.kind
    return f"# HELP {name} {_escape(family.help)}\n# TYPE {name} {kind}\n"


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    # As Go prints floats, which is what prometheus_client does too (the tests compare): an exponent from 1e+06 on.
    if -1e6 < value < 1e6:
        return repr(float(value))
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value < 0 or dot <= 6:
        return text
    mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{dot - 1:02d}"
