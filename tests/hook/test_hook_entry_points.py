"""docs/reference/entry-points.md against both headers and against the hook: a function that is new in a header is noticed."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from .conftest import HOOK, ROOT, cuda_include

PAGE = ROOT / "docs" / "reference" / "entry-points.md"
NEWEST = Path(__file__).parent / "cuda-13.5.txt"
LISTS = ("Interposed", "Passed on purpose", "Unknown")


def plain(name: str) -> str:
    """The name without the marks of its version and default stream."""
    return re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", name)


def declared(include: Path) -> set[str]:
    specification = importlib.util.spec_from_file_location("driver_names", ROOT / "tools" / "driver_names.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules["driver_names"] = module
    specification.loader.exec_module(module)
    return set(module.names(include))


def installed() -> set[str]:
    """Names of the header that the project is built with, or of the one in $POOLMETER_CUDA_INCLUDE."""
    return declared(cuda_include())


def newest() -> set[str]:
    return set(NEWEST.read_text().split())


def sections() -> dict[str, list[str]]:
    """Names on the page by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    return {title: re.findall(r"`(cu[A-Z]\w+)`", body) for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def interposed() -> set[str]:
    return set(re.findall(r"X\((cu\w+)\)", (HOOK / "hooks.h").read_text().split("#define PM_NEEDS")[0]))


@pytest.mark.parametrize("header", [installed, newest], ids=["installed", "newest"])
def test_every_function_of_a_header_is_on_the_page(header) -> None:
    names = {plain(name) for name in header()}
    listed = {name for names in sections().values() for name in names}
    assert len(names) > 440
    assert names - listed == set(), "new functions: interpose them, or say on the page why they pass"


def test_the_page_names_each_function_once_and_none_that_no_header_has() -> None:
    assert tuple(sections()) == LISTS
    listed = [name for names in sections().values() for name in names]
    assert len(listed) == len(set(listed)), sorted({name for name in listed if listed.count(name) > 1})
    assert set(listed) - {plain(name) for name in installed() | newest()} == set()


def test_nothing_is_unknown() -> None:
    assert sections()["Unknown"] == []


def test_the_page_lists_what_the_hook_interposes() -> None:
    assert set(sections()["Interposed"]) == {plain(name) for name in interposed()}


@pytest.mark.parametrize("header", [installed, newest], ids=["installed", "newest"])
def test_of_an_interposed_name_every_variant_is(header) -> None:
    bases = {plain(name) for name in interposed()}
    assert {name for name in header() if plain(name) in bases} - interposed() == set()
    assert interposed() - installed() - newest() == set()
