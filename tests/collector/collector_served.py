"""A collector's state for tests of its API: a store, books, and callers of every role."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from collector_fakes import NOW
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from poolmeter.books.tokens import Role as TokenRole
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import Authority, Credentials, Role
from poolmeter.collector.daemon import listen
from poolmeter.collector.face import WebServer, find_in, issued_in
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pullers import Names
from poolmeter.collector.push import Pushes
from poolmeter.collector.store import Store

ADMIN = "between-daemons"
PERSONS = (Role.OPERATOR, Role.FINANCE, Role.TENANT, Role.NODE)


@contextlib.contextmanager
def collector(folder: Path, now_us: int = NOW) -> Iterator[ApiState]:
    """Store and books under a folder, with nobody known but the admin."""
    clock = ManualClock(now_us)
    with Store(folder / "store") as store, Books(folder / "books.sqlite", clock) as books:
        authority = Authority(Credentials(ADMIN, find=find_in(books), issued=issued_in(books)))

        async def push(request: Request) -> Response:
            publisher = Publisher(store)
            publishing = asyncio.create_task(publisher.run())
            try:
                return await Pushes({}, publisher, Names({}), "collector", clock, lambda _: None).push(request)
            finally:
                publishing.cancel()

        yield ApiState(store, books, ADMIN, clock=clock, authority=authority, push=push)


def token_of(state: ApiState, role: Role, tenant: str = "t1", node: str = "n1", name: str | None = None) -> str:
    """A fresh token of a role."""
    given = {"tenant": tenant if role is Role.TENANT else None, "node": node if role is Role.NODE else None}
    return state.books.tokens.add(name or f"{role.value} {given}", TokenRole(role.value), "test", **given)[1]


def client(state: ApiState, token: str | None = ADMIN, extra: Sequence[BaseRoute] = (), app: Starlette | None = None) -> httpx.AsyncClient:
    """Asks an application in this process."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(app or create_app(state, extra))
    return httpx.AsyncClient(transport=transport, base_url="http://collector", headers=headers)


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """An application behind the collector's own server, in a thread: its URL."""
    with contextlib.closing(listen("127.0.0.1", 0)) as bound:
        server = WebServer(app, None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                thread.join(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
