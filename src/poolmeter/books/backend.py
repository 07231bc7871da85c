"""What a database must do to hold the books."""

from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from poolmeter.errors import PoolmeterError


class Purpose(Enum):
    """What a transaction is for."""

    READ = "read"  # one state of the books, beside a writer
    WRITE = "write"  # one writer at a time, who sees what all before it have written
    UPGRADE = "upgrade"  # the same while there may be no tables yet


class Backend(Protocol):
    """One place where books are, and how it behaves."""

    name: str  # how errors call it; without any secret

    def __init__(self, where: Path | str) -> None: ...

    @staticmethod
    def takes(where: Path | str) -> bool:
        """Whether `where` is a place of this kind."""
        ...

    def begin(self, purpose: Purpose) -> AbstractContextManager[Connection]:
        """A transaction: committed at the end of the block, undone when the block raises."""
        ...

    def passes(self, error: DBAPIError) -> bool:
        """Whether the same transaction may succeed if it is tried again soon."""
        ...

    def refusal(self, error: DBAPIError) -> PoolmeterError:
        """What to tell people."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
