"""Reading a store: the catalog that `CURRENT` names, opened read-only, while the collector may be writing the next one.

A catalog is a small DuckDB file: views over exactly the live segments (`device_minutes`, `slice_minutes`, `process_minutes`, `event_log`,
`quarantine`, `slice_hours`, `device_hours`, `slice_days`, `device_days`) and tables (`meta`, `nodes`, `sequences`, `devices`, `segments`,
`lost`, `now_nodes`, `now_devices`, `now_slices`, `now_processes`, `now_sources`); docs/reference/store.md lists the columns. Views name files relative to the root, so a
store can be moved; plain `duckdb` (2.x) must be started in the root.
"""

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.tables import STORE_VERSION, TABLES, literal
from poolmeter.collector.tables import quoted as quoted
from poolmeter.errors import DataError, Unavailable
from poolmeter.model.now import NOW_PARTS

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

CURRENT = "CURRENT"
_NAME = re.compile(r"^catalog-(\d+)\.duckdb$")
_NAME_MOST = 1000
_ATTEMPTS = 5
# Told of each connection that is opened in its context, to bound it and to end it: how a server limits what one request asks, whoever asks it.
opened: "ContextVar[Callable[[duckdb.DuckDBPyConnection], None] | None]" = ContextVar("opened", default=None)
_RESTORE = "poolmeter store restore puts a backup in its place"
# Every column of every table, and no row: what a damaged or foreign catalog of the right version lacks is told before it is asked for.
_TABLES = "SELECT 0 FROM " + ", ".join(
    f"(SELECT {', '.join(quoted(field.name) for field in fields)} FROM {name} LIMIT 0)"
    for name, fields in TABLES.items()
    if name not in NOW_PARTS
)


class TornStore(DataError):
    """Something of the store is damaged: whoever asks can do nothing about it."""


class TornCatalog(TornStore):
    """The catalog, or the file that names it, is damaged: a backup has to take its place."""


def current_name(root: Path) -> str | None:
    """The file name of the newest catalog; None when the root holds no store.

    Raises DataError on a torn or foreign `CURRENT`, and where there is none beside segments: whoever took that for a new store would found an
    empty one, and delete them as leftovers.
    """
    try:
        with (root / CURRENT).open("rb") as file:
            text = file.read(_NAME_MOST).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        if _has_segments(root):
            raise TornCatalog(f"{root / CURRENT} is missing beside segments, expected the name of a catalog; {_advice(root)}") from None
        return None
    except IsADirectoryError:
        raise TornCatalog(f"{root / CURRENT} is a folder, expected a file with the name of a catalog; {_advice(root)}") from None
    except OSError as error:
        raise Unavailable(f"store {root} cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise TornCatalog(
            f"{root / CURRENT} is no text, expected the name of a catalog such as catalog-7.duckdb; {_advice(root)}"
        ) from None
    if _NAME.match(text) is None:
        raise TornCatalog(f"{root / CURRENT} is {text!r:.80}, expected the name of a catalog such as catalog-7.duckdb; {_advice(root)}")
    return text


def _has_segments(root: Path) -> bool:
    return next((root / "segments").glob("*/*/*.parquet"), None) is not None


def _advice(root: Path) -> str:
    """What brings a store back whose `CURRENT` is damaged: a catalog beside it that can be opened, else a backup."""
    import duckdb

    try:
        names = sorted((path.name for path in root.iterdir() if _NAME.match(path.name)), key=generation_of, reverse=True)
    except OSError:
        names = []
    for name in names:
        try:
            with duckdb.connect(str(root / name), read_only=True) as connection:
                if connection.execute("SELECT store_version FROM meta").fetchall() == [(STORE_VERSION,)]:
                    return f"{name} is whole: with that name as its one line the store is what it was ({_RESTORE}, where segments of it are gone)"
        except duckdb.Error:
            continue
    return _RESTORE


def generation_of(name: str) -> int:
    """The number in a catalog's file name, -1 for any other file."""
    found = _NAME.match(name)
    return int(found[1]) if found else -1


def open_catalog(root: Path) -> "duckdb.DuckDBPyConnection":
    """A read-only connection to the newest catalog, views ready to query; a context manager that closes it.

    Open one per question: a connection kept open goes on seeing the old state, whose segments are deleted after a grace period.
    Raises Unavailable when there is no store, DataError when it has another version or is damaged.
    """
    import duckdb

    connection, found = open_any(root)
    if found == STORE_VERSION:
        try:
            connection.execute(_TABLES)
        except duckdb.Error as error:
            connection.close()
            wrong = str(error).splitlines()[0]
            raise TornCatalog(
                f"catalog of store {root} fails with {wrong!r:.120}, expected the tables of version {found}; {_RESTORE}"
            ) from None
        return connection
    connection.close()
    advice = "poolmeter store migrate brings it there" if found < STORE_VERSION else "a newer poolmeter wrote it"
    raise DataError(f"store {root} has version {found}, expected {STORE_VERSION}: {advice}")


