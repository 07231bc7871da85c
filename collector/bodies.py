"""What an exporter may send: parsing of usage and snapshot answers, bounded before anything is unpacked."""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poolmeter import arrow, now
from poolmeter.collector.check import check_epoch
from poolmeter.collector.now import Newest, of_tables
from poolmeter.errors import DataError
from poolmeter.model.plain import from_plain
from poolmeter.model.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

USAGE_LIMIT = 64 << 20
SNAPSHOT_LIMIT = 16 << 20
MESSAGES_MOST = 1000
NODE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")
_SEQUENCE_LIMIT = 1 << 62


@dataclass(frozen=True)
class Answer:
    """One usage answer: whose spool, which epoch, up to where it reaches, whether more is waiting, and the rows (wide table).

    `snapshot` is where in the body the node's snapshot begins; None: the exporter knows no snapshot in its usage answers, or was not
    asked for one.
    """

    node: str
    epoch: str
    last_sequence: int
    more: bool
    table: "pa.Table"
    snapshot: int | None = None


def parse_answer(headers: Mapping[str, str], body: bytes) -> Answer:
    """An exporter's answer to GET /v1/usage. Raises DataError; the rows themselves are checked by poolmeter.collector.check."""
    node = _header(headers, "X-Poolmeter-Node")
    if NODE.match(node) is None:
        raise DataError(f"header X-Poolmeter-Node is {node!r:.80}, expected a node name")
    epoch = _header(headers, "X-Poolmeter-Epoch")
    if not check_epoch(epoch):
        raise DataError(f"header X-Poolmeter-Epoch is {epoch!r:.80}, expected a UUID")
    last = _header(headers, "X-Poolmeter-Last-Sequence")
    if not re.fullmatch(r"[0-9]{1,19}", last) or int(last) >= _SEQUENCE_LIMIT:
        raise DataError(f"header X-Poolmeter-Last-Sequence is {last!r:.80}, expected a number below 2^62")
    more = _header(headers, "X-Poolmeter-More").lower()
    if more not in ("true", "false", "1", "0"):
        raise DataError(f"header X-Poolmeter-More is {more!r:.80}, expected true or false")
    at = _snapshot_at(headers, len(body))
    usage = body if at is None else body[:at]
    refuse_compressed(usage)
    return Answer(node, epoch, int(last), more in ("true", "1"), arrow.from_bytes(usage), at)


def parse_now(answer: Answer, body: bytes) -> Newest | None:
    """The snapshot behind an answer's records; None when the exporter has taken none yet. Raises DataError."""
    if answer.snapshot is None or answer.snapshot == len(body):
        return None
    part = body[answer.snapshot :]  # a copy: the records before it are not to be kept as long as the snapshot is
    refuse_compressed(part)
    return of_tables(now.from_bytes(part, answer.node))


def _snapshot_at(headers: Mapping[str, str], size: int) -> int | None:
    text = headers.get("X-Poolmeter-Snapshot")
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) > size:
        raise DataError(f"header X-Poolmeter-Snapshot is {text!r:.80}, expected a place in a body of {size} bytes")
    return int(text)


def parse_snapshot(body: bytes, node: str) -> Snapshot:
    """An exporter's answer to GET /v1/snapshot. Raises DataError, also when it is another node's."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"snapshot of {len(body)} bytes is not JSON: {error!s:.80}") from None
    # A schema envelope may stand around it; the fields are the same.
    inner = value.get("snapshot") if isinstance(value, dict) and "taken_us" not in value else value
    snapshot = from_plain(Snapshot, inner, "snapshot")
    if snapshot.node != node:
        raise DataError(f"snapshot is of node {snapshot.node!r:.80}, expected {node!r}")
    return snapshot


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise DataError(f"header {name} is absent, expected an exporter's")
    return value.strip()


def refuse_compressed(body: bytes) -> None:
    """Raises DataError when a batch of an Arrow stream is compressed: a few bytes could then claim any amount of memory.

    So could thousands of batches without rows.

    Walks the stream's framing (length-prefixed FlatBuffers messages, each followed by its buffers) without unpacking anything.
    """
    at = messages = 0
    while at + 8 <= len(body):
        messages += 1
        if messages > MESSAGES_MOST:
            raise DataError(f"usage body has more than {MESSAGES_MOST} Arrow messages, expected a few")
        marker, length = struct.unpack_from("<Ii", body, at)
        if marker != 0xFFFFFFFF:
            raise DataError(f"usage body is no Arrow stream at byte {at}")
        if length == 0:
            return
        start = at + 8
        if length < 0 or start + length > len(body):
            raise DataError(f"usage body is cut short at byte {at}")
        try:
            compressed, size = _message(body, start, start + length)
        except (struct.error, IndexError):
            raise DataError(f"usage body has a broken Arrow message at byte {at}") from None
        if compressed:
            raise DataError("usage body holds compressed Arrow batches, expected plain ones")
        if size < 0:
            raise DataError(f"usage body has a broken Arrow message at byte {at}")
        at = start + length + size


def _message(body: bytes, start: int, end: int) -> tuple[bool, int]:
    """Of a FlatBuffers `Message`: whether it holds a batch with `compression`, and its body's length (Arrow format, Message.fbs)."""
    root = start + _uint32(body, start, end)
    # Message: 0 version, 1 header type, 2 header, 3 bodyLength.
    size_at = _field(body, root, 3, end)
    size = struct.unpack_from("<q", body, size_at)[0] if size_at else 0
    kind_at, header_at = _field(body, root, 1, end), _field(body, root, 2, end)
    kind = body[kind_at] if kind_at else 0
    if kind not in (2, 3) or not header_at:
        return False, size
    header = header_at + _uint32(body, header_at, end)
    if kind == 2:  # DictionaryBatch: 1 data, a RecordBatch
        data_at = _field(body, header, 1, end)
        if not data_at:
            return False, size
        header = data_at + _uint32(body, data_at, end)
    # RecordBatch: 0 length, 1 nodes, 2 buffers, 3 compression.
    return _field(body, header, 3, end) != 0, size


def _uint32(body: bytes, at: int, end: int) -> int:
    if not 0 <= at <= end - 4:
        raise IndexError(at)
    return int(struct.unpack_from("<I", body, at)[0])


def _field(body: bytes, table: int, number: int, end: int) -> int:
    """Where a table's field lies, 0 when it is absent."""
    if not 0 <= table <= end - 4:
        raise IndexError(table)
    vtable = table - struct.unpack_from("<i", body, table)[0]
    if not 0 <= vtable <= end - 4:
        raise IndexError(vtable)
    size = struct.unpack_from("<H", body, vtable)[0]
    slot = 4 + 2 * number
    if slot + 2 > size or vtable + slot + 2 > end:
        return 0
    offset = struct.unpack_from("<H", body, vtable + slot)[0]
    return table + offset if offset else 0
