"""The exporter's HTTP face: reads never change anything, the one write (an acknowledgement) needs the collector's token."""

import hmac
import json
import logging
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poolmeter.errors import BadInput, Refused, Unavailable
from poolmeter.exporter.agent import Agent
from poolmeter.exporter.answer import usage_answer
from poolmeter.exporter.compat import PAGES
from poolmeter.exporter.scrape import Scrapes, newest
from poolmeter.model.plain import to_plain
from poolmeter.period import rfc3339

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_LOG = logging.getLogger("poolmeter.exporter")
ARROW = "application/vnd.apache.arrow.stream"
BODY_LIMIT = 65_536
KEEP_ALIVE_S = 75  # longer than collectors and Prometheus wait between two questions


class Face:
    """The endpoints over an agent. `token` None: acknowledgements need none. `compat` names pages of other exporters' names to serve."""

    def __init__(self, agent: Agent, token: str | None, compat: Sequence[str] = ()) -> None:
        self._agent = agent
        self.token = token
        self._scrapes = Scrapes()
        self._compat = {name: Scrapes(PAGES[name]) for name in compat}

    @property
    def renders(self) -> int:
        """How often the page of `/metrics` was made."""
        return self._scrapes.renders

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/metrics", self.metrics),
                *(Route(f"/metrics/{name}", self.metrics) for name in self._compat),
                Route("/v1/usage", self.usage),
                Route("/v1/ack", self.acknowledge, methods=["POST"]),
                Route("/v1/snapshot", self.snapshot),
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
            ]
        )

    def metrics(self, request: Request) -> Response:
        """A page for Prometheus, made at most once a turn however many ask."""
        page = newest(self._agent)
        if page is None:
            return _error(503, "no data has been collected yet")
        scrapes = self._compat.get(request.url.path.removeprefix("/metrics/"), self._scrapes)
        # Several fields of one name say the same as one that lists them.
        accept, encoding = (", ".join(request.headers.getlist(name)) for name in ("accept", "accept-encoding"))
        answer = scrapes.answer(page, accept, encoding)
        return Response(answer.body, headers=answer.headers)

    def usage(self, request: Request) -> Response:
        """Records after EPOCH,SEQUENCE as an Arrow stream; from the spool's start without `after`, or for another epoch.

        With `snapshot=arrow` the newest snapshot stands behind it, as another Arrow stream, from byte X-Poolmeter-Snapshot on (nothing
        before the first look): who asks both every few seconds for a thousand nodes needs half the requests.
        """
        try:
            epoch, sequence = parse_after(request.query_params.get("after"))
            limit = _number(request.query_params.get("limit", "50000"), "limit", 1, 500_000)
        except BadInput as error:
            return _error(400, str(error))
        snapshot = request.query_params.get("snapshot") == "arrow"
        answer = usage_answer(self._agent, self._agent.settings.node, epoch, sequence, limit, snapshot)
        return Response(answer.body, media_type=ARROW, headers=answer.headers)

    async def acknowledge(self, request: Request) -> Response:
        """Note what a consumer has stored. 401 without the token, 400 for a bad body or consumer, 409 for another epoch or a sequence ahead."""
        if self.token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return _error(401, "authorization is missing or wrong, expected the collector's bearer token")
        from starlette.concurrency import run_in_threadpool

        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_LIMIT:
                return _error(413, f"body has more than {BODY_LIMIT} bytes")
        try:
            consumer, epoch, sequence = parse_acknowledgement(body)
            position = await run_in_threadpool(self._agent.spool.acknowledge, consumer, epoch, sequence)
        except BadInput as error:
            return _error(400, str(error))
        except Refused as error:
            return _error(409, str(error))
        return JSONResponse({"schema": "poolmeter.ack/1", "consumer": consumer, "epoch": epoch, "seq": position})

    def snapshot(self, request: Request) -> Response:
        """The newest snapshot as JSON."""
        page = newest(self._agent)
        if page is None:
            return _error(503, "no data has been collected yet")
        body = json.dumps({"schema": "poolmeter.snapshot/1", **to_plain(page.snapshot)}, ensure_ascii=False, separators=(",", ":"))
        return Response(body.encode("utf-8", "replace"), media_type="application/json")

    def healthz(self, request: Request) -> Response:
        """200 while the exporter looks at its sources; 503 before the first look and when it has stopped to, for a supervisor to start it anew."""
        page = newest(self._agent)
        if page is None:
            reason: str | None = "no data has been collected yet"
        else:
            reason = next((source.reason for source in page.snapshot.sources if source.source == "agent"), None)
        if reason is not None:
            return JSONResponse({"schema": "poolmeter.health/1", "ok": False, "reason": reason}, status_code=503)
        return JSONResponse({"schema": "poolmeter.health/1", "ok": True})

    def readyz(self, request: Request) -> Response:
        """200 when every source gave valid data; else 503 with those that did not, why, and since when."""
        page = newest(self._agent)
        sources = page.snapshot.sources if page else ()
        ok = page is not None and all(source.ok for source in sources)
        failing = [source for source in sources if not source.ok]
        failures = [
            {"source": source.source, "reason": source.reason, "since": rfc3339(source.since_us) if source.since_us is not None else None}
            for source in failing
        ]
        for name, reason in sorted(self._scrapes.failed.items()):
            ok = False
            failures.append({"source": "metrics", "reason": f"family {name} cannot be written: {reason}", "since": None})
        body = {
            "schema": "poolmeter.ready/1",
            "ok": ok,
            "released": self._agent.released_us() is not None,
            "failing": list(dict.fromkeys(str(item["source"]) for item in failures)),
            "failures": failures,
            "sources": [to_plain(source) for source in sources],
        }
        return JSONResponse(body, status_code=200 if ok else 503)


