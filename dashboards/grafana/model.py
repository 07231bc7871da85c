"""The few pieces of Grafana 11's dashboard JSON that are used here, as plain dictionaries."""

from collections.abc import Sequence
from dataclasses import dataclass

Json = dict[str, object]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24  # the width of Grafana's grid


@dataclass(frozen=True)
class Query:
    """One PromQL query of a panel; `legend` is Grafana's legend format. A `table` query takes one instant."""

    expr: str
    legend: str = ""
    table: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel: what it is called, what it means, its unit, its queries and its size on the grid.

    `minimum` and `maximum` fix the axis; `stack` piles the series up; `options` are merged into the panel as they are.
    """

    kind: str
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    minimum: float | None = None
    maximum: float | None = None
    stack: bool = False
    thresholds: tuple[tuple[str, float | None], ...] = (("green", None),)
    colours: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    transformations: tuple[Json, ...] = ()
    overrides: tuple[Json, ...] = ()


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it, laid out left to right."""

    title: str
    panels: tuple[Panel, ...]


def layout(rows: Sequence[Row]) -> list[Json]:
    """The panels of all rows with ids and grid positions, top to bottom."""
    out: list[Json] = []
    top = 0
    for row in rows:
        out.append(
            {"id": len(out) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": _at(0, top, COLUMNS, 1)}
        )
        top += 1
        left = tallest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            out.append(_panel(panel, len(out) + 1, _at(left, top, panel.width, panel.height)))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return out


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": [{"color": colour, "value": value} for colour, value in panel.thresholds]},
        # What is not known is said, never drawn as 0.
        "noValue": "unknown",
    }
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    options: Json = {}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    elif panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stack else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stack else "none", "group": "A"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    overrides = [*panel.overrides]
    for name, colour in panel.colours:
        fixed: Json = {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
        overrides.append({"matcher": {"id": "byName", "options": name}, "properties": [fixed]})
    body: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options | dict(panel.options),
        "targets": [_target(query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
    }
    if panel.transformations:
        body["transformations"] = list(panel.transformations)
    return body


def _target(query: Query, letter: str) -> Json:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": not query.table,
        "instant": query.table,
        "format": "table" if query.table else "time_series",
    }


def datasource_variable() -> Json:
    """The choice of a Prometheus."""
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "current": {}, "hide": 0}


def label_variable(name: str, label: str, query: str) -> Json:
    """A choice of several values of a label, all by default; `query` is a label_values(...)."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also finds series without the label: a slice without a pool is not hidden.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard(uid: str, title: str, description: str, variables: Sequence[Json], rows: Sequence[Row]) -> Json:
    """The whole dashboard, in the form that Grafana's import and file provisioning take."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["poolmeter", "gpu"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(variables)},
        "panels": layout(rows),
    }
