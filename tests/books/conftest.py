"""Every test that asks for `places` or `place` runs on every back end."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poolmeter.clock import ManualClock

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves test folders off the path
from books_decisions import NOW
from books_places import KINDS, Places, Server, server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], Server]]:
    """Gives a running PostgreSQL, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        found: list[Server] = []

        def running() -> Server:
            if not found:
                found.append(stack.enter_context(server()))
            return found[0]

        yield running


@pytest.fixture(params=KINDS)
def places(request: pytest.FixtureRequest, tmp_path: Path, postgres: Callable[[], Server]) -> Places:
    return Places(request.param, tmp_path, postgres)


@pytest.fixture
def place(places: Places) -> Path | str:
    return places.new()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)
