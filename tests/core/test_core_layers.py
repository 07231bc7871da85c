"""What the layers promise and import-linter cannot say: the pure rooms are pure, and the list of the collector's modules is whole."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = ("model", "sharing", "rules")
# Modules of the standard library that read or change what is outside the program, clocks and chance included.
OUTSIDE = frozenset(
    {
        "asyncio", "builtins", "ctypes", "fcntl", "glob", "http", "importlib", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
        "random", "secrets", "select", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
        "urllib", "uuid",
    }
)  # fmt: skip


def imported(source: str) -> set[str]:
    """Every module that Python source imports, with its whole name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.add(node.module or "")
    return found


def impure(source: str) -> set[str]:
    """Imports that a pure module must not have: third parties, the outside, and rooms above it."""
    allowed = tuple(f"poolmeter.{room}" for room in PURE)
    return {
        name
        for name in imported(source)
        if (name.partition(".")[0] in OUTSIDE)
        or not (name.partition(".")[0] in sys.stdlib_module_names or name.startswith(allowed) or name == "poolmeter.errors")
    }


@pytest.mark.parametrize("path", sorted(p for room in PURE for p in (ROOT / "src/poolmeter" / room).glob("*.py")), ids=lambda p: p.name)
def test_a_pure_room_imports_nothing_that_acts(path: Path) -> None:
    assert impure(path.read_text()) == set(), path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import duckdb, math", {"duckdb"}),
        ("def f():\n    from os import path", {"os"}),
        ("from poolmeter.exporter.spool import Spool", {"poolmeter.exporter.spool"}),
        ("import time", {"time"}),
        ("from dataclasses import dataclass\nfrom poolmeter.model.units import MICROSECONDS", set()),
    ],
)
def test_the_check_sees_what_is_forbidden(source: str, found: set[str]) -> None:
    assert impure(source) == found


def test_the_contract_names_every_module_of_the_collector() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(
        set(contract["forbidden_modules"]) for contract in contracts if "poolmeter.dashboards" in contract.get("source_modules", ())
    )
    folder = ROOT / "collector"
    modules = {
        f"poolmeter.collector.{path.stem}" for path in (*folder.glob("*.py"), *(path.parent for path in folder.glob("*/__init__.py")))
    }
    assert listed == modules - {"poolmeter.collector.__init__", "poolmeter.collector.catalog"}


# The name of a package where it is not the name of its module.
PACKAGES = {
    "dns": "dnspython",
    "google": "protobuf",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-proto",
    "prometheus_client": "prometheus-client",
    "promql_parser": "promql-parser",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
    "focus_data_toolkit": "focus-data-toolkit",
}
# The whole of a test's own folder, and what the card's machine has of itself.
OWN = frozenset({"poolmeter", "conftest", "tests"})


def undeclared(roots: tuple[str, ...], declared: set[str]) -> set[str]:
    """Third-party modules that the Python files under `roots` import, anywhere in them, and no dependency provides."""
    files = [path for root in roots for path in (ROOT / root).rglob("*.py")]
    local = {path.stem for path in files}
    names: set[str] = set()
    for path in files:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    foreign = names - sys.stdlib_module_names - OWN - local
    return {name for name in foreign if PACKAGES.get(name, name) not in declared}


def dependencies(*extras: str) -> set[str]:
    """The packages that the project declares, without versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in lines}


def test_what_the_package_imports_is_declared() -> None:
    rooms = ("exporter", "collector", "accounting", "enforcer", "simulator", "dashboards", "alerts", "src/poolmeter")
    assert undeclared(rooms, dependencies("postgres")) == set()


def test_what_the_tests_import_is_declared() -> None:
    assert undeclared(("tests",), dependencies("test", "postgres")) == set()
