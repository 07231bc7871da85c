"""What opens over the panes: help, the details of a row, and the question before a signal."""

import signal
from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from poolmeter.exporter.top.words import clean

HELP = """\
 up down j k   move                   tab shift+tab  next, previous pane
 pgup pgdn     a page                 home end g G   first, last row
 enter         details of the row     / F4           filter processes by text
 esc           no filter; close       T F5           processes as a tree
 a             hide or show tenants   v              cards without slices
 x F9          send a signal          r I            sort the other way round
 z space       stand still, go on     h ? F1, q F10  this help, quit

 sort by:  u device time   m memory    t tenant    p pid    c host CPU
           s host memory   o user      d card      w command

 TIME and USE are parts of the card's time over the last three seconds,
 CPU is of one core. LIMIT: of a card what is promised, of a slice its
 limit (~: a promise without a limit). THROT: part of the time in which
 programs wait for their limit. LATELY: the card's use, 2 s a column.
 ? is not known, which is never 0; what does not apply is empty. Values
 of a node that cannot be reached are dim, with its last (state).
"""


class _Box(ModalScreen[None]):
    BINDINGS = [
        Binding("escape,q,enter,h,question_mark,f1,f10", "dismiss", "close"),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
    ]
    DEFAULT_CSS = """
    _Box { align: center middle; background: transparent; }
    _Box VerticalScroll { width: 84; max-width: 100%; height: auto; max-height: 100%; border: solid ansi_cyan; background: ansi_default; }
    """

    def action_scroll(self, by: int) -> None:
        """Scroll what is longer than the box."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


class HelpScreen(_Box):
    """The keys."""

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "keys"
            yield Static(Text(HELP.rstrip("\n")))


class DetailsScreen(_Box):
    """Names and values of one row, as they were when it was opened."""

    def __init__(self, title: str, values: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._values = title, values

    def compose(self) -> ComposeResult:
        width = max((len(name) for name, _ in self._values), default=0)
        # Text, not markup: a name with brackets in it is still only a name.
        text = Text()
        for name, value in self._values:
            text.append(f" {name.rjust(width)}  ", style="bold")
            text.append(clean(value) + "\n")
        text.rstrip()
        with VerticalScroll() as box:
            box.border_title = Text(self._title)
            yield Static(text)


class SignalScreen(ModalScreen[signal.Signals | None]):
    """Which signal, if any; what is dismissed with None sends nothing."""

    BINDINGS = [
        Binding("t", "choose('SIGTERM')", "TERM"),
        Binding("i", "choose('SIGINT')", "INT"),
        Binding("k", "choose('SIGKILL')", "KILL"),
        Binding("escape,q,n,enter", "choose('')", "nothing"),
    ]
    DEFAULT_CSS = """
    SignalScreen { align: center middle; background: transparent; }
    SignalScreen Static { width: 70; max-width: 100%; height: auto; border: heavy ansi_red; background: ansi_default; padding: 0 1; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(
            Text(f"{clean(self._question)}\n\nt  TERM: ask it to end\ni  INT: interrupt it\nk  KILL: end it now\nesc  send nothing")
        )

    def action_choose(self, name: str) -> None:
        """Close with the choice."""
        self.dismiss(signal.Signals[name] if name else None)
