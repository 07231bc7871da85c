"""A finding: what was checked, how it stands, one sentence, and one command that would mend it."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class State(Enum):
    """How a check came out. UNKNOWN: it could not be found out, which is neither well nor ill."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One check of one thing. `fix` is a command for whoever may run it; nothing here runs it."""

    check: str
    state: State
    found: str
    fix: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class Machine:
    """Where this machine tells of itself; tests have their own."""

    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    sys: Path = Path("/sys")


@dataclass(frozen=True)
class Subject:
    """One node to look at. `simulated`: the variables by which a program finds its simulated driver, None for real cards."""

    name: str
    run: Path
    exporter_url: str
    simulated: dict[str, str] | None = field(default=None)


def ok(check: str, found: str) -> Finding:
    """It is as it should be."""
    return Finding(check, State.OK, found)


def warning(check: str, found: str, fix: str | None = None) -> Finding:
    """It works, and something is lost by it."""
    return Finding(check, State.WARNING, found, fix)


def problem(check: str, found: str, fix: str | None = None) -> Finding:
    """Something does not work because of it."""
    return Finding(check, State.PROBLEM, found, fix)


def unknown(check: str, found: str, fix: str | None = None) -> Finding:
    """It cannot be told."""
    return Finding(check, State.UNKNOWN, found, fix)
