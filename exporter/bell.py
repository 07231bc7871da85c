"""What the exporter's one loop waits by: a tick, a signal, or somebody at the control socket, whichever comes first."""

import contextlib
import os
import select
import signal
from types import FrameType


class Bell:
    """A pipe that signal handlers and other threads write to: unlike an Event it may be rung in a handler that interrupts its own waiter."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stop = False
        self.reload = False

    def fileno(self) -> int:
        """The descriptor that can be read while it rings."""
        return self._read

    def answer_signals(self) -> None:
        """SIGTERM and SIGINT ask to stop, SIGHUP to read the configuration again."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        else:
            self.stop = True
        self.ring()

    def ring(self) -> None:
        """Wake the loop, and whoever waits for a slow call on its behalf."""
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._write, b"!")

    def silence(self) -> None:
        """Stop ringing."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def wait(self, seconds: float) -> None:
        """Until it rings, at most so long."""
        select.select([self._read], [], [], max(0.0, seconds))

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._read)
        os.close(self._write)
