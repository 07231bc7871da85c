"""HTTP questions to accounting, mounted in the collector's process: the same numbers as the commands, from the same functions.

GET /v1/reports/usage, /v1/reports/chargeback and /v1/reports/focus take from, to, by (not focus), time-zone, tenant, node and pool (the
latter three repeatable), format (json | csv | parquet | arrow), and the latter two also basis. GET /allocation/compute is OpenCost's. The plan is the server's own: a request names no file.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from poolmeter.accounting.chargeback import chargeback_for
from poolmeter.accounting.dimensions import CHARGE_BY, Filters, own, parse_by
from poolmeter.accounting.focus import focus_report
from poolmeter.accounting.opencost import PARAMETERS, compute, parse_question
from poolmeter.accounting.source import TooMany, at_most
from poolmeter.accounting.usage import usage_report
from poolmeter.clock import Clock, SystemClock
from poolmeter.config import AccountingSection
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.period import Period, parse_period, time_zone
from poolmeter.report import Report, dumps, render

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

T = TypeVar("T")
ROWS_MOST = 500_000  # of the store, for one answer
VALUES_MOST = 100
_REPEATED = frozenset({"tenant", "node", "pool"})
_log = logging.getLogger("poolmeter.accounting")
_TYPES = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.file",
}
_COMMON = frozenset({"from", "to", "by", "time-zone", "tenant", "node", "pool", "format"})


def routes(
    root: Path,
    settings: AccountingSection | None = None,
    clock: Clock | None = None,
    tenant_of: "Callable[[Request], str | None] | None" = None,
) -> "list[Route]":
    """The routes over the store in `root`. Errors are `{"error": SENTENCE}`: 400 for bad input, 503 for a store that is not there.

    `tenant_of` says which tenant asks (None: somebody who may see all); without it no tenant is answered.
    """
    from starlette.routing import Route

    asks = tenant_of or _no_tenant

    chosen, now = settings or AccountingSection(), clock or SystemClock()

    def usage(params: "QueryParams", tenant: str | None) -> Report:
        """Who used what."""
        by, period, filters = parse_by(params.get("by", "tenant")), _period(params, chosen.time_zone, now), own(_filters(params), tenant)
        return _shielded(tenant, lambda: usage_report(root, period, by, filters))

    def chargeback(params: "QueryParams", tenant: str | None) -> Report:
        """What it cost, and whose it is."""
        by, basis, filters = parse_by(params.get("by", "tenant"), CHARGE_BY), _basis(params), own(_filters(params), tenant)
        period = _asked(params, chosen.time_zone, now)
        return _shielded(tenant, lambda: chargeback_for(root, period, by, filters, flag=None, configured=chosen.plan, basis=basis))

    def focus(params: "QueryParams", tenant: str | None) -> Report:
        """The bill as FOCUS rows."""
        basis, filters, period = _basis(params), own(_filters(params), tenant), _asked(params, chosen.time_zone, now)
        return _shielded(
            tenant,
            lambda: focus_report(root, period, flag=None, configured=chosen.plan, basis=basis, issuer=chosen.issuer, filters=filters),
        )

    return [
        Route("/v1/reports/usage", _endpoint(usage, _COMMON, asks), methods=["GET"]),
        Route("/v1/reports/chargeback", _endpoint(chargeback, _COMMON | {"basis"}, asks), methods=["GET"]),
        Route("/v1/reports/focus", _endpoint(focus, (_COMMON | {"basis"}) - {"by"}, asks), methods=["GET"]),
        *(Route(path, _opencost(root, chosen, now, asks), methods=["GET"]) for path in ("/allocation/compute", "/allocation")),
    ]


def _no_tenant(request: "Request") -> str | None:
    if getattr(request.scope.get("state", {}).get("caller"), "tenant", None) is not None:
        raise Refused("the token is a tenant's, expected another: these reports are of all tenants")
    return None


def _shielded(tenant: str | None, ask: "Callable[[], T]") -> "T":
    """The answer; what is wrong with the pool's data or plan is not a tenant's to read. Its own question has been checked before."""
    try:
        with at_most(ROWS_MOST):
            return ask()
    except TooMany:
        raise
    except BadInput as error:
        if tenant is None:
            raise
        _log.warning("a report for tenant %s failed: %s", tenant, error)
        raise DataError("this period cannot be reported; who runs the pool sees why") from error


def _asked(params: "QueryParams", zone: str, clock: Clock) -> "Callable[[str | None], Period]":
    """The period of a request in the plan's zone, checked in ours before the plan is known."""
    _period(params, zone, clock)
    return lambda plan_zone: _period(params, plan_zone or zone, clock)


