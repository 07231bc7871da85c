"""The collector process: pullers, publisher, maintenance and API around one store and one set of books."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvicorn
from starlette.routing import BaseRoute

from poolmeter import __version__
from poolmeter.books.place import place
from poolmeter.books.writer import Books
from poolmeter.clock import Clock, SystemClock
from poolmeter.collector import tracing
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.events import take_outcomes
from poolmeter.collector.face import Face, LiveFace, WebServer
from poolmeter.collector.limits import Limits
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pull import NodePuller, PullSettings
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Store
from poolmeter.collector.tracing import Tracer
from poolmeter.errors import PoolmeterError, Unavailable
from poolmeter.places import CollectorData
from poolmeter.report import write_whole
from poolmeter.web.otlp import Poster

_log = logging.getLogger("poolmeter.collector")
MAINTENANCE_S = 30.0
LAST_PULL_S = 5.0
GAP_S = 1.0
SPREAD_ABOVE = 8  # so many nodes are asked at once at the start; more are spread over the interval


@dataclass(frozen=True)
class Settings:
    """What the daemon is told. `pull.token` goes to exporters; `face` reads who may ask and over what, at the start and at SIGHUP."""

    data: CollectorData
    host: str
    port: int
    nodes: tuple[str, ...]
    pull: PullSettings
    process_days: int
    face: Callable[[], Face]
    limits: Limits = field(default_factory=Limits)
    otlp_endpoint: str | None = None
    ready_file: Path | None = None
    books: str | None = None  # a database's URL; without, the file in the data folder


class Names:
    """Which URL may answer as which node: as before, and no two alike."""

    def __init__(self, rows: Mapping[str, NodeRow]) -> None:
        self._node_of = {url: row.node for url, row in rows.items() if row.node is not None}

    def claim(self, url: str, node: str) -> str | None:
        """None when `url` may answer as `node`, else why not."""
        before = self._node_of.get(url)
        if before is not None and before != node:
            return f"{url} answers as node {node!r}, expected {before!r} as before"
        other = next((known for known, name in self._node_of.items() if name == node and known != url), None)
        if other is not None:
            return f"{url} answers as node {node!r}, which {other} already does; expected one exporter per node"
        self._node_of[url] = node
        return None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Unavailable when the port is taken or not permitted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio then sends small answers at once
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(128)
    except OSError as error:
        server.close()
        expected = "expected an address of this machine and a free port (host and port in [collector] of --config, or --host and --port)"
        raise Unavailable(f"collector cannot listen on {host} port {port}: {error.strerror or error}; {expected}") from None
    return server


def run(settings: Settings, extra_routes: Sequence[BaseRoute] = (), clock: Clock | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises Unavailable (port, store owned by another), DataError, BadInput before anything starts."""
    with (
        contextlib.closing(listen(settings.host, settings.port)) as server,
        Store(settings.data.store) as store,
        Books(place(settings.books, settings.data.books), clock, upgrade=True) as books,
    ):
        asyncio.run(_serve(settings, server, store, books, extra_routes, clock or SystemClock()))


async def _serve(
    settings: Settings, server: socket.socket, store: Store, books: Books, extra_routes: Sequence[BaseRoute], clock: Clock
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    face = LiveFace(settings.face, settings.data.root, books)
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, face.reload))
    traces = _traces(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    known = store.state.nodes
    rows = {url: known.get(url) or NodeRow(url, None, None, None, "new") for url in settings.nodes}
    names = Names(rows)
    publisher = Publisher(store, forget=[url for url in known if url not in rows], gap_s=min(GAP_S, settings.pull.interval_s / 4))
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=4)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False) as session:
        pullers = [
            NodePuller(row, session, publisher, settings.pull, clock, names.claim, lambda batch: take_outcomes(books, batch))
            for row in rows.values()
        ]
        state = ApiState(
            store,
            books,
            face.authority.credentials.token,
            lambda: [puller.status for puller in pullers],
            publisher,
            clock=clock,
            authority=face.authority,
            limits=settings.limits,
            tracer=traces,
            reload_ok=lambda: face.reload_ok,
        )
        web = WebServer(create_app(state, extra_routes), face.context)
        publishing = asyncio.create_task(publisher.run())
        serving = asyncio.create_task(web.serve(sockets=[server]))
        spread = settings.pull.interval_s / len(pullers) if len(pullers) > SPREAD_ABOVE else 0.0
        working = [asyncio.create_task(puller.run(spread * index)) for index, puller in enumerate(pullers)]
        working.append(asyncio.create_task(_maintenance(store, books, settings.process_days, clock)))
        stopping = asyncio.create_task(stop.wait())
        try:
            await _announce(web, serving, server, settings, face.scheme)
            await asyncio.wait({stopping, serving, publishing}, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(working)
            publisher.hurry()
            if not publishing.done():
                await _last_pulls(pullers, min(LAST_PULL_S, settings.pull.timeout_s))
        finally:
            await _cancel([*working, stopping])
            web.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await _cancel([publishing])
            if traces is not None:
                await asyncio.to_thread(traces.stop)
            if settings.ready_file is not None:
                settings.ready_file.unlink(missing_ok=True)
        for task in (serving, publishing):
            if not task.cancelled() and task.exception() is not None:
                raise Unavailable(f"collector stopped: {task.exception()!r:.200}") from task.exception()


def _traces(settings: Settings) -> Tracer | None:
    """The tracer in force from here on, in what this task starts; None when nothing is traced. Raises BadInput."""
    if settings.otlp_endpoint is None:
        return None
    made = Tracer(Poster(settings.otlp_endpoint, f"poolmeter/{__version__}"), settings.pull.consumer)
    made.start()
    tracing.tracer.set(made)
    return made


async def _announce(web: uvicorn.Server, serving: "asyncio.Task[None]", server: socket.socket, settings: Settings, scheme: str) -> None:
    while not web.started and not serving.done():
        await asyncio.sleep(0.005)
    if serving.done():
        return
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{scheme}://{host}:{server.getsockname()[1]}"
    _log.info("collector serves %s, store %s, %d nodes", url, settings.data.store, len(settings.nodes))
    if settings.ready_file is not None:
        await asyncio.to_thread(write_whole, settings.ready_file, (json.dumps({"url": url, "pid": os.getpid()}) + "\n").encode())


async def _last_pulls(pullers: Sequence[NodePuller], limit_s: float) -> None:
    """Every node once more, as far as the time goes: what is acknowledged is stored, the rest waits in the spools."""
    _, late = await asyncio.wait(
        [asyncio.create_task(puller.pull()) for puller in pullers] or [asyncio.create_task(asyncio.sleep(0))], timeout=limit_s
    )
    await _cancel(list(late))


async def _cancel(tasks: Sequence["asyncio.Task[object]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _maintenance(store: Store, books: Books, process_days: int, clock: Clock) -> None:
    while True:
        await asyncio.sleep(MAINTENANCE_S)
        try:
            await asyncio.to_thread(books.expire_due)
            await asyncio.to_thread(maintain, store, clock.wall_us(), process_days)
        except PoolmeterError as error:
            _log.error("maintenance: %s", error)
        except Exception:
            _log.exception("maintenance failed")
