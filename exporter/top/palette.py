"""Roles as terminal styles: the terminal's own sixteen colours, so that any background and any old terminal will do; or none at all."""

from rich.style import Style

_PLAIN = {
    "": Style(),
    "header": Style(bold=True, reverse=True),
    "headerstale": Style(bold=True, reverse=True),
    "title": Style(bold=True),
    "sorted": Style(bold=True, underline=True),
    "card": Style(bold=True),
    "dim": Style(dim=True),
    "unknown": Style(dim=True),
    "bad": Style(bold=True),
    "cursor": Style(reverse=True),
    "keys": Style(),
    "key": Style(bold=True),
}
_COLOURS = {
    **_PLAIN,
    "headerstale": Style(bold=True, color="white", bgcolor="red"),
    "title": Style(color="black", bgcolor="green"),
    "sorted": Style(color="black", bgcolor="cyan"),
    "tenant": Style(color="cyan"),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "trend": Style(color="green"),
    "unknown": Style(color="yellow", dim=True),
    "key": Style(color="black", bgcolor="cyan"),
}
_NONE = Style()


def style(role: str, colour: bool) -> Style:
    """The style of a role; one that is not known has none of its own."""
    return (_COLOURS if colour else _PLAIN).get(role, _NONE)
