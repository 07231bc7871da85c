"""The page "Pool now": five figures, a bar per card for compute and memory, the slices, and what could not be read."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from poolmeter.clock import SystemClock
from poolmeter.dashboards import charts
from poolmeter.dashboards.figures import (
    UNKNOWN,
    Figures,
    Part,
    Share,
    ago,
    compute_parts,
    figures,
    memory_parts,
    percent_ppm,
    plain_text,
    size,
)
from poolmeter.dashboards.reading import CardNow, NodeNow, PoolNow, SliceNow, read_pool
from poolmeter.dashboards.settings import settings
from poolmeter.errors import PoolmeterError
from poolmeter.model.units import MICROSECONDS
from poolmeter.period import rfc3339

NODES_AT_FIRST = 4
FRAME: dict[str, Any] = {"border": True, "height": "stretch", "delta_color": "off", "delta_arrow": "off"}


def show() -> None:
    """The page."""
    st.title("Pool now")
    _live()


@st.fragment(run_every="15s")
def _live() -> None:
    try:
        pool = read_pool(settings().store, SystemClock().wall_us())
    except PoolmeterError as error:
        st.error(plain_text(str(error)), icon=":material/database_off:")
        return
    _age(pool)
    _figures(figures(pool))
    _health(pool)
    colours = charts.colours_of(pool.tenants)
    if pool.cards:
        st.html(charts.legend(colours))
    nodes = [node for node in pool.nodes if any(card.node == node.name for card in pool.cards)]
    if len(nodes) > NODES_AT_FIRST:
        names = [node.name for node in nodes]
        picked = st.multiselect("Nodes", names, default=names[:NODES_AT_FIRST])
        nodes = [node for node in nodes if node.name in picked]
    for node in nodes:
        _node(node, pool, colours)
    st.markdown("#### Slices")
    _slices(pool.slices, pool)


def _age(pool: PoolNow) -> None:
    taken = [node.taken_us for node in pool.nodes if node.taken_us is not None]
    minutes = [card.minute_us for card in pool.cards if card.minute_us is not None and not card.stale]
    words = [f"Snapshot {ago(max(taken, default=None), pool.at_us)} old" if taken else "No snapshot yet"]
    words.append(f"device time of the minute {rfc3339(max(minutes))[11:16]} UTC" if minutes else "no minute closed lately")
    if any(node.simulated for node in pool.nodes):
        words.append("simulated pool")
    st.caption(" · ".join(words))


def _figures(now: Figures) -> None:
    columns = st.columns(5)
    columns[0].metric("Cards", f"{now.cards_up} of {now.cards}", help="Cards that answer, of all that are known.", **FRAME)
    for column, label, share, what, meaning in (
        (columns[1], "Allocated", now.allocated, "cards", "Device time promised to somebody."),
        (columns[2], "Busy", now.busy, "cards", "Device time in which a card ran a kernel of anybody."),
        (columns[3], "Idle allocated", now.idle_allocated, "slices", "Device time promised and not used by those it was promised to."),
        (columns[4], "Unaccounted", now.unaccounted, "cards", "Device time used by programs without the hook: billed to nobody."),
    ):
        column.metric(label, share.text(), share.note(what), help=_help(meaning, share, what), **FRAME)


def _help(meaning: str, share: Share, what: str) -> str:
    return f"{meaning} Part of the cards' last closed minute; {share.known} of {share.total} {what} are known."


def _health(pool: PoolNow) -> None:
    for node in pool.nodes:
        if node.stale:
            since = f"no snapshot for {ago(node.taken_us, pool.at_us)}" if node.taken_us is not None else "no snapshot yet"
            st.warning(
                f"{plain_text(node.name)}: {since}. {plain_text(node.reason or '')} Its cards are {UNKNOWN}.", icon=":material/cloud_off:"
            )
        elif node.reason:
            st.warning(f"{plain_text(node.name)}: {plain_text(node.reason)}", icon=":material/cloud_off:")
    stale = {node.name for node in pool.nodes if node.stale}
    for source in pool.sources:
        if not source.ok and source.node not in stale:
            last = f"last read {ago(source.at_us, pool.at_us)} ago" if source.at_us is not None else "never read"
            reason = f"{plain_text(source.reason)}; " if source.reason else ""
            st.warning(
                f"{plain_text(source.node)}: source {plain_text(source.source)} fails: {reason}{last}.", icon=":material/sensors_off:"
            )


def _node(node: NodeNow, pool: PoolNow, colours: dict[str, str]) -> None:
    cards = [card for card in pool.cards if card.node == node.name]
    facts = [f"{len(cards)} × {model}" for model in dict.fromkeys(card.model for card in cards)]
    if node.pool:
        facts.append(f"pool {node.pool}")
    facts.append(_power(cards))
    st.markdown(f"#### {plain_text(node.name)} :small[:gray[{plain_text(' · '.join(facts))}]]")
    order = [_short(card) for card in cards]
    left, right = st.columns(2)
    for column, title, parts_of in ((left, "Compute, last minute", compute_parts), (right, "Memory", memory_parts)):
        parts: list[Part] = []
        for card in cards:
            on_card = [piece for piece in pool.slices if piece.node == card.node and piece.device_uuid == card.uuid]
            parts += [Part(_short(card), part.owner, part.kind, part.share) for part in parts_of(card, on_card)]
        column.caption(title)
        column.altair_chart(charts.bars(parts, order, colours), width="stretch")


def _short(card: CardNow) -> str:
    return f"card {card.index}" + ("" if card.up else " (down)")


def _power(cards: Sequence[CardNow]) -> str:
    known = [card.power_mw for card in cards if card.power_mw is not None and not card.stale]
    if not known:
        return f"power {UNKNOWN}"
    missing = "" if len(known) == len(cards) else f" ({len(known)} of {len(cards)} cards known)"
    return f"{sum(known) // 1000} W{missing}"


def _slices(slices: Sequence[SliceNow], pool: PoolNow) -> None:
    if not slices:
        st.info("No allocation stands. Make one with: poolmeter run --tenant NAME --compute 50 --memory 10G -- PROGRAM")
        return
    minute = {(card.node, card.uuid): card.span_us for card in pool.cards}
    index = {(card.node, card.uuid): card.index for card in pool.cards}
    rows = []
    for piece in slices:
        span = minute.get((piece.node, piece.device_uuid))
        used = None if not span or piece.used_us is None or piece.stale else percent_ppm(piece.used_us * MICROSECONDS // span)
        never = piece.last_activity_us is None and piece.state in ("allocated", "held")
        rows.append(
            {
                "tenant": piece.tenant,
                "state": UNKNOWN if piece.stale else piece.state,
                "node": piece.node,
                "card": str(index.get((piece.node, piece.device_uuid), UNKNOWN)),
                "promise": percent_ppm(piece.promise_ppm) or UNKNOWN,
                "limit": percent_ppm(piece.compute_limit_ppm) or "none",
                "used, last minute": used or UNKNOWN,
                "memory limit": "none" if piece.memory_limit_bytes is None else size(piece.memory_limit_bytes),
                "memory used": UNKNOWN if piece.stale else size(piece.memory_used_bytes),
                "last activity": "never" if never else ago(piece.last_activity_us, pool.at_us),
                "denied": UNKNOWN if piece.denied_allocations_total is None else str(piece.denied_allocations_total),
                "project": piece.project or "",
                "workload": piece.workload or "",
                "allocation": piece.allocation_id,
            }
        )
    st.dataframe(pd.DataFrame(rows), hide_index=True, width="stretch")