def parse_after(text: str | None) -> tuple[str | None, int]:
    """Epoch and sequence of `EPOCH,SEQUENCE`; None: from the start. Raises BadInput."""
    if text is None or text == "":
        return None, 0
    epoch, comma, sequence = text.rpartition(",")
    if not comma or not epoch:
        raise BadInput(f"after is {text!r:.80}, expected EPOCH,SEQUENCE")
    return epoch, _number(sequence, "sequence of after", 0, (1 << 62) - 1)


def parse_acknowledgement(body: bytes) -> tuple[str, str, int]:
    """Consumer, epoch and sequence of a JSON body. Raises BadInput."""
    try:
        values: Any = json.loads(body)
    except ValueError as error:
        raise BadInput(f"body is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput("body is no object, expected consumer, epoch and seq")
    for name, kind in (("consumer", str), ("epoch", str), ("seq", int)):
        if type(values.get(name)) is not kind:
            raise BadInput(f"{name} is {values.get(name)!r:.80}, expected {'text' if kind is str else 'a whole number'}")
    return values["consumer"], values["epoch"], values["seq"]


def _number(text: str, what: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
        raise BadInput(f"{what} is {text!r:.40}, expected a whole number from {low} to {high}")
    return int(text)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"schema": "poolmeter.error/1", "error": message}, status_code=status, headers=headers)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises Unavailable when the port is taken or not permitted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without, an answer waits 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise Unavailable(f"address {host}:{port} cannot be listened on: {error.strerror or error}, expected a free port") from None
    return bound


class Server:
    """uvicorn in a thread of its own, so that the turns keep the main thread and its signals."""

    def __init__(self, application: "ASGIApp", bound: socket.socket, context: ssl.SSLContext | None = None) -> None:
        host, port = bound.getsockname()[:2]
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            loop="asyncio",  # the one loop whose TLS takes a context that changes
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        self._server = uvicorn.Server(config)
        self._bound = bound
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [bound]}, name="http", daemon=True)

    def start(self, timeout_s: float = 10.0) -> None:
        """Returns once it answers."""
        import time

        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise Unavailable(f"the server at {self.url} did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        """Finish what is being answered, then close."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._bound.close()
