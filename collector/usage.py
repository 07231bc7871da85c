"""`GET /v1/usage`: stored records by kind and tier, filtered, in pages of bounded size that join to the whole."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from poolmeter.clock import Clock
from poolmeter.collector.catalog import open_catalog, unreadable
from poolmeter.collector.gate import caller_of
from poolmeter.collector.routes import Parameter
from poolmeter.collector.tables import VIEWS, Field, quoted, schema_of, segment_fields
from poolmeter.collector.tenancy import Scope, usage_scope
from poolmeter.collector.tracing import span
from poolmeter.errors import BadInput
from poolmeter.model.usage import RecordKind
from poolmeter.model.wire import SCHEMA_VERSION
from poolmeter.period import Period, parse_period

if TYPE_CHECKING:
    import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"
LIMIT = 10_000
LIMIT_MOST = 100_000
PAGE_BYTES = 16 << 20
VALUES_MOST = 100
_BATCH = 1024
TIERS = ("minute", "hour", "day")
# Parameter -> column.
FILTERS: Mapping[str, str] = {"node": "node", "tenant": "tenant", "allocation": "allocation_id", "device": "device_uuid"}
_POSITION = ("epoch", "sequence")

PARAMETERS = (
    Parameter("kind", "kind of record (slice)", enum=tuple(kind.value for kind in RecordKind)),
    Parameter("tier", "one row a minute, hour or day (minute); hours and days are of slices and devices", enum=TIERS),
    Parameter("from", "start, inclusive: RFC 3339, a date, 7d (this month); a day is in when it begins in the period"),
    Parameter("to", "end, exclusive (now)"),
    *(Parameter(name, f"only this {name}; repeatable", many=True) for name in FILTERS),
    Parameter("columns", "names of columns, with commas (all)"),
    Parameter("limit", f"rows of a page, at most {LIMIT_MOST} ({LIMIT}); a page has at most {PAGE_BYTES >> 20} MiB", type="integer"),
    Parameter("cursor", "the cursor of the page before (JSON: cursor; Arrow: header X-Poolmeter-Cursor)"),
)


@dataclass(frozen=True)
class Asked:
    """One question: which rows, which columns, from where on."""

    kind: RecordKind
    tier: str
    view: str
    period: Period
    filters: Mapping[str, tuple[str, ...]]
    fields: tuple[Field, ...]
    limit: int
    cursor: str | None
    scope: Scope

    @property
    def time(self) -> str:
        """The column that says when."""
        return f"{self.tier}_us"


class Usage:
    """The endpoint over a store's root."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root, self._clock = root, clock

    async def records(self, request: Request) -> Response:
        """A page of records."""
        asked = parse(request, self._clock.wall_us())
        as_arrow = ARROW in request.headers.get("accept", "")
        body, cursor = await run_in_threadpool(self._answer, asked, as_arrow)
        headers = {"X-Poolmeter-Cursor": cursor} if cursor else {}
        return Response(body, media_type=ARROW if as_arrow else "application/json", headers=headers)

    def _answer(self, asked: Asked, as_arrow: bool) -> tuple[bytes, str | None]:
        sql, parameters, order = sql_of(asked)
        with span("query", attributes={"db.system.name": "duckdb", "poolmeter.view": asked.view}) as traced:
            table, more = read_page(self._root, sql, parameters, asked.limit)
            traced.set("poolmeter.rows", table.num_rows)
        cursor = _cursor([table.column(name)[-1].as_py() for name in order]) if more else None
        page = table.select([field.name for field in asked.fields])
        if as_arrow:
            from poolmeter.arrow import METADATA_KEY, to_bytes

            schema = schema_of(asked.fields).with_metadata({METADATA_KEY: SCHEMA_VERSION.encode()})
            return to_bytes(page.cast(schema)), cursor
        rows = [{name: _plain(value) for name, value in row.items() if value is not None} for row in page.to_pylist()]
        answer: dict[str, Any] = {"schema": "poolmeter.records/1", "rows": rows, "totals": {}, "warnings": []}
        answer |= {"from": asked.period.start_text(), "to": asked.period.end_text(), "kind": asked.kind.value, "tier": asked.tier}
        return json.dumps(answer | ({"cursor": cursor} if cursor else {}), ensure_ascii=False).encode("utf-8", "replace"), cursor


