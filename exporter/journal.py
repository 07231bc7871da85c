"""The enforcer's event journal, read by its tail: whole lines only, from a known byte on."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from poolmeter.errors import DataError
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import from_plain

_HEAD = 4096  # bytes that the first line is looked for in


@dataclass(frozen=True)
class JournalPart:
    """New events in file order, the offset after them, and what was wrong with lines that were passed over."""

    events: tuple[JournalEvent, ...]
    offset: int
    head: str
    faults: tuple[str, ...] = ()


def parse_events(body: bytes, name: str) -> tuple[tuple[JournalEvent, ...], tuple[str, ...]]:
    """Events of whole lines, and a sentence for each line that is no event."""
    events, faults = [], []
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        try:
            events.append(from_plain(JournalEvent, json.loads(line)))
        except (ValueError, DataError) as error:
            faults.append(f"{name}: line {number} of the new ones is no event: {error}")
    return tuple(events), tuple(faults)


def read_journal(path: Path, offset: int, head: str) -> JournalPart:
    """What was appended since `offset`. No file: nothing. A file that begins otherwise than `head` says (an inode would be
    reused), or is shorter than `offset`, is another one and is read from its start.

    Raises OSError when it may not be read. A last line without its end is still being written and stays for the next time.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD)
            found = hashlib.sha256(start[: start.find(b"\n") + 1] or start).hexdigest()
            if os.fstat(file.fileno()).st_size < offset or found != head:
                offset = 0
            file.seek(offset)
            body = file.read()
    except FileNotFoundError:
        return JournalPart((), 0, "")
    whole = body[: body.rfind(b"\n") + 1]
    events, faults = parse_events(whole, str(path))
    return JournalPart(events, offset + len(whole), found, faults)
