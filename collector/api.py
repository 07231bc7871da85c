"""The collector's HTTP API: health, nodes, usage records, snapshots, the books' decisions, its own metrics.

Errors are `{"error": sentence}` with 400 (bad input), 401, 404, 409 (refused), 413, 415 or 503. Lists are the contract's JSON object.
"""

import base64
import binascii
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from poolmeter.books.writer import Booked, Books, NotInBooks
from poolmeter.clock import Clock, SystemClock
from poolmeter.collector.catalog import query
from poolmeter.collector.discovery.watch import SourceStatus
from poolmeter.collector.now import NOW_TABLES, snapshot_objects
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.push import PATH as PUSH
from poolmeter.collector.reception import NodeStatus
from poolmeter.collector.routes import Endpoint, Parameter, openapi, routes_of
from poolmeter.collector.store import Store
from poolmeter.collector.tables import SegmentKind, quoted, segment_fields
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.model.units import HOUR_US
from poolmeter.model.usage import RecordKind
from poolmeter.now import joined
from poolmeter.period import parse_period, rfc3339
from poolmeter.tokens import HINT

ARROW = "application/vnd.apache.arrow.stream"
LIMIT = 10_000
LIMIT_MOST = 100_000
BODY_LIMIT = 1 << 20
_OPEN = ("/healthz", "/readyz", PUSH)  # a push asks for a token of its own, that of a node
_VIEW = {kind: f"{kind.value}_minutes" for kind in RecordKind} | {RecordKind.EVENT: "event_log"}
_ORDER = ("minute_us", "node", "epoch", "sequence")


@dataclass
class ApiState:
    """What the endpoints answer from."""

    store: Store
    books: Books
    token: str  # asked of requests that change something
    statuses: Callable[[], Sequence[NodeStatus]] = tuple
    publisher: Publisher | None = None
    reads_need_token: bool = False
    clock: Clock = field(default_factory=SystemClock)
    discovery: Callable[[], Sequence[SourceStatus]] = tuple
    troubles: Callable[[], Sequence[str]] = tuple  # what else is wrong, for the health page


