"""What a journal that has grown too long keeps: pure, lines in and lines out.

Kept are the last word on every allocation that is still there, the newest decisions (none is carried out twice), and what is so recent
that an exporter which was down may not have read it. The rest has been carried by the exporter and is in the store.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from poolmeter.enforcer.journal import COMPACTED, parse_line
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import canonical_json
from poolmeter.model.units import DAY_US

KEEP_US = 8 * DAY_US  # a day more than a spool keeps its records unless configured
KEEP_BYTES = 16 << 20
KEEP_DECISIONS = 5000


def compact(
    lines: Sequence[bytes], allocations: Collection[str], now_us: int, *, keep_bytes: int = KEEP_BYTES, keep_decisions: int = KEEP_DECISIONS
) -> list[bytes] | None:
    """The lines to keep, in their order, or None when all of them are; `allocations` are the ids that are still there.

    The first line is a mark unlike any before it, so that a reader that knows the file by its first line reads it anew and passes over
    what it knows by number and time. A second mark stands where the newest dropped event stood, with its number: a reader that has not
    come so far learns that something is missing.
    """
    events = [_outline(parse_line(line, f"journal line {number}")) for number, line in enumerate(lines, 1)]
    recent: set[int] = set()
    left = keep_bytes
    for index in range(len(lines) - 1, -1, -1):
        left -= len(lines[index])
        if left < 0 or events[index].at_us < now_us - KEEP_US:
            break
        recent.add(index)
    last_word = {event.allocation_id: index for index, event in enumerate(events) if event.allocation is not None}
    decisions = [index for index, event in enumerate(events) if event.decision_id is not None]
    kept = {*recent, *(last_word[key] for key in allocations if key in last_word), *decisions[-keep_decisions:]}
    dropped = [index for index, event in enumerate(events) if index not in kept and event.kind != COMPACTED]
    if not dropped:
        return None
    # An earlier mark stays the newest where only older events go now: numbers never run backwards.
    place = max([*dropped, *(index for index, event in enumerate(events) if event.kind == COMPACTED and event.sequence > 0)])
    newest = events[place]
    before = sum(int((event.reason or "0").split()[0]) for event in events if event.kind == COMPACTED and event.sequence == 0)
    count = f"{before + len(dropped)} events up to {newest.sequence} are no longer here"
    head = _line(JournalEvent(0, 0, COMPACTED, reason=count))
    mark = _line(JournalEvent(newest.sequence, newest.at_us, COMPACTED, reason=count))
    out = [head]
    for index, line in enumerate(lines):
        if index == place:
            out.append(mark)
        elif index in kept and events[index].kind != COMPACTED:
            out.append(line)
    return out


def _outline(event: JournalEvent) -> JournalEvent:
    """The event without what is largest in it: all of a journal's are held at once, while every request waits."""
    return replace(event, allocation=None if event.allocation is None else {}, demand=None)


def _line(event: JournalEvent) -> bytes:
    return canonical_json(event).encode() + b"\n"
