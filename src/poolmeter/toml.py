"""Reading a TOML file that somebody wrote: whatever is in it, the answer is a table or one sentence."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poolmeter.errors import BadInput

MAX_BYTES = 4 * 1024 * 1024  # a configuration or a plan has kilobytes; a device file never ends


def read_toml(path: Path, name: str) -> bytes:
    """The bytes of the file, which errors call `name`. Raises BadInput."""
    try:
        with path.open("rb") as file:
            body = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"{name} cannot be read: {found}, expected a TOML file") from None
    if len(body) > MAX_BYTES:
        raise BadInput(f"{name} is longer than {MAX_BYTES} bytes, expected a TOML file")
    return body


def parse_toml(body: bytes, name: str, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The table in `body`. Raises BadInput."""
    try:
        found = tomllib.loads(body.decode("utf-8"), parse_float=parse_float)
        repr(found)  # a number in hexadecimal may have more digits than can be shown in decimal, as a message would
    except RecursionError:
        raise BadInput(f"{name} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # also what int() says of a number with thousands of digits
        raise BadInput(f"{name} is not TOML: {error!s:.200}") from None
    return found
