"""Push: exporters that cannot be reached post what a pull would have fetched, and get the acknowledgement as the answer.

One request holds what `GET /v1/usage?snapshot=arrow` of an exporter answers, headers and body, and goes through the same intake. Who may
push as which node is told by the token alone, and nothing of a body is read before that is known.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from poolmeter.clock import Clock
from poolmeter.collector.bodies import NODE, USAGE_LIMIT
from poolmeter.collector.gate import caller_of
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pullers import Names
from poolmeter.collector.reception import Got, Intake, NodeStatus, Outcomes, parsed
from poolmeter.collector.state import NodeRow
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable

_log = logging.getLogger("poolmeter.collector")
PATH = "/v1/push"
ADDRESS = "push:"  # what stands before the node's name where a pulled node has its URL
BODY_LIMIT = 16 << 20  # as sent; unpacked, it has the limit of a pull's answer
TOTAL_LIMIT = 256 << 20  # of all bodies that are being received
BODY_S = 30.0
AT_ONCE = 2  # bodies unpacked and decoded at the same time
BURST, PER_SECOND = 30.0, 2.0  # requests of a node
SILENT_S = 60.0  # a node that has not pushed for so long, or for four pull intervals, is failing
TOKEN_LENGTH = 16
LINES_MOST = 100_000

# The node that a bearer token may push as, None for a token that is nobody's. Raises PoolmeterError when that cannot be told.
NodeOfToken = Callable[[str], str | None]


class PushTokens:
    """Tokens of nodes from a file of `node=token` lines that only its owner can read; read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput."""
        self._path = path
        self._read: tuple[int, int, int] | None = None
        self._node_of: dict[bytes, str] = {}
        self._refresh()

    def node_of(self, token: str) -> str | None:
        """Whose token it is. A file that has become unusable is said in the log; what it said before holds."""
        self._refresh_or_say()
        return self._node_of.get(_digest(token))

    def nodes(self) -> frozenset[str]:
        """Every node that may push."""
        self._refresh_or_say()
        return frozenset(self._node_of.values())

    def _refresh_or_say(self) -> None:
        try:
            self._refresh()
        except BadInput as error:
            _log.error("%s; its tokens of before hold", error)

    def _refresh(self) -> None:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                now = (found.st_mtime_ns, found.st_size, found.st_ino)
                if now == self._read:
                    return
                self._read = now
                if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                    mode = stat.S_IMODE(found.st_mode)
                    raise BadInput(f"push tokens file {self._path} has mode {mode:04o}, expected a file with 0600 or 0400")
                body = file.read(LINES_MOST * 100)
        except OSError as error:
            raise BadInput(f"push tokens file {self._path} cannot be read: {error.strerror or error}") from None
        self._node_of = parse_push_tokens(body, str(self._path))


def parse_push_tokens(body: bytes, name: str) -> dict[bytes, str]:
    """Nodes by the digest of their token, so that a look-up takes no time that tells of a token. Raises BadInput; no token is shown."""
    try:
        lines = body.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(f"push tokens file {name} is not ASCII text at byte {error.start}") from None
    found: dict[bytes, str] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        node, equals, token = (part.strip() for part in line.partition("="))
        if not equals or NODE.match(node) is None:
            raise BadInput(f"push tokens file {name} line {number} names no node, expected node=token")
        if len(token) < TOKEN_LENGTH or not token.isprintable() or " " in token:
            raise BadInput(f"push tokens file {name} line {number}: token of {node} is no {TOKEN_LENGTH} characters long, or has spaces")
        if node in seen or _digest(token) in found:
            raise BadInput(f"push tokens file {name} line {number}: node {node} or its token is there twice, expected each once")
        seen.add(node)
        found[_digest(token)] = node
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class _Pushed:
    """One node that pushes."""

    def __init__(self, intake: Intake, now_s: float) -> None:
        self.intake = intake
        self.busy = False
        self.last_s = now_s
        self._tokens, self._at = BURST, now_s

    def spend(self, now_s: float) -> bool:
        """Whether the node may ask once more now."""
        self._tokens = min(BURST, self._tokens + (now_s - self._at) * PER_SECOND)
        self._at = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Pushes:
    """Everything that is pushed. Methods belong to the event loop's thread.

    `known` are the store's rows; `names` guards that no node is both pulled and pushed; `consumer` is whose acknowledgements these are;
    `nodes` tells who may push now, so that those who no longer may leave their name to a pull (None: that is not known). Who a request is
    from the gate in front of the endpoint has found out.
    """

    def __init__(
        self,
        known: Mapping[str, NodeRow],
        publisher: Publisher,
        names: Names,
        consumer: str,
        clock: Clock,
        outcomes: Outcomes,
        nodes: Callable[[], frozenset[str]] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self._allowed = nodes
        self._publisher = publisher
        self._names = names
        self._consumer = consumer
        self._clock = clock
        self._outcomes = outcomes
        self._silent_s = silent_s
        self._nodes: dict[str, _Pushed] = {}
        self._received = 0
        self._working = asyncio.Semaphore(AT_ONCE)
        for url, row in known.items():
            if url.startswith(ADDRESS):
                if row.node is not None:
                    self._names.claim(url, row.node)
                self._nodes[url.removeprefix(ADDRESS)] = self._pushed(row)

    def statuses(self) -> list[NodeStatus]:
        """The state of every node that pushes."""
        return [pushed.intake.status for pushed in self._nodes.values()]

    async def push(self, request: Request) -> Response:
        """Store what a node posts, and acknowledge it. 413, 415, 429 and the statuses of errors; nothing is stored then."""
        node = caller_of(request.scope).node
        if node is None:
            return _error(403, "the token is bound to no node, expected one of the role node")
        now_s = asyncio.get_running_loop().time()
        pushed = self._nodes.get(node) or self._pushed(NodeRow(f"{ADDRESS}{node}", None, None, None, "new"))
        self._nodes[node] = pushed
        if not pushed.spend(now_s):
            return _error(429, f"node {node} asks more than {PER_SECOND:g} times a second", {"Retry-After": "5"})
        if pushed.busy:
            return _error(429, f"node {node} is pushing already, expected one request at a time", {"Retry-After": "1"})
        pushed.busy, pushed.last_s = True, now_s
        try:
            return await self._take(pushed, node, request)
        finally:
            pushed.busy, pushed.last_s = False, asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Say of nodes that no longer push that they do not, until cancelled."""
        while True:
            await asyncio.sleep(self._silent_s / 4)
            if self._allowed is not None:
                try:
                    self.retire(await asyncio.to_thread(self._allowed))
                except PoolmeterError as error:  # who may push cannot be told now: whoever could still can
                    _log.error("%s", error)
            await self.find_silent(asyncio.get_running_loop().time())

    async def find_silent(self, now_s: float) -> None:
        """Mark nodes that have not pushed for too long by `now_s` (the loop's time)."""
        for pushed in list(self._nodes.values()):
            row = pushed.intake.status.row
            if row.state == "up" and not pushed.busy and now_s - pushed.last_s > self._silent_s:
                await pushed.intake.failed("failing", f"has not pushed for {self._silent_s:g} seconds")

    def _pushed(self, row: NodeRow) -> _Pushed:
        self._publisher.keep(row.url)
        intake = Intake(row, self._publisher, self._clock, self._names.claim, self._outcomes)
        return _Pushed(intake, asyncio.get_running_loop().time())

    async def _take(self, pushed: _Pushed, node: str, request: Request) -> Response:
        intake = pushed.intake
        intake.status.pulls += 1
        status, reason, state = 500, "", "failing"
        try:
            with self._receiving() as room:
                body = await _body(request, room)
                async with self._working:
                    got = await asyncio.to_thread(_parsed, request.headers, body, node)
                del body
                # Not under the semaphore: this waits for a publication, which many nodes share.
                intake.admit(node)
                through = await intake.take(got.answer, got.newest, got.warning)
        except _Status as error:
            status, reason = error.status, str(error)
        except Refused as error:
            status, reason, state = 409, str(error), "refused"
        except DataError as error:
            status, reason = 400, str(error)
        except PoolmeterError as error:
            status, reason = 503, str(error)
        except TimeoutError:
            status, reason = 408, f"the body took longer than {BODY_S:g} seconds"
        except ClientDisconnect:
            reason = "the connection ended within the body"
        except Exception as error:
            _log.exception("push of %s failed", node)
            reason = f"internal error: {type(error).__name__}"
        else:
            intake.succeeded()
            acknowledged = {"consumer": self._consumer, "epoch": got.answer.epoch, **({} if through is None else {"seq": through})}
            return JSONResponse({"schema": "poolmeter.push/1", "node": node, **acknowledged})
        await intake.failed(state, reason)
        return _error(status, reason, {"Retry-After": "5"} if status in (429, 503) else None)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[Callable[[int], None]]:
        mine = 0

        def room(size: int) -> None:
            nonlocal mine
            if self._received + size > TOTAL_LIMIT:
                raise Unavailable(f"{self._received} bytes are being received, expected at most {TOTAL_LIMIT} at a time")
            self._received += size
            mine += size

        try:
            yield room
        finally:
            self._received -= mine

    def retire(self, nodes: frozenset[str]) -> None:
        """Nodes not in `nodes` push no more: they are forgotten, their rows stay, and their names are free for a pull."""
        for node in [node for node in self._nodes if node not in nodes and not self._nodes[node].busy]:
            url = self._nodes.pop(node).intake.status.row.url
            self._names.release(url)
            self._publisher.forget(url)