def _opencost(
    root: Path, settings: AccountingSection, clock: Clock, asks: "Callable[[Request], str | None]"
) -> "Callable[[Request], Response]":
    from starlette.responses import Response

    def answer(request: "Request") -> Response:
        """What it cost, as OpenCost tells it."""
        try:
            tenant, values, now_us = asks(request), request.query_params, clock.wall_us()
            parse_question(values, time_zone(settings.time_zone), now_us, tenant)
            body = _shielded(tenant, lambda: compute(root, values, settings.time_zone, settings.plan, now_us, tenant))
        except PoolmeterError as error:
            body = {"code": _status(error), "status": "error", "message": str(error)}
        return Response(dumps(body) + "\n", int(str(body["code"])), media_type="application/json")

    described = {"parameters": PARAMETERS, "media": ("application/json",), "answer": "Allocations", "refusal": "AllocationsError"}
    vars(answer).update(described)  # for the OpenAPI document
    return answer


def _status(error: PoolmeterError) -> int:
    known = ((DataError, 503), (BadInput, 400), (Refused, 403), (Unavailable, 503))
    return next((code for kind, code in known if isinstance(error, kind)), 409)


def _basis(params: "QueryParams") -> str | None:
    basis = params.get("basis")
    if basis not in (None, "allocated", "used"):
        raise BadInput(f"basis is {basis!r:.40}, expected allocated or used")
    return basis


def _period(params: "QueryParams", zone: str, clock: Clock) -> Period:
    return parse_period(params.get("from"), params.get("to"), params.get("time-zone") or zone, clock.wall_us())


def _filters(params: "QueryParams") -> Filters:
    return Filters(tenant=tuple(params.getlist("tenant")), node=tuple(params.getlist("node")), pool=tuple(params.getlist("pool")))


def _endpoint(
    report: "Callable[[QueryParams, str | None], Report]", known: frozenset[str], asks: "Callable[[Request], str | None]"
) -> "Callable[[Request], Response]":
    from starlette.responses import Response

    def answer(request: "Request") -> Response:
        try:
            params = request.query_params
            for name in params:
                if name not in known:
                    raise BadInput(f"query parameter is {name!r:.60}, expected one of {', '.join(sorted(known))}")
                given, most = len(params.getlist(name)), VALUES_MOST if name in _REPEATED else 1
                if given > most:
                    raise BadInput(f"query parameter {name} is given {given} times, expected {f'at most {most}' if most > 1 else 'once'}")
            fmt = params.get("format", "json")
            if fmt not in _TYPES:
                raise BadInput(f"format is {fmt!r:.40}, expected one of {', '.join(_TYPES)}")
            return Response(render(report(params, asks(request)), fmt), media_type=_TYPES[fmt])
        except PoolmeterError as error:
            return Response(json.dumps({"error": str(error)}) + "\n", _status(error), media_type="application/json")

    answer.__doc__ = report.__doc__
    vars(answer)["parameters"] = tuple(sorted(known))  # for the OpenAPI document
    # A plain function: starlette runs it in a thread, so that a long question does not hold up the pulls.
    return answer
