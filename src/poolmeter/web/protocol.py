"""uvicorn's HTTP/1.1 protocol with limits of time and number: a peer that sends or takes next to nothing is let go of.

uvicorn itself closes a connection that is idle after an answer, and nothing else: one that never sends a request, sends it a byte at a
time, or never reads its answer would stay as long as it likes. And it takes any number of them, to answer all with 503.
"""

import asyncio
import json
from collections import Counter
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """Aborts a connection that is waited for in vain.

    A request, or 64 KiB more of its body, is to come within `REQUEST_S`; 64 KiB of an answer are to be taken within `WRITE_S`. `dropped`
    counts connections of the process by which of the two it was. Connections beyond uvicorn's `limit_concurrency`, and of one address beyond
    three quarters of it, are closed as they come: one peer keeps nobody else out.
    """

    REQUEST_S = 20.0
    WRITE_S = 20.0
    STEP_BYTES = 65_536
    dropped: ClassVar[dict[str, int]] = {"request": 0, "answer": 0, "crowd": 0}
    held: ClassVar[Counter[str]] = Counter()  # open connections by address

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._since = 0
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        self.held[self._address] += 1
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and (len(self.connections) > most or self.held[self._address] > most - most // 4):
            self._drop("crowd")
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        self.held[self._address] -= 1
        if not self.held[self._address]:
            del self.held[self._address]
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": f"the request is no HTTP/1.1, or its head has more than 64 KiB: {msg}"}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Not for the log: anybody can send one, and it is answered as what it is without."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            return
        self._since += len(data)
        if not self.cycle.more_body:
            self._stop_reading()
        elif self._since >= self.STEP_BYTES:
            self._await_request()

    def on_response_complete(self) -> None:
        # Also where the connection is closing: that waits for the peer to take what is left.
        self._await_request()
        super().on_response_complete()
        if not self.cycle.response_complete and not self.cycle.more_body:  # the next one was there already
            self._stop_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing()
        self._writing = self.loop.call_later(self.WRITE_S, self._drop, "answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()

    def _await_request(self) -> None:
        self._stop_reading()
        self._since = 0
        self._reading = self.loop.call_later(self.REQUEST_S, self._drop, "request")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        self.transport.abort()
