"""Decisions over HTTP: listed, entered, approved, rejected, and the log of who did that; all of it in the books."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from poolmeter.books.ledger import Change, is_text
from poolmeter.books.models import DecisionRow
from poolmeter.books.writer import Booked, Books, NotInBooks
from poolmeter.collector.auth import Caller, Role
from poolmeter.collector.gate import caller_of
from poolmeter.collector.tenancy import decision_fields, decisions_for
from poolmeter.collector.usage import number
from poolmeter.errors import BadInput
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.plain import from_plain, to_plain

BODY_LIMIT = 1 << 20
LIST_LIMIT = 1000
LIST_LIMIT_MOST = 10_000
LOG_LIMIT = 200
LOG_LIMIT_MOST = 1000
DECISIONS = DecisionRow.__tablename__


class Decisions:
    """The endpoints over the books; `root` is the store that says whose an allocation is."""

    def __init__(self, books: Books, root: Path) -> None:
        self._books, self._root = books, root

    async def list(self, request: Request) -> Response:
        text = request.query_params.get("state")
        if text is not None and text not in set(DecisionState):
            raise BadInput(f"state is {text!r:.40}, expected one of {', '.join(DecisionState)}")
        wanted = DecisionState(text) if text else None
        query, caller = request.query_params, caller_of(request.scope)
        limit = number(query.get("limit", str(LIST_LIMIT)), "limit", LIST_LIMIT_MOST)
        found = await run_in_threadpool(self._found, caller, wanted, query.get("node"), query.get("after"), limit + 1)
        more = {"after": found[limit - 1].decision.id} if len(found) > limit else {}
        return _answer(caller, found[:limit], more)

    def _found(self, caller: Caller, state: DecisionState | None, node: str | None, after: str | None, limit: int) -> Sequence[Booked]:
        """So many decisions that the caller sees, however many of others lie between."""
        if after is not None and not self._sees(caller, after):
            raise NotInBooks(f"after is {after!r:.80}, expected the id of a decision")  # another's is as if it were not there
        size = LIST_LIMIT_MOST if caller.role is Role.TENANT else limit
        found: list[Booked] = []
        while len(found) < limit:
            page = self._books.list(state, node, after, size)
            found += decisions_for(caller, self._root, page)
            if len(page) < size:
                break
            after = page[-1].decision.id
        return found[:limit]

    def _sees(self, caller: Caller, decision_id: str) -> bool:
        try:
            return is_text(decision_id) and bool(decisions_for(caller, self._root, [self._books.get(decision_id)]))
        except NotInBooks:
            return False

    async def log(self, request: Request) -> Response:
        """Who changed which decision, when, from what to what and why: oldest first, after a number."""
        found, after = await self._changes(request, DECISIONS, request.query_params.get("decision"))
        rows = [
            {
                "number": change.number, "decision_id": change.key, "at_us": change.at_us, "by": change.by, "reason": change.reason,
                "from_state": change.before and change.before["state"], "to_state": change.after["state"],
            }
            for change in found
        ]  # fmt: skip
        return JSONResponse(listing("decision_log", [_known(row) for row in rows]) | after)

    async def changes(self, request: Request) -> Response:
        """Every change of the books: who, what, when, why, before and after: oldest first, after a number."""
        found, after = await self._changes(request, request.query_params.get("subject"), request.query_params.get("key"))
        return JSONResponse(listing("books_log", [_known(asdict(change)) for change in found]) | after)

    async def _changes(self, request: Request, subject: str | None, key: str | None) -> tuple[Sequence[Change], dict[str, int]]:
        wanted = request.query_params
        after = number(wanted.get("after", "0"), "after", (1 << 63) - 1, least=0)
        limit = number(wanted.get("limit", str(LOG_LIMIT)), "limit", LOG_LIMIT_MOST)
        found = await run_in_threadpool(lambda: self._books.changes(subject, key, after_number=after, limit=limit + 1))
        return found[:limit], {"after": found[limit - 1].number} if len(found) > limit else {}

    async def add(self, request: Request) -> Response:
        body = await json_body(request)
        given = body.get("decisions")
        if not isinstance(given, list) or not given:
            raise BadInput(f"decisions is {given!r:.40}, expected a list of at least one")
        parsed = [
            from_plain(Decision, {"sequence": 0, **item} if isinstance(item, dict) else item, f"decisions[{n}]")
            for n, item in enumerate(given)
        ]
        caller = caller_of(request.scope)
        found = await run_in_threadpool(self._books.add_decisions, parsed, author_of(body, caller))
        return _answer(caller, found)

    async def approve(self, request: Request) -> Response:
        return await self._move(request, DecisionState.APPROVED)

    async def reject(self, request: Request) -> Response:
        return await self._move(request, DecisionState.REJECTED)

    async def _move(self, request: Request, state: DecisionState) -> Response:
        body = await json_body(request)
        caller = caller_of(request.scope)
        by, reason = author_of(body, caller), text_of(body, "reason")
        return _answer(caller, [await run_in_threadpool(self._books.transition, request.path_params["id"], state, by, reason)])


def _answer(caller: Caller, found: Sequence[Booked], more: Mapping[str, str] = MappingProxyType({})) -> Response:
    return JSONResponse(listing("decisions", [decision_fields(caller, decision_object(booked)) for booked in found]) | dict(more))


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def author_of(body: Mapping[str, Any], caller: Caller) -> str:
    """Who the books say it was: what the admin's client says, and of others the name of their token too, which they cannot choose."""
    said = text_of(body, "by")
    if caller.role is Role.ADMIN:
        return said or "api"
    return f"{said} ({caller.name})" if said else caller.name


