"""The live view on a screen that exists only in memory: keys, sorting, filter, tree, sizes, staleness, hostile names, signals."""

import asyncio
import dataclasses
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from exporter_top_fakes import HOSTILE, Watched, later, part, process, snapshot
from textual.pilot import Pilot

from poolmeter.errors import Refused
from poolmeter.exporter.top.app import TopApp
from poolmeter.exporter.top.grid import Grid
from poolmeter.exporter.top.host import Host
from poolmeter.exporter.top.screens import DetailsScreen, HelpScreen, SignalScreen
from poolmeter.exporter.top.signals import send
from poolmeter.model.snapshot import Snapshot
from poolmeter.vendors.proc import start_ticks_of

Shown = tuple[TopApp, Pilot[None], Watched]


@asynccontextmanager
async def shown(made: Watched, size: tuple[int, int] = (120, 40), signals: bool = False) -> AsyncIterator[Shown]:
    """The view, drawn once; turns are the test's own."""
    app = TopApp(made.watch, 3600.0, signals=signals)
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(30):
            while not made.feed.polls or not app.frame.at_us:
                await pilot.pause()
        yield app, pilot, made


def lines(app: TopApp, name: str) -> list[str]:
    """What stands on the lines of a pane."""
    widget = app.screen_stack[0].query_one(f"#{name}")
    return [widget.render_line(y).text for y in range(widget.size.height)]


def pids(app: TopApp) -> list[int]:
    """The processes in the order shown."""
    return [row.process.pid for row in app.screen_stack[0].query_one("#processes", Grid).rows]


def many(count: int = 300) -> Snapshot:
    """A node with many processes."""
    return snapshot(processes=tuple(process(pid, "vision" if pid % 2 else "search") for pid in range(1, count + 1)))


async def test_everything_is_there(tmp_path: Path) -> None:
    first = snapshot()
    async with shown(Watched(tmp_path, first), (80, 24)) as (app, pilot, made):
        made.say(later(first, card=600_000, vision=500_000))
        app.show()
        await pilot.pause()
        assert "gpu-01" in lines(app, "head")[0] and "driver 580.1" in lines(app, "head")[0]
        cards = lines(app, "cards")
        assert "NVIDIA H200" in cards[1] and "60%" in cards[1] and "51C" in cards[1] and "300W" in cards[1]
        assert "search" in cards[2] and "vision" in cards[3] and "50%" in cards[3] and "25%" in cards[3]
        assert "(unaccounted)" in lines(app, "tenants")[3]
        assert "vision" in lines(app, "processes")[1] and "no hook" in "".join(lines(app, "processes"))
        assert "help" in lines(app, "foot")[0] and "quit" in lines(app, "foot")[0]


async def test_sorting_by_key_and_the_other_way_round(tmp_path: Path) -> None:
    async with shown(Watched(tmp_path, snapshot())) as (app, pilot, _):
        await pilot.press("m")
        assert pids(app) == [10, 9, 200] and "MEM▼" in lines(app, "processes")[0]
        await pilot.press("m")
        assert pids(app) == [9, 10, 200] and "MEM▲" in lines(app, "processes")[0]
        await pilot.press("p")
        assert pids(app) == [9, 10, 200] and "PID▲" in lines(app, "processes")[0]
        await pilot.press("I")
        assert pids(app) == [200, 10, 9]
        await pilot.press("t")
        assert pids(app) == [9, 10, 200]
        for key in "ucsodw":
            await pilot.press(key)
            assert sorted(pids(app)) == [9, 10, 200]


async def test_the_cursor_moves_and_stays_on_its_row(tmp_path: Path) -> None:
    first = many()
    async with shown(Watched(tmp_path, first)) as (app, pilot, made):
        grid = app.query_one("#processes", Grid)
        await pilot.press("p", "j", "down", "down", "k")
        assert grid.cursor == 2 and grid.under_cursor().process.pid == 3
        made.say(dataclasses.replace(later(first), processes=first.processes[1:]))
        app.show()
        assert grid.under_cursor().process.pid == 3 and grid.cursor == 1, "a row above it went, the cursor goes with its own"
        await pilot.press("G")
        assert grid.cursor == 298 and grid.top + grid.size.height - 1 == 299
        await pilot.press("pageup")
        assert grid.cursor == 298 - (grid.size.height - 1)
        await pilot.press("g", "up")
        assert grid.cursor == 0 and grid.top == 0
        made.say(dataclasses.replace(later(first, 2_000_000), processes=()))
        app.show()
        await pilot.press("j", "enter", "G")
        assert grid.under_cursor() is None and "no process to show" in lines(app, "processes")[0]


