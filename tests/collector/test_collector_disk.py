"""A disk that is full, that is read-only, that comes back: what the collector says, and that nothing acknowledged is lost."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENTER = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a store saw on a small disk of its own."""
    disk, elsewhere = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("elsewhere")
    trial = [*ENTER, "mount", "-t", "tmpfs", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs root and mount namespaces")
    program = [sys.executable, str(Path(__file__).with_name("small_disk.py")), str(disk), str(elsewhere)]
    done = subprocess.run([*ENTER, *program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_full_disk_is_said_and_takes_no_acknowledged_row(seen: dict[str, Any]) -> None:
    assert (seen["at first"]["ready"], seen["at first"]["status"]) == (200, "ok")
    full = seen["full"]
    assert full["ready"] == 503 and full["said"] == full["failure"] == full["warnings"][0]
    assert full["said"].endswith("cannot be written: No space left on device")
    assert full["status"] == "degraded" and full["writable"] is False and full["free"] < 200_000
    # Refused again, nothing more stored than what was acknowledged, and every segment whole.
    assert seen["full still"] == [True, True, True, True]
    assert seen["upkeep"] is None or "cannot be written" in seen["upkeep"]


def test_a_freed_disk_is_written_again_without_a_restart(seen: dict[str, Any]) -> None:
    failure, health, all_there = seen["freed"]
    assert failure is None and all_there
    assert (health["ready"], health["status"], health["writable"], health["warnings"]) == (200, "ok", True, [])


def test_a_read_only_disk_is_said_read_and_refused_at_the_start(seen: dict[str, Any]) -> None:
    assert seen["read-only"]["failure"].endswith("cannot be written: Read-only file system")
    assert seen["read-only"]["ready"] == 503 and seen["read-only"]["said"] == seen["read-only"]["failure"]
    assert seen["read"] is True and seen["reader"] is True
    assert seen["start"].endswith("cannot be written: Read-only file system")
    failure, health = seen["writable again"]
    assert failure is None and health["ready"] == 200 and health["status"] == "ok"


def test_what_was_acknowledged_before_and_between_the_faults_is_there_once(seen: dict[str, Any]) -> None:
    assert seen["known"] is True and seen["once"] is True
