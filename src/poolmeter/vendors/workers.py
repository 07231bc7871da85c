"""Threads that each make one slow thing at a time, so that a call that does not come back keeps up only its own card."""

import threading
import time
from collections.abc import Callable, Iterable


class Worker:
    """One thread, one job at a time. A job that hangs keeps the worker busy for ever; a call into a C library cannot be cancelled."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._since: float | None = None
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def _loop(self) -> None:
        while True:
            with self._ready:
                while self._job is None:
                    self._ready.wait()
                job = self._job
            try:
                job()
            finally:
                with self._ready:
                    self._job = self._since = None
                    self._ready.notify_all()

    @property
    def busy_s(self) -> float:
        """How long the job under way takes already; 0 when none is."""
        since = self._since
        return 0.0 if since is None else max(1e-6, time.monotonic() - since)

    def start(self, job: Callable[[], None]) -> bool:
        """Begin a job, which raises nothing; False when one is under way."""
        with self._ready:
            if self._job is not None:
                return False
            self._job, self._since = job, time.monotonic()
            self._ready.notify_all()
            return True

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the worker is idle within the time (None: however long it takes)."""
        with self._ready:
            return self._ready.wait_for(lambda: self._job is None, timeout_s)


def wait_all(workers: Iterable[Worker], patience_s: float | None) -> bool:
    """Whether all are idle within the time together."""
    deadline = None if patience_s is None else time.monotonic() + patience_s
    return all(worker.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for worker in workers)
