"""Talking to a node's enforcer: one request, one answer."""

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

from poolmeter.enforcer.protocol import MAX_ANSWER, IdBody, address_of, decode_answer, encode_request
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import Unavailable
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import from_plain
from poolmeter.places import NodeRun


class EnforcerClient:
    """An enforcer by its run folder. Each call opens a connection of its own, so that the kernel tells who asks."""

    def __init__(self, run: NodeRun, timeout_s: float = 60.0) -> None:
        self.run = run
        self._timeout_s = timeout_s

    def ping(self) -> dict[str, Any]:
        """`node`, `version`, and `simulated_machine` (absent on real cards)."""
        return dict(self._ask("ping", {}))

    def create(self, request: AllocationRequest) -> Allocation:
        """A new allocation. Raises BadInput, Refused or Unavailable."""
        return from_plain(Allocation, self._ask("create", request)["allocation"])

    def list(self) -> tuple[Allocation, ...]:
        """The node's allocations, oldest first."""
        return tuple(from_plain(Allocation, row) for row in self._ask("list", {})["rows"])

    def show(self, allocation_id: str) -> dict[str, Any]:
        """`allocation`; `processes`, `memory_used_bytes` and `hook_faults` as its meter tells them; `meter_trouble`, why it does not (None: it does)."""
        return dict(self._ask("show", IdBody(allocation_id)))

    def resize(self, request: ResizeRequest) -> tuple[Allocation, tuple[str, ...]]:
        """The allocation with its new limits in force, and warnings."""
        answer = self._ask("resize", request)
        return from_plain(Allocation, answer["allocation"]), tuple(answer["warnings"])

    def suspend(self, allocation_id: str) -> tuple[Allocation, tuple[str, ...]]:
        """The allocation with its device time given back, and warnings."""
        answer = self._ask("suspend", IdBody(allocation_id))
        return from_plain(Allocation, answer["allocation"]), tuple(answer["warnings"])

    def resume(self, allocation_id: str) -> tuple[Allocation, tuple[str, ...]]:
        """The allocation with its promise in force again. Raises Refused while the cards cannot give it."""
        answer = self._ask("resume", IdBody(allocation_id))
        return from_plain(Allocation, answer["allocation"]), tuple(answer["warnings"])

    def release(self, allocation_id: str, force: bool = False) -> Allocation:
        """The allocation as it ended."""
        return from_plain(Allocation, self._ask("release", IdBody(allocation_id, force))["allocation"])

    def _ask(self, verb: str, body: object) -> Any:
        path = self.run.socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._timeout_s)
            try:
                with address_of(path) as address:
                    _connect(connection, address, self._timeout_s)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it hung up
                    connection.sendall(encode_request(verb, body))
                line = _read_line(connection)
            except (FileNotFoundError, ConnectionRefusedError):
                raise Unavailable(f"no enforcer answers at {path}: start one with poolmeter enforcer or poolmeter up") from None
            except PermissionError:
                raise Unavailable(f"enforcer socket {path} is closed to this user, expected its owner or root") from None
            except OSError as error:  # also the time-out
                raise Unavailable(f"enforcer at {path} gave no answer to {verb}: {error}") from None
        if not line.endswith(b"\n"):
            raise Unavailable(f"enforcer at {path} hung up before it answered {verb}: whether it was done is not known")
        return decode_answer(line)


def answers(path: Path) -> bool:
    """Whether an enforcer listens on this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        try:
            with address_of(path) as address:
                connection.connect(address)
        except (OSError, Unavailable):
            return False
    return True


def _connect(connection: socket.socket, address: str, timeout_s: float) -> None:
    # A Unix socket with a full queue says EAGAIN at once instead of waiting its time-out.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("its queue is full") from None
            time.sleep(0.02)


def _read_line(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < MAX_ANSWER:
        part = connection.recv(65536)
        parts.append(part)
        size += len(part)
        if not part or part.endswith(b"\n"):
            break
    return b"".join(parts)
