"""docs/reference/entry-points.md against cuda.h and against the hook: a function that is new in a header is noticed."""

import importlib.util
import re
from pathlib import Path

import pytest

from .conftest import HOOK, ROOT

PAGE = ROOT / "docs" / "reference" / "entry-points.md"
FAMILIES = re.compile(
    r"Launch|^cuMem|Array|Mipmap|^cuGraph|Ipc|External|^cuModule|^cuLibrary|Capture|^cuCtx(Create|Destroy|SetLimit|Synchronize)|GreenCtx"
    r"|TotalMem|Multicast|PrimaryCtx|^cuStream(Destroy|Sync|Wait|Write|BatchMem|AddCallback|AttachMem)|^cuLink|^cuCheckpoint|MemPool|GraphMem"
    r"|Coredump"
)


def plain(name: str) -> str:
    """The name without the marks of its version and default stream."""
    return re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", name)


def header() -> Path:
    package = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" / "include" for place in (package.submodule_search_locations or [])] if package else []
    for folder in [*places, Path("/usr/local/cuda-13.0/include"), Path("/usr/local/cuda/include")]:
        if (folder / "cuda.h").exists():
            return folder / "cuda.h"
    pytest.skip("cuda.h is not on this machine: it comes with the build requirements")


def sections() -> dict[str, list[str]]:
    """Names on the page by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    return {title: re.findall(r"`(cu[A-Z]\w+)`", body) for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_function_of_the_header_that_works_or_takes_memory_is_on_the_page_once() -> None:
    declared = {plain(name) for name in re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w*)\s*\(", header().read_text())}
    assert len(declared) > 400
    listed = [name for names in sections().values() for name in names]
    assert len(listed) == len(set(listed)), "a function is on the page twice"
    expected = {name for name in declared if FAMILIES.search(name)}
    assert expected - set(listed) == set(), "new functions: interpose them, or say on the page why they pass"
    assert set(listed) - declared == set(), "functions on the page that the header does not have"


def test_the_page_lists_what_the_hook_interposes() -> None:
    text = (HOOK / "hooks.h").read_text().split("#define PM_NEEDS")[0]
    hooked = {plain(name) for name in re.findall(r"X\((cu\w+)\)", text)}
    assert set(sections()["Interposed"]) == hooked
