"""The one tree of exceptions, and the exit code each branch ends a command with.

    PoolmeterError            1
    ├── Refused               1   asked for and not granted, or a check found something
    ├── BadInput              2   usage, configuration, a file or a value that cannot be honoured
    │   └── DataError         2   stored or received data that breaks its own rules
    └── Unavailable           3   a card, store, collector or verb that is not there (now)
        └── NotBuilt          3   a verb of the command tree that this version does not have yet

The message is one sentence that names the thing, the value found and the value expected; `cli.main` alone prints it.
"""


class PoolmeterError(Exception):
    """Base of everything poolmeter raises on purpose."""

    exit_code = 1


class Refused(PoolmeterError):
    """A request understood and refused (admission, a guard, a failed check)."""

    exit_code = 1


class BadInput(PoolmeterError):
    """Input that cannot be honoured: flags, configuration, price plans, files."""

    exit_code = 2


class DataError(BadInput):
    """Stored or received data that breaks its own rules."""


class Unavailable(PoolmeterError):
    """Something needed is not there: card, store, collector, permission, port."""

    exit_code = 3


class NotBuilt(Unavailable):
    """A verb of the command tree that this version does not have yet."""
