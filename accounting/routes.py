"""HTTP questions to accounting, mounted in the collector's process: the same numbers as the commands, from the same functions.

GET /v1/reports/usage, /v1/reports/chargeback and /v1/reports/focus take from, to, by (not focus), time-zone, tenant, node and pool (the
latter three repeatable), format (json | csv | parquet | arrow), and the latter two also basis. GET /allocation/compute is OpenCost's. The plan is the server's own: a request names no file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting.chargeback import chargeback_for
from poolmeter.accounting.dimensions import CHARGE_BY, Filters, parse_by
from poolmeter.accounting.focus import focus_report
from poolmeter.accounting.opencost import PARAMETERS, compute
from poolmeter.accounting.usage import usage_report
from poolmeter.clock import Clock, SystemClock
from poolmeter.config import AccountingSection
from poolmeter.errors import BadInput, PoolmeterError, Unavailable
from poolmeter.period import Period, parse_period
from poolmeter.report import Report, dumps, render

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_TYPES = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.file",
}
_COMMON = frozenset({"from", "to", "by", "time-zone", "tenant", "node", "pool", "format"})


def routes(root: Path, settings: AccountingSection | None = None, clock: Clock | None = None) -> "list[Route]":
    """The routes over the store in `root`. Errors are `{"error": SENTENCE}`: 400 for bad input, 503 for a store that is not there."""
    from starlette.routing import Route

    chosen, now = settings or AccountingSection(), clock or SystemClock()

    def usage(params: "QueryParams") -> Report:
        """Who used what."""
        return usage_report(root, _period(params, chosen.time_zone, now), parse_by(params.get("by", "tenant")), _filters(params))

    def chargeback(params: "QueryParams") -> Report:
        """What it cost, and whose it is."""
        return chargeback_for(
            root,
            lambda plan_zone: _period(params, plan_zone or chosen.time_zone, now),
            parse_by(params.get("by", "tenant"), CHARGE_BY),
            _filters(params),
            flag=None,
            configured=chosen.plan,
            basis=_basis(params),
        )

    def focus(params: "QueryParams") -> Report:
        """The bill as FOCUS rows."""
        return focus_report(
            root,
            lambda plan_zone: _period(params, plan_zone or chosen.time_zone, now),
            flag=None,
            configured=chosen.plan,
            basis=_basis(params),
            issuer=chosen.issuer,
            filters=_filters(params),
        )

    return [
        Route("/v1/reports/usage", _endpoint(usage, _COMMON), methods=["GET"]),
        Route("/v1/reports/chargeback", _endpoint(chargeback, _COMMON | {"basis"}), methods=["GET"]),
        Route("/v1/reports/focus", _endpoint(focus, (_COMMON | {"basis"}) - {"by"}), methods=["GET"]),
        *(Route(path, _opencost(root, chosen, now), methods=["GET"]) for path in ("/allocation/compute", "/allocation")),
    ]


def _opencost(root: Path, settings: AccountingSection, clock: Clock) -> "Callable[[Request], Response]":
    from starlette.responses import Response

    def answer(request: "Request") -> Response:
        """What it cost, as OpenCost tells it."""
        try:
            body = compute(root, request.query_params, settings.time_zone, settings.plan, clock.wall_us())
        except PoolmeterError as error:
            body = {"code": _status(error), "status": "error", "message": str(error)}
        return Response(dumps(body) + "\n", int(str(body["code"])), media_type="application/json")

    described = {"parameters": PARAMETERS, "media": ("application/json",), "answer": "Allocations", "refusal": "AllocationsError"}
    vars(answer).update(described)  # for the OpenAPI document
    return answer


def _status(error: PoolmeterError) -> int:
    return 400 if isinstance(error, BadInput) else 503 if isinstance(error, Unavailable) else 409


def _basis(params: "QueryParams") -> str | None:
    basis = params.get("basis")
    if basis not in (None, "allocated", "used"):
        raise BadInput(f"basis is {basis!r}, expected allocated or used")
    return basis


def _period(params: "QueryParams", zone: str, clock: Clock) -> Period:
    return parse_period(params.get("from"), params.get("to"), params.get("time-zone") or zone, clock.wall_us())


def _filters(params: "QueryParams") -> Filters:
    return Filters(tenant=tuple(params.getlist("tenant")), node=tuple(params.getlist("node")), pool=tuple(params.getlist("pool")))


def _endpoint(report: "Callable[[QueryParams], Report]", known: frozenset[str]) -> "Callable[[Request], Response]":
    from starlette.responses import Response

    def answer(request: "Request") -> Response:
        try:
            params = request.query_params
            for name in params:
                if name not in known:
                    raise BadInput(f"query parameter is {name!r}, expected one of {', '.join(sorted(known))}")
            fmt = params.get("format", "json")
            if fmt not in _TYPES:
                raise BadInput(f"format is {fmt!r}, expected one of {', '.join(_TYPES)}")
            return Response(render(report(params), fmt), media_type=_TYPES[fmt])
        except PoolmeterError as error:
            return Response(json.dumps({"error": str(error)}) + "\n", _status(error), media_type="application/json")

    answer.__doc__ = report.__doc__
    vars(answer)["parameters"] = tuple(sorted(known))  # for the OpenAPI document
    # A plain function: starlette runs it in a thread, so that a long question does not hold up the pulls.
    return answer
