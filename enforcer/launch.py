"""Starting a program under an allocation and seeing it through: the child asks for the allocation, then becomes the program.

That the child asks makes it the owner by its own credentials: the allocation lives as long as the program, also when whoever
started it is killed.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.allocation import Allocation
from poolmeter.model.plain import from_plain, to_plain

NOT_FOUND = 127
NOT_EXECUTABLE = 126

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: sent by the kernel, as by a terminal to its whole foreground group
_ERRORS: dict[str, type[PoolmeterError]] = {"Refused": Refused, "BadInput": BadInput, "Unavailable": Unavailable}


@dataclass(frozen=True)
class Prepared:
    """What the child has when it is about to become the program."""

    allocation: Allocation
    environment: Mapping[str, str]


def hooked_environment(
    base: Mapping[str, str], allocation: Allocation, folder: Path, hook: Path | None, simulated: Mapping[str, str]
) -> dict[str, str]:
    """The program's environment: its allocation, its devices and, unless the hook comes another way (None), the preload.

    An own CUDA_VISIBLE_DEVICES stays: whoever set it means to narrow the choice further. `simulated` goes before what is there.
    """
    environment = dict(base)
    environment["POOLMETER_ALLOCATION_DIR"] = str(folder)
    environment["POOLMETER_ALLOCATION"] = allocation.id
    # The grant says it too; this is for a program that cannot find its grant at all.
    environment["POOLMETER_ON_FAULT"] = allocation.on_fault
    environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(item.device_uuid for item in allocation.slices))
    for name, value in simulated.items():
        environment[name] = _before(value, base.get(name)) if name == "LD_LIBRARY_PATH" else value
    if hook is not None:
        if any(char in str(hook) for char in " :"):
            raise Unavailable(f"hook library {hook} cannot be preloaded, expected a path without spaces and colons")
        environment["LD_PRELOAD"] = _before(str(hook), base.get("LD_PRELOAD"))
    return environment


def _before(value: str, others: str | None) -> str:
    return f"{value}:{others}" if others else value


def launch(command: list[str], prepare: Callable[[], Prepared], started: Callable[[Allocation], None]) -> tuple[int, Allocation]:
    """Runs `command` and returns its exit status (128 + signal when one ended it) and its allocation.

    `prepare` runs in the child; `started` in the parent, once the allocation is there and before the program runs. Signals go on to
    the program. Raises what `prepare` raised; 127 and 126 are a command that is not there or not executable, as in a shell.
    """
    told_read, told_write = os.pipe()
    go_read, go_write = os.pipe()
    # Blocked before the fork: a signal that comes early waits until there is somebody to pass it to.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(told_read)
        os.close(go_write)
        _become(command, prepare, told_write, go_read, mask)
    os.close(told_write)
    os.close(go_read)
    try:
        with os.fdopen(told_read, "rb") as told:
            line = told.readline()
            first = json.loads(line) if line.endswith(b"\n") else {}
            if "error" in first:
                _reap(child)
                raise _ERRORS.get(first["error"], Unavailable)(first["message"])
            if "allocation" not in first:  # ended by a signal while it asked
                raise Ended(_reap(child))
            allocation = from_plain(Allocation, first["allocation"])
            try:
                started(allocation)
            except BaseException:
                os.close(go_write)  # the child ends without running the program
                go_write = -1
                _reap(child)
                raise
            with contextlib.suppress(BrokenPipeError):  # ended by a signal meanwhile
                os.write(go_write, b"\n")
            failed = told.readline()
        status = _see_through(child)
        if failed:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"poolmeter: {json.loads(failed)['message']}\n")
        return status, allocation
    finally:
        if go_write >= 0:
            os.close(go_write)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Ended(Unavailable):
    """The child was ended by a signal before it had an allocation; `status` is 128 + signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the program was ended with status {status} before it had an allocation")
        self.status = status


def _become(command: list[str], prepare: Callable[[], Prepared], told: int, go: int, mask: set[int | signal.Signals]) -> NoReturn:
    try:
        # A program expects the dispositions that a shell would have given it, not those of the Python that starts it.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            prepared = prepare()
        except PoolmeterError as error:
            kind = next((name for name, branch in _ERRORS.items() if isinstance(error, branch)), "Unavailable")
            _tell(told, {"error": kind, "message": str(error)})
            os._exit(125)
        _tell(told, {"allocation": to_plain(prepared.allocation)})
        if not os.read(go, 1):
            os._exit(125)  # whoever started this is gone, or could not go on
        try:
            os.execvpe(command[0], command, dict(prepared.environment))
        except (FileNotFoundError, NotADirectoryError):
            _tell(told, {"message": f"command is {command[0]!r:.200}, expected a program: there is none"})
            os._exit(NOT_FOUND)
        except (OSError, ValueError) as error:
            _tell(told, {"message": f"command is {command[0]!r:.200}, expected a program: {error}"})
            os._exit(NOT_EXECUTABLE)
    except BaseException as error:
        _tell(told, {"error": "Unavailable", "message": f"internal error: {type(error).__name__}: {error}"})
    finally:
        os._exit(125)


def _tell(descriptor: int, message: dict[str, object]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def _reap(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _see_through(child: int) -> int:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        info = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        # What a terminal sent has reached the program already; twice would be one too many.
        if info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
            try:
                os.kill(child, info.si_signo)
            except ProcessLookupError:
                continue
            except PermissionError:
                sys.stderr.write(f"poolmeter: signal {info.si_signo} could not be passed on to pid {child}\n")
