"""Native parts for the hook's tests: built once per run with the system's compiler, from this tree."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "enforcer" / "native" / "hook"
ACCOUNTING = (
    "board",
    "bucket",
    "charges",
    "clock",
    "estimates",
    "guard",
    "lanes",
    "limiter",
    "marks",
    "memory",
    "neighbours",
    "pages",
    "pointers",
    "process",
    "samples",
    "settler",
    "slots",
    "tracker",
)
DEVICE = "GPU-00000000-0000-0000-0000-000000000001"


def build(target: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compiles `sources` with the accounting library into `target`."""
    accounting = [str(HOOK / f"{name}.c") for name in ACCOUNTING]
    command = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}", *flags]
    subprocess.run([*command, *map(str, sources), *accounting, "-o", str(target), "-lpthread"], check=True)
    return target


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libpoolmeter_pages.so and the test programs."""
    folder = tmp_path_factory.mktemp("native")
    here = Path(__file__).parent
    build(folder / "worker", here / "worker.c")
    sources = [str(HOOK / f"{name}.c") for name in ("library", "memory", "pages", "slots")]
    command = ["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}"]
    subprocess.run([*command, *sources, "-o", str(folder / "libpoolmeter_pages.so")], check=True)
    return folder


@pytest.fixture
def long_run() -> int:
    """How many times the usual counts: 1, or 20 with POOLMETER_LONG=1."""
    return 20 if os.environ.get("POOLMETER_LONG") == "1" else 1
