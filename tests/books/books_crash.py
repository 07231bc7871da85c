"""Kills a writer of the books at a statement of its transaction."""

import os
import signal
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, event


def crash_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process of its own and kill -9 that before its statement `number` (a COMMIT is one); whether it got that far."""
    child = os.fork()
    if child == 0:
        try:
            _count_to(number)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def _count_to(number: int) -> None:
    seen = 0

    def statement(*_: Any) -> None:
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    event.listen(Engine, "before_cursor_execute", statement)
    event.listen(Engine, "commit", statement)
