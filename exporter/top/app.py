"""The live view: header, three panes, a line of keys. It asks in a thread, so that a slow exporter never holds up a key."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Hashable

from rich.segment import Segment
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from poolmeter.errors import PoolmeterError
from poolmeter.exporter.top import header, tree
from poolmeter.exporter.top.columns import Cell
from poolmeter.exporter.top.details import details
from poolmeter.exporter.top.grid import Grid
from poolmeter.exporter.top.palette import style
from poolmeter.exporter.top.panes import (
    FALLING,
    CardLine,
    card_columns,
    matches,
    sort_processes,
    tenant_columns,
)
from poolmeter.exporter.top.plain import card_lines
from poolmeter.exporter.top.rows import CardRow, Frame, PartRow, ProcessRow, SliceRow, TenantRow
from poolmeter.exporter.top.screens import DetailsScreen, HelpScreen, SignalScreen
from poolmeter.exporter.top.signals import send
from poolmeter.exporter.top.watch import Watch
from poolmeter.exporter.top.words import clean, fitted

_KEYS = (
    ("h", "help"), ("tab", "pane"), ("enter", "details"), ("/", "filter"), ("T", "tree"), ("u m t p c", "sort"), ("q", "quit"), ("z", "pause"),
)  # fmt: skip
_SORT_KEYS = {
    "u": "use", "m": "memory", "p": "pid", "t": "tenant", "c": "cpu", "s": "rss", "o": "user", "d": "card", "w": "command",
}  # fmt: skip


class Lines(Widget):
    """Some lines of pieces, drawn as they are."""

    def __init__(self, colour: bool, name: str) -> None:
        super().__init__(id=name)
        self._colour = colour
        self.lines: list[Cell] = []

    def show(self, lines: list[Cell]) -> None:
        """Put these lines there; the widget takes as much height as they need."""
        if lines == self.lines:
            return
        if len(lines) != len(self.lines):
            self.styles.height = len(lines)
        self.lines = lines
        self.refresh()

    def render_line(self, y: int) -> Strip:
        pieces = self.lines[y] if y < len(self.lines) else ()
        return Strip([Segment(text, style(role, self._colour)) for text, role in pieces]).adjust_cell_length(self.size.width)


class TopApp(App[None]):
    """What `poolmeter top` runs on a terminal."""

    CSS = """
    Screen { overflow: hidden; background: ansi_default; }
    #head, #foot { height: 1; }
    #processes { height: 1fr; min-height: 2; }
    #filter { height: 1; border: none; padding: 0; display: none; background: ansi_default; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "poolmeter top"
    BINDINGS = [
        Binding("q,f10", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("h,question_mark,f1", "help", "help"),
        Binding("j,down", "move(1)", "down"),
        Binding("k,up", "move(-1)", "up"),
        Binding("pagedown,ctrl+f", "page(1)", "page down"),
        Binding("pageup,ctrl+b", "page(-1)", "page up"),
        Binding("g,home", "move(-1000000)", "first"),
        Binding("G,end", "move(1000000)", "last"),
        Binding("tab", "app.focus_next", "next pane"),
        Binding("shift+tab", "app.focus_previous", "previous pane"),
        Binding("enter", "details", "details"),
        Binding("slash,f4", "filter", "filter"),
        Binding("escape", "clear", "clear"),
        Binding("T,f5", "tree", "tree"),
        Binding("a", "tenants", "tenants"),
        Binding("v", "slices", "slices"),
        Binding("r,I", "reverse", "reverse"),
        Binding("z,space", "pause", "pause"),
        Binding("x,f9", "signal", "signal"),
        *[Binding(key, f"sort('{name}')", name) for key, name in _SORT_KEYS.items()],
    ]

    def __init__(self, watch: Watch, interval_s: float = 1.0, sort: str = "use", needle: str = "", signals: bool = False) -> None:
        self.coloured = not os.environ.get("NO_COLOR")  # before Textual takes it out of the environment
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self._watch, self._interval_s = watch, interval_s
        self.sort_key, self.reversed, self.needle, self.signals = sort, False, needle, signals
        self.as_tree, self.paused, self.with_slices = False, False, True
        self.frame = Frame(0)
        self.note: tuple[str, str] | None = None
        self._lock = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield Lines(self.coloured, "head")
        yield Grid[CardLine](card_columns(False), _card_key, lambda row: row.stale, " no card to show", "cards")
        yield Grid[TenantRow](tenant_columns(), lambda row: row.tenant, lambda row: row.stale, " no allocation stands", "tenants")
        yield Grid[tree.Line](tree.columns(False), tree.key, tree.faded, " no process to show", "processes")
        yield Input(placeholder="show processes that contain…", id="filter", compact=True)
        yield Lines(self.coloured, "foot")

    def on_mount(self) -> None:
        for grid in self.query(Grid):
            grid.colour = self.coloured
        self.query_one("#processes").focus()
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: whoever runs it sees to its end
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.set_interval(self._interval_s, self.turn)
        self.turn()

    @work(exclusive=False, group="turn")
    async def turn(self) -> None:
        """Ask and show. One at a time: while an address is slow, only what is known grows older on the screen."""
        if self._lock.locked():
            self.show()
            return
        async with self._lock:
            await asyncio.to_thread(self._watch.poll)
        self.show()

    def show(self) -> None:
        """Make a frame of what is known and put it on the screen, unless it stands still."""
        if not self.paused:
            self.frame = self._watch.frame()
        self.draw()

    def draw(self) -> None:
        """Put the frame there as it is to be looked at now."""
        if not self.is_running or not self.screen_stack:
            return
        base, frame = self.screen_stack[0], self.frame
        many = len(frame.nodes) > 1
        width, height = self.size
        head = header.lines(frame, width, max(1, height // 6))
        base.query_one("#head", Lines).show(head)
        cards = card_lines(frame, self.with_slices)
        base.query_one("#cards", Grid).show(cards, card_columns(many))
        tenants = base.query_one("#tenants", Grid)
        tenants.show(frame.tenants)
        shown = [row for row in frame.processes if matches(row, self.needle)] if self.needle else list(frame.processes)
        ordered = sort_processes(tuple(shown), self.sort_key, self.reversed)
        lines = tree.by_tenant(ordered) if self.as_tree else list(ordered)
        falling = (self.sort_key in FALLING) != self.reversed
        base.query_one("#processes", Grid).show(lines, tree.columns(many), self.sort_key, falling)
        self._heights(height - len(head) - 1, len(cards), len(frame.tenants), len(lines))
        base.query_one("#foot", Lines).show([self._foot(width, len(shown), len(frame.processes))])

    def _heights(self, room: int, cards: int, tenants: int, processes: int) -> None:
        # Each pane gets what it needs, as far as there is room; then the more important ones first, up to a fair part.
        pane = self.screen_stack[0].query_one("#tenants")
        wanted = {"cards": cards + 1, "tenants": tenants + 1 if pane.display else 0, "processes": processes + 1}
        given = {name: min(lines, least) for (name, lines), least in zip(wanted.items(), (4, 3, 5), strict=True)}
        left = max(0, room - sum(given.values()))
        for name, most in (("tenants", room // 4), ("cards", room // 2), *((name, room) for name in ("processes", "cards", "tenants"))):
            more = min(left, max(0, min(wanted[name], most) - given[name]))
            given[name] += more
            left -= more
        pane.styles.height = given["tenants"]
        self.screen_stack[0].query_one("#cards").styles.height = given["cards"]

    def _foot(self, width: int, shown: int, all_of: int) -> Cell:
        if self.note is not None:
            return ((fitted(f" {self.note[0]}", width), self.note[1]),)
        state = []
        if self.paused:
            state.append("STANDING STILL")
        if self.needle:
            state.append(f"filter {clean(self.needle)!r}: {shown} of {all_of}")
        pieces: list[tuple[str, str]] = [(f" {', '.join(state)} ", "warn")] if state else []
        used = sum(len(text) for text, _ in pieces)
        for key, word in _KEYS:
            if used + len(key) + len(word) + 3 > width:
                break
            pieces += [(f" {key}", "key"), (f" {word} ", "keys")]
            used += len(key) + len(word) + 3
        return tuple(pieces)

    def _focused(self) -> "Grid[object] | None":
        return self.focused if isinstance(self.focused, Grid) else None

    def action_move(self, by: int) -> None:
        """The cursor of the pane."""
        if grid := self._focused():
            grid.move(by)

    def action_page(self, by: int) -> None:
        """A page of the pane."""
        if grid := self._focused():
            grid.move(by * max(1, grid.size.height - 1))

    def action_sort(self, name: str) -> None:
        """Sort by it; once more turns it round."""
        self.reversed = not self.reversed if self.sort_key == name else False
        self.sort_key = name
        self.draw()

    def action_reverse(self) -> None:
        """The other way round."""
        self.reversed = not self.reversed
        self.draw()

    def action_tree(self) -> None:
        """Processes under their tenants, or all in one list."""
        self.as_tree = not self.as_tree
        self.draw()

    def action_tenants(self) -> None:
        """Hide or show the pane of tenants."""
        pane = self.query_one("#tenants")
        if pane.has_focus:
            self.query_one("#processes").focus()
        pane.display = not pane.display
        self.draw()

    def action_slices(self) -> None:
        """Cards alone, or each with its slices."""
        self.with_slices = not self.with_slices
        self.draw()

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self.paused = not self.paused
        self.show()

    def action_help(self) -> None:
        """The keys."""
        self.push_screen(HelpScreen())

    def action_details(self) -> None:
        """Everything of the row under the cursor."""
        if (grid := self._focused()) and (row := grid.under_cursor()) is not None:
            self._open(row)

    def on_grid_opened(self, message: Grid.Opened) -> None:
        self._open(message.row)

    def _open(self, row: object) -> None:
        if isinstance(row, tree.Branch):
            row = next((tenant for tenant in self.frame.tenants if tenant.tenant == row.tenant), None)
        if isinstance(row, (CardRow, PartRow, SliceRow, TenantRow, ProcessRow)):
            self.push_screen(DetailsScreen(type(row).__name__.removesuffix("Row").lower(), details(row)))

    def action_filter(self) -> None:
        """Ask for the text."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.value = self.needle
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.display:
            self.needle = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._end_filter()

    def on_key(self, event: events.Key) -> None:
        self.note = None
        if event.key == "escape" and isinstance(self.focused, Input):
            event.stop()
            self.action_clear()

    def _end_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one("#processes").focus()
        self.draw()

    def action_clear(self) -> None:
        """No filter."""
        self.needle = ""
        self._end_filter()

    def action_signal(self) -> None:
        """Ask which signal to send to the process under the cursor."""
        row = self.query_one("#processes", Grid).under_cursor()
        if not self.signals:
            self._say("signals are off: start poolmeter top with --allow-signals", "warn")
        elif not isinstance(row, ProcessRow):
            self._say("no process is under the cursor", "warn")
        else:
            self._ask(row)

    @work
    async def _ask(self, row: ProcessRow) -> None:
        question = f"Send process {row.process.pid} of {row.tenant} a signal? ({row.process.command or 'name not known'})"
        number = await self.push_screen_wait(SignalScreen(question))
        if number is None:
            return
        try:
            send(row, number)
            self._say(f"{number.name} sent to process {row.process.pid}", "warn")
        except PoolmeterError as error:
            self._say(str(error), "bad")

    def _say(self, text: str, role: str) -> None:
        self.note = (text, role)
        self.draw()


def _card_key(row: CardLine) -> Hashable:
    if isinstance(row, CardRow):
        return row.node, row.device.uuid
    if isinstance(row, PartRow):
        return row.node, row.kind, row.id
    return row.node, row.slice.device_uuid, row.slice.allocation_id
