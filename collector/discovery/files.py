"""Files that name exporters: a URL a line, TOML, or Prometheus' file_sd (JSON, YAML), looked at again and again.

Looked at by time, size and inode rather than by inotify: that also works on network file systems and on the links of a ConfigMap.
"""

import asyncio
import glob
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from poolmeter.collector.discovery.source import Answer
from poolmeter.collector.discovery.targets import BODY_LIMIT, Urls, parse_groups, parse_json, parse_lines, parse_toml_nodes, parse_yaml
from poolmeter.errors import BadInput, DataError

SETTLED_S = 2.0  # a file that changed later than that may be half written
FILES_MOST = 1000

Stat = tuple[int, int, int, int]
Parse = Callable[[bytes, str, str, int], frozenset[str]]


def parse_node_file(body: bytes, path: str, scheme: str, limit: int) -> frozenset[str]:
    """A file of `[collector.discovery] type = "file"`: TOML by its name, else lines. Raises DataError."""
    if path.endswith(".toml"):
        try:
            return parse_toml_nodes(body, scheme, limit)
        except BadInput as error:
            raise DataError(str(error)) from None
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text at byte {error.start}") from None
    return parse_lines(text, scheme, limit)


def parse_file_sd(body: bytes, path: str, scheme: str, limit: int) -> frozenset[str]:
    """A file of Prometheus' file_sd: YAML by its name, else JSON. Raises DataError."""
    value = parse_yaml(body) if path.endswith((".yml", ".yaml")) else parse_json(body)
    return parse_groups(value, scheme, limit)


@dataclass
class _Known:
    seen: Stat  # at the last look
    read: Stat | None = None  # when it was last read, good or not
    urls: frozenset[str] | None = None  # of the last that was good
    trouble: str | None = None


class Files:
    """Files by name or pattern. A file that cannot be read or is half written keeps what it said before, and is named.

    A file that a pattern no longer matches says nothing any more; one that is named in full is expected to be there.
    """

    def __init__(self, kind: str, patterns: Sequence[str], parse: Parse, scheme: str, limit: int) -> None:
        self._kind = kind
        self._patterns = tuple(patterns)
        self._parse = parse
        self._scheme = scheme
        self._limit = limit
        self._known: dict[str, _Known] = {}

    @property
    def name(self) -> str:
        """Kind and patterns."""
        return f"{self._kind} {', '.join(self._patterns)}"[:200]

    async def ask(self, session: aiohttp.ClientSession) -> Answer:
        """What all files together name. Raises DataError when nothing of it could ever be read, or they name too many."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> Answer:
        paths, troubles = self._match()
        # A folder that cannot be read is not a folder without files.
        if not troubles:
            self._known = {path: known for path, known in self._known.items() if path in paths}
        urls = Urls(self._limit)
        for path in sorted({*paths, *self._known}):
            trouble = self._look(path)
            if trouble is not None:
                troubles.append(f"{path} {trouble}")
            for url in (self._known[path].urls or ()) if path in self._known else ():
                urls.add(url)
        if troubles and all(known.urls is None for known in self._known.values()):
            raise DataError(troubles[0])
        return Answer(urls.all(), troubles[0] if troubles else None)

    def _match(self) -> tuple[list[str], list[str]]:
        paths: dict[str, None] = {}
        troubles: list[str] = []
        for pattern in self._patterns:
            if not glob.has_magic(pattern):
                paths[pattern] = None
                continue
            folder = Path(pattern).parent
            try:
                if not glob.has_magic(str(folder)):
                    os.scandir(folder).close()
            except OSError as error:
                troubles.append(f"{folder} cannot be listed: {error.strerror or error}")
                continue
            paths |= dict.fromkeys(sorted(glob.glob(pattern)))
        if len(paths) > FILES_MOST:
            raise DataError(f"{len(paths)} files match, expected at most {FILES_MOST}")
        return list(paths), troubles

    def _look(self, path: str) -> str | None:
        """Take in one file; what is wrong with it."""
        known = self._known.get(path)
        try:
            with open(path, "rb", opener=_open_without_waiting) as file:
                now = _stat(file.fileno())
                if known is not None and known.read == now:
                    return known.trouble
                settled = (known is not None and known.seen == now) or time.time() - now[0] / 1e9 > SETTLED_S
                if known is None:
                    known = self._known[path] = _Known(now)
                known.seen = now
                if not settled:
                    return known.trouble if known.read else "was written this moment, it is read at the next look"
                body = file.read(BODY_LIMIT + 1) or b""
                if _stat(file.fileno()) != now:
                    return known.trouble
                known.read = now
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        try:
            if len(body) > BODY_LIMIT:
                raise DataError(f"has more than {BODY_LIMIT} bytes, expected at most that")
            known.urls = self._parse(body, path, self._scheme, self._limit)
            known.trouble = None
        except DataError as error:
            known.trouble = str(error)
        return known.trouble


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _stat(descriptor: int) -> Stat:
    found = os.fstat(descriptor)
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns
