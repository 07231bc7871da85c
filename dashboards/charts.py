"""Altair charts, and the colours that mean the same thing on every page, on light and dark ground."""

import html
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from poolmeter.dashboards.figures import FREE, NOBODY, NOT_KNOWN, SWITCHING, UNACCOUNTED, Part, percent

if TYPE_CHECKING:
    import altair as alt

# Mid-tones: legible on white and on Streamlit's dark ground.
_TENANTS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#d4a72c", "#9d755d", "#2f9fd0",
    "#8fae3a", "#ff7f9c", "#6b6ecf", "#bd6b39", "#3f8f86", "#c9a0dc", "#a0a54a", "#7b5ea7",
)  # fmt: skip
_NOBODY = {UNACCOUNTED: "#d62728", SWITCHING: "#7f4fc9", FREE: "#9a9a9a", NOT_KNOWN: "#787d88"}
_LINES = {"idle": "#c0a16b", "unallocated": "#9a9a9a", "overhead": "#7f4fc9"}
_OPACITY = {"used": 1.0, "promised": 0.35, "other": 0.9}
CARD_PX = 24
OWNER_PX = 30


def colours_of(tenants: Sequence[str]) -> dict[str, str]:
    """A colour per tenant, by its place among all tenants the store has seen."""
    return {tenant: _TENANTS[i % len(_TENANTS)] for i, tenant in enumerate(tenants)}


def legend(colours: Mapping[str, str]) -> str:
    """One line of HTML that says what the colours mean; names are escaped, a tenant chose its own."""

    def item(background: str, text: str, opacity: float = 1.0) -> str:
        style = f"display:inline-block;width:.8em;height:.8em;border-radius:2px;background:{background};opacity:{opacity}"
        return f'<span style="white-space:nowrap;margin-right:1.1em"><span style="{style}"></span> {html.escape(text)}</span>'

    items = [item(colour, tenant) for tenant, colour in colours.items()]
    pale = f"{_TENANTS[0]}{round(255 * _OPACITY['promised']):02x}"
    items.append(item(f"linear-gradient(90deg,{_TENANTS[0]} 50%,{pale} 50%)", "full: used, pale: promised and not used"))
    items += [item(_NOBODY[name], name.strip("()"), 0.25 if name == FREE else 1.0) for name in NOBODY]
    return f'<div style="font-size:.85rem;line-height:1.6">{"".join(items)}</div>'


def bars(parts: Sequence[Part], order: Sequence[str], colours: Mapping[str, str]) -> "alt.Chart":
    """A bar per card, filled by its parts from left to right; cards in `order`, which is also how tall the chart is."""
    import altair as alt
    import pandas as pd

    rank = {name: i for i, name in enumerate([*colours, UNACCOUNTED, SWITCHING, NOT_KNOWN, FREE])}
    rows = [
        {
            "card": part.card,
            "whose": part.owner.strip("()") if part.owner in NOBODY else part.owner,
            "what": part.kind if part.owner not in NOBODY else "",
            "share": float(part.share),  # for drawing alone
            "text": percent(part.share),
            "colour": _NOBODY.get(part.owner) or colours.get(part.owner, "#5a5a5a"),
            "opacity": 0.25 if part.owner == FREE else _OPACITY[part.kind],
            # Used parts of all tenants first, then promised ones, then nobody's: the filled length reads as "busy".
            "rank": {"used": 0, "promised": 1000, "other": 2000 if part.owner == FREE else 500}[part.kind] + rank.get(part.owner, 999),
        }
        for part in parts
    ]
    chart: alt.Chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            x=alt.X(
                "share:Q",
                stack="zero",
                title=None,
                scale=alt.Scale(domain=[0, 1], clamp=True),
                axis=alt.Axis(format="%", tickCount=5, grid=True),
            ),
            y=alt.Y(
                "card:N", sort=list(order), title=None, axis=alt.Axis(labelLimit=110, minExtent=84, labelOverlap=False, labelFlush=False)
            ),
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("opacity:Q", scale=None),
            order=alt.Order("rank:Q"),
            tooltip=[alt.Tooltip("card:N"), alt.Tooltip("whose:N"), alt.Tooltip("what:N"), alt.Tooltip("text:N", title="share")],
        )
        .properties(height=CARD_PX * len(order) + 30)
    )
    return chart


def cost_bars(rows: Sequence[tuple[str, str, Decimal]], currency: str, colours: Mapping[str, str]) -> "alt.Chart":
    """A bar per owner of (owner, line, cost), stacked by line. Lengths are floats for drawing; the tooltip holds the exact amount."""
    import altair as alt
    import pandas as pd

    owners = list(dict.fromkeys(owner for owner, _, _ in rows))
    table = [
        {
            "owner": owner,
            "line": line,
            "length": float(cost),
            "cost": f"{cost:f} {currency}",
            "colour": colours.get(owner) or _LINES.get(line, "#5a5a5a"),
            "opacity": 1.0 if line == "usage" else 0.6,
        }
        for owner, line, cost in rows
    ]
    chart: alt.Chart = (
        alt.Chart(pd.DataFrame(table))
        .mark_bar(height={"band": 0.72})
        .encode(
            x=alt.X("sum(length):Q", stack="zero", title=currency, axis=alt.Axis(tickCount=6)),
            y=alt.Y("owner:N", sort=owners, title=None, axis=alt.Axis(labelLimit=180)),
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("opacity:Q", scale=None),
            detail="line:N",
            tooltip=[alt.Tooltip("owner:N"), alt.Tooltip("line:N"), alt.Tooltip("cost:N")],
        )
        .properties(height=OWNER_PX * len(owners) + 50)
    )
    return chart