def decision_object(booked: Booked) -> dict[str, Any]:
    """A booked decision as one flat JSON object: the Decision's fields and what became of it."""
    plain: dict[str, Any] = to_plain(booked)
    return {**plain.pop("decision"), **plain}


def listing(name: str, rows: Sequence[Mapping[str, object]], warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The object of every answer with rows."""
    return {"schema": f"poolmeter.{name}/1", "rows": list(rows), "totals": {}, "warnings": list(warnings)}


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a body. Raises NotJson, TooLarge, BadInput."""
    # Only application/json: a form that a foreign page posts from a browser must not approve anything.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise NotJson(f"Content-Type is {request.headers.get('content-type')!r:.60}, expected application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise NotJson(f"Content-Encoding is {request.headers['content-encoding']!r:.60}, expected none")
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_LIMIT:
                raise TooLarge(f"body has more than {BODY_LIMIT} bytes, expected at most that")
            chunks.append(chunk)
    except ClientDisconnect:
        raise BadInput("body is cut short, expected all of it") from None
    try:
        value = json.loads(b"".join(chunks) or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"body is not JSON: {error!s:.80}") from None
    if not isinstance(value, dict):
        raise BadInput(f"body is {value!r:.40}, expected an object")
    return value


class TooLarge(BadInput):
    """A body that is larger than it may be."""


class NotJson(BadInput):
    """A body that does not say it is JSON."""


def text_of(body: Mapping[str, Any], name: str) -> str | None:
    """A text field of a body; None when it is not there. Raises BadInput."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > 1000):
        raise BadInput(f"{name} is {value!r:.40}, expected text of at most 1000 characters")
    return value


def limit_of(request: Request) -> int | None:
    """How many rows of a list are asked for; None: all. Raises BadInput."""
    text = request.query_params.get("limit")
    return None if text is None else number(text, "limit", LIST_LIMIT_MOST)


def page(name: str, rows: Iterable[Mapping[str, Any]], key: str, limit: int | None) -> Response:
    """The first rows of a list, and where there are more, `after`: what the next page is asked for with."""
    found = list(islice(rows, None if limit is None else limit + 1))
    more = {} if limit is None or len(found) <= limit else {"after": found[limit - 1][key]}
    return JSONResponse(listing(name, found[:limit]) | more)