class _Status(PoolmeterError):
    """An answer with a status of its own."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def _body(request: Request, room: Callable[[int], None]) -> bytes:
    """The body as sent, bounded in size and time."""
    if request.headers.get("content-encoding", "identity") not in ("identity", "gzip"):
        raise _Status(415, f"Content-Encoding is {request.headers['content-encoding']!r:.40}, expected gzip or identity")
    chunks, size = [], 0
    async with asyncio.timeout(BODY_S):
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_LIMIT:
                raise _Status(413, f"body has more than {BODY_LIMIT} bytes, expected at most that")
            room(len(chunk))
            chunks.append(chunk)
    return b"".join(chunks)


def unpacked(body: bytes, limit: int) -> bytes:
    """What a gzip body holds. Raises DataError for one that is broken or holds more than `limit` bytes, having unpacked no more."""
    found = zlib.decompressobj(wbits=31)
    try:
        out = found.decompress(body, limit + 1)
    except zlib.error as error:
        raise DataError(f"body is not gzip: {error!s:.80}") from None
    if len(out) > limit:
        raise _Status(413, f"body unpacks to more than {limit} bytes, expected at most that")
    if not found.eof or found.unused_data:
        raise DataError("body is cut short or has something behind it, expected one whole gzip member")
    return out


def _parsed(headers: Mapping[str, str], body: bytes, node: str) -> Got:
    if headers.get("content-encoding") == "gzip":
        body = unpacked(body, USAGE_LIMIT)
    got = parsed(headers, body)
    if got.answer.node != node:
        raise Refused(f"node is {got.answer.node!r:.80}, expected {node!r}, whose token it is")
    return got


def _error(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers=headers)
