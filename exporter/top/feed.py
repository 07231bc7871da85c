"""Where the snapshots come from: GET /v1/snapshot of exporters (one node each) or of a collector (the whole pool)."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poolmeter.errors import BadInput, DataError
from poolmeter.model.plain import from_plain
from poolmeter.model.snapshot import Snapshot
from poolmeter.web.trust import Trust

MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Answer:
    """What one address said. `error` (one sentence) None: it answered; `pooled`: it is a collector, whose snapshots are as old as its pulls."""

    url: str
    at_us: int
    snapshots: tuple[Snapshot, ...] = ()
    error: str | None = None
    pooled: bool = False


class Address:
    """One server, asked over a connection that is kept. Raises BadInput for what is no http or https URL."""

    def __init__(
        self, url: str, token: str | None = None, ca_file: str | None = None, timeout_s: float = 5.0, trust: Trust | None = None
    ) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            self._host, self._port = parts.hostname, parts.port
            (self._host or "").encode("idna")  # as the connection will: a label may be too long
        except ValueError:
            parts, self._host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or not parts.path.isascii():
            raise BadInput(f"address is {url!r:.120}, expected a URL such as http://127.0.0.1:9877")
        self._path = parts.path
        self._headers = {"Accept": "application/json", "Connection": "keep-alive"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = (trust or Trust(None if ca_file is None else Path(ca_file))).context()
        self._connection: http.client.HTTPConnection | None = None
        self.date: str | None = None  # what time it was there at the last answer, as it said

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine by its address."""
        host = self._host or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError or http.client.HTTPException."""
        for fresh in (self._connection is None, True):
            if self._connection is None:
                self._connection = self._connect()
            try:
                self._connection.request("GET", self._path + path, headers=self._headers)
                response = self._connection.getresponse()
                body = response.read(MAX_BYTES + 1)
                self.date = response.headers["Date"]
                if response.will_close:
                    self.close()
                return response.status, body
            except (OSError, http.client.HTTPException):
                self.close()
                if fresh:  # a kept connection that the server has closed meanwhile is tried once more
                    raise
        raise AssertionError("unreachable")

    def _connect(self) -> http.client.HTTPConnection:
        assert self._host is not None
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def snapshots(self) -> Answer:
        """Ask once; what goes wrong is the answer's error."""
        snapshots: tuple[Snapshot, ...] = ()
        pooled, error = False, None
        try:
            status, body = self.get("/v1/snapshot")
            if status == 200:
                snapshots, pooled = parse_snapshots(body)
            else:
                error = f"it answers with status {status}{_reason(body)}"
        except DataError as fault:
            error = f"it answers with something else than snapshots: {fault}"
        except (TimeoutError, socket.gaierror, ConnectionError, OSError) as fault:
            error = _plainly(fault, self._timeout_s)
        except http.client.HTTPException as fault:
            error = f"it does not speak HTTP ({type(fault).__name__})"
        return Answer(self.url, time.time_ns() // 1000, snapshots, error, pooled)


def _plainly(fault: OSError, timeout_s: float) -> str:
    if isinstance(fault, TimeoutError):
        return f"it gives no answer within {timeout_s:g} s"
    if isinstance(fault, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate cannot be verified: {fault.verify_message}; --ca-file FILE says whom to trust"
    if isinstance(fault, ssl.SSLError):
        return f"TLS fails: {fault.reason or fault}"
    return fault.strerror or str(fault) or type(fault).__name__


def _reason(body: bytes) -> str:
    try:
        value = json.loads(body)
        return f": {value['error']}" if isinstance(value, dict) and isinstance(value.get("error"), str) else ""
    except (ValueError, RecursionError):
        return ""


def parse_snapshots(body: bytes) -> tuple[tuple[Snapshot, ...], bool]:
    """The snapshots of an answer, and whether they are a collector's. Raises DataError."""
    if len(body) > MAX_BYTES:
        raise DataError(f"an answer of more than {MAX_BYTES >> 20} MiB")
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise DataError("no JSON") from None
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        return tuple(from_plain(Snapshot, row, f"snapshot {index}") for index, row in enumerate(value["rows"])), True
    return (from_plain(Snapshot, value, "snapshot"),), False


class Feed:
    """All addresses, asked side by side."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)
        self._pool = ThreadPoolExecutor(min(16, len(self.addresses)), thread_name_prefix="top") if len(self.addresses) > 1 else None

    def poll(self) -> tuple[Answer, ...]:
        """One answer an address, in their order; takes as long as the slowest, at most a time-out."""
        if self._pool is None:
            return tuple(address.snapshots() for address in self.addresses)
        return tuple(self._pool.map(Address.snapshots, self.addresses))

    def close(self) -> None:
        """Let go of everything."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for address in self.addresses:
            address.close()
