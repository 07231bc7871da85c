"""The collector's HTTP endpoints as data: one tuple that both the router and /openapi.json are made from."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from poolmeter import __version__
from poolmeter.errors import BadInput

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Parameter:
    """A query or path parameter."""

    name: str
    description: str
    where: str = "query"
    enum: tuple[str, ...] = ()
    type: str = "string"


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. `media` are the types it answers with."""

    method: str
    path: str
    handler: Handler
    summary: str
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = ("application/json",)
    statuses: tuple[int, ...] = (200,)
    body: str | None = None


_STATUS = {
    200: "Done", 400: "Bad input", 401: "No or a wrong token", 404: "Not there", 409: "Refused", 413: "Body too large",
    415: "Body is not JSON", 503: "Unavailable",
}  # fmt: skip


def routes_of(endpoints: Iterable[Endpoint]) -> list[Route]:
    """Starlette routes."""
    return [
        Route(endpoint.path, _checked(endpoint) if endpoint.path.startswith("/v1/") else endpoint.handler, methods=[endpoint.method])
        for endpoint in endpoints
    ]


def _checked(endpoint: Endpoint) -> Handler:
    """The handler, once no query parameter is one it does not know: a misspelt filter must not answer for everything."""
    known = [parameter.name for parameter in endpoint.parameters if parameter.where == "query"]

    async def handler(request: Request) -> Response:
        for name in request.query_params:
            if name not in known:
                raise BadInput(f"query parameter is {name!r}, expected {' or '.join(known) if known else 'none'}")
        return await endpoint.handler(request)

    return handler


def openapi(endpoints: Iterable[Endpoint], routes: Sequence[BaseRoute]) -> dict[str, object]:
    """The OpenAPI 3.1 document: `endpoints` in full, and every other of `routes` by its path and docstring."""
    paths: dict[str, dict[str, object]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    for path, method, summary in _others(routes, ""):
        paths.setdefault(path, {}).setdefault(method.lower(), {"summary": summary, "responses": {"200": {"description": _STATUS[200]}}})
    return {
        "openapi": "3.1.0",
        "info": {"title": "poolmeter collector", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, object]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    out: dict[str, object] = {
        "summary": endpoint.summary,
        "parameters": [
            {
                "name": parameter.name,
                "in": parameter.where,
                "required": parameter.where == "path",
                "description": parameter.description,
                "schema": {"type": parameter.type, **({"enum": list(parameter.enum)} if parameter.enum else {})},
            }
            for parameter in endpoint.parameters
        ],
        "responses": {
            str(status): {
                "description": _STATUS[status],
                "content": {media: {} for media in endpoint.media} if status == 200 else error,
            }
            for status in endpoint.statuses
        },
    }
    if endpoint.body is not None:
        out["requestBody"] = {"description": endpoint.body, "content": {"application/json": {"schema": {"type": "object"}}}}
    return out


def _others(routes: Sequence[BaseRoute], prefix: str) -> Iterable[tuple[str, str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _others(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            words = (route.endpoint.__doc__ or route.name).strip().splitlines()
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                yield prefix + route.path, method, words[0] if words else route.name