def parse(request: Request, now_us: int) -> Asked:
    """The question of a request. Raises BadInput, and Forbidden for what is not the caller's."""
    wanted = request.query_params
    kind = RecordKind(_one_of(wanted.get("kind", RecordKind.SLICE.value), "kind", tuple(RecordKind)))
    scope = usage_scope(caller_of(request.scope), kind)
    tier = _one_of(wanted.get("tier", "minute"), "tier", tiers_of(kind))
    view = _view(kind, tier)
    known = [field for field in segment_fields(VIEWS[view][0]) if field.name not in scope.hidden]
    names = {field.name for field in known}
    filters = {}
    for name, column in FILTERS.items():
        values = tuple(dict.fromkeys(wanted.getlist(name)))
        if len(values) > VALUES_MOST:
            raise BadInput(f"{name} is given {len(values)} times, expected at most {VALUES_MOST}")
        if values and column not in names:
            raise BadInput(f"{name} is a filter that records of kind {kind.value} do not have, expected another")
        if values:
            filters[column] = values
    return Asked(
        kind, tier, view, parse_period(wanted.get("from"), wanted.get("to"), "UTC", now_us), filters,
        _chosen(wanted.get("columns"), known), number(wanted.get("limit", str(LIMIT)), "limit", LIMIT_MOST), wanted.get("cursor"), scope,
    )  # fmt: skip


def tiers_of(kind: RecordKind) -> tuple[str, ...]:
    """The tiers that the store keeps of a kind."""
    return tuple(tier for tier in TIERS if _view(kind, tier) in VIEWS)


def _view(kind: RecordKind, tier: str) -> str:
    return "event_log" if kind is RecordKind.EVENT and tier == "minute" else f"{kind.value}_{tier}s"


