"""The exporter's control socket: letting go of the cards, and taking them back.

A Unix socket in the run folder, for root and for whoever runs the exporter (by peer credentials); no network, no secret. One JSON line asks,
one answers: `{"verb": "release", "seconds": 600}`, `{"verb": "resume"}`.
"""

import contextlib
import json
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable

_LOG = logging.getLogger("poolmeter.exporter")
LINE_LIMIT = 4096
WAIT_S = 10.0
MAX_SECONDS = 86_400
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Request:
    """What is asked, and where the answer goes."""

    verb: str
    seconds: int | None
    answer: "queue.SimpleQueue[dict[str, Any]]" = field(default_factory=queue.SimpleQueue)


def parse_request(line: bytes) -> Request:
    """A request from its line. Raises BadInput."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BadInput(f"request is no JSON: {error}") from None
    if not isinstance(values, dict) or values.get("verb") not in ("release", "resume"):
        raise BadInput(f"request is {line[:80]!r}, expected verb release or resume")
    seconds = values.get("seconds")
    if values["verb"] == "release" and (type(seconds) is not int or not 1 <= seconds <= MAX_SECONDS):
        raise BadInput(f"seconds is {seconds!r:.40}, expected 1 to {MAX_SECONDS}")
    return Request(values["verb"], seconds)


class ControlSocket:
    """Listens in a thread of its own; requests wait in `requests` for the loop, which `ring` wakes."""

    def __init__(self, path: Path, ring: Callable[[], None]) -> None:
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._path, self._ring = path, ring
        self._listener = _bind(path)
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(WAIT_S)
            connection.sendall(json.dumps(self._answer(connection)).encode() + b"\n")

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        line = _line(connection)  # before anything is said, so that who is refused hears it
        try:
            _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid not in (0, os.geteuid()):
                raise Refused(f"user {uid} may not control the exporter, expected root or user {os.geteuid()}")
            request = parse_request(line)
            self.requests.put(request)
            self._ring()
            return request.answer.get(timeout=WAIT_S)
        except queue.Empty:
            return {"error": f"the exporter gave no answer in {WAIT_S:g} s", "exit_code": Unavailable.exit_code}
        except PoolmeterError as error:
            return {"error": str(error), "exit_code": error.exit_code}

    def close(self) -> None:
        """Stop listening and take the socket away."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the spool's lock says that no other exporter of this node runs
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise Unavailable(f"control socket {path} cannot be made: {error.strerror or error}") from None
    return listener


def _line(connection: socket.socket) -> bytes:
    found = b""
    while b"\n" not in found and len(found) <= LINE_LIMIT:
        part = connection.recv(LINE_LIMIT)
        if not part:
            break
        found += part
    return found.partition(b"\n")[0]


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """The exporter's answer. Raises Unavailable when none listens, or the error that it answers with."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_S + 2)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _line(connection)
        values: dict[str, Any] = json.loads(line)
    except PermissionError:
        raise Refused(f"control socket {path} is not for user {os.geteuid()}, expected root or whoever runs the exporter") from None
    except OSError as error:
        raise Unavailable(f"no exporter listens at {path}: {error.strerror or error}") from None
    except ValueError:
        raise Unavailable(f"the exporter at {path} gave no answer") from None
    if "error" in values:
        kind = {1: Refused, 2: BadInput}.get(int(values.get("exit_code", 3)), Unavailable)
        raise kind(values["error"])
    return values
