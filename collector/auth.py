"""Who may ask what: the one table of endpoints and roles, and how a request is known to be from somebody.

A caller is known by a bearer token (the collector's own, one of the books, which has a role, or that of a node that pushes), or by a
password or token of the web configuration. Where nobody has been given a token of their own, reading asks for none.
"""

import hashlib
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from starlette.concurrency import run_in_threadpool

from poolmeter.web.guard import Admission

_KEPT_S = 2.0  # a token that was revoked is known no longer than this
_KEPT = 1024


class Role(StrEnum):
    """What a caller is. `reader` is whoever reads without a token where that is allowed, and the users and tokens of the web configuration."""

    ADMIN = "admin"
    OPERATOR = "operator"
    FINANCE = "finance"
    TENANT = "tenant"
    NODE = "node"
    READER = "reader"


@dataclass(frozen=True)
class Caller:
    """Who asks. `tenant` is that of a tenant's token, `node` that of a node's; `name` is for logs and limits, and who the books say it was."""

    role: Role
    name: str
    tenant: str | None = None
    node: str | None = None


ADMIN = Caller(Role.ADMIN, "admin")
ANYBODY = Caller(Role.READER, "anybody")

_A, _O, _F, _T, _N, _R = Role.ADMIN, Role.OPERATOR, Role.FINANCE, Role.TENANT, Role.NODE, Role.READER
# Every endpoint and who may ask it. What is not here, the collector answers to the admin alone; a test holds the table against the routes.
ACCESS: Mapping[tuple[str, str], frozenset[Role]] = {
    ("GET", "/healthz"): frozenset(Role),
    ("GET", "/readyz"): frozenset(Role),
    ("GET", "/v1/health"): frozenset({_A, _O, _R}),
    ("GET", "/v1/nodes"): frozenset({_A, _O, _R}),
    ("GET", "/v1/usage"): frozenset({_A, _O, _F, _T, _R}),
    ("GET", "/v1/snapshot"): frozenset({_A, _O, _T, _R}),
    ("GET", "/v1/decisions"): frozenset({_A, _O, _F, _T, _R}),
    ("POST", "/v1/decisions"): frozenset({_A, _O}),
    ("POST", "/v1/decisions/{id}/approve"): frozenset({_A, _O}),
    ("POST", "/v1/decisions/{id}/reject"): frozenset({_A, _O}),
    ("GET", "/v1/books/decisions"): frozenset({_A, _O, _F}),
    ("GET", "/v1/books/log"): frozenset({_A, _F}),
    ("GET", "/v1/books/assets"): frozenset({_A, _O, _F}),
    ("POST", "/v1/books/assets"): frozenset({_A, _F}),
    ("GET", "/v1/reports/usage"): frozenset({_A, _O, _F, _T, _R}),
    ("GET", "/v1/reports/chargeback"): frozenset({_A, _F, _T, _R}),
    ("GET", "/v1/reports/focus"): frozenset({_A, _F, _T, _R}),
    ("GET", "/allocation/compute"): frozenset({_A, _F, _T, _R}),
    ("GET", "/allocation"): frozenset({_A, _F, _T, _R}),
    # Of a node alone: a token that is bound to none would not say whose records these are.
    ("POST", "/v1/push"): frozenset({_N}),
    ("GET", "/metrics"): frozenset({_A, _O, _R}),
    ("GET", "/openapi.json"): frozenset(Role),
}
# Answered to whoever reaches the port: a supervisor has no token, and they tell nothing.
OPEN = ("/healthz", "/readyz")
NODE_HINT = "expected Authorization: Bearer with a token of the role node, or one of collector.push_tokens_file"


def may(caller: Caller, method: str, template: str) -> bool:
    """Whether a caller may ask a method of a route, named as in `ACCESS`."""
    wanted = "GET" if method == "HEAD" else method
    return caller.role in ACCESS.get((wanted, template), frozenset({Role.ADMIN}))


# The caller that a secret of the books belongs to, None for an unknown, revoked or expired one; may wait for a disk.
FindToken = Callable[[str], Caller | None]


@dataclass
class Credentials:
    """What callers are known by: may be replaced while the collector serves.

    `token` is the admin's. `find` looks up the tokens of the books, and `issued` says whether there are any. `open_reading` False: reading asks
    for a token even where none was issued.
    """

    token: str
    open_reading: bool = True
    web: Admission | None = None
    find: FindToken | None = None
    issued: Callable[[], bool] | None = None


class Authority:
    """Says who a request is from. What it found out is kept for two seconds by a keyed digest, so that a busy client costs one look-up."""

    def __init__(self, credentials: Credentials, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.credentials = credentials
        self._salt = os.urandom(32)
        self._kept: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        self._open: tuple[float, bool] | None = None
        self._monotonic = monotonic

    def forget(self) -> None:
        """Look everybody up again: credentials have changed."""
        self._kept.clear()
        self._open = None

    def recent(self, given: bytes) -> Caller | None:
        """Who was found to send this header a moment ago."""
        found = self._kept.get(self._digest(given))
        return found[1] if found is not None and self._monotonic() - found[0] < _KEPT_S else None

    def seen(self, given: bytes) -> str | None:
        """The name of who once sent this header: whose rate a request counts against, whatever else comes from its address."""
        found = self._kept.get(self._digest(given))
        return found[1].name if found is not None else None

    async def caller(self, given: bytes) -> Caller | None:
        """Who sends this Authorization header (empty: none was sent); None when nobody does."""
        if not given:
            return ANYBODY if await self._reading_is_open() else None
        caller = self.recent(given)
        if caller is None:
            caller = await self._look_up(given)
            if caller is None:
                self._kept.pop(self._digest(given), None)
                # Not read as nobody's where that is allowed: who sends a token that opens nothing should learn of it.
                return None
            self._kept[self._digest(given)] = (self._monotonic(), caller)
            self._kept.move_to_end(self._digest(given))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return caller

    async def _look_up(self, given: bytes) -> Caller | None:
        known = self.credentials
        kind, _, rest = given.strip().partition(b" ")
        secret = rest.strip()
        if kind.lower() == b"bearer":
            if secrets.compare_digest(secret, known.token.encode()):
                return ADMIN
            if known.find is not None and secret.isascii():
                found = await run_in_threadpool(known.find, secret.decode("ascii"))
                if found is not None:
                    return found
        if known.web is not None:
            name = await known.web.user(given)
            if name is not None:
                return Caller(Role.READER, f"web:{name}")
        return None

    async def _reading_is_open(self) -> bool:
        known = self.credentials
        if not known.open_reading or (known.web is not None and known.web.config.guarded):
            return False
        if known.issued is None:
            return True
        now = self._monotonic()
        if self._open is None or now - self._open[0] >= _KEPT_S:
            self._open = (now, not await run_in_threadpool(known.issued))
        return self._open[1]

    def _digest(self, given: bytes) -> bytes:
        return hashlib.blake2b(given, key=self._salt, digest_size=32).digest()