async def test_panes_take_turns(tmp_path: Path) -> None:
    async with shown(Watched(tmp_path, snapshot())) as (app, pilot, _):
        seen = []
        for _ in range(3):
            await pilot.press("tab")
            seen.append(app.focused.id if app.focused else None)
        assert seen == ["cards", "tenants", "processes"]
        await pilot.press("shift+tab")
        assert app.focused is not None and app.focused.id == "tenants"
        await pilot.press("a")
        assert app.focused is not None and app.focused.id == "processes" and not app.query_one("#tenants").display
        await pilot.press("a")
        assert app.query_one("#tenants").display
        await pilot.press("v")
        assert len(app.query_one("#cards", Grid).rows) == 1
        await pilot.press("v")
        assert len(app.query_one("#cards", Grid).rows) == 3


async def test_filter(tmp_path: Path) -> None:
    async with shown(Watched(tmp_path, snapshot())) as (app, pilot, _):
        await pilot.press("slash", *"visq")
        assert pids(app) == [] and app.is_running, "q is a letter here"
        await pilot.press("backspace", "enter")
        assert pids(app) == [10] and "filter 'vis': 1 of 3" in lines(app, "foot")[0]
        assert app.focused is not None and app.focused.id == "processes"
        await pilot.press("escape")
        assert sorted(pids(app)) == [9, 10, 200]
        await pilot.press("f4", *"no hook", "escape")
        assert len(pids(app)) == 3 and not app.query_one("#filter").display


async def test_tree_by_tenant(tmp_path: Path) -> None:
    async with shown(Watched(tmp_path, many(4))) as (app, pilot, _):
        await pilot.press("T", "p")
        body = [line.split() for line in lines(app, "processes")[1:7]]
        assert [line[0] for line in body] == ["vision", "1", "3", "search", "2", "4"]
        assert "2 processes" in lines(app, "processes")[1]
        await pilot.press("enter")
        assert isinstance(app.screen, DetailsScreen)
        await pilot.press("escape", "f5")
        assert len(app.query_one("#processes", Grid).rows) == 4


async def test_details_and_help_open_and_close(tmp_path: Path) -> None:
    hostile = snapshot(slices=(part("a-evil", HOSTILE),), processes=(process(10, HOSTILE, command=HOSTILE),))
    async with shown(Watched(tmp_path, hostile), (80, 24)) as (app, pilot, _):
        for pane in ("processes", "cards", "tenants"):
            app.query_one(f"#{pane}").focus()
            await pilot.press("j", "enter")
            assert isinstance(app.screen, DetailsScreen)
            text = app.export_screenshot()
            assert "\x1b" not in text and "\u202e" not in text and "\x07" not in text
            await pilot.press("q")
            assert len(app.screen_stack) == 1 and app.is_running
        await pilot.press("h")
        assert isinstance(app.screen, HelpScreen)
        help_text = app.export_screenshot().replace("&#160;", " ")
        assert "this help" in help_text and "with its last (state)" in help_text, "it fits into 80x24"
        await pilot.press("escape")
        assert len(app.screen_stack) == 1


async def test_hostile_names_stay_in_their_cells(tmp_path: Path) -> None:
    hostile = snapshot("n\n\x1b[2J", slices=(part("a\n", HOSTILE),), processes=(process(10, HOSTILE, command=HOSTILE * 40),))
    async with shown(Watched(tmp_path, hostile), (100, 24)) as (app, _, _):
        for name in ("head", "cards", "tenants", "processes"):
            for line in lines(app, name):
                assert line.isprintable() and "\u202e" not in line
        assert "[b]x[/b]" in "".join(lines(app, "tenants")), "markup is only text"


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12), (20, 6), (300, 100)])
async def test_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    first = many()
    async with shown(Watched(tmp_path, first), (100, 30)) as (app, pilot, made):
        await pilot.resize_terminal(*size)
        made.say(later(first, vision=1000))
        app.show()
        await pilot.pause()
        for name in ("head", "cards", "tenants", "processes", "foot"):
            for strip in (app.query_one(f"#{name}").render_line(y) for y in range(app.query_one(f"#{name}").size.height)):
                assert strip.cell_length == size[0]
        if size[1] >= 12:
            assert app.query_one("#processes").size.height >= 3 and app.query_one("#cards").size.height >= 2
            assert app.query_one("#foot").region.bottom == size[1]


