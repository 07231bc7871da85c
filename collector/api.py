"""The collector's HTTP API: health, nodes, usage records, snapshots, the books' decisions, its own metrics.

Errors are `{"error": sentence}` with 400 (bad input), 401, 403, 404, 409 (refused), 413, 415, 429 or 503. Lists are the contract's JSON object.
"""

import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute

from poolmeter.books.writer import Books, NotInBooks
from poolmeter.clock import Clock, SystemClock
from poolmeter.collector.assets import Assets
from poolmeter.collector.auth import Authority, Caller, Credentials
from poolmeter.collector.catalog import TornStore, query
from poolmeter.collector.decisions import (
    LIST_LIMIT,
    LIST_LIMIT_MOST,
    LOG_LIMIT,
    LOG_LIMIT_MOST,
    Decisions,
    NotJson,
    TooLarge,
    limit_of,
    listing,
    page,
)
from poolmeter.collector.discovery.watch import SourceStatus
from poolmeter.collector.gate import Gate, caller_of
from poolmeter.collector.limits import Limits, Queries
from poolmeter.collector.now import NOW_TABLES, snapshot_objects
from poolmeter.collector.observed import Observed
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.push import PATH as PUSH
from poolmeter.collector.reception import NodeStatus
from poolmeter.collector.routes import Endpoint, Handler, Parameter, openapi, routes_of
from poolmeter.collector.store import Store
from poolmeter.collector.tables import SegmentKind
from poolmeter.collector.tenancy import Forbidden, snapshots_for
from poolmeter.collector.tracing import Tracer
from poolmeter.collector.usage import ARROW, PARAMETERS, Usage
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.decision import DecisionState
from poolmeter.model.units import DAY_US, HOUR_US
from poolmeter.now import joined
from poolmeter.period import rfc3339


@dataclass
class ApiState:
    """What the endpoints answer from. `token` is the admin's; `authority` may be given with more to know callers by."""

    store: Store
    books: Books
    token: str
    statuses: Callable[[], Sequence[NodeStatus]] = tuple
    publisher: Publisher | None = None
    reads_need_token: bool = False
    clock: Clock = field(default_factory=SystemClock)
    discovery: Callable[[], Sequence[SourceStatus]] = tuple
    troubles: Callable[[], Sequence[str]] = tuple  # what else is wrong, for the health page
    authority: Authority | None = None
    limits: Limits = field(default_factory=Limits)
    observed: Observed = field(default_factory=Observed)
    tracer: Tracer | None = None
    queries: Queries | None = None
    reload_ok: Callable[[], bool | None] = lambda: None
    push: Handler | None = None  # takes in what nodes post; without, nothing is pushed here


def create_app(state: ApiState, extra_routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The application; `extra_routes` are other components' (they stand behind the same gate)."""
    state.authority = state.authority or Authority(Credentials(state.token, not state.reads_need_token))
    state.queries = Queries(state.limits)
    routes = [*routes_of(_endpoints(state)), *extra_routes]
    gate = Middleware(
        Gate, routes=routes, authority=state.authority, limits=state.limits, observed=state.observed, queries=state.queries
    )  # fmt: skip
    handlers: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        PoolmeterError: _failed,
        HTTPException: _not_there,
        Exception: _fault,
    }
    app = Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)
    # A redirect would go where the request's Host header says, with whatever token the client sends there.
    app.router.redirect_slashes = False
    app.state.collector = state
    return app