def create_app(state: ApiState, extra_routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The application; `extra_routes` are other components' (they stand behind the same token)."""
    endpoints = _endpoints(state)
    middleware = [Middleware(_TokenGuard, token=state.token, reads=state.reads_need_token)]
    handlers: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {PoolmeterError: _failed}
    app = Starlette(routes=[*routes_of(endpoints), *extra_routes], middleware=middleware, exception_handlers=handlers)
    app.state.collector = state
    return app


def _endpoints(state: ApiState) -> tuple[Endpoint, ...]:
    health, decisions = _Health(state), _Decisions(state)
    kinds = tuple(kind.value for kind in RecordKind)

    async def document(request: Request) -> Response:
        return JSONResponse(openapi(endpoints, request.app.routes))

    async def metrics(_: Request) -> Response:
        from poolmeter.collector.metrics import CONTENT_TYPE, render

        return Response(await run_in_threadpool(render, state), media_type=CONTENT_TYPE)

    endpoints = (
        Endpoint("GET", "/healthz", health.alive, "Whether the process answers", media=("text/plain",)),
        Endpoint("GET", "/readyz", health.ready, "Whether the store can be written", media=("text/plain",), statuses=(200, 503)),
        Endpoint("GET", "/v1/health", health.health, "Store, disk and every node with its reason"),
        Endpoint("GET", "/v1/nodes", health.nodes, "Every node"),
        Endpoint(
            "GET", "/v1/usage", _Usage(state).records, "Usage records of one kind, oldest first, paged",
            (
                Parameter("kind", "kind of record (slice)", enum=kinds),
                Parameter("from", "start, inclusive: RFC 3339, a date, 7d (this month)"),
                Parameter("to", "end, exclusive (now)"),
                Parameter("limit", f"rows of a page, at most {LIMIT_MOST} ({LIMIT})", type="integer"),
                Parameter("cursor", "the cursor of the page before (JSON: cursor; Arrow: header X-Poolmeter-Cursor)"),
            ),
            ("application/json", ARROW), (200, 400, 503),
        ),
        Endpoint("GET", "/v1/snapshot", health.snapshots, "The newest snapshot of every node"),
        Endpoint(
            "GET", "/v1/decisions", decisions.list, "Decisions by node and sequence",
            (Parameter("state", "only this state", enum=tuple(DecisionState)), Parameter("node", "only this node")), statuses=(200, 400),
        ),
        Endpoint(
            "POST", "/v1/decisions", decisions.add, "Enter proposals, all or none; without a sequence they get the node's next",
            statuses=(200, 400, 409, 413, 415), body='{"decisions": [a Decision, ...], "by": who}',
        ),
        *(
            Endpoint(
                "POST", f"/v1/decisions/{{id}}/{verb}", handler, f"{verb.capitalize()} a proposal",
                (Parameter("id", "the decision", "path"),), statuses=(200, 400, 404, 409, 413, 415), body='{"by": who, "reason": why}',
            )
            for verb, handler in (("approve", decisions.approve), ("reject", decisions.reject))
        ),
        Endpoint("GET", "/metrics", metrics, "The collector's own metrics for Prometheus", media=("text/plain",)),
        Endpoint("GET", "/openapi.json", document, "This document"),
    )  # fmt: skip
    return endpoints


class _Health:
    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def alive(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, _: Request) -> Response:
        trouble = self._state.store.trouble
        return PlainTextResponse(f"{trouble or 'ok'}\n", 503 if trouble else 200)

    async def health(self, _: Request) -> Response:
        state = self._state.store.state
        disk = await run_in_threadpool(shutil.disk_usage, self._state.store.root)
        rows = self._rows()
        # A node that is gone went where its source no longer names it: told, and no fault.
        bad = [row for row in rows if row["state"] != "gone" and (row["state"] not in ("up", "new") or "reason" in row)]
        sources = [_source(status) for status in self._state.discovery()]
        quarantined = sum(segment.rows for segment in state.segments.values() if segment.kind is SegmentKind.QUARANTINE)
        warnings = [f"node {row.get('node') or row['url']} is {row['state']}: {row.get('reason', 'no reason known')}" for row in bad]
        warnings += [f"discovery {row['source']}: {row['reason']}" for row in sources if "reason" in row]
        warnings += [self._quarantined(status) for status in self._state.statuses() if self._sends_nonsense(status)]
        warnings += self._state.troubles()
        if self._state.store.trouble:
            warnings.insert(0, self._state.store.trouble)
        warnings += self._state.store.damaged.values()
        publisher = self._state.publisher
        store = {
            "generation": state.generation,
            "published": rfc3339(state.published_us),
            "segments": len(state.segments),
            "bytes": sum(segment.bytes for segment in state.segments.values()),
            "quarantine_rows": quarantined,
            "writable": self._state.store.trouble is None,
            **(
                {}
                if publisher is None or not publisher.recent
                else {
                    "publish_p50_ms": publisher.recent_ms(0.5),
                    "publish_p99_ms": publisher.recent_ms(0.99),
                }
            ),
            "disk_free_bytes": disk.free,
            "disk_total_bytes": disk.total,
        }
        body = _listing("health", rows, warnings) | {"status": "degraded" if warnings else "ok", "store": store, "discovery": sources}
        return JSONResponse(body)

    def _sends_nonsense(self, status: NodeStatus) -> bool:
        """Whether rows of the exporter went to quarantine within the last hour."""
        return status.quarantined_us is not None and self._state.clock.wall_us() - status.quarantined_us < HOUR_US

    def _quarantined(self, status: NodeStatus) -> str:
        return f"node {status.row.node or status.row.url} sent {status.quarantined} rows that broke a rule, the last: {status.quarantine_reason}"

    async def nodes(self, _: Request) -> Response:
        return JSONResponse(_listing("nodes", self._rows()))

    async def snapshots(self, _: Request) -> Response:
        return JSONResponse(_listing("snapshots", await run_in_threadpool(self._snapshots)))

    def _snapshots(self) -> list[dict[str, Any]]:
        now = self._state.store.state.now
        return snapshot_objects({name: joined(name, [found[name] for found in now.values()]) for name in NOW_TABLES})

    def _rows(self) -> list[dict[str, object]]:
        statuses = {status.row.url: status for status in self._state.statuses()}
        out = []
        for row in self._state.store.state.nodes.values():
            status = statuses.get(row.url)
            row = status.row if status else row
            values: dict[str, object] = {
                "url": row.url,
                "node": row.node,
                "state": row.state,
                "reason": row.reason,
                "epoch": row.epoch,
                "last_sequence": row.last_sequence,
                "last_pull": None if row.last_pull_us is None else rfc3339(row.last_pull_us),
                "pool": row.pool,
                "simulated": row.simulated,
            }
            if status is not None:
                values |= {
                    "pulls": status.pulls,
                    "failures": status.failures,
                    "rows": status.rows,
                    "quarantined": status.quarantined,
                    "quarantine_reason": status.quarantine_reason,
                    "last_success": None if status.last_success_us is None else rfc3339(status.last_success_us),
                    "lag_us": status.lag_us,
                }
            out.append({name: value for name, value in values.items() if value is not None})
        return out


class _Usage:
    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def records(self, request: Request) -> Response:
        wanted = request.query_params
        kind_text = wanted.get("kind", RecordKind.SLICE.value)
        if kind_text not in set(RecordKind):
            raise BadInput(f"kind is {kind_text!r:.40}, expected one of {', '.join(RecordKind)}")
        period = parse_period(wanted.get("from"), wanted.get("to"), "UTC", self._state.clock.wall_us())
        limit = _number(wanted.get("limit", str(LIMIT)), "limit", LIMIT_MOST)
        kind = RecordKind(kind_text)
        columns = [column.name for column in segment_fields(SegmentKind(kind.value))]
        sql = f"SELECT {', '.join(map(quoted, columns))} FROM {_VIEW[kind]} WHERE minute_us >= ? AND minute_us < ?"
        parameters: list[object] = [period.start_us, period.end_us]
        if "cursor" in wanted:
            sql += f" AND ({', '.join(_ORDER)}) > (?, ?, ?, ?)"
            parameters += _parse_cursor(wanted["cursor"])
        sql += f" ORDER BY {', '.join(_ORDER)} LIMIT {limit + 1}"
        table = await run_in_threadpool(query, self._state.store.root, sql, parameters)
        page = table.slice(0, limit)
        cursor = _cursor([page.column(name)[-1].as_py() for name in _ORDER]) if table.num_rows > limit else None
        headers = {"X-Poolmeter-Cursor": cursor} if cursor else {}
        if ARROW in request.headers.get("accept", ""):
            from poolmeter.arrow import kind_schema, to_bytes

            body = await run_in_threadpool(lambda: to_bytes(page.cast(kind_schema(kind))))
            return Response(body, media_type=ARROW, headers=headers)
        rows = [{name: value for name, value in row.items() if value is not None} for row in page.to_pylist()]
        answer = _listing("records", rows) | {"from": period.start_text(), "to": period.end_text(), "kind": kind.value}
        return JSONResponse(answer | ({"cursor": cursor} if cursor else {}), headers=headers)


class _Decisions:
    def __init__(self, state: ApiState) -> None:
        self._books = state.books

    async def list(self, request: Request) -> Response:
        text = request.query_params.get("state")
        if text is not None and text not in set(DecisionState):
            raise BadInput(f"state is {text!r:.40}, expected one of {', '.join(DecisionState)}")
        wanted = DecisionState(text) if text else None
        found = await run_in_threadpool(self._books.list, wanted, request.query_params.get("node"))
        return JSONResponse(_listing("decisions", [decision_object(booked) for booked in found]))

    async def add(self, request: Request) -> Response:
        body = await _json_body(request)
        given = body.get("decisions")
        if not isinstance(given, list) or not given:
            raise BadInput(f"decisions is {given!r:.40}, expected a list of at least one")
        parsed = [
            from_plain(Decision, {"sequence": 0, **item} if isinstance(item, dict) else item, f"decisions[{n}]")
            for n, item in enumerate(given)
        ]
        found = await run_in_threadpool(self._books.add_decisions, parsed, _text(body, "by") or "api")
        return JSONResponse(_listing("decisions", [decision_object(booked) for booked in found]))

    async def approve(self, request: Request) -> Response:
        return await self._move(request, DecisionState.APPROVED)

    async def reject(self, request: Request) -> Response:
        return await self._move(request, DecisionState.REJECTED)

    async def _move(self, request: Request, state: DecisionState) -> Response:
        body = await _json_body(request)
        by, reason = _text(body, "by") or "api", _text(body, "reason")
        booked = await run_in_threadpool(self._books.transition, request.path_params["id"], state, by, reason)
        return JSONResponse(_listing("decisions", [decision_object(booked)]))


def decision_object(booked: Booked) -> dict[str, Any]:
    """A booked decision as one flat JSON object: the Decision's fields and what became of it."""
    plain: dict[str, Any] = to_plain(booked)
    return {**plain.pop("decision"), **plain}


def _source(status: SourceStatus) -> dict[str, object]:
    values = {
        "source": status.name,
        "state": status.state,
        "reason": status.reason,
        "targets": None if status.urls is None else len(status.urls),
        "failures": status.failures,
        "last_success": None if status.last_success_us is None else rfc3339(status.last_success_us),
    }
    return {name: value for name, value in values.items() if value is not None}


def _listing(name: str, rows: Sequence[Mapping[str, object]], warnings: Sequence[str] = ()) -> dict[str, Any]:
    return {"schema": f"poolmeter.{name}/1", "rows": list(rows), "totals": {}, "warnings": list(warnings)}


async def _json_body(request: Request) -> dict[str, Any]:
    # Only application/json: a form that a foreign page posts from a browser must not approve anything.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise _NotJson(f"Content-Type is {request.headers.get('content-type')!r:.60}, expected application/json")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_LIMIT:
            raise _TooLarge(f"body has more than {BODY_LIMIT} bytes, expected at most that")
        chunks.append(chunk)
    try:
        value = json.loads(b"".join(chunks) or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"body is not JSON: {error!s:.80}") from None
    if not isinstance(value, dict):
        raise BadInput(f"body is {value!r:.40}, expected an object")
    return value


class _TooLarge(BadInput):
    pass


class _NotJson(BadInput):
    pass


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > 1000):
        raise BadInput(f"{name} is {value!r:.40}, expected text of at most 1000 characters")
    return value


def _number(text: str, name: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= most:
        raise BadInput(f"{name} is {text!r:.40}, expected a number from 1 to {most}")
    return int(text)


def _cursor(position: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode().rstrip("=")


def _parse_cursor(text: str) -> list[object]:
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if [type(value) for value in found] == [int, str, str, int] and all(abs(value) < 1 << 63 for value in (found[0], found[3])):
            return list(found)
    except (ValueError, TypeError, binascii.Error, RecursionError):
        pass
    raise BadInput(f"cursor is {text!r:.60}, expected one that an earlier page gave")


async def _failed(_: Request, error: Exception) -> Response:
    known = ((_TooLarge, 413), (_NotJson, 415), (NotInBooks, 404), (BadInput, 400), (Refused, 409), (Unavailable, 503))
    status = next((code for kind, code in known if isinstance(error, kind)), 500)
    return JSONResponse({"error": str(error)}, status)


class _TokenGuard:
    def __init__(self, app: ASGIApp, token: str, reads: bool) -> None:
        self._app = app
        self._free = () if reads else ("GET", "HEAD")
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN and scope["method"] not in self._free:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._wanted):
                what = "has another token than the collector's" if given else "has no token"
                await JSONResponse({"error": f"the request {what}, {HINT}"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