def _chosen(text: str | None, known: Sequence[Field]) -> tuple[Field, ...]:
    if text is None:
        return tuple(known)
    by_name = {field.name: field for field in known}
    names = [name.strip() for name in text.split(",")]
    for index, name in enumerate(names):
        if name not in by_name or name in names[:index]:
            raise BadInput(f"columns names {name!r:.60}, expected each once of {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def sql_of(asked: Asked) -> tuple[str, list[object], tuple[str, ...]]:
    """SQL, its parameters, and the columns of its result that are a row's position.

    Rows are in the order of time, node, and what names a row: its place in the spool, or where there is none, or none to be shown, a digest
    of its keys. So a page begins where the one before ended whatever has come in between.
    """
    fields = segment_fields(VIEWS[asked.view][0])
    keys = [quoted(field.name) for field in fields if field.type == "VARCHAR"]
    if asked.tier == "minute" and not asked.scope.hidden:
        place = list(_POSITION)
    elif asked.tier == "minute":
        # The epoch is a random UUID that no tenant sees, so the digest does not tell the sequence.
        place = ["md5(epoch || ',' || sequence)"]
    else:
        parts = [f"coalesce('.' || {key}, ''), chr(10)" for key in keys]
        place = [f"md5(concat({', '.join(parts)}))"]
    order = [asked.time, "node", *place]
    condition = f"{asked.time} >= ? AND {asked.time} < ?"
    parameters: list[object] = [asked.period.start_us, asked.period.end_us]
    if asked.scope.tenant is not None:
        condition += " AND tenant = ?"
        parameters.append(asked.scope.tenant)
    start = asked.cursor is not None and parse_cursor(asked.cursor, [int, str, *([str, int] if len(place) == 2 else [str])])
    if start:
        condition += f" AND {asked.time} >= ?"
        parameters.append(start[0])
    # A tenant's other filters look at its own rows alone: how long they take must not tell whether others have what they name.
    kept = "MATERIALIZED" if asked.scope.tenant is not None and asked.filters else "NOT MATERIALIZED"
    more = [f"{column} IN ({', '.join('?' * len(values))})" for column, values in asked.filters.items()]
    parameters += [value for values in asked.filters.values() for value in values]
    if start:
        more.append(f"({', '.join(order)}) > ({', '.join('?' * len(order))})")
        parameters += start
    names = tuple(f"_{index}" for index in range(len(order)))
    shown = [quoted(field.name) for field in asked.fields] + [f"{what} AS {name}" for what, name in zip(order, names, strict=True)]
    sql = f"WITH own AS {kept} (SELECT * FROM {asked.view} WHERE {condition}) SELECT {', '.join(shown)} FROM own"
    sql += f" WHERE {' AND '.join(more)}" if more else ""
    return f"{sql} ORDER BY {', '.join(order)} LIMIT {asked.limit + 1}", parameters, names


def read_page(root: Path, sql: str, parameters: Sequence[object], limit: int, bytes_most: int = PAGE_BYTES) -> "tuple[pa.Table, bool]":
    """At most `limit` rows and about `bytes_most` bytes of an answer (one row at least), and whether there are more.

    Asked again once when a segment was deleted under it. Raises what `poolmeter.collector.catalog.query` raises.
    """
    import duckdb

    for last in (False, True):
        with open_catalog(root) as connection:
            try:
                return _taken(connection.sql(sql, params=list(parameters)).to_arrow_reader(_BATCH), limit, bytes_most)
            except duckdb.Error as error:
                if last or not isinstance(error, duckdb.IOException):
                    raise unreadable(root, error) from None
            except OSError as error:  # what Arrow makes of an error of DuckDB while it reads on
                raise unreadable(root, duckdb.OutOfMemoryException(str(error))) from None
    raise AssertionError("unreachable")


def _taken(reader: "pa.RecordBatchReader", limit: int, bytes_most: int) -> "tuple[pa.Table, bool]":
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in reader:
        left = limit - rows
        fits = batch.num_rows
        if size + batch.nbytes > bytes_most:
            fits = max(1 if rows == 0 else 0, batch.num_rows * (bytes_most - size) // batch.nbytes)
        taken = min(left, fits)
        batches.append(batch.slice(0, taken))
        rows, size = rows + taken, size + batch.nbytes
        if taken < batch.num_rows:
            return pa.Table.from_batches(batches, reader.schema), True
    return pa.Table.from_batches(batches, reader.schema), False


def _plain(value: object) -> object:
    return int(value) if isinstance(value, Decimal) else value


def _one_of(text: str, name: str, known: Sequence[str]) -> str:
    if text not in known:
        raise BadInput(f"{name} is {text!r:.40}, expected one of {', '.join(known)}")
    return text


def number(text: str, name: str, most: int, least: int = 1) -> int:
    """A whole number of a parameter. Raises BadInput."""
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not least <= int(text) <= most:
        raise BadInput(f"{name} is {text!r:.40}, expected a number from {least} to {most}")
    return int(text)


def _cursor(position: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode().rstrip("=")


def parse_cursor(text: str, types: Sequence[type]) -> list[object]:
    """A position in the order of rows. Raises BadInput."""
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if [type(value) for value in found] == list(types) and all(abs(value) < 1 << 63 for value in found if type(value) is int):
            # Half a character, as JSON can escape it, is in no row, and databases take it for a fault.
            "".join(value for value in found if type(value) is str).encode()
            return list(found)
    except (ValueError, TypeError, binascii.Error, RecursionError):
        pass
    raise BadInput(f"cursor is {text!r:.60}, expected one that an earlier page gave")