async def test_an_exporter_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    first = snapshot()
    async with shown(Watched(tmp_path, first), (80, 24)) as (app, pilot, made):
        made.say(second := later(first, vision=300_000))
        made.fail("it gives no answer within 2 s")
        app.show()
        await pilot.pause()
        head = lines(app, "head")
        assert "STALE" in head[0] and "not reachable since" in head[1]
        assert "stale" in lines(app, "cards")[1] and "(active)" in lines(app, "cards")[3] and "30%" in lines(app, "cards")[3]
        row = app.query_one("#processes", Grid).render_line(2)
        assert row.text.strip() and all(part.style is not None and part.style.dim for part in row), "dimmed"
        made.say(later(second))
        app.show()
        await pilot.pause()
        assert len(lines(app, "head")) == 1 and "STALE" not in lines(app, "head")[0]


async def test_standing_still(tmp_path: Path) -> None:
    first = snapshot()
    async with shown(Watched(tmp_path, first)) as (app, pilot, made):
        await pilot.press("z")
        made.say(dataclasses.replace(later(first), processes=()))
        app.show()
        assert len(pids(app)) == 3 and "STANDING STILL" in lines(app, "foot")[0]
        await pilot.press("space")
        assert pids(app) == []


async def test_no_colour_when_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown(Watched(tmp_path, snapshot())) as (app, _, _):
        for name in ("head", "cards", "tenants", "processes", "foot"):
            widget = app.query_one(f"#{name}")
            for y in range(widget.size.height):
                assert not any(part.style and (part.style.color or part.style.bgcolor) for part in widget.render_line(y))


async def test_only_the_terminals_own_colours(tmp_path: Path) -> None:
    async with shown(Watched(tmp_path, snapshot())) as (app, _, _):
        used = set()
        for name in ("head", "cards", "tenants", "processes", "foot"):
            widget = app.query_one(f"#{name}")
            for y in range(widget.size.height):
                for piece in widget.render_line(y):
                    if piece.style:
                        used |= {colour for colour in (piece.style.color, piece.style.bgcolor) if colour}
        assert used and all(colour.number is not None and colour.number < 16 for colour in used)


def living(child: "subprocess.Popen[bytes]") -> Snapshot:
    """A snapshot in which the child is a process on the card."""
    return snapshot(processes=(process(child.pid, "vision", start_ticks=start_ticks_of(child.pid)),))


@pytest.mark.parametrize("end", [b"q", b"\x03", signal.SIGTERM])
def test_on_a_terminal(end: bytes | signal.Signals, tmp_path: Path) -> None:
    """The program itself on a pseudo-terminal of sixteen colours: it draws, follows a new size, and leaves the terminal as it was."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("COLORTERM", None)
        words = [sys.executable, "-m", "poolmeter.cli", "top", "--exporter", "http://127.0.0.1:1", "--data", str(tmp_path)]
        os.execve(sys.executable, words, environment)
    said = b""

    def read_until(wanted: bytes, since: int) -> None:
        nonlocal said
        deadline = time.monotonic() + 30
        while wanted not in said[since:]:
            assert time.monotonic() < deadline, said[-2000:]
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    said += os.read(terminal, 65536)
                except OSError:  # it has closed the terminal
                    assert wanted in said[since:], said[-2000:]

    def resize(columns: int, rows: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    try:
        resize(80, 24)
        read_until(b"not reachable since", 0)
        resize(100, 12)
        before = len(said)
        read_until(b"\x1b[12;", before)
        assert b"\x1b[38;" not in said and b"\x1b[48;" not in said, "no colours beyond the sixteen"
        before = len(said)
        if isinstance(end, bytes):
            os.write(terminal, end)
        else:
            os.kill(pid, end)
        read_until(b"\x1b[?1049l", before)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


async def test_signals_are_off_unless_asked_for(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    made = Watched(tmp_path, living(child))
    made.watch._host = Host()
    try:
        async with shown(made) as (app, pilot, _):
            await pilot.press("x")
            assert len(app.screen_stack) == 1 and "--allow-signals" in lines(app, "foot")[0]
        async with shown(made, signals=True) as (app, pilot, _):
            await pilot.press("x")
            await pilot.pause()
            assert isinstance(app.screen, SignalScreen)
            await pilot.press("enter")
            assert child.poll() is None, "enter sends nothing"
            await pilot.press("f9")
            await pilot.pause()
            await pilot.press("t")
            await pilot.pause()
            assert child.wait(20) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_no_signal_to_another_process_of_the_same_pid(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        made = Watched(tmp_path, living(child))
        made.watch._host = Host()
        made.watch.poll()
        (row,) = made.watch.frame().processes
        other = dataclasses.replace(row, process=dataclasses.replace(row.process, start_ticks=1))
        with pytest.raises(Refused, match="another one by now"):
            send(other, signal.SIGTERM)
        with pytest.raises(Refused, match="this machine"):
            send(dataclasses.replace(row, local=False), signal.SIGTERM)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    with pytest.raises(Refused, match="cannot be signalled"):
        send(row, signal.SIGTERM)
