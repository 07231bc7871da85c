"""Shared by all tests: hypothesis profiles, the seed, and counts that grow in the long run."""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

LONG = os.environ.get("POOLMETER_LONG") == "1"
SEED = int(os.environ.get("POOLMETER_SEED", "1"))
DEADLINE = float(os.environ.get("POOLMETER_DEADLINE", "inf"))  # time.time() after which a long loop stops early

settings.register_profile("test", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("long" if LONG else "test")


@pytest.fixture
def rng() -> random.Random:
    """Randomness that changes from commit to commit in CI and is printed with a failure."""
    print(f"POOLMETER_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def rounds() -> Callable[[int, int], Iterator[int]]:
    """`rounds(short, full)` counts to `short` in make test, to `full` in make long, or until the long run's time is up."""

    def count(short: int, full: int) -> Iterator[int]:
        done = 0
        for done in range(1, (full if LONG else short) + 1):
            yield done - 1
            if time.time() > DEADLINE and done >= short:
                break
        print(f"rounds done: {done}")

    return count


def skip_where_closed(folders: Iterable[Path]) -> None:
    for folder in folders:
        if not folder.stat().st_mode & 0o001:
            pytest.skip(f"{folder} is closed to other users")


@pytest.fixture
def seen_by_others() -> None:
    """Skips where another user could not run what is installed here, because it lies in somebody's own folder."""
    skip_where_closed((Path(sys.prefix), *Path(sys.prefix).parents))


@pytest.fixture
def open_tmp_path(tmp_path: Path) -> Path:
    """A folder of the test's own that other users can enter; pytest's own folders are closed to them, and nobody else's are opened."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder != tmp_path and Path(tempfile.gettempdir()).resolve() not in folder.parents:
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    skip_where_closed(tmp_path.parents)
    return tmp_path
