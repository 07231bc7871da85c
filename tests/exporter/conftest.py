"""A node per test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "web"))

from exporter_fakes import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with one card and a running exporter."""
    made = Node(tmp_path)
    yield made
    made.close()
