"""JSON Schemas of what the API answers, read off the model and the store's tables so that they cannot drift from them."""

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from poolmeter.books.assets import FIELDS
from poolmeter.books.writer import Booked, LogEntry
from poolmeter.collector.tables import TABLES, VIEWS, WIDE, Field, segment_fields
from poolmeter.model.decision import Decision
from poolmeter.model.now import NOW_FIELDS

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean"}
_MOMENT: Schema = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"}
_OF_COLUMN: dict[str, Schema] = {"BIGINT": _WHOLE, WIDE: _WHOLE, "VARCHAR": _TEXT, "BOOLEAN": _FLAG}

_NODE: dict[str, Schema] = {
    "url": _TEXT, "node": _TEXT, "state": _TEXT, "reason": _TEXT, "epoch": _TEXT, "last_sequence": _WHOLE, "last_pull": _MOMENT,
    "pool": _TEXT, "simulated": _FLAG, "pulls": _WHOLE, "failures": _WHOLE, "rows": _WHOLE, "quarantined": _WHOLE,
    "last_success": _MOMENT, "lag_us": _WHOLE, "quarantine_rows": _WHOLE, "quarantine_reason": _TEXT,
}  # fmt: skip
_STORE: dict[str, Schema] = {
    "generation": _WHOLE, "published": _MOMENT, "segments": _WHOLE, "bytes": _WHOLE, "quarantine_rows": _WHOLE, "writable": _FLAG,
    "disk_free_bytes": _WHOLE, "disk_total_bytes": _WHOLE,
}  # fmt: skip
# Of the last thousand publications since the start; absent before the first.
_STORE_TIMES: dict[str, Schema] = {"publish_p50_ms": {"type": "number"}, "publish_p99_ms": {"type": "number"}}
_SOURCE: dict[str, Schema] = {
    "source": _TEXT, "state": _TEXT, "reason": _TEXT, "targets": _WHOLE, "failures": _WHOLE, "last_success": _MOMENT,
}  # fmt: skip
_PUSHED: dict[str, Schema] = {
    "schema": {"const": "poolmeter.push/1"}, "node": _TEXT, "consumer": _TEXT, "epoch": _TEXT, "seq": _WHOLE,
}  # fmt: skip


def closed(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """An object with these properties and no other."""
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


def listing(name: str, row: Schema, more: Mapping[str, Schema] | None = None, required: Iterable[str] = ()) -> Schema:
    """The object of every answer with rows."""
    properties: dict[str, Schema] = {
        "schema": {"const": f"poolmeter.{name}/1"},
        "rows": {"type": "array", "items": row},
        "totals": {"type": "object"},
        "warnings": {"type": "array", "items": _TEXT},
        **(more or {}),
    }
    return closed(properties, ("schema", "rows", "totals", "warnings", *required))


def _columns(columns: Iterable[Field], required: Iterable[str] = ()) -> Schema:
    return closed({column.name: _OF_COLUMN[column.type] for column in columns}, required)


def _of_part(table: str) -> list[Field]:
    """The columns of one of the `now_*` tables that a part of a snapshot has of its own."""
    return [column for column in TABLES[table] if column.name not in ("node", "taken_us")]


def of_record(record_type: type) -> Schema:
    """A dataclass in its plain form: what may be None may be absent."""
    hints = typing.get_type_hints(record_type)
    properties = {field.name: _of_hint(hints[field.name]) for field in fields(record_type)}
    required = [
        field.name for field in fields(record_type) if field.default is MISSING and not isinstance(hints[field.name], types.UnionType)
    ]
    return closed(properties, required)


def _of_hint(hint: Any) -> Schema:
    if isinstance(hint, types.UnionType):
        return _of_hint(next(part for part in typing.get_args(hint) if part is not type(None)))
    if is_dataclass(hint):
        return of_record(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [item.value for item in hint]}
    return {int: _WHOLE, str: _TEXT, bool: _FLAG}[hint]


@cache
def schemas() -> dict[str, Schema]:
    """Every schema by its name in the document's components."""
    records = {view: _columns(segment_fields(kind)) for view, (kind, *_) in VIEWS.items() if view != "quarantine"}
    period = {"from": _MOMENT, "to": _MOMENT, "kind": _TEXT, "tier": _TEXT, "cursor": _TEXT}
    # A tenant is shown less of a device and of a node than others, so little of them is required.
    parts = {
        part: {"type": "array", "items": _columns(_of_part(table), ("uuid", "model") if part == "devices" else ())}
        for table, part in NOW_FIELDS.items()
    }
    snapshot = closed(
        {"node": _TEXT, "taken_us": _WHOLE, "epoch": _TEXT, "sequence": _WHOLE, "simulated": _FLAG, "pool": _TEXT, **parts},
        ("node", "taken_us", "simulated", *parts),
    )
    booked = of_record(Booked)["properties"]
    decision = closed(
        {**of_record(Decision)["properties"], **{name: what for name, what in booked.items() if name != "decision"}}, ("id", "node")
    )
    health = {
        "status": {"enum": ["ok", "degraded"]},
        "store": {**closed({**_STORE, **_STORE_TIMES}, _STORE), "additionalProperties": True},
        "discovery": {"type": "array", "items": closed(_SOURCE, ("source", "state", "failures"))},
    }
    node = {**closed(_NODE, ("url", "state")), "additionalProperties": True}
    change = closed(
        {
            "number": _WHOLE, "transaction_id": _TEXT, "at_us": _WHOLE, "by": _TEXT, "subject": _TEXT, "key": _TEXT, "reason": _TEXT,
            "before": {"type": "object"}, "after": {"type": "object"},
        },
        ("number", "at_us", "by", "subject", "key", "after"),
    )  # fmt: skip
    return {
        "Error": closed({"error": _TEXT}, ("error",)),
        # OpenCost's own, which has more fields than anybody lists.
        "Allocations": closed(
            {
                "code": {"const": 200},
                "status": _TEXT,
                "message": _TEXT,
                "currency": _TEXT,
                "data": {
                    "type": "array",
                    "items": {"type": "object", "additionalProperties": {"type": "object", "required": ["name", "totalCost"]}},
                },
            },
            ("code", "data"),
        ),
        "AllocationsError": closed({"code": _WHOLE, "status": _TEXT, "message": _TEXT}, ("code", "message")),
        "Report": {"type": "object", "required": ["schema", "rows", "totals", "warnings"]},
        "Records": listing("records", {"anyOf": list(records.values())}, period, ("from", "to", "kind", "tier")),
        "Nodes": listing("nodes", node, {"after": _TEXT}),
        "Health": listing("health", node, health, health),
        "Snapshots": listing("snapshots", snapshot, {"after": _TEXT}),
        "Decisions": listing("decisions", decision, {"after": _TEXT}),
        "DecisionLog": listing("decision_log", of_record(LogEntry), {"after": _WHOLE}),
        "BooksLog": listing("books_log", change, {"after": _WHOLE}),
        "BooksAssets": listing("books_assets", {"type": "object", "required": ["uuid", *FIELDS]}, {"after": _TEXT}),
        "Pushed": closed(_PUSHED, ("schema", "node", "consumer", "epoch")),
        "Document": {"type": "object", "required": ["openapi", "info", "paths", "components"]},
    }
