"""The enforcer's daemon: a Unix socket in front of the book, the care for dead owners, and the poll for decisions.

Who may do what is the kernel's word (SO_PEERCRED): root and the enforcer's own user everything, others create, and see, change or
end what they created. A client that is slow, silent or talks nonsense holds up nobody but itself.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from poolmeter import __version__
from poolmeter.enforcer import allocations as disk
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Changed, Owner
from poolmeter.enforcer.decisions import DecisionPoll
from poolmeter.enforcer.protocol import (
    MAX_REQUEST,
    IdBody,
    Peer,
    address_of,
    decode_request,
    encode_answer,
    encode_error,
    peer_of,
    record,
)
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import to_plain

log = logging.getLogger(__name__)

_IDLE_S = 30.0  # a connection that says nothing for so long is closed
_CONNECTIONS = 128  # of one user at a time: who fills them keeps out nobody else
_BACKLOG = 512
_TEND_S = 1.0


class Daemon:
    """Serves one book until it is told to stop."""

    def __init__(self, book: Book, node: str, simulated_machine: str | None = None, decisions: DecisionPoll | None = None) -> None:
        self.book = book
        self.node = node
        self.simulated_machine = simulated_machine
        self.decisions = decisions
        self._open: Counter[int] = Counter()
        self._quick = ThreadPoolExecutor(4, "quick")
        self._slow = ThreadPoolExecutor(8, "slow")

    async def serve(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Listens until `stop` is set; `ready` is called once requests are answered. Raises Unavailable when it cannot listen."""
        listener = self._listen()
        server = await asyncio.start_unix_server(self._connection, sock=listener, limit=MAX_REQUEST, backlog=_BACKLOG)
        cares = [asyncio.create_task(self._tend())]
        if self.decisions is not None:
            cares.append(asyncio.create_task(self.decisions.run()))
        try:
            ready()
            await stop.wait()
        finally:
            server.close()
            for care in cares:
                care.cancel()
            await asyncio.gather(*cares, return_exceptions=True)
            for threads in (self._quick, self._slow):
                threads.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(OSError):
                os.unlink(self.book.run.socket)

    def _listen(self) -> socket.socket:
        path = self.book.run.socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The run folder's lock is held: whoever left this socket is dead.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            # Born closed to others: the mode is set before anybody can connect (listen comes after).
            with address_of(path) as address:
                listener.bind(address)
            os.chmod(path, 0o666 if os.geteuid() == 0 else 0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise Unavailable(f"socket {path} cannot be opened: {error.strerror or error}") from None
        listener.setblocking(False)
        return listener

    async def _tend(self) -> None:
        while True:
            try:
                for allocation_id in await asyncio.to_thread(self.book.tend):
                    log.info("released %s: its owner has ended", allocation_id)
            except Exception:
                log.exception("tending allocations failed")
            await asyncio.sleep(_TEND_S)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_of(writer.get_extra_info("socket"))
        self._open[peer.uid] += 1
        try:
            if self._open[peer.uid] > _CONNECTIONS:
                raise Unavailable(f"uid {peer.uid} has {_CONNECTIONS} connections to the enforcer open, expected fewer")
            while line := await asyncio.wait_for(_line(reader), _IDLE_S):
                writer.write(await self._answer(line, peer))
                await asyncio.wait_for(writer.drain(), _IDLE_S)
        except PoolmeterError as error:  # after a request that is too long, where the next one begins is not known
            writer.write(encode_error(error))
        except (TimeoutError, OSError):
            pass
        finally:
            self._open[peer.uid] -= 1
            if not self._open[peer.uid]:
                del self._open[peer.uid]
            writer.close()

    async def _answer(self, line: bytes, peer: Peer) -> bytes:
        try:
            verb, body = decode_request(line)
            # Verbs that ask for devices wait in threads of their own: a driver that hangs must not hold up a list or a release.
            threads = self._slow if verb in ("create", "resize", "resume", "suspend") else self._quick
            loop = asyncio.get_running_loop()
            return encode_answer(await loop.run_in_executor(threads, getattr(self, f"_{verb}"), body, peer))
        except PoolmeterError as error:
            return encode_error(error)
        except Exception as error:
            log.exception("request of pid %s failed", peer.pid)
            return encode_error(Unavailable(f"the enforcer failed at this request: {type(error).__name__}: {error}"))

    # ---- verbs: plain body and peer in, plain body out; in a thread, the book does the locking ----------------------

    def _ping(self, body: dict[str, object], peer: Peer) -> Any:
        return (
            to_plain({"node": self.node, "version": __version__, "simulated_machine": self.simulated_machine}) if not body else _empty(body)
        )

    def _list(self, body: dict[str, object], peer: Peer) -> Any:
        if body:
            return _empty(body)
        return {"rows": [to_plain(item) for item in self.book.entries() if _may(peer, item)]}

    def _show(self, body: dict[str, object], peer: Peer) -> Any:
        allocation = self._authorise(record(IdBody, body, "show").id, peer, "show")
        folder = disk.folder_of(self.book.run, allocation.id)
        slots = disk.live_slots(folder)
        meter = disk.meter_state(folder)
        return {
            "allocation": to_plain(allocation),
            "processes": [{"pid": slot.pid, "command": slot.comm, "uid": slot.uid} for slot in slots],
            "memory_used_bytes": meter.memory_used_bytes,
            "hook_faults": meter.hook_faults,
            "meter_trouble": meter.trouble,
        }

    def _create(self, body: dict[str, object], peer: Peer) -> Any:
        request = record(AllocationRequest, body, "create")
        if request.enforcement == "root" and peer.uid != 0:
            raise Refused(f"enforcement root is asked by uid {peer.uid}, expected uid 0")
        owner = Owner(uid=peer.uid)
        if request.owned:
            ticks = disk.start_ticks(peer.pid) if peer.pid else None
            if ticks is None:
                raise BadInput("an owned allocation is asked by a process that cannot be seen from the enforcer's pid namespace")
            owner = Owner(peer.uid, peer.pid, ticks)
        return {"allocation": to_plain(self.book.create(request, owner))}

    def _resize(self, body: dict[str, object], peer: Peer) -> Any:
        request = record(ResizeRequest, body, "resize")
        self._authorise(request.id, peer, "resize")
        return _changed(self.book.resize(request))

    def _suspend(self, body: dict[str, object], peer: Peer) -> Any:
        request = record(IdBody, body, "suspend")
        self._authorise(request.id, peer, "suspend")
        return _changed(self.book.suspend(request.id))

    def _resume(self, body: dict[str, object], peer: Peer) -> Any:
        request = record(IdBody, body, "resume")
        self._authorise(request.id, peer, "resume")
        return _changed(self.book.resume(request.id))

    def _release(self, body: dict[str, object], peer: Peer) -> Any:
        request = record(IdBody, body, "release")
        self._authorise(request.id, peer, "release")
        return {"allocation": to_plain(self.book.release(request.id, force=request.force))}

    def _authorise(self, allocation_id: str, peer: Peer, verb: str) -> Allocation:
        allocation = self.book.get(allocation_id)
        if not _may(peer, allocation):
            raise Refused(f"uid {peer.uid} may not {verb} allocation {allocation_id}, expected uid {allocation.owner_uid} or root")
        return allocation


def _changed(changed: Changed) -> Any:
    return {"allocation": to_plain(changed.allocation), "warnings": list(changed.warnings)}


def _may(peer: Peer, allocation: Allocation) -> bool:
    """Whether the peer may see, change and end the allocation."""
    return peer.uid in {0, os.geteuid(), allocation.owner_uid}


async def _line(reader: asyncio.StreamReader) -> bytes:
    """One line with its end, or nothing at the end of the stream. Raises BadInput for one that is too long."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return b""
    except asyncio.LimitOverrunError:
        raise BadInput(f"request is longer than {MAX_REQUEST} bytes, expected a shorter one") from None


def _empty(body: dict[str, object]) -> Any:
    raise BadInput(f"body has the keys {sorted(body)!r:.80}, expected none")
