"""The progress bar: inside its ends, silent where nobody looks, gone when it is over."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.progress import WIDTH, Progress, line


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


@given(st.floats(-1e6, 1e6), st.floats(0.5, 1e6))
def test_the_bar_never_leaves_its_ends(done: float, total: float) -> None:
    text = line(done, total, "s")
    filled = text[1 : WIDTH + 1].rstrip()
    assert text[0] == "[" and text[WIDTH + 1] == "]" and set(filled) <= {"#"}
    assert (filled == "") if done <= 0 else True
    assert len(filled) == WIDTH if done >= total else len(filled) <= WIDTH


def test_a_terminal_sees_it_grow_and_go() -> None:
    screen = Screen()
    with Progress(10, stream=screen) as progress:
        for done in (0.0, 0.01, 5.0, 10.0):
            progress.show(done)
    assert screen.getvalue().count("\r") == 4  # three states that differ, and the end
    assert "5 of 10 s" in screen.getvalue() and screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("fail", [False, True])
def test_a_pipe_gets_nothing(fail: bool) -> None:
    pipe = io.StringIO()
    try:
        with Progress(10, stream=pipe) as progress:
            progress.show(5)
            if fail:
                raise ValueError
    except ValueError:
        assert fail
    assert pipe.getvalue() == ""
