"""A thread that does what may take long (a socket, a directory service), so that a tick never waits for it."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from poolmeter.errors import PoolmeterError

_LOG = logging.getLogger("poolmeter.exporter")
T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """What the last run came to. `trouble` None: `value` is its answer; else `value` is the last good one (None: there never was one)."""

    value: T | None
    trouble: str | None
    at_us: int | None  # wall time of the last good answer
    duration_us: int | None
    runs: int


class Worker(Generic[T]):
    """Runs `job` every `interval_s` and when woken. The thread starts with the first `wake`; it is a daemon, so that a hung call holds up no exit."""

    def __init__(self, name: str, job: Callable[[], T], interval_s: float, hang_s: float) -> None:
        self.name = name
        self._job = job
        self._interval_s, self._hang_s = interval_s, hang_s
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._running_since: float | None = None
        self.begun = 0  # runs begun, also the one under way: what is asked now is answered once `result.runs` is more than this
        self._result: Result[T] = Result(None, None, None, None, 0)

    @property
    def result(self) -> Result[T]:
        """The newest result; a run that hangs is trouble of its own."""
        result, since = self._result, self._running_since
        if since is not None and time.monotonic() - since > self._hang_s:
            return Result(
                result.value,
                f"{self.name} has not answered for {time.monotonic() - since:.0f} s, expected an answer within {self._hang_s:g} s",
                result.at_us,
                result.duration_us,
                result.runs,
            )
        return result

    def wake(self) -> None:
        """Run now, or again after the run that is under way."""
        self._wanted.set()
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._loop, name=f"who-{self.name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End after the run under way; it is not waited for."""
        self._ended.set()
        self._wanted.set()

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._wanted.wait(self._interval_s)
            self._wanted.clear()
            if not self._ended.is_set():
                self.run()

    def run(self) -> None:
        """One run, in the calling thread."""
        began = self._running_since = time.monotonic()
        self.begun += 1
        value, trouble, at_us = self._result.value, None, self._result.at_us
        try:
            value = self._job()
            at_us = time.time_ns() // 1000
        except PoolmeterError as error:
            trouble = str(error)
        except Exception as error:  # a source that breaks must not take the thread with it
            _LOG.exception("attribution by %s failed", self.name)
            trouble = f"{self.name} failed: {type(error).__name__}: {error!s:.200}"
        self._result = Result(value, trouble, at_us, round((time.monotonic() - began) * 1_000_000), self._result.runs + 1)
        self._running_since = None