def _endpoints(state: ApiState) -> tuple[Endpoint, ...]:
    health, decisions, usage = _Health(state), Decisions(state.books, state.store.root), Usage(state.store.root, state.clock)
    assets = Assets(state.books)

    pages = (
        Parameter("after", "only entries after this number, as the page before gave (0)", type="integer"),
        Parameter("limit", f"entries of a page, at most {LOG_LIMIT_MOST} ({LOG_LIMIT})", type="integer"),
    )

    def rows_of(key: str) -> tuple[Parameter, ...]:
        return (
            Parameter("after", f"behind the row with this {key}: `after` of an answer that is not the last asks for the next"),
            Parameter("limit", f"at most so many, up to {LIST_LIMIT_MOST}; without it all", type="integer"),
        )

    async def document(request: Request) -> Response:
        return JSONResponse(openapi(endpoints, request.app.routes))

    async def metrics(_: Request) -> Response:
        from poolmeter.collector.metrics import CONTENT_TYPE, render

        return Response(await run_in_threadpool(render, state), media_type=CONTENT_TYPE)

    endpoints = (
        Endpoint("GET", "/healthz", health.alive, "Whether the process answers", media=("text/plain",)),
        Endpoint("GET", "/readyz", health.ready, "Whether the store can be written", media=("text/plain",), statuses=(200, 503)),
        Endpoint("GET", "/v1/health", health.health, "Store, disk and every node with its reason", answer="Health"),
        Endpoint("GET", "/v1/nodes", health.nodes, "Every node by URL", rows_of("url"), statuses=(200, 400), answer="Nodes"),
        Endpoint(
            "GET", "/v1/usage", usage.records, "Usage records of one kind, oldest first, paged", PARAMETERS, ("application/json", ARROW),
            (200, 400, 403, 503), answer="Records",
        ),
        Endpoint(
            "GET", "/v1/snapshot", health.snapshots, "The newest snapshot of every node by name", rows_of("node"), statuses=(200, 400),
            answer="Snapshots",
        ),
        Endpoint(
            "GET", "/v1/decisions", decisions.list, "Decisions by node and sequence, paged: `after` of an answer that is not the last asks for the next",
            (
                Parameter("state", "only this state", enum=tuple(DecisionState)), Parameter("node", "only this node"),
                Parameter("after", "behind the decision with this id"),
                Parameter("limit", f"at most so many ({LIST_LIMIT}), up to {LIST_LIMIT_MOST}", type="integer"),
            ),
            statuses=(200, 400, 404, 503), answer="Decisions",
        ),
        Endpoint(
            "POST", "/v1/decisions", decisions.add, "Enter proposals, all or none; without a sequence they get the node's next",
            statuses=(200, 400, 409, 413, 415), body='{"decisions": [a Decision, ...], "by": who}', answer="Decisions",
        ),
        *(
            Endpoint(
                "POST", f"/v1/decisions/{{id}}/{verb}", handler, f"{verb.capitalize()} a proposal",
                (Parameter("id", "the decision", "path"),), statuses=(200, 400, 404, 409, 413, 415), body='{"by": who, "reason": why}',
                answer="Decisions",
            )
            for verb, handler in (("approve", decisions.approve), ("reject", decisions.reject))
        ),
        Endpoint(
            "GET", "/v1/books/decisions", decisions.log, "Who changed which decision, when and why: oldest first",
            (Parameter("decision", "only this decision"), *pages), statuses=(200, 400, 503), answer="DecisionLog",
        ),
        Endpoint(
            "GET", "/v1/books/log", decisions.changes, "Every change of the books: who, what, when, why, before and after: oldest first",
            (Parameter("subject", "only this table"), Parameter("key", "only this row of a table"), *pages), statuses=(200, 400, 503),
            answer="BooksLog",
        ),
        Endpoint("GET", "/v1/books/assets", assets.list, "What people wrote of each device, by uuid", rows_of("uuid"), statuses=(200, 400, 503), answer="BooksAssets"),
        Endpoint(
            "POST", "/v1/books/assets", assets.enter, "Write the register of devices, all or none; a field that a row lacks stays",
            statuses=(200, 400, 409, 413, 415, 503), body='{"assets": [{"uuid": text, ...}], "by": who, "reason": why, "dry_run": true}',
            answer="BooksAssets",
        ),
        *(
            ()
            if state.push is None
            else (
                Endpoint(
                    "POST", PUSH, state.push, "Take in records and the snapshot of the node whose token it is; the answer acknowledges them",
                    statuses=(200, 400, 408, 409, 413, 415, 503), body="what an exporter answers GET /v1/usage?snapshot=arrow with",
                    body_media=ARROW, answer="Pushed",
                ),
            )
        ),
        Endpoint("GET", "/metrics", metrics, "The collector's own metrics for Prometheus", media=("text/plain",)),
        Endpoint("GET", "/openapi.json", document, "This document", answer="Document"),
    )  # fmt: skip
    return endpoints


NODES_TOGETHER = 50  # snapshots decoded at once: one by one costs twice as much
QUARANTINE_SQL = """SELECT node, SUM(rows)::BIGINT AS rows, ARG_MAX(reason, received_us) AS reason FROM quarantine
WHERE received_us >= ? GROUP BY node"""


