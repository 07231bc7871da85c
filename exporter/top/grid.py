"""A table that draws only the lines on the screen, so that five hundred processes cost as much as twenty."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from poolmeter.exporter.top.columns import Column, Placed, heading, line, place
from poolmeter.exporter.top.palette import style

R = TypeVar("R")
_MEASURED = 200  # rows that widths are taken from; the rest is cut to them


class Grid(Widget, Generic[R], can_focus=True):
    """Rows under titles, with a cursor that stays on its row while rows come, go and change their order.

    `key` names a row for as long as it lives; `faded`: its values are old. `empty` stands where there are no rows.
    """

    DEFAULT_CSS = "Grid { height: 1fr; }"
    colour = reactive(True)

    class Opened(Message):
        """Enter, or a click on the row under the cursor."""

        def __init__(self, row: object) -> None:
            self.row = row
            super().__init__()

    def __init__(
        self, columns: Sequence[Column[R]], key: Callable[[R], Hashable], faded: Callable[[R], bool], empty: str, name: str
    ) -> None:
        super().__init__(id=name)
        self._columns = list(columns)
        self._key, self._faded, self._empty = key, faded, empty
        self.rows: list[R] = []
        self.top = 0
        self.cursor = 0
        self.sorted_by: str | None = None
        self.falling = True
        self._placed: list[Placed[R]] = []
        self._placed_for: tuple[int, int] = (-1, 0)
        self._version = 0

    def show(
        self, rows: Sequence[R], columns: Sequence[Column[R]] | None = None, sorted_by: str | None = None, falling: bool = True
    ) -> None:
        """Put these rows there; the cursor stays on the row it was on, else at its place."""
        before = self._key(self.rows[self.cursor]) if self.cursor < len(self.rows) else None
        if columns is not None:
            self._columns = list(columns)
        self.rows, self.sorted_by, self.falling = list(rows), sorted_by, falling
        # At the top it stays at the top: whoever watches the biggest does not follow one that has become small.
        if before is not None and self.cursor > 0:
            self.cursor = next((index for index, row in enumerate(self.rows) if self._key(row) == before), self.cursor)
        self._version += 1
        self._settle()

    def under_cursor(self) -> R | None:
        """The row the cursor is on; None when there is none."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def move(self, by: int) -> None:
        """The cursor, up or down, as far as there are rows."""
        self.cursor += by
        self._settle()

    def _settle(self) -> None:
        self.cursor = max(0, min(self.cursor, len(self.rows) - 1))
        room = max(1, self.size.height - 1)
        self.top = max(0, min(self.top, len(self.rows) - room))
        if self.cursor < self.top:
            self.top = self.cursor
        elif self.cursor >= self.top + room:
            self.top = self.cursor - room + 1
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if self._placed_for != (width, self._version):
            self._placed = place(self._columns, self.rows[self.top : self.top + _MEASURED], width)
            self._placed_for = (width, self._version)
        index = self.top + y - 1
        if y == 0:
            role = "title"
            pieces = heading(self._placed, self.sorted_by, self.falling) if self.rows else [(self._empty, "title")]
        elif index < len(self.rows):
            role, pieces = "", line(self._placed, self.rows[index])
        else:
            role, pieces = "", []
        segments = [Segment(text, self._style(kind or role)) for text, kind in pieces]
        strip = Strip(segments).adjust_cell_length(width, self._style(role))
        if y > 0 and index < len(self.rows):
            if self._faded(self.rows[index]):
                strip = Strip([Segment(part.text, Style(dim=True)) for part in strip])
            if index == self.cursor and self.has_focus:
                strip = Strip([Segment(part.text, self._style("cursor")) for part in strip])
        return strip

    def _style(self, role: str) -> Style:
        return style(role, self.colour)

    def on_resize(self, event: events.Resize) -> None:
        self._settle()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move(-3)

    def on_click(self, event: events.Click) -> None:
        index = self.top + event.y - 1
        if event.y > 0 and index < len(self.rows):
            if index == self.cursor and event.chain > 1:
                self.post_message(self.Opened(self.rows[index]))
            self.cursor = index
            self._settle()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