def open_any(root: Path) -> "tuple[duckdb.DuckDBPyConnection, int]":
    """Like `open_catalog`, of any version, and which it is. Raises Unavailable when there is no store, DataError when it is torn."""
    import duckdb

    failure = ""
    for _ in range(_ATTEMPTS):
        name = current_name(root)
        if name is None:
            expected = "the data folder of a collector that has run (--data or POOLMETER_DATA names it)"
            raise Unavailable(f"store {root} is not there (no file {CURRENT}), expected {expected}")
        path = root / name
        try:
            connection = duckdb.connect(str(path), read_only=True)
        except duckdb.Error as error:
            # The collector moved on between the two reads and the grace period is over: look again.
            failure = str(error).splitlines()[0]
            if current_name(root) != name:
                continue
            if not path.exists():
                raise TornCatalog(f"catalog {path} is missing, expected the file that {CURRENT} names; {_advice(root)}") from None
            expected = f"a DuckDB 2 file of store version {STORE_VERSION}"
            raise TornCatalog(f"catalog {path} cannot be opened: {failure:.200}; expected {expected}; {_RESTORE}") from None
        try:
            version = _prepare(connection, root)
            watch = opened.get()
            if watch is not None:
                watch(connection)
            return connection, version
        except BaseException:
            connection.close()
            raise
    raise Unavailable(f"store {root} has no readable catalog: {failure:.200}")


def _prepare(connection: "duckdb.DuckDBPyConnection", root: Path) -> int:
    import duckdb

    try:
        found = connection.execute("SELECT store_version FROM meta").fetchall()
    except duckdb.Error as error:
        raise TornCatalog(f"store {root} has no version: {str(error).splitlines()[0]:.120}; expected {STORE_VERSION}; {_RESTORE}") from None
    if len(found) != 1 or found[0][0] is None:
        raise TornCatalog(f"store {root} has version absent, expected {STORE_VERSION}")
    connection.execute(f"SET file_search_path = {literal(str(root.absolute()))}")
    connection.execute("SET TimeZone = 'UTC'")
    return int(found[0][0])


def unreadable(root: Path, error: "duckdb.Error") -> Exception:
    """What to raise for a question that failed: TornStore for a torn file, Unavailable for one that is gone or for want of memory, else `error`."""
    import duckdb

    wrong = (
        duckdb.ParserException,
        duckdb.BinderException,
        duckdb.CatalogException,
        duckdb.ConversionException,
        duckdb.OutOfRangeException,
    )
    # A parameter that is missing and a file without its magic bytes are of one kind; the file is named.
    unfit = isinstance(error, duckdb.InvalidInputException) and ".parquet" not in str(error)
    if isinstance(error, wrong) or unfit:
        return error  # the question is wrong, not the store
    kind = Unavailable if isinstance(error, (duckdb.IOException, duckdb.OutOfMemoryException)) else TornStore
    return kind(f"store {root} cannot be read: {str(error).splitlines()[0]:.200}")


def query(root: Path, sql: str, parameters: Sequence[object] = ()) -> "pa.Table":
    """The Arrow table of one question, asked again once when a segment was deleted under it.

    `parameters` fill the `?` of `sql`. Raises what `open_catalog` raises, Unavailable when a segment is gone for good or memory does not suffice, DataError when a
    segment is torn, and duckdb's own error on wrong SQL, values and parameters.
    """
    import duckdb

    for last in (False, True):
        with open_catalog(root) as connection:
            try:
                return connection.sql(sql, params=list(parameters)).to_arrow_table()
            except duckdb.Error as error:
                if last or not isinstance(error, duckdb.IOException):
                    raise unreadable(root, error) from None
    raise AssertionError("unreachable")


def open_catalogs(roots: Sequence[Path]) -> "duckdb.DuckDBPyConnection":
    """A connection to the newest catalogs of several collectors' roots, with the views and tables of one; a context manager that closes it.

    Each record counts once, also when a node's collector died and another took it over. Of nodes, devices and snapshots the newest word
    counts. `quarantine` may name a row once for each root. Raises what `open_catalog` raises, and BadInput without roots.
    """
    from poolmeter.collector.roots import open_roots

    return open_roots(roots)
