"""What travels over the enforcer's Unix socket: one JSON object a line each way, of bounded size and fixed shape.

    {"version":1,"verb":"resize","body":{"id":"a-…","memory_bytes":8589934592}}
    {"version":1,"ok":true,"body":{…}}
    {"version":1,"ok":false,"error":{"kind":"refused","message":"…"}}

Records inside a body are in the plain form of poolmeter.model.plain.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.plain import canonical_json, from_plain

VERSION = 1
MAX_REQUEST = 64 * 1024
MAX_ANSWER = 64 * 1024 * 1024
VERBS = ("create", "list", "ping", "release", "resize", "resume", "show", "suspend")

_KINDS: tuple[tuple[str, type[PoolmeterError]], ...] = (("refused", Refused), ("bad_input", BadInput), ("unavailable", Unavailable))
_SOCKET_PATH = 107  # bytes of sun_path without its NUL
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True)
class IdBody:
    """The body of `show`, `release`, `suspend` and `resume`."""

    id: str
    force: bool = False


def encode_request(verb: str, body: object) -> bytes:
    """The line that asks for `verb`."""
    return canonical_json({"version": VERSION, "verb": verb, "body": body}).encode() + b"\n"


def decode_request(line: bytes) -> tuple[str, dict[str, object]]:
    """Verb and body of a request line. Raises BadInput."""
    request = _object(line, "request")
    if set(request) != {"version", "verb", "body"}:
        raise BadInput(f"request has the keys {sorted(request)!r:.120}, expected version, verb and body")
    if request["version"] != VERSION:
        raise BadInput(f"request has version {request['version']!r:.20}, expected {VERSION}")
    verb, body = request["verb"], request["body"]
    if verb not in VERBS:
        raise BadInput(f"verb is {verb!r:.40}, expected one of {', '.join(VERBS)}")
    if not isinstance(body, dict):
        raise BadInput(f"body of {verb} is {body!r:.40}, expected an object")
    return verb, body


def record(kind: type[T], body: Mapping[str, object], what: str) -> T:
    """A record out of a body. Raises BadInput, also for keys it does not know: a misspelt limit is not a default."""
    _no_strangers(kind, body, what)
    try:
        return from_plain(kind, dict(body), what)
    except DataError as error:
        raise BadInput(str(error)) from None


def _no_strangers(kind: Any, body: Mapping[str, object], what: str) -> None:
    known = {field.name: field.type for field in fields(kind)}
    for key, value in body.items():
        if key not in known:
            raise BadInput(f"{what} has the key {key!r:.60}, expected one of {', '.join(known)}")
        if is_dataclass(known[key]) and isinstance(value, dict):
            _no_strangers(known[key], value, f"{what}.{key}")


def encode_answer(body: object) -> bytes:
    """The line of a request that was carried out."""
    return canonical_json({"version": VERSION, "ok": True, "body": body}).encode() + b"\n"


def encode_error(error: PoolmeterError) -> bytes:
    """The line of a request that failed."""
    kind = next((name for name, branch in _KINDS if isinstance(error, branch)), "unavailable")
    return canonical_json({"version": VERSION, "ok": False, "error": {"kind": kind, "message": str(error)}}).encode() + b"\n"


def decode_answer(line: bytes) -> Any:
    """The body of an answer. Raises what the enforcer raised, or DataError for a line that is no answer."""
    answer = _object(line, "answer")
    if answer.get("ok") is True:
        return answer.get("body")
    error = answer.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise DataError(f"answer of the enforcer is {line[:80]!r}, expected ok or an error")
    raise dict(_KINDS).get(str(error.get("kind")), Unavailable)(error["message"])


def _object(line: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise BadInput(f"{what} is {line[:60]!r}, expected a JSON object") from None
    if not isinstance(value, dict):
        raise BadInput(f"{what} is {line[:60]!r}, expected a JSON object")
    return value


def peer_of(connection: socket.socket) -> Peer:
    """The process and user that connected, in this process's pid namespace (pid 0: it cannot be seen from here)."""
    return Peer(*_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """An address of the socket at `path` to bind or connect to, also where the path is longer than a socket address can be.

    A long one goes through a descriptor of its folder, which must stay open until the call is done. Raises Unavailable.
    """
    if len(os.fsencode(path)) <= _SOCKET_PATH:
        yield str(path)
        return
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"folder {path.parent} of the enforcer's socket cannot be opened: {error.strerror}") from None
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
