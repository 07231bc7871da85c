"""The lines above the panes: whose snapshot this is, how old, and what is wrong with it."""

from datetime import datetime

from poolmeter.exporter.top.columns import Cell
from poolmeter.exporter.top.rows import Frame, NodeRow
from poolmeter.exporter.top.words import UNKNOWN, clean, duration, fitted, width_of
from poolmeter.model.units import MICROSECONDS


def clock(us: int) -> str:
    """The local time of day."""
    return datetime.fromtimestamp(us / MICROSECONDS).astimezone().strftime("%H:%M:%S")


def lines(frame: Frame, width: int, most: int) -> list[Cell]:
    """The summary, then at most `most` lines of trouble; each exactly `width` columns."""
    out = [_summary(frame, width)]
    troubles = _troubles(frame)
    if len(troubles) > most:
        troubles = [*troubles[: most - 1], (f"and {len(troubles) - most + 1} more (--once lists all)", "warn")] if most else []
    return out + [((fitted(f" ! {text}", width), role),) for text, role in troubles]


def _summary(frame: Frame, width: int) -> Cell:
    cards = len(frame.cards)
    up = sum(card.state == "ok" and not card.stale for card in frame.cards)
    names = [clean(node.name) for node in frame.nodes]
    who = names[0] if len(names) == 1 else f"{len(names)} nodes" if names else "no node yet"
    drivers = sorted({node.driver for node in frame.nodes if node.driver})
    facts = [f"{up} of {cards} card{'s' * (cards != 1)} up"] if frame.nodes else []
    if frame.nodes:
        facts.append(f"driver {clean(drivers[0]) if len(drivers) == 1 else UNKNOWN if not drivers else f'{len(drivers)} versions'}")
    if any(node.simulated for node in frame.nodes):
        facts.insert(1, "simulated")
    age = max((node.age_us for node in frame.nodes), default=None)
    stale = any(node.stale for node in frame.nodes)
    fresh = "" if age is None else f"{duration(age)} old"
    right = f"{fresh}{' STALE' if stale else ''} · {clock(frame.at_us)} " if fresh else f"{clock(frame.at_us)} "
    room = width - width_of(right)
    left = f" poolmeter top  {who}"
    if room < 20:
        return ((fitted(left, width), "header"),)
    for fact in facts:
        if width_of(left) + 3 + width_of(fact) < room:
            left += f" · {fact}"
    return ((fitted(left, room - 1) + " ", "header"), (right, "headerstale" if stale else "header"))


def _troubles(frame: Frame) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = [
        (f"{url}: not reachable since {clock(since)}: {clean(why)}", "bad") for url, since, why in frame.missing
    ]
    for node in frame.nodes:
        name = clean(node.name)
        if node.gone_since_us is not None:
            found.append((f"{name}: not reachable since {clock(node.gone_since_us)}: {clean(node.error or UNKNOWN)}", "bad"))
        elif node.stale:
            found.append((f"{name}: stale, nothing new since {clock(node.taken_us + (node.skew_us or 0))}", "bad"))
        if not node.stale:
            found += [(f"{name}: {clean(reason)}", "warn") for reason in node.trouble]
        if node.skew_us is not None:
            found.append((_skew(node, name), "warn"))
    return found


def _skew(node: NodeRow, name: str) -> str:
    skew = node.skew_us or 0
    return f"{name}: its clock is {duration(abs(skew))} {'behind' if skew > 0 else 'ahead of'} this machine's"
