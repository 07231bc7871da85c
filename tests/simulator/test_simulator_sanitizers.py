"""The native parts under AddressSanitizer and UndefinedBehaviorSanitizer. Builds them, so the whole run is for POOLMETER_LONG=1."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import LONG

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "simulator" / "native"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_engine_under_sanitizers(tmp_path: Path) -> None:
    """A small C program drives the machine and its engine, with a child that is killed while it holds the machine."""
    program = tmp_path / "engine"
    machine = SOURCES / "machine"
    words = ["gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    words += ["-I", str(machine), "-o", str(program), str(Path(__file__).with_name("engine_smoke.c"))]
    words += map(str, sorted(machine.glob("*.c")))
    subprocess.run([*words, "-lpthread"], check=True, timeout=100)
    done = subprocess.run([str(program), str(tmp_path / "machine"), "800" if LONG else "40"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recovered" in done.stdout


@pytest.mark.skipif(not LONG, reason="builds everything; POOLMETER_LONG=1")
def test_the_driver_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    build = tmp_path / "build"
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(build),
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DPOOLMETER_SANITIZE=address,undefined",
    ]
    subprocess.run(configure, check=True, capture_output=True, timeout=100)
    subprocess.run(["cmake", "--build", str(build), "-j2"], check=True, capture_output=True, timeout=900)
    subprocess.run(
        ["cmake", "--install", str(build), "--prefix", str(tmp_path / "installed")], check=True, capture_output=True, timeout=100
    )
    preload = [
        subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    env = os.environ | {
        "POOLMETER_NATIVE": str(tmp_path / "installed/poolmeter/native"),
        "POOLMETER_LONG": "0",
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    tests = [str(path) for path in Path(__file__).parent.glob("test_simulator_*.py") if path.name != Path(__file__).name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]
