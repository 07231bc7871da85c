"""The collector's HTTP endpoints as data: one tuple that both the router and /openapi.json are made from."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from poolmeter import __version__
from poolmeter.collector.auth import ACCESS, OPEN, Role
from poolmeter.collector.schemas import schemas
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
    many: bool = False


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. `media` are the types it answers with, `answer` the schema of its JSON (a name of `schemas()`), `refusal` that of
    its own errors."""

    method: str
    path: str
    handler: Handler
    summary: str
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = ("application/json",)
    statuses: tuple[int, ...] = (200,)
    body: str | None = None
    body_media: str = "application/json"
    answer: str | None = None
    refusal: str = "Error"


_STATUS = {
    200: "Done", 400: "Bad input", 401: "No or a wrong token", 403: "The token's role may not ask this", 404: "Not there", 408: "Body too slow",
    409: "Refused",
    413: "Body too large", 415: "Body is not JSON", 429: "Too many requests", 503: "Unavailable",
}  # fmt: skip
_GUARDED = (401, 403, 429)


def routes_of(endpoints: Iterable[Endpoint]) -> list[Route]:
    """Starlette routes."""
    return [
        Route(endpoint.path, _checked(endpoint) if endpoint.path.startswith("/v1/") else endpoint.handler, methods=[endpoint.method])
        for endpoint in endpoints
    ]


def _checked(endpoint: Endpoint) -> Handler:
    """The handler, once no query parameter is one it does not know: a misspelt filter must not answer for everything."""
    known = {parameter.name: parameter.many for parameter in endpoint.parameters if parameter.where == "query"}

    async def handler(request: Request) -> Response:
        for name in request.query_params:
            if name not in known:
                raise BadInput(f"query parameter is {name!r}, expected {' or '.join(known) if known else 'none'}")
            if not known[name] and len(request.query_params.getlist(name)) > 1:
                raise BadInput(f"query parameter {name} is given {len(request.query_params.getlist(name))} times, expected once")
        return await endpoint.handler(request)

    return handler


def openapi(endpoints: Iterable[Endpoint], routes: Sequence[BaseRoute]) -> dict[str, object]:
    """The OpenAPI 3.1 document: `endpoints` in full, and every other of `routes` by what it says of itself."""
    paths: dict[str, dict[str, object]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    for other in _others(routes, ""):
        if other.method.lower() not in paths.setdefault(other.path, {}):
            paths[other.path][other.method.lower()] = _operation(other)
    return {
        "openapi": "3.1.0",
        "info": {"title": "poolmeter collector", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "basic": {"type": "http", "scheme": "basic"}},
            "schemas": schemas(),
        },
    }


_REPORTS = ("application/json", "text/csv", "application/vnd.apache.parquet", "application/vnd.apache.arrow.file")
_MANY = ("tenant", "node", "pool")


async def _nothing(_: Request) -> Response:
    raise AssertionError("described, not served")


def _operation(endpoint: Endpoint) -> dict[str, object]:
    # Who may ask, and how much, is refused before an endpoint's own errors can be.
    error, own = ({"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}} for name in ("Error", endpoint.refusal))
    done: dict[str, object] = {media: {} for media in endpoint.media}
    if endpoint.answer is not None:
        done["application/json"] = {"schema": {"$ref": f"#/components/schemas/{endpoint.answer}"}}
    is_open = endpoint.path in OPEN
    roles = ACCESS.get((endpoint.method, endpoint.path), frozenset({Role.ADMIN}))
    out: dict[str, object] = {
        "summary": endpoint.summary,
        "parameters": [_parameter(parameter) for parameter in endpoint.parameters],
        "security": [] if is_open else [{"bearer": []}, {"basic": []}, *([{}] if Role.READER in roles else [])],
        "x-roles": sorted(role.value for role in roles),
        "responses": {
            str(status): {
                "description": _STATUS[status],
                "content": done if status == 200 else {"text/plain": {}} if is_open else error if status in _GUARDED else own,
            }
            for status in sorted(
                {*endpoint.statuses, *(() if is_open else _GUARDED), *((400,) if endpoint.path.startswith("/v1/") else ())}
            )
        },
    }
    if endpoint.body is not None:
        out["requestBody"] = {
            "description": endpoint.body,
            "content": {endpoint.body_media: {"schema": {"type": "object"}} if endpoint.body_media == "application/json" else {}},
        }
    return out


def _parameter(parameter: Parameter) -> dict[str, object]:
    one: dict[str, object] = {"type": parameter.type, **({"enum": list(parameter.enum)} if parameter.enum else {})}
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.where == "path",
        "description": parameter.description,
        "schema": {"type": "array", "items": one} if parameter.many else one,
    }


def _others(routes: Sequence[BaseRoute], prefix: str) -> Iterable[Endpoint]:
    """Routes of other components, described by their endpoints' docstring and the attributes `parameters`, `media`, `answer` and `refusal`."""
    for route in routes:
        if isinstance(route, Mount):
            yield from _others(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            words = (route.endpoint.__doc__ or route.name).strip().splitlines()
            parameters = tuple(Parameter(name, name, many=name in _MANY) for name in getattr(route.endpoint, "parameters", ()))
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                yield Endpoint(
                    method,
                    prefix + route.path,
                    _nothing,
                    words[0] if words else route.name,
                    parameters,
                    getattr(route.endpoint, "media", _REPORTS),
                    (200, 400, 409, 503),
                    answer=getattr(route.endpoint, "answer", "Report"),
                    refusal=getattr(route.endpoint, "refusal", "Error"),
                )
