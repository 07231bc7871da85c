"""The Grafana dashboard: generated as committed, and clean by the rules a reader would check it by."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from poolmeter.dashboards.grafana import generate
from poolmeter.dashboards.grafana.pool import pool_dashboard

DASHBOARD: dict[str, Any] = json.loads(generate.FILE.read_text(encoding="utf-8"))
# Grafana's names of units that this dashboard may use.
UNITS = {"short", "percentunit", "bytes", "watt", "s"}
ONCE_A_MINUTE = {"poolmeter_device_switch_overhead_seconds_total", "poolmeter_slice_energy_joules_total"}
COUNTER_FUNCTIONS = {"rate", "increase", "irate"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    return [(f"{panel['title']} {target['refId']}", target["expr"]) for panel in panels() for target in panel["targets"]]


def variables() -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def concrete(expr: str) -> str:
    """A query as Prometheus would get it, everything chosen."""
    text = expr.replace("$__rate_interval", "1m")
    for name in variables():
        text = text.replace(f"${name}", ".*")
    assert "$" not in text, text
    return text


def walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every node of a parsed query with those above it."""
    yield node, above
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from walk(child, (*above, node))
    for child in getattr(node, "args", None) or ():
        yield from walk(child, (*above, node))


def test_committed_file_is_the_generated_one() -> None:
    assert generate.FILE.read_text(encoding="utf-8") == generate.text(), "run: python -m poolmeter.dashboards.grafana.generate"
    assert pool_dashboard() == DASHBOARD


def test_identity_and_format() -> None:
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] == 39  # Grafana 11.0
    assert "id" not in DASHBOARD  # the importing Grafana's own
    assert DASHBOARD["editable"] is False


def test_datasource_is_a_variable_everywhere() -> None:
    assert variables()["datasource"]["type"] == "datasource" and variables()["datasource"]["query"] == "prometheus"
    for panel in panels():
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_node_pool_and_tenant_can_be_chosen_and_are_used() -> None:
    chosen = {name: variable for name, variable in variables().items() if variable["type"] == "query"}
    assert set(chosen) == {"node", "pool", "tenant"}
    for name, variable in chosen.items():
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".*"
        assert any(f'=~"${name}"' in expr for _, expr in queries())


def test_every_panel_says_what_it_is() -> None:
    titles = Counter(panel["title"] for panel in panels())
    assert [title for title, count in titles.items() if count > 1] == []
    for panel in panels():
        assert panel["title"] and len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"] == "unknown"
        assert panel["targets"]


def test_panels_have_their_own_places() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("name", "expr"), queries(), ids=[name for name, _ in queries()])
def test_query_is_valid_and_rates_counters_alone(name: str, expr: str) -> None:
    tree = promql_parser.parse(concrete(expr))
    selectors = 0
    for node, above in walk(tree):
        if not isinstance(node, promql_parser.VectorSelector):
            continue
        selectors += 1
        functions = {parent.func.name for parent in above if isinstance(parent, promql_parser.Call)}
        counter = node.name.endswith("_total")
        assert counter == bool(functions & COUNTER_FUNCTIONS), f"{node.name} under {functions or 'no function'}"
    assert selectors
    # An interval written by hand breaks with another scrape interval; counters that move once a minute need a longer one.
    for metric, interval in re.findall(r"(\w+)\{[^}]*\}\[([^\]]*)\]", expr):
        assert interval == ("5m" if metric in ONCE_A_MINUTE else "$__rate_interval"), metric


def test_the_walk_sees_every_selector() -> None:
    """The rule above is only as good as its walk: every metric named in a query is visited."""
    for _, expr in queries():
        seen = [node.name for node, _ in walk(promql_parser.parse(concrete(expr))) if isinstance(node, promql_parser.VectorSelector)]
        assert Counter(seen) == Counter(re.findall(r"\bpoolmeter_\w+|\bup\b", re.sub(r'"[^"]*"', "", expr)))
