"""The collector process: pullers, publisher, maintenance and API around one store and one set of books."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
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
from poolmeter.collector.discovery.build import sources_of
from poolmeter.collector.discovery.source import Source
from poolmeter.collector.discovery.watch import Discovery
from poolmeter.collector.events import take_outcomes
from poolmeter.collector.face import Face, LiveFace, WebServer, nodes_in
from poolmeter.collector.limits import Limits
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.peers import Peers, PeerSettings
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pull import PullSettings
from poolmeter.collector.pullers import Pullers, cancel
from poolmeter.collector.push import ADDRESS, SILENT_S, Pushes, PushTokens
from poolmeter.collector.retention import Retention
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Store
from poolmeter.collector.tracing import Tracer
from poolmeter.config import DiscoverySection
from poolmeter.errors import PoolmeterError, Unavailable
from poolmeter.model.units import HOUR_US
from poolmeter.places import CollectorData
from poolmeter.report import write_whole
from poolmeter.web.otlp import Poster

_log = logging.getLogger("poolmeter.collector")
MAINTENANCE_S = 30.0
LAST_PULL_S = 5.0
GAP_S = 1.0
GONE_MOST = 1000  # lines of nodes that are gone, however fast they come and go
DESCRIPTORS = 65_536
KEEP_ALIVE_S = 70.0  # exporters close theirs after 75
# A publication lets go of the interpreter hundreds of times, and waits so long for it each time that the pulls have it: a tenth of the customary.
SWITCH_S = 0.0005


@dataclass(frozen=True)
class Settings:
    """What the daemon is told. `pull.token` goes to exporters; `face` reads who may ask and over what, at the start and at SIGHUP."""

    data: CollectorData
    host: str
    port: int
    nodes: tuple[str, ...]
    pull: PullSettings
    keep: Retention
    face: Callable[[], Face]
    limits: Limits = field(default_factory=Limits)
    otlp_endpoint: str | None = None
    ready_file: Path | None = None
    books: str | None = None  # a database's URL; without, the file in the data folder
    discovery: tuple[DiscoverySection, ...] = ()
    discovery_limit: int = 5000
    gone_hours: int = 24
    push_tokens_file: Path | None = None
    peers: PeerSettings | None = None


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
    sources = sources_of(settings.discovery, settings.discovery_limit)
    tokens = None if settings.push_tokens_file is None else PushTokens(settings.push_tokens_file)
    _take_descriptors()
    sys.setswitchinterval(SWITCH_S)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as server,
        Store(settings.data.store) as store,
        Books(place(settings.books, settings.data.books), clock, upgrade=True) as books,
    ):
        asyncio.run(_serve(settings, sources, tokens, server, store, books, extra_routes, clock or SystemClock()))


async def _serve(
    settings: Settings,
    sources: Sequence[Source],
    tokens: PushTokens | None,
    server: socket.socket,
    store: Store,
    books: Books,
    extra_routes: Sequence[BaseRoute],
    clock: Clock,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    face = LiveFace(settings.face, settings.data.root, books, tokens)
    pushers = nodes_in(books, clock, tokens)
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, face.reload))
    traces = _traces(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    known = store.state.nodes
    peers = Peers(settings.peers)
    allowed = await asyncio.to_thread(pushers)
    stays = {url: row for url, row in known.items() if _stays(row, settings, peers, allowed)}
    publisher = Publisher(store, forget=known.keys() - stays.keys(), gap_s=min(GAP_S, settings.pull.interval_s / 4))
    # A connection to an exporter outlives the interval: opening one costs as much as a request.
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=4, keepalive_timeout=min(2 * settings.pull.interval_s, KEEP_ALIVE_S))
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False) as session:
        pulled = {url: row for url, row in stays.items() if not url.startswith(ADDRESS)}
        pullers = Pullers(pulled, session, publisher, settings.pull, clock, lambda batch: take_outcomes(books, batch), peers.mine)
        discovery = Discovery(
            sources,
            settings.nodes,
            [url for url, row in pulled.items() if row.state != "gone"],
            lambda urls, reason: pullers.assign(urls, gone=reason),
            settings.discovery_limit,
            clock,
        )
        pushed = {url: row for url, row in stays.items() if url.startswith(ADDRESS)}
        pushes = Pushes(
            pushed,
            publisher,
            pullers.names,
            settings.pull.consumer,
            clock,
            lambda batch: take_outcomes(books, batch),
            pushers,
            max(SILENT_S, 4 * settings.pull.interval_s),
        )
        state = ApiState(
            store,
            books,
            face.authority.credentials.token,
            lambda: [*pullers.statuses(), *pushes.statuses()],
            publisher,
            clock=clock,
            discovery=lambda: discovery.statuses,
            troubles=peers.reasons,
            push=pushes.push,
            authority=face.authority,
            limits=settings.limits,
            tracer=traces,
            reload_ok=lambda: face.reload_ok,
        )
        web = WebServer(create_app(state, extra_routes), face.context)
        publishing = asyncio.create_task(publisher.run())
        serving = asyncio.create_task(web.serve(sockets=[server]))
        await discovery.start()
        working = [
            asyncio.create_task(_maintenance(store, books, settings.keep, clock)),
            asyncio.create_task(peers.run(session, pullers.share_anew)),
            asyncio.create_task(discovery.run()),
            asyncio.create_task(_forget_gone(pullers, settings.gone_hours * HOUR_US, clock)),
            asyncio.create_task(pushes.watch()),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await _announce(web, serving, server, settings, face.scheme)
            await asyncio.wait({stopping, serving, publishing}, return_when=asyncio.FIRST_COMPLETED)
            await cancel(working)
            await pullers.stop()
            publisher.hurry()
            if not publishing.done():
                await pullers.last_pulls(min(LAST_PULL_S, settings.pull.timeout_s))
        finally:
            await cancel([*working, stopping])
            await pullers.stop()
            web.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await cancel([publishing])
            if traces is not None:
                await asyncio.to_thread(traces.stop)
            if settings.ready_file is not None:
                settings.ready_file.unlink(missing_ok=True)
        for task in (serving, publishing):
            if not task.cancelled() and task.exception() is not None:
                raise Unavailable(f"collector stopped: {task.exception()!r:.200}") from task.exception()


def _stays(row: NodeRow, settings: Settings, peers: Peers, pushers: frozenset[str]) -> bool:
    """Whether the store's word on an exporter outlives the start; one that was configured and is no more is forgotten."""
    if row.url.startswith(ADDRESS):
        return row.url.removeprefix(ADDRESS) in pushers
    return (row.url in settings.nodes or bool(settings.discovery)) and peers.mine(row.url)


async def _forget_gone(pullers: Pullers, after_us: int, clock: Clock) -> None:
    while True:
        pullers.forget_gone(clock.wall_us() - after_us, GONE_MOST)
        await asyncio.sleep(MAINTENANCE_S)


def _take_descriptors() -> None:
    """Allow as many open files as this process may: a thousand exporters take a thousand connections, and the customary limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


async def _maintenance(store: Store, books: Books, keep: Retention, clock: Clock) -> None:
    while True:
        await asyncio.sleep(MAINTENANCE_S)
        try:
            await asyncio.to_thread(books.expire_due)
            await asyncio.to_thread(maintain, store, clock.wall_us(), keep)
        except PoolmeterError as error:
            _log.error("maintenance: %s", error)
        except Exception:
            _log.exception("maintenance failed")
