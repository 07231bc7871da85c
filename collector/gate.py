"""What stands in front of every route: rate, who asks, whether they may, how long it may take; and what is counted and traced of it."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poolmeter.collector import catalog
from poolmeter.collector.auth import ADMIN, NODE_HINT, OPEN, Authority, Caller, may
from poolmeter.collector.limits import Crowded, Limits, Queries, Question, Rates, asks_store
from poolmeter.collector.observed import Observed
from poolmeter.collector.tracing import SERVER, Span, span
from poolmeter.errors import PoolmeterError
from poolmeter.tokens import HINT

if TYPE_CHECKING:
    from poolmeter.web.guard import Admission

_PIECE = 65_536  # a reader that takes nothing is noticed at the next piece
UNKNOWN = "(none)"  # no route: there is nothing to guard
OTHER = "(other)"


@dataclass
class Gate:
    """An ASGI application in front of `app`, whose routes are `routes`. It sets `caller` in the request's state."""

    app: ASGIApp
    routes: Sequence[BaseRoute]
    authority: Authority
    limits: Limits
    observed: Observed
    queries: Queries

    def __post_init__(self) -> None:
        self.rates = Rates(self.limits.requests_per_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        template = template_of(self.routes, scope)
        web = self.authority.credentials.web
        answer = _Answer(send, web)
        started = time.perf_counter()
        self.observed.in_flight.inc()
        attributes = {"http.request.method": scope["method"], "http.route": template, "url.path": scope["path"]}
        try:
            with span(f"{scope['method']} {template}", SERVER, attributes, _parent(scope)) as traced:
                await self._answer(scope, receive, answer, template, web)
                traced.set("http.response.status_code", answer.status or 500)
                traced.failed = (answer.status or 500) >= 500
        finally:
            self.observed.in_flight.dec()
            status = str(answer.status or 500)
            self.observed.requests.labels(template, scope["method"] if template != UNKNOWN else "GET", status).inc()
            self.observed.seconds.labels(template).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer", template: str, web: "Admission | None") -> None:
        given = b", ".join(value for name, value in scope["headers"] if name == b"authorization")
        known, seen = self.authority.recent(given), self.authority.seen(given)
        address = scope["client"][0] if scope.get("client") else "local"
        # By address until it was found out who asks: guessing a token, and comparing a password, is bounded too.
        wait = self.rates.wait_s(f"address {address}" if seen is None else f"caller {seen}")
        if wait is not None or (web is not None and not web.in_rate()):
            self.observed.rejected.labels("rate").inc()
            later = {"Retry-After": str(math.ceil(wait or 1.0))}
            await refuse(429, "too many requests, expected fewer a second", scope, receive, answer, later)
            return
        heavy = False
        if template not in OPEN:
            try:
                caller = known or await self.authority.caller(given)
            except PoolmeterError as error:  # the books cannot be asked
                await refuse(503, str(error), scope, receive, answer, {"Retry-After": "5"})
                return
            allowed = caller is not None and (template == UNKNOWN or may(caller, scope["method"], template))
            if caller is None or (not given and not allowed):
                self.observed.rejected.labels("token").inc()
                hint = HINT if may(ADMIN, scope["method"], template) else NODE_HINT
                what = "has another token than the collector's" if given else "has no token"
                challenges = {"WWW-Authenticate": "Bearer"}
                await refuse(401, f"the request {what}, {hint}", scope, receive, answer, challenges)
                return
            if not allowed:
                self.observed.rejected.labels("role").inc()
                await refuse(403, f"the token is that of a {caller.role}, expected one whose role may ask this", scope, receive, answer)
                return
            scope.setdefault("state", {})["caller"] = caller
            heavy = asks_store(template, caller)
        if heavy:
            await self._question(scope, receive, answer)
        else:
            await self.app(scope, receive, answer)

    async def _question(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        """A request that asks the store: in its turn, within its time and memory."""
        question = self.queries.question()
        timer = asyncio.get_running_loop().call_later(self.limits.query_timeout_s, question.end)
        answer.question, answer.timer = question, timer
        try:
            async with self.queries.turn():
                if not question.over:
                    token = catalog.opened.set(question.opened)
                    began = time.perf_counter()
                    try:
                        await self.app(scope, receive, answer)
                    except Exception:
                        if not question.over:
                            raise
                        # What an interrupted question fails with is not worth telling.
                    finally:
                        catalog.opened.reset(token)
                        self.observed.queries.observe(time.perf_counter() - began)
        except Crowded as error:
            self.observed.rejected.labels("crowd").inc()
            await refuse(503, str(error), scope, receive, answer, {"Retry-After": "5"})
            return
        finally:
            timer.cancel()
        if answer.status is None:
            self.observed.rejected.labels("time").inc()
            answer.question = None
            sentence = (
                f"the question took longer than {self.limits.query_timeout_s:g} s, expected a smaller one: a shorter period, a coarser tier"
            )
            await refuse(503, sentence, scope, receive, answer, {"Retry-After": "30"})


class _Answer:
    """The way an answer takes: with the web configuration's headers, in pieces, and not at all once its question has run over."""

    def __init__(self, send: Send, web: "Admission | None") -> None:
        self.status: int | None = None
        self.question: Question | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._send = send
        self._headers = web.headers if web is not None else []

    async def __call__(self, message: Message) -> None:
        if self.question is not None and self.question.over and self.status is None:
            return  # what it says is that it was interrupted
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.timer is not None:
                self.timer.cancel()
            message["headers"] = [*message.get("headers", ()), *self._headers]
        elif message["type"] == "http.response.body" and self.status is None:
            return
        body = memoryview(message.get("body", b""))
        at = 0
        while len(body) - at > _PIECE:
            await self._send({"type": "http.response.body", "body": bytes(body[at : at + _PIECE]), "more_body": True})
            at += _PIECE
        await self._send({**message, "body": bytes(body[at:])} if at else message)


async def refuse(status: int, sentence: str, scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None) -> None:
    """Answer with an error."""
    await JSONResponse({"error": sentence}, status, headers)(scope, receive, send)


def template_of(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The path of the route that a request is for, with its parameters' names; one that is only asked by a wrong method is named too."""
    partial = UNKNOWN
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route.path if isinstance(route, Route) else OTHER
        if match is Match.PARTIAL and isinstance(route, Route):
            partial = route.path
    return partial


def caller_of(scope: Scope) -> Caller:
    """Who asks, as the gate found out."""
    caller: Caller = scope["state"]["caller"]
    return caller


def _parent(scope: Scope) -> Span | None:
    text = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    with contextlib.suppress(ValueError):
        return Span.parse(text.decode("ascii"))
    return None
