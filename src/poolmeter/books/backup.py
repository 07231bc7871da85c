"""A copy of the books while others write them."""

import contextlib
import os
import sqlite3
from pathlib import Path

from poolmeter.books.place import check_url, is_url
from poolmeter.errors import BadInput, DataError, Unavailable


def backup(where: Path | str, target: Path) -> None:
    """The books at `where`, as they are at one moment, in the new file `target`: whole and synced, or not there.

    Works on books of any revision. Raises BadInput for PostgreSQL's and when `target` is there, DataError when what is copied is
    damaged, Unavailable when it cannot be read or written.
    """
    if is_url(where):
        raise BadInput(f"books {check_url(str(where))} are in PostgreSQL, expected pg_dump for a backup of them")
    if target.exists():
        raise BadInput(f"backup {target} is there already, expected a new file")
    if not Path(where).is_file():
        raise Unavailable(f"books {where} are not there, expected the file of a collector that has run")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        _copy(Path(where), part)
        # A link, not a rename, which would go over what somebody else has made there meanwhile.
        os.link(part, target)
        for path, flags in ((target, os.O_RDONLY), (target.parent, os.O_RDONLY | os.O_DIRECTORY)):
            descriptor = os.open(path, flags)
            os.fsync(descriptor)
            os.close(descriptor)
    except FileExistsError:
        raise BadInput(f"backup {target} is there already, expected a new file") from None
    except sqlite3.DatabaseError as error:
        kind = Unavailable if isinstance(error, sqlite3.OperationalError) else DataError
        raise kind(f"books {where} cannot be copied to {target}: {error}") from None
    except OSError as error:
        raise Unavailable(f"backup {target} cannot be written: {error.strerror or error}") from None
    finally:
        for name in (part, part.with_name(part.name + "-journal"), part.with_name(part.name + "-wal"), part.with_name(part.name + "-shm")):
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)


def _copy(source: Path, part: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source, timeout=5)) as found,
        contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy,
    ):
        # The copy is as readable as the books are: it has the hashes of tokens.
        part.chmod(source.stat().st_mode & 0o777)
        found.backup(copy)
        # One file, without a log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        damage = copy.execute("PRAGMA quick_check").fetchall()
        if damage != [("ok",)]:
            raise sqlite3.DatabaseError(str(damage[0][0]))
