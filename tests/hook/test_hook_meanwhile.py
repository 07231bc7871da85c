"""Calls of several threads at once, on a driver of functions: who is charged for what the others take and give back meanwhile."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from poolmeter.pages import native as pages_native
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter

from .conftest import DEVICE, HOOK, build, cuda_include

HERE = Path(__file__).parent


def program(target: Path, sanitizer: str, *shims: str) -> Path:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{cuda_include()}")
    return build(target, HERE / f"{target.name}.c", *(HOOK / f"{name}.c" for name in shims), flags=flags)


@pytest.fixture(scope="module")
def reuse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("reuse") / "reuse"
    return program(target, "address,undefined", "claim", "shim_context", "shim_memory", "shim_array")


@pytest.fixture(scope="module")
def overlap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("overlap") / "overlap"
    return program(target, "thread", "claim", "shim_context", "shim_memory", "shim_module", "shim_limit", "shim_graph")


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("leaving") / "leaving"
    return program(target, "address,undefined", "claim", "shim_context", "shim_launch")


@pytest.fixture
def folder(tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of 12 MiB."""
    monkeypatch.setenv("POOLMETER_NATIVE", str(native))
    pages_native.pages_library.cache_clear()
    folder = tmp_path / "allocations" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "devices").mkdir()
    write_grant(folder / "grant", Grant("a", (DeviceGrant(DEVICE, memory_bytes=12 << 20),)))
    create_meter(folder / "meter", [DEVICE])
    return folder


def run(program: Path, folder: Path, *words: str) -> Any:
    environment = os.environ | {"POOLMETER_ALLOCATION_DIR": str(folder), "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0"}
    done = subprocess.run([str(program), *words], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["release", "unmap", "unmap_tiles", "destroy_array", "free"])
@pytest.mark.parametrize("code", [0, 999])
def test_what_another_thread_allocates_meanwhile_is_its_own(reuse: Path, folder: Path, name: str, code: int) -> None:
    same, before, after, end = run(reuse, folder, name, str(code))
    assert same
    assert (before, after, end) == (1, 1, 0)  # the other's new piece, or what could not be freed


IN_THE_ACCOUNT = ("alloc", "free", "create", "release", "trim", "limit", "limit_back", "module", "module_goes")
UNDER_WAY = ("first", "first_changed", "second", "second_changed")


@pytest.mark.parametrize("when", UNDER_WAY)
@pytest.mark.parametrize("name", [*IN_THE_ACCOUNT, "context", "context_goes"])
def test_a_module_is_not_charged_for_a_call_under_way(overlap: Path, folder: Path, name: str, when: str) -> None:
    result, after, worth, end = run(overlap, folder, name, when)
    assert (result, end) == (0, 0)
    assert after == (0 if name == "module" else worth)  # what a module takes cannot be told


@pytest.mark.parametrize("name", IN_THE_ACCOUNT)
def test_a_module_is_charged_its_own_beside_a_whole_call(overlap: Path, folder: Path, name: str) -> None:
    result, after, worth, end = run(overlap, folder, name, "within")
    assert (result, end) == (0, 0)
    assert after == worth + 1


@pytest.mark.parametrize("name", ["neighbour", "half", "sibling"])
def test_a_module_is_neither_refused_nor_charged_for_what_a_neighbour_takes(overlap: Path, folder: Path, name: str) -> None:
    """Whose it is cannot be told: also where the neighbour's call only begins or ends meanwhile, or is of another process of the allocation."""
    result, after, _, end = run(overlap, folder, name, "beside")
    assert (result, after, end) == (0, 0, 0)


def test_a_module_is_charged_beside_a_neighbour_that_takes_nothing(overlap: Path, folder: Path) -> None:
    assert run(overlap, folder, "quiet", "beside") == [0, 1, 0, 0]


def test_a_module_beyond_the_limit_is_refused_where_nobody_else_is(overlap: Path, folder: Path) -> None:
    assert run(overlap, folder, "unseen", "beside") == [2, 0, 0, 0]


def test_a_module_is_not_refused_where_neighbours_cannot_be_seen(overlap: Path, folder: Path) -> None:
    (folder / "../../devices").resolve().rmdir()
    result, after, _, end = run(overlap, folder, "unseen", "beside")
    assert (result, after, end) == (0, 0, 0)


@pytest.mark.parametrize("code", [0, 999])
def test_a_launch_on_several_devices_goes_on_while_the_process_ends(leaving: Path, folder: Path, code: int) -> None:
    assert run(leaving, folder, str(code)) == 719  # the driver's own answer
