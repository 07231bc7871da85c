"""A daemon's Unix socket: whether it is to be asked, and one HTTP request over it."""

import contextlib
import http.client
import json
import os
import socket
import stat
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from poolmeter.errors import Unavailable

BODY_BYTES = 4 << 20


class Use(StrEnum):
    """Whether a source is used: always, never, or where its socket is found."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass
class Door:
    """A socket by its path. In `auto`, one that was there once is missed when it goes."""

    use: Use
    path: Path
    _met: bool = field(default=False, init=False)

    def look(self) -> tuple[bool, str | None]:
        """Whether the source is in use, and what is wrong with its socket (None: it can be asked)."""
        if self.use is Use.OFF:
            return False, None
        try:
            found = stat.S_ISSOCK(os.stat(self.path).st_mode)
        except OSError as error:
            return self._wanted, f"socket {self.path} is not there: {error.strerror}" if self._wanted else None
        if not found:
            return self._wanted, f"{self.path} is no socket" if self._wanted else None
        if not os.access(self.path, os.R_OK | os.W_OK):
            return self._wanted, f"socket {self.path} may not be used by this user" if self._wanted else None
        self._met = True
        return True, None

    @property
    def _wanted(self) -> bool:
        return self._met or self.use is Use.ON


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float, peer_uid: int | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path, self._timeout_s, self._peer_uid = path, timeout_s, peer_uid
        self.raw: socket.socket | None = None  # `sock` is let go of while an answer is still being read

    def connect(self) -> None:
        self.sock = self.raw = connect(self._path, self._timeout_s, self._peer_uid)


def connect(path: Path, timeout_s: float, peer_uid: int | None = None) -> socket.socket:
    """A connection to a Unix socket. With `peer_uid`, only if its server runs as that user. Raises OSError, Unavailable."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.settimeout(timeout_s)
        made.connect(str(path))
        if peer_uid is not None:
            uid = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid != peer_uid:
                raise Unavailable(f"socket {path} is served by user {uid}, expected user {peer_uid}")
    except BaseException:
        made.close()
        raise
    return made


def get_json(path: Path, target: str, timeout_s: float, peer_uid: int | None = None) -> Any:
    """The JSON that `GET target` gives; None for 404. Raises Unavailable: no answer in time, another status, no JSON, too long."""
    connection = _Connection(path, timeout_s, peer_uid)
    late = threading.Event()

    def cut() -> None:
        # The socket's own limit is for each part of an answer: a server that drips, in its head or its body, would hold us for ever.
        late.set()
        if connection.raw is not None:
            with contextlib.suppress(OSError):
                connection.raw.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(timeout_s, cut)
    watch.daemon = True
    watch.start()
    try:
        connection.request("GET", target, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = bytearray()
        while part := answer.read1(1 << 16):
            body += part
            if len(body) > BODY_BYTES:
                raise Unavailable(f"socket {path} answered more than {BODY_BYTES} bytes to {target:.80}")
        if late.is_set():
            raise TimeoutError
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Unavailable(f"socket {path} answered status {answer.status} to {target:.80}, expected 200")
        return json.loads(bytes(body))
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise Unavailable(f"socket {path} did not finish its answer to {target:.80} within {timeout_s:g} s") from None
        raise Unavailable(f"socket {path} gives no answer: {type(error).__name__} {error!s:.120}") from None
    except (ValueError, RecursionError):
        raise Unavailable(f"socket {path} answered something that is no JSON to {target:.80}") from None
    finally:
        watch.cancel()
        with contextlib.suppress(OSError):
            connection.close()
