"""Who may ask: basic auth, bearer tokens, a rate limit and response headers in front of an ASGI application, by a web configuration."""

import base64
import binascii
import hmac
import json
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import bcrypt
from starlette.concurrency import run_in_threadpool

from poolmeter.web.config import WebConfig

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_KNOWN_LIMIT = 256
# Compared with for a user that is not there, so that names cannot be told by the time an answer takes.
_NOBODY = b"$2b$10$abcdefghijklmnopqrstuuRGHV9zzgNuoLMFVTV9bJvXQj6hO2yTe"


class Admission:
    """What a web configuration asks of requests: a rate, a password or a token, and headers for its answers.

    `config` may be replaced while it serves; the next request is under the new one. A bcrypt comparison takes tens of ms: its outcome is
    kept, by a digest, for the configuration it was made under.
    """

    def __init__(self, config: WebConfig) -> None:
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._salt = os.urandom(32)
        self._tokens_at = time.monotonic()
        self.config = config

    @property
    def config(self) -> WebConfig:
        """What is in force."""
        return self._config

    @config.setter
    def config(self, config: WebConfig) -> None:
        self._config = config
        self._known.clear()
        self._bucket = float(config.rate_limit.burst)
        self.headers = [(name.lower().encode(), value.encode()) for name, value in config.http_server_config.headers.items() if value]

    @property
    def challenges(self) -> list[tuple[bytes, bytes]]:
        """Headers that say how to ask."""
        found = [b'Basic realm="poolmeter"'] if self._config.basic_auth_users else []
        found += [b"Bearer"] if self._config.tokens else []
        return [(b"www-authenticate", item) for item in found]

    def in_rate(self) -> bool:
        """Whether one more request is within `rate_limit`; counts it."""
        limit = self._config.rate_limit
        interval = limit.seconds
        if interval <= 0:
            return True
        now = time.monotonic()
        self._bucket = min(float(limit.burst), self._bucket + (now - self._tokens_at) / interval)
        self._tokens_at = now
        if self._bucket < 1:
            return False
        self._bucket -= 1
        return True

    async def user(self, given: bytes, extra_token: str | None = None) -> str | None:
        """Whom an Authorization header is from: a user's name, "token" for a bearer token, None for nobody that the configuration knows."""
        config = self._config
        kind, _, rest = given.strip().partition(b" ")
        rest = rest.strip()
        if kind.lower() == b"bearer":
            tokens = (*config.tokens, *((extra_token,) if extra_token is not None else ()))
            # Every token is compared, so that the time does not say which was near.
            return "token" if sum(hmac.compare_digest(rest, token.encode()) for token in tokens) > 0 else None
        if kind.lower() != b"basic" or not config.basic_auth_users:
            return None
        try:
            user, colon, password = base64.b64decode(rest, validate=True).partition(b":")
            name = user.decode()
        except (binascii.Error, UnicodeDecodeError):
            return None
        if not colon:
            return None
        wanted = config.basic_auth_users.get(name)
        hashed = wanted.encode() if wanted is not None else _NOBODY
        digest = hmac.digest(self._salt, b"\0".join((user, hashed, password)), "sha256")
        found = self._known.get(digest)
        if found is None:
            found = await run_in_threadpool(matches, password, hashed) and wanted is not None
            if config is self._config:
                self._known[digest] = found
                if len(self._known) > _KNOWN_LIMIT:
                    self._known.popitem(last=False)
        return name if found else None


class Guard:
    """An application that asks for what `config` asks for. `extra_token` (the collector's) is a bearer token too."""

    def __init__(self, application: Application, config: WebConfig, extra_token: str | None = None) -> None:
        self._application = application
        self._admission = Admission(config)
        self.extra_token = extra_token

    @property
    def config(self) -> WebConfig:
        """What is in force; may be replaced while it serves."""
        return self._admission.config

    @config.setter
    def config(self, config: WebConfig) -> None:
        self._admission.config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        admission, headers = self._admission, self._admission.headers

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and headers:
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        if not admission.in_rate():
            await _refuse(send_with_headers, 429, "too many requests, expected at most what rate_limit allows", ())
            return
        if admission.config.guarded:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if await admission.user(given, self.extra_token) is None:
                message = "authorization is missing or wrong, expected what the web configuration asks for"
                await _refuse(send_with_headers, 401, message, admission.challenges)
                return
        await self._application(scope, receive, send_with_headers)


def matches(password: bytes, hashed: bytes) -> bool:
    """Whether a password has this bcrypt hash; one of over 72 bytes, or with a zero byte, has none."""
    try:
        return bcrypt.checkpw(password, hashed)
    except ValueError:
        return False


async def _refuse(send: Send, status: int, message: str, headers: Any) -> None:
    body = json.dumps({"schema": "poolmeter.error/1", "error": message}).encode()
    kept = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})
