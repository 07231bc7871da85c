"""Calls that free: once the driver has freed, a handle or an address may be another thread's new allocation."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from poolmeter.pages import native as pages_native
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter

from .conftest import DEVICE, HOOK, build, cuda_include

HERE = Path(__file__).parent
SHIMS = tuple(HOOK / f"{name}.c" for name in ("claim", "shim_context", "shim_memory", "shim_array"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{cuda_include()}")
    return build(tmp_path_factory.mktemp("reuse") / "reuse", HERE / "reuse.c", *SHIMS, flags=flags)


@pytest.fixture
def folder(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POOLMETER_NATIVE", str(native))
    pages_native.pages_library.cache_clear()
    write_grant(tmp_path / "grant", Grant("a", (DeviceGrant(DEVICE, memory_bytes=64 << 20),)))
    create_meter(tmp_path / "meter", [DEVICE])
    return tmp_path


def run(program: Path, folder: Path, name: str, code: int) -> list[int]:
    environment = os.environ | {"POOLMETER_ALLOCATION_DIR": str(folder), "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0"}
    done = subprocess.run([str(program), name, str(code)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said: list[int] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("name", ["release", "unmap", "unmap_tiles", "destroy_array", "free"])
@pytest.mark.parametrize("code", [0, 999])
def test_what_another_thread_allocates_meanwhile_is_its_own(program: Path, folder: Path, name: str, code: int) -> None:
    same, before, after, end = run(program, folder, name, code)
    assert same
    assert (before, after, end) == (1, 1, 0)  # the other's new piece, or what could not be freed