class _Health:
    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._quarantine: tuple[object, dict[str, tuple[int, str]]] = (None, {})

    async def alive(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, _: Request) -> Response:
        trouble = self._state.store.trouble
        return PlainTextResponse(f"{trouble or 'ok'}\n", 503 if trouble else 200)

    async def health(self, _: Request) -> Response:
        state = self._state.store.state
        disk = await run_in_threadpool(shutil.disk_usage, self._state.store.root)
        rows = self._rows()
        # Who lies is found by node, not by address: rows that broke a rule within a day, and the newest sentence.
        try:
            liars, unread = await run_in_threadpool(self._liars), []
        except PoolmeterError as error:  # a torn segment: the page says so, and goes on
            liars, unread = {}, [f"rows that broke a rule cannot be told: {error}"]
            unread += [self._quarantined(status) for status in self._state.statuses() if self._sends_nonsense(status)]
        for row in rows:
            if row.get("node") in liars:
                row["quarantine_rows"], row["quarantine_reason"] = liars[str(row["node"])]
        # A node that is gone went where its source no longer names it: told, and no fault.
        bad = [row for row in rows if row["state"] != "gone" and (row["state"] not in ("up", "new") or "reason" in row)]
        sources = [_source(status) for status in self._state.discovery()]
        quarantined = sum(segment.rows for segment in state.segments.values() if segment.kind is SegmentKind.QUARANTINE)
        warnings = [f"node {row.get('node') or row['url']} is {row['state']}: {row.get('reason', 'no reason known')}" for row in bad]
        warnings += [f"discovery {row['source']}: {row['reason']}" for row in sources if "reason" in row]
        warnings += [
            f"node {node} sent {count} rows within a day that broke a rule, last: {reason}" for node, (count, reason) in liars.items()
        ]
        warnings += unread
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
        body = listing("health", rows, warnings) | {"status": "degraded" if warnings else "ok", "store": store, "discovery": sources}
        return JSONResponse(body)

    def _sends_nonsense(self, status: NodeStatus) -> bool:
        """Whether rows of the exporter went to quarantine within the last hour."""
        return status.quarantined_us is not None and self._state.clock.wall_us() - status.quarantined_us < HOUR_US

    def _quarantined(self, status: NodeStatus) -> str:
        return f"node {status.row.node or status.row.url} sent {status.quarantined} rows that broke a rule, the last: {status.quarantine_reason}"

    def _liars(self) -> dict[str, tuple[int, str]]:
        """Rows in quarantine and the newest reason by node; asked again only when the quarantine or the hour is another."""
        files = frozenset(name for name, segment in self._state.store.state.segments.items() if segment.kind is SegmentKind.QUARANTINE)
        now = self._state.clock.wall_us()
        key = (files, now // HOUR_US)
        if self._quarantine[0] != key:
            found = query(self._state.store.root, QUARANTINE_SQL, [now - DAY_US]).to_pylist() if files else []
            self._quarantine = (key, {row["node"]: (row["rows"], row["reason"]) for row in found})
        return self._quarantine[1]

    async def nodes(self, request: Request) -> Response:
        limit = limit_of(request)
        rows = sorted(self._rows(), key=lambda row: str(row["url"]))
        return page("nodes", (row for row in rows if str(row["url"]) > request.query_params.get("after", "")), "url", limit)

    async def snapshots(self, request: Request) -> Response:
        caller, after, limit = caller_of(request.scope), request.query_params.get("after", ""), limit_of(request)
        return await run_in_threadpool(lambda: page("snapshots", self._snapshots(caller, after), "node", limit))

    def _snapshots(self, caller: Caller, after: str) -> Iterator[dict[str, Any]]:
        """What a caller may see of the newest snapshots behind a node, some nodes at a time: there may be thousands."""
        now = self._state.store.state.now
        nodes = [node for node in sorted(now) if node > after]
        for first in range(0, len(nodes), NODES_TOGETHER):
            tables = [now[node] for node in nodes[first : first + NODES_TOGETHER]]
            yield from snapshots_for(
                caller, snapshot_objects({name: joined(name, [found[name] for found in tables]) for name in NOW_TABLES})
            )

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


async def _failed(_: Request, error: Exception) -> Response:
    known = (
        (Forbidden, 403), (TooLarge, 413), (NotJson, 415), (NotInBooks, 404), (TornStore, 503), (BadInput, 400), (Refused, 409), (Unavailable, 503),
    )  # fmt: skip
    status = next((code for kind, code in known if isinstance(error, kind)), 500)
    return JSONResponse({"error": str(error)}, status)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = str(error.detail)
    if error.status_code == 405:
        sentence = f"method is {request.method!r:.20}, expected {(error.headers or {}).get('Allow', 'another')}"
    if error.status_code == 404:
        sentence = f"path is {request.url.path!r:.80}, expected one that /openapi.json lists"
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


async def _fault(_: Request, __: Exception) -> Response:
    # The server logs the traceback: it is not the caller's.
    return JSONResponse({"error": "the collector has a fault of its own, which its log tells"}, 500)
