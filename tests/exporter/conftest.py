"""A node and a simulated machine per test."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "web"))

from exporter_fakes import Node

from poolmeter.simulator.machine import Machine


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with one card and a running exporter."""
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A simulated machine with two T4."""
    with contextlib.closing(Machine.create("t4x2", tmp_path / "machine.sim")) as made:
        yield made
