"""The register of devices over HTTP: read in pages or whole, and written all or none; all of it in the books."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from poolmeter.books.writer import Books
from poolmeter.collector.decisions import author_of, json_body, limit_of, listing, page, text_of
from poolmeter.collector.gate import caller_of
from poolmeter.errors import BadInput


class Assets:
    """The endpoints over the books' register."""

    def __init__(self, books: Books) -> None:
        self._register = books.assets

    async def list(self, request: Request) -> Response:
        limit, after = limit_of(request), request.query_params.get("after", "")
        rows = await run_in_threadpool(self._register.list)
        return page("books_assets", (row for row in rows if str(row["uuid"]) > after), "uuid", limit)

    async def enter(self, request: Request) -> Response:
        body = await json_body(request)
        rows, dry_run = body.get("assets"), body.get("dry_run", False)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise BadInput(f"assets is {rows!r:.40}, expected a list of objects")
        if not isinstance(dry_run, bool):
            raise BadInput(f"dry_run is {dry_run!r:.40}, expected true or false")
        by, reason = author_of(body, caller_of(request.scope)), text_of(body, "reason") or ""
        entered = await run_in_threadpool(self._register.enter, rows, by, reason, dry_run)
        totals = {"added": list(entered.added), "changed": list(entered.changed), "unchanged": list(entered.unchanged)}
        return JSONResponse(listing("books_assets", []) | {"totals": totals})
