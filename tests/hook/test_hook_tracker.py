"""Charged device time against the truth of a model device: patterns, neighbours, changes of length, failing events."""

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "model", Path(__file__).parent / "model.c", flags=("-O2",))


def run(model: Path, switch_us: int, seconds: float, board: int, *tenants: str) -> list[float]:
    """Errors in percent, per tenant; turns of the device are 2 ms."""
    command = [str(model), "2000", str(switch_us), str(seconds), str(board), *tenants]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["pending_ns"] == 0 for row in rows)
    return [100 * (row["charged_ns"] / row["truth_ns"] - 1) for row in rows]


ALONE = (
    "queue:5", "queue:50", "queue:200", "queue:1000", "queue:20000", "sync:50", "sync:1000", "sync:20000", "gaps:50", "gaps:1000",
    "mixed:50", "mixed:1000", "change:50:5000", "change:1000:20000", "two:20:300", "copies:50", "copies:1000", "streams:50", "streams:1000",
    "untimed:50",
)  # fmt: skip


@pytest.mark.parametrize("tenant", ALONE)
def test_alone(model: Path, tenant: str) -> None:
    assert abs(run(model, 0, 2, 1, tenant)[0]) < 0.6


@pytest.mark.parametrize("tenant", ["queue:50", "queue:200", "queue:1000", "sync:50", "gaps:50", "gaps:1000", "change:50:5000"])
def test_what_events_and_launching_take_on_a_card_is_not_charged(model: Path, tenant: str) -> None:
    assert abs(run(model, 0, 2, 2, tenant)[0]) < 2


SHARED = (
    ("queue:50", "queue:50"), ("queue:1000", "queue:1000"), ("queue:50", "queue:1000"), ("gaps:50", "queue:1000"),
    ("sync:1000", "queue:1000"), ("two:20:300", "queue:50"), ("queue:50", "queue:50", "queue:1000"),
)  # fmt: skip


@pytest.mark.parametrize("tenants", SHARED)
@pytest.mark.parametrize("switch_us", [40, 160])
def test_sharing_from_the_start(model: Path, tenants: tuple[str, ...], switch_us: int) -> None:
    assert all(abs(error) < 2 for error in run(model, switch_us, 3, 1, *tenants))


@pytest.mark.parametrize("first", ["queue:5000", "queue:20000", "queue:1000"])
@pytest.mark.parametrize("second", ["queue:5000", "queue:20000", "queue:5000:0:5", "queue:20000:0:300", "queue:50"])
def test_launches_longer_than_a_turn(model: Path, first: str, second: str) -> None:
    """Neither ever has the device alone for a whole launch, so that its length shows only in what is left of its spans."""
    assert all(abs(error) < 3 for error in run(model, 160, 3, 1, first, second))


@pytest.mark.parametrize("switch_us", [40, 220])
def test_launches_longer_than_a_turn_with_other_costs_of_switching(model: Path, switch_us: int) -> None:
    """Nobody has launches short enough to measure turns by."""
    assert all(abs(error) < 7 for error in run(model, switch_us, 3, 1, "queue:20000", "queue:20000"))


@pytest.mark.parametrize("pattern", ["queue", "sync"])
@pytest.mark.parametrize("us", [500, 1000, 5000, 20000])
@pytest.mark.parametrize("neighbour", ["pause:50:100", "pause:200:500", "pause:1000:3000", "pause:200:10000"])
def test_beside_a_neighbour_with_a_little_work_now_and_then(model: Path, pattern: str, us: int, neighbour: str) -> None:
    """It ends its turns early, and has work for more of the time than it takes."""
    mine, other = run(model, 160, 3, 1, f"{pattern}:{us}", neighbour)
    assert abs(mine) < 6
    assert abs(other) < 1


@pytest.mark.parametrize("tenant", ["queue:1000", "queue:5000", "queue:20000"])
@pytest.mark.parametrize("neighbour", ["late:1000", "late:20000", "late:5000"])
def test_what_was_measured_while_a_neighbour_set_itself_up(model: Path, tenant: str, neighbour: str) -> None:
    """Nobody tells of that work, so that launches seem longer and alone; what follows sets it right."""
    assert all(abs(error) < 5 for error in run(model, 160, 3, 1, tenant, neighbour))


@pytest.mark.parametrize("neighbour", ["queue:1000", "queue:50"])
def test_lengths_that_vary_beside_a_neighbour(model: Path, neighbour: str) -> None:
    assert all(abs(error) < 5 for error in run(model, 160, 3, 1, "mixed:50", neighbour))


@pytest.mark.parametrize(
    "tenants", [("sync:20000", "sync:20000"), ("sync:20000", "queue:20000"), ("sync:5000", "sync:5000"), ("sync:500", "pause:5000:5000")]
)
def test_waiting_for_each_long_launch(model: Path, tenants: tuple[str, str]) -> None:
    """What is left of a launch for its last turn leaves the neighbour a shorter wait."""
    assert all(abs(error) < 5 for error in run(model, 160, 3, 1, *tenants))
