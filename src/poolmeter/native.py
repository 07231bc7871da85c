"""Where the built C libraries and programs of poolmeter lie."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import poolmeter
from poolmeter.errors import Unavailable


def native_folders() -> Iterator[Path]:
    """The folders that may hold built files, nearest first.

    `POOLMETER_NATIVE` names one folder explicitly (a sanitizer build). An editable install keeps the sources in the tree and puts what CMake
    built into site-packages/poolmeter/native, so the folders on `poolmeter.__path__` alone are not enough.
    """
    override = os.environ.get("POOLMETER_NATIVE")
    if override:
        yield Path(override)
        return
    seen: set[Path] = set()
    roots = [Path(entry) for entry in poolmeter.__path__]
    roots += [Path(sysconfig.get_path(key)) / "poolmeter" for key in ("platlib", "purelib")]
    for root in roots:
        folder = root / "native"
        if folder not in seen:
            seen.add(folder)
            yield folder


def native_path(name: str) -> Path:
    """The path of the built file `name`, relative to the native folder, as in `native_path("sim/libcuda.so.1")`.

    Raises Unavailable, naming the folders looked at, when no folder holds it.
    """
    folders = list(native_folders())
    for folder in folders:
        candidate = folder / name
        if candidate.exists():
            return candidate
    looked = ", ".join(str(folder) for folder in folders)
    raise Unavailable(f"the built file {name} is in none of {looked}: install poolmeter (make install) so that its C parts are built")
