"""The wheel holds what the tree holds, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("exporter", "collector", "accounting", "enforcer", "simulator", "dashboards", "alerts")
NATIVE = {"libpoolmeter_hook.so", "libpoolmeter_pages.so", "libpoolmeter_sim.so", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.executable).parent / "uv"
    words = [str(uv), "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as content:
        return {name for name in content.namelist() if not name.endswith("/")}


def test_every_module_is_in_the_wheel_once(names: set[str]) -> None:
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/poolmeter").rglob("*.py")}
    for component in COMPONENTS:
        modules |= {f"poolmeter/{path.relative_to(ROOT)}" for path in (ROOT / component).rglob("*.py")}
    modules = {name for name in modules if "__pycache__" not in name}
    assert {name for name in names if name.endswith(".py") and name.startswith("poolmeter/")} == modules


def test_the_native_parts_are_in_the_wheel(names: set[str]) -> None:
    assert {f"poolmeter/native/{name}" for name in NATIVE} <= names


def test_every_file_a_component_reads_is_in_the_wheel(names: set[str]) -> None:
    data = {f"poolmeter/{path.relative_to(ROOT)}" for component in COMPONENTS for path in (ROOT / component).rglob("*.toml")}
    assert data and data <= names


def test_nothing_else_is_in_the_wheel(names: set[str]) -> None:
    foreign = {name for name in names if not name.startswith("poolmeter/") and ".dist-info/" not in name}
    assert foreign == set()
    inside = {name for name in names if name.startswith("poolmeter/") and not name.startswith("poolmeter/native/")}
    assert {Path(name).suffix or name for name in inside} <= {".py", ".typed", ".toml", ".json", ".svg", ".yml", ".md"}
    assert not {name for name in names if "/tests/" in name}


def test_one_wheel_serves_every_python(names: set[str]) -> None:
    """The native parts are loaded by ctypes: nothing in the wheel belongs to one version of Python."""
    assert not {name for name in names if ".cpython-" in name or ".abi3." in name}


def test_the_wheel_says_so(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"], wheel.name


def test_links_are_links() -> None:
    """A clone without symbolic links holds text files here, and nothing imports."""
    for component in COMPONENTS:
        link = ROOT / "src" / "poolmeter" / component
        assert link.is_symlink() and link.resolve() == ROOT / component, f"{link} is no link: clone with core.symlinks=true"
