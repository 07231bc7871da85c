"""Bringing a store of an older version, and the books beside it, to this one: a new catalog is written, segments stay as they are.

`STEPS[n]` makes the tables of version n + 1 out of those of version n. The new catalog becomes the store in the one step that every
publication ends with, so a migration that is killed has not happened.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.books.migrate import Upgraded
from poolmeter.books.upgrade import upgrade
from poolmeter.collector.catalog import current_name, open_any, open_catalog, unreadable
from poolmeter.collector.now import write_now
from poolmeter.collector.publication import CatalogWriter, name_current
from poolmeter.collector.segments import sync_folders
from poolmeter.collector.state import State, catalog_tables, state_from
from poolmeter.collector.tables import STORE_VERSION, TABLES, schema_of
from poolmeter.errors import DataError, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

Tables = dict[str, "pa.Table"]


def _with_checksums_and_lost(tables: Tables) -> Tables:
    """Version 2 knows a checksum of each segment (none of those that are there), what was lost, and hours (views alone).

    Its newest snapshots are a segment, which is written with the catalog: tables of theirs are taken as they are.
    """
    import pyarrow as pa

    segments = tables["segments"]
    nothing = pa.nulls(segments.num_rows, pa.utf8())
    return tables | {"segments": segments.append_column("sha256", nothing), "lost": schema_of(TABLES["lost"]).empty_table()}


STEPS: dict[int, Callable[[Tables], Tables]] = {1: _with_checksums_and_lost}


@dataclass(frozen=True)
class Migrated:
    """What a migration did: the store's version found, the generation of its catalog now, and the books' revisions (None: no books)."""

    before: int
    generation: int
    books: Upgraded | None


def migrate(root: Path, books: Path | str | None = None) -> Migrated:
    """Bring the store to this version, and the books at `books` where one is given. Of the same version: nothing is changed.

    Nothing is changed either where one of the two is newer than this program. Raises Unavailable (no store, a collector owns it, the disk,
    a server of books), DataError (a newer version, a torn catalog), BadInput (newer books).
    """
    import duckdb

    from poolmeter.collector.store import own

    if current_name(root) is None:
        raise Unavailable(f"store {root} is not there, expected the data folder of a collector that has run")
    lock = own(root)
    try:
        connection, found = open_any(root)
        with connection:
            if found > STORE_VERSION or found not in (STORE_VERSION, *STEPS):
                who = "a newer poolmeter" if found > STORE_VERSION else "no poolmeter"
                raise DataError(f"store {root} has version {found}, expected {min(STEPS)} to {STORE_VERSION}: {who} wrote it")
            try:
                names = [row[0] for row in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
                tables = {name: connection.sql(f"SELECT * FROM {name}").to_arrow_table() for name in names}
            except duckdb.Error as error:
                raise unreadable(root, error) from None
        upgraded = None if books is None else upgrade(books)
        if found == STORE_VERSION:
            open_catalog(root).close()
            return Migrated(found, int(tables["meta"].column("generation")[0].as_py()), upgraded)
        for version in range(found, STORE_VERSION):
            tables = STEPS[version](tables)
        return Migrated(found, _publish(root, state_from(tables)), upgraded)
    finally:
        os.close(lock)


def _publish(root: Path, state: State) -> int:
    import duckdb

    generation = state.generation + 1
    writer = CatalogWriter(root)
    try:
        newest = write_now(root, state.now)
        sync_folders(root, newest, set())
        segments = state.segments | {segment.file: segment for segment in newest}
        wanted = replace(state, generation=generation, segments=segments)
        writer.write(generation, tuple(wanted.segments.values()), catalog_tables(wanted), {})
        name_current(root, generation, lambda: None)
    except (OSError, duckdb.Error) as error:
        raise Unavailable(f"store {root} cannot be written: {str(error).splitlines()[0]:.200}") from None
    finally:
        writer.close()
    return generation
