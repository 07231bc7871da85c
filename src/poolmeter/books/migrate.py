"""Which revision books have, and how they are brought to this one. Nothing ever brings them back."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

from poolmeter.books.models import REVISION, REVISION_TABLE, REVISIONS
from poolmeter.errors import BadInput

MIGRATIONS = Path(__file__).parent / "migrations"
FIRST = REVISIONS[0]
_revision = table(REVISION_TABLE, column("version_num"))
_version = table("books_version", column("version"))
_log = logging.getLogger("poolmeter.books")
# Alembic has one environment a process. Whoever waits here holds its own books alone, so nobody waits for the other.
_environment = threading.Lock()


@dataclass(frozen=True)
class Upgraded:
    """What an upgrade did: the revision found (None: there were no tables) and the one the books have now."""

    before: str | None
    after: str


def found_revision(connection: Connection, name: str, quick: bool = False) -> str | None:
    """The revision of the books; None when the database is empty. `quick`: they are known to be books.

    Raises BadInput when other tables are there. Books from before revisions had a version instead, of which there was one.
    """
    tables = [REVISION_TABLE] if quick else inspect(connection).get_table_names()
    if REVISION_TABLE in tables:
        rows = connection.execute(select(_revision.c.version_num)).scalars().all()
        if len(rows) != 1:
            raise BadInput(f"books {name} have {len(rows)} revisions, expected one")
        return str(rows[0])
    if "books_version" in tables:
        rows = connection.execute(select(_version.c.version)).scalars().all()
        if list(rows) != [1]:
            raise BadInput(f"books {name} have version {', '.join(str(row) for row in rows) or 'absent'}, expected 1 or a revision")
        return FIRST
    if tables:
        raise BadInput(f"books {name} have no revision but the table {tables[0]!r:.60}, expected an empty database or books")
    return None


def check_revision(found: str | None, name: str) -> None:
    """Raises BadInput unless it is the revision of this program."""
    if found == REVISION:
        return
    if found in REVISIONS:
        how = "poolmeter store migrate, or the start of a collector, brings them up"
        raise BadInput(f"books {name} have revision {found}, expected {REVISION}: {how}")
    raise BadInput(
        f"books {name} have revision {found}, expected {REVISION} or older: a newer poolmeter made them and is needed to use them"
    )


def bring_up(connection: Connection, name: str) -> Upgraded:
    """Bring the books in this transaction to this program's revision; tables are made where there are none.

    Raises BadInput for books of a newer program, and for other tables.
    """
    before = found_revision(connection, name)
    if before == REVISION:
        return Upgraded(before, REVISION)
    if before is not None and before not in REVISIONS:
        check_revision(before, name)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # also of what it says when it is imported
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _environment:
        if before == FIRST and not inspect(connection).has_table(REVISION_TABLE):
            command.stamp(config, FIRST)
        command.upgrade(config, REVISION)
    if before is not None:
        _log.info("books %s brought from revision %s to %s", name, before, REVISION)
    return Upgraded(before, REVISION)
