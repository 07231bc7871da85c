"""Bearer tokens in files: how they are read, made, and found by whoever talks to a collector.

A collector asks a token of whoever changes something: that of `collector.api_token_file` (which it then asks of readers too), else the
one in the file `token` of its data folder, which it makes. Enforcer and commands look in the same two places.
"""

import contextlib
import os
import secrets
from pathlib import Path

from poolmeter.errors import BadInput, Unavailable

HINT = "expected Authorization: Bearer with the token of collector.api_token_file, else of the file token in the collector's data folder"
MAX_BYTES = 4096


def read_token(path: Path) -> str:
    """The token in a file. Raises BadInput when it cannot be read or holds none."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"token file {path} cannot be read: {why}; expected one line of ASCII text") from None
    if not text or len(text) >= MAX_BYTES or not text.isprintable() or " " in text:
        raise BadInput(f"token file {path} holds no token, expected one line of ASCII text without spaces")
    return text


def own_token_file(data: Path) -> Path:
    """Where the token of a data folder is."""
    return data / "token"


def make_token(data: Path) -> Path:
    """The file with the token of a data folder, made with mode 0600 where there is none. Raises Unavailable."""
    path = own_token_file(data)
    try:
        data.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Whole or not at all, and never over another's: a token that is half written, or replaced, is one nobody has.
            fresh = path.with_name(f".token.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            with open(fresh, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
            fresh.unlink()
    except OSError as error:
        raise Unavailable(f"token file {path} cannot be made: {error.strerror or error}") from None
    return path


def client_token(api_token_file: Path | None, data: Path) -> str | None:
    """What to send to a collector: the token of the configured file, else of the data folder's where this user may read it, else none.

    Raises BadInput for a configured file that cannot be used.
    """
    if api_token_file is not None:
        return read_token(api_token_file)
    with contextlib.suppress(BadInput):
        return read_token(own_token_file(data))
    return None
