"""The collector's face to the network: who may ask and over what, by files that are read again at SIGHUP; and the server behind it."""

import contextlib
import logging
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from poolmeter.books.tokens import Role as TokenRole
from poolmeter.books.writer import Books
from poolmeter.clock import Clock
from poolmeter.collector.auth import Authority, Caller, Credentials, Role
from poolmeter.collector.push import NodeOfToken, PushTokens
from poolmeter.errors import BadInput, PoolmeterError
from poolmeter.tokens import make_token, read_token
from poolmeter.web.config import WebConfig
from poolmeter.web.guard import Admission
from poolmeter.web.protocol import PatientProtocol
from poolmeter.web.tls import RotatingContext

_log = logging.getLogger("poolmeter.collector")
CONNECTIONS_MOST = 2048  # a thousand nodes that push hold one each


@dataclass(frozen=True)
class Face:
    """What the files say: the web configuration, and the token of `api_token_file` (None: only writing asks for one, the data folder's)."""

    web: WebConfig
    token: str | None


class LiveFace:
    """The face in force; `pushers` are tokens of nodes that the books do not know. Raises BadInput or Unavailable at the start; later what cannot be taken leaves everything as it was."""

    def __init__(self, read: Callable[[], Face], data: Path, books: Books, pushers: PushTokens | None = None) -> None:
        self._read, self._data = read, data
        face = read()
        tls = face.web.tls_server_config
        self.context = None if tls is None else RotatingContext(tls)
        self.reload_ok: bool | None = None
        self.web = Admission(face.web)
        find = find_in(books, None if pushers is None else pushers.node_of)
        self.authority = Authority(Credentials(self._token(face), face.token is None, self.web, find, issued_in(books)))

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self.context is None else "https"

    def reload(self) -> None:
        """Read every file again: all of it is taken, or nothing, which is said."""
        try:
            face = self._read()
            tls = face.web.tls_server_config
            if (tls is None) != (self.context is None):
                raise BadInput("the web configuration turns TLS on or off, expected that only at a start")
            token = self._token(face)
            if self.context is not None and tls is not None:
                self.context.replace(tls)
        except Exception as error:
            # Also what no reader foresaw: a file must not end a collector that runs, nor be passed over in silence.
            self.reload_ok = False
            foreseen = isinstance(error, (PoolmeterError, OSError))
            _log.error("the configuration was not reloaded: %s; what was in force stays", error, exc_info=not foreseen)
            return
        credentials = self.authority.credentials
        credentials.token, credentials.open_reading = token, face.token is None
        self.web.config = face.web
        self.authority.forget()
        self.reload_ok = True
        _log.info("the web configuration and tokens were reloaded")

    def _token(self, face: Face) -> str:
        if face.token is not None:
            return face.token
        where = make_token(self._data)
        _log.info("writing needs the token in %s", where)
        return read_token(where)


class WebServer(uvicorn.Server):
    """uvicorn over an application, in the loop and with the signals of whoever runs it."""

    def __init__(self, app: ASGIApp, context: RotatingContext | None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=3,
            loop="asyncio",  # the one loop whose TLS takes a context that changes
            http=PatientProtocol,
            ws="none",
            limit_concurrency=min(CONNECTIONS_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The daemon stops the server itself, after the last pull.
        yield


def find_in(books: Books, node_of: NodeOfToken | None = None) -> Callable[[str], Caller | None]:
    """The look-up of a secret among the tokens of nodes that `node_of` knows, and among those of the books."""

    def find(secret: str) -> Caller | None:
        node = None if node_of is None else node_of(secret)
        if node is not None:
            return Caller(Role.NODE, f"push:{node}", node=node)
        token = books.tokens.find(secret)
        return None if token is None else Caller(Role(token.role.value), token.name, token.tenant, token.node)

    return find


def issued_in(books: Books) -> Callable[[], bool]:
    """Whether the books hold a token that is not revoked."""

    def issued() -> bool:
        return any(token.revoked_us is None for token in books.tokens.list())

    return issued


def nodes_in(books: Books, clock: Clock, pushers: PushTokens | None = None) -> Callable[[], frozenset[str]]:
    """Every node that has a token to push with."""

    def nodes() -> frozenset[str]:
        now = clock.wall_us()
        own = {token.node for token in books.tokens.list() if token.role is TokenRole.NODE and token.node and token.valid(now)}
        return frozenset(own) | (pushers.nodes() if pushers is not None else frozenset())

    return nodes
