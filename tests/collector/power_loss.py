"""A disk that loses power: what a crash leaves when only what was synced is sure to be there.

`Disk` watches the calls that a store makes durable with (fsync, rename, replace, unlink, mkdir, rmdir) and keeps, of each folder, the names
that were synced and the changes since; of each file the bytes at its last fsync. `crash` lets the power go at any of these calls;
`leave` then writes what may be found afterwards: of each folder's changes since its sync a random first part, of a file that was never
synced all bytes, some or none.
"""

import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


class PowerLoss(BaseException):
    """The power is gone: nothing may clean up behind it."""


@dataclass(eq=False)
class File:
    """A file: `synced` are its bytes at its last fsync, None before the first."""

    synced: bytes | None = None


@dataclass
class Folder:
    """A folder: the names that a crash cannot take, and what was done since, in order."""

    synced: dict[str, "File | Folder"] = field(default_factory=dict)
    since: list[tuple[str, str, "File | Folder | None"]] = field(default_factory=list)


class Disk:
    """One folder tree watched from empty on. `at` is the number of the call that the power goes with (None: never)."""

    def __init__(self, root: Path, rng: random.Random, at: int | None) -> None:
        self.root = root
        self.calls = 0
        self.syncs = 0
        self._rng = rng
        self._at = at
        self._dead = False
        self._top = Folder()
        self._live: dict[Path, File | Folder] = {root: self._top}
        self._adopt(root)
        self._images: dict[str, bytes] = {}

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Put itself between the store and the system."""
        for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            paths = (
                [Path(f"/proc/self/fd/{words[0]}").readlink()]
                if name == "fsync"
                else [Path(word) for word in words[: 1 + (name in ("rename", "replace"))]]
            )
            if not all(path.is_relative_to(self.root) for path in paths):
                return real(*words, **named)
            if self._dead:
                raise PowerLoss
            self.calls += 1
            before = self.calls == self._at and self._rng.random() < 0.5
            if before:
                self._lose()
            done = real(*words, **named)
            getattr(self, f"_{name}")(*paths)
            if self.calls == self._at:
                self._lose()
            return done

        return call

    def _lose(self) -> None:
        self._dead = True
        # What the files hold now: a late writer of this process must not change it.
        self._images = {str(path): path.read_bytes() for path in self._live if path.is_file()}
        for path in self.root.rglob("*"):
            if path.is_file():
                self._images[str(path)] = path.read_bytes()
        raise PowerLoss

    def _fsync(self, path: Path) -> None:
        self.syncs += 1
        if stat.S_ISDIR(path.stat().st_mode):
            folder = self._folder(path)
            for child in path.iterdir():
                if child not in self._live:
                    self._add(child, Folder() if child.is_dir() else File())
            folder.synced = {child.name: self._live[child] for child in path.iterdir()}
            folder.since = []
        else:
            self._file(path).synced = path.read_bytes()

    def _rename(self, source: Path, target: Path) -> None:
        moved = self._live.pop(source, None) or File()
        self._live[target] = moved
        assert source.parent == target.parent, "a rename across folders is not one step of one folder"
        self._folder(target.parent).since.append(("rename", f"{source.name}/{target.name}", moved))

    _replace = _rename

    def _unlink(self, path: Path) -> None:
        self._live.pop(path, None)
        self._folder(path.parent).since.append(("remove", path.name, None))

    _rmdir = _unlink

    def _mkdir(self, path: Path) -> None:
        self._add(path, Folder())

    def _add(self, path: Path, found: "File | Folder") -> None:
        self._live[path] = found
        self._folder(path.parent).since.append(("add", path.name, found))

    def _folder(self, path: Path) -> Folder:
        found = self._live.get(path)
        assert isinstance(found, Folder), f"{path} is a folder that nobody made"
        return found

    def _file(self, path: Path) -> File:
        if path not in self._live:
            self._add(path, File())
        found = self._live[path]
        assert isinstance(found, File)
        return found

    def _adopt(self, path: Path) -> None:
        """What is there before the watch begins is durable."""
        folder = self._folder(path)
        for child in path.iterdir():
            made: File | Folder = Folder() if child.is_dir() else File(child.read_bytes())
            self._live[child] = folder.synced[child.name] = made
            if isinstance(made, Folder):
                self._adopt(child)

    def leave(self, target: Path) -> None:
        """Write what a machine may find after the crash into `target`."""
        bytes_of = {id(found): self._images.get(str(path), b"") for path, found in self._live.items() if isinstance(found, File)}
        self._leave(self._top, target, bytes_of)

    def _leave(self, folder: Folder, target: Path, bytes_of: dict[int, bytes]) -> None:
        target.mkdir()
        names = dict(folder.synced)
        for what, name, found in folder.since[: self._rng.randint(0, len(folder.since))]:
            if what == "remove":
                names.pop(name, None)
            elif what == "add":
                assert found is not None
                names[name] = found
            else:
                source, new = name.split("/")
                names.pop(source, None)
                assert found is not None
                names[new] = found
        for name, found in names.items():
            if isinstance(found, Folder):
                self._leave(found, target / name, bytes_of)
                continue
            body = found.synced
            if body is None:
                body = bytes_of.get(id(found), b"")
                body = body[: self._rng.choice([0, self._rng.randint(0, len(body)), len(body)])]
            (target / name).write_bytes(body)
