"""Opening and reading page files that a tenant may have tampered with."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from poolmeter.errors import Unavailable
from poolmeter.pages import layout
from poolmeter.pages.errors import PageVersionError, TamperedPage


@contextlib.contextmanager
def open_page(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of the regular file at `path`; never follows a link, never waits for a FIFO's other end.

    Raises TamperedPage for anything but a regular file and Unavailable when it is absent or not permitted.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unavailable(f"page {path} is absent, expected a file") from None
    except PermissionError:
        raise Unavailable(f"page {path} cannot be opened by uid {os.geteuid()}, expected permission to") from None
    except OSError as error:  # ELOOP of a link, ENXIO of a FIFO or socket
        raise TamperedPage(f"page {path} cannot be opened ({error.strerror}), expected a regular file") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TamperedPage(f"page {path} has file mode {os.fstat(descriptor).st_mode:o}, expected a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, path: str | Path, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, by pread; a short read raises TamperedPage."""
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise TamperedPage(f"page {path} ends at byte {offset + len(data)}, expected {offset + size}")
    return data


def check_magic(path: str | Path, magic: int, major: int, minor: int, expected: int) -> None:
    """Raises TamperedPage for another magic number and PageVersionError for another ABI major version."""
    if magic != expected:
        raise TamperedPage(f"page {path} begins with {magic:#018x}, expected {expected:#018x}")
    if major != layout.ABI_MAJOR:
        raise PageVersionError(f"page {path} has ABI version {major}.{minor}, expected {layout.ABI_MAJOR}.x")


def text(raw: bytes, path: str | Path, name: str) -> str:
    """A NUL-terminated field; raises TamperedPage when it is not UTF-8."""
    try:
        return raw.split(b"\0", 1)[0].decode()
    except UnicodeDecodeError:
        raise TamperedPage(f"page {path} holds {raw!r} as {name}, expected UTF-8 text") from None


def encoded(value: str, size: int, name: str) -> bytes:
    """`value` for a field of `size` bytes with its NUL; raises ValueError when it does not fit."""
    raw = value.encode()
    if len(raw) >= size or b"\0" in raw:
        raise ValueError(f"{name} {value!r} has {len(raw)} bytes, expected fewer than {size} and no NUL")
    return raw
