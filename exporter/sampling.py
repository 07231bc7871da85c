"""The agent's side of a sampler child: start it, ask it, kill it when it hangs, start it again."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from poolmeter.errors import DataError
from poolmeter.exporter.sampler import LENGTH
from poolmeter.model.plain import from_plain
from poolmeter.vendors.reading import VendorReading

_MOST_DOUBLINGS = 6
RESTART_AFTER_S = 2.0  # a child that dies at once is not started in a tight loop


class Source(Protocol):
    """Where the agent gets readings of devices from. `hooked`: processes (pid, start ticks) whose device time their own hook tells, so that it need not be asked."""

    hooked: frozenset[tuple[int, int]]

    @property
    def name(self) -> str: ...

    def poll(self, budget_s: float) -> VendorReading | None:
        """The answer to the request under way, None when there is none within `budget_s`. Starts a new request when none is under way."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why there are no answers, in one sentence; None while all is well."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether something that was closed holds the devices still."""
        ...

    def close(self) -> None: ...


class SamplerProcess:
    """A child that reads a vendor's library. One request at a time; one that is not answered in `timeout_s` costs the child its life.

    So does one card's call that takes longer, of which the child tells while it reads the others on.
    """

    def __init__(
        self,
        vendor: str,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        restart_after_s: float = RESTART_AFTER_S,
        bell: int | None = None,
    ) -> None:
        """`bell` is a descriptor that ends a wait for an answer when it can be read: somebody has something more urgent to do."""
        self.name = vendor
        self.hooked: frozenset[tuple[int, int]] = frozenset()
        self.restarts = 0
        self.timeout_s = timeout_s
        self._environment = environment
        self._command = command
        self._monotonic = monotonic
        self._restart_after_s = restart_after_s
        self._bell = bell
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: float | None = None
        self._started = float("-inf")
        self._buffer = b""
        self._trouble: str | None = None
        self._futile = 0  # children replaced in a row because their library was of no use
        self._hung = 0  # children killed in a row because one card's call hung
        self._dying: subprocess.Popen[bytes] | None = None

    @property
    def stuck(self) -> bool:
        return self._dying is not None and self._dying.poll() is None

    @property
    def trouble(self) -> str | None:
        return self._trouble

    @property
    def pid(self) -> int | None:
        """The child's pid, for tests and logs."""
        return self._child.pid if self._child else None

    def poll(self, budget_s: float) -> VendorReading | None:
        if self._child is None and not self._start():
            return None
        if self._asked is None and not self._ask():
            return None
        body = self._receive(budget_s)
        if body is None:
            if self._asked is not None and self._monotonic() - self._asked > self.timeout_s:
                self._kill(f"{self.name} sampler gave no answer for {self.timeout_s:g} s and was killed")
            return None
        self._asked = None
        try:
            reading = from_plain(VendorReading, json.loads(body))
        except (ValueError, DataError) as error:
            self._kill(f"{self.name} sampler sent an answer that is no reading: {error}")
            return None
        self._trouble = reading.error
        if reading.error is None:
            self._futile = 0
        if reading.replace:
            self._futile = min(self._futile + 1, _MOST_DOUBLINGS)
            self._kill(f"{reading.error or self.name + ' sampler is of no more use'}; another sampler is started")
        elif reading.hung_us > self._patience_s * 1_000_000:
            self._hung = min(self._hung + 1, _MOST_DOUBLINGS)
            self._kill(f"{self.name} sampler has a call that did not come back for {reading.hung_us // 1000} ms and was killed")
        elif reading.hung_us == 0:
            self._hung = 0
        return reading

    @property
    def _patience_s(self) -> float:
        """How long one card's call may take. A card that hangs in each new child costs the others a restart ever more seldom."""
        return float(self.timeout_s * 2**self._hung)

    def _start(self) -> bool:
        now = self._monotonic()
        if now - self._started < self._restart_after_s * 2**self._futile:
            return False
        self._started = now
        try:
            self._child = subprocess.Popen(
                # The limit of now: a child whose first look may take longer than that would be killed before it answers.
                self._command or (sys.executable, "-m", "poolmeter.exporter.sampler", self.name, str(self.timeout_s)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(self._environment) if self._environment is not None else None,
                # An interrupt of the terminal is the agent's business: it ends the child after the last minute is closed.
                start_new_session=True,
            )
        except OSError as error:
            self._trouble = f"{self.name} sampler cannot be started: {error}"
            return False
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self._buffer, self._asked = b"", None
        return True

    def _ask(self) -> bool:
        assert self._child is not None and self._child.stdin is not None
        try:
            body = json.dumps({"hooked": sorted(self.hooked)}, separators=(",", ":")).encode()
            self._child.stdin.write(LENGTH.pack(len(body)) + body)
            self._child.stdin.flush()
        except OSError:
            self._kill(f"{self.name} sampler ended by itself with status {self._child.poll()}")
            return False
        self._asked = self._monotonic()
        return True

    def _receive(self, budget_s: float) -> bytes | None:
        assert self._child is not None and self._child.stdout is not None
        handle = self._child.stdout.fileno()
        deadline = time.monotonic() + budget_s
        while True:
            if len(self._buffer) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    body, self._buffer = self._buffer[LENGTH.size : end], self._buffer[end:]
                    return body
            left = deadline - time.monotonic()
            watched = [handle] if self._bell is None else [handle, self._bell]
            if left <= 0 or handle not in select.select(watched, [], [], left)[0]:
                return None
            chunk = os.read(handle, 1 << 20)
            if not chunk:
                self._kill(f"{self.name} sampler ended by itself with status {self._child.wait()}")
                return None
            self._buffer += chunk

    def _kill(self, why: str) -> None:
        self._trouble = why
        self.restarts += 1
        self.close()

    def close(self) -> None:
        """End the child, also in the midst of a call."""
        child, self._child, self._asked = self._child, None, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # an unsent request to a dead child
                    stream.close()
        try:
            child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._dying = child
            self._trouble = f"{self.name} sampler (pid {child.pid}) is stuck in the kernel and cannot be killed yet"
