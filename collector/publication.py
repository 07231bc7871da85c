"""Publishing: a fresh catalog beside the old ones, then `CURRENT` replaced. Readers see one state or the other, never between."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.catalog import CURRENT
from poolmeter.collector.rollup import view_source
from poolmeter.collector.segments import TEMPORARY, Segment, sync_folder
from poolmeter.collector.tables import TABLES, VIEWS, literal, quoted, view_fields

if TYPE_CHECKING:
    import pyarrow as pa


def catalog_name(generation: int) -> str:
    """File name of a generation's catalog."""
    return f"catalog-{generation}.duckdb"


def write_catalog(root: Path, generation: int, segments: Sequence[Segment], tables: Mapping[str, "pa.Table"]) -> Path:
    """A durable catalog that nothing names yet. `tables` holds every table of `TABLES`. Raises OSError, duckdb.Error."""
    import duckdb

    temporary = root / f"{TEMPORARY}catalog-{generation}.duckdb"
    temporary.unlink(missing_ok=True)
    try:
        with duckdb.connect(str(temporary), config={"threads": 1}) as connection:
            connection.execute(f"SET file_search_path = {literal(str(root.absolute()))}")
            connection.execute("BEGIN")
            for name in TABLES:
                connection.register("incoming", tables[name])
                connection.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
                connection.unregister("incoming")
            for view in VIEWS:
                connection.execute(view_statement(view, segments))
            connection.execute("COMMIT")
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        final = root / catalog_name(generation)
        os.rename(temporary, final)
    except Exception:
        for left in (temporary, temporary.with_name(temporary.name + ".wal")):
            left.unlink(missing_ok=True)
        raise
    sync_folder(root)
    return final


def view_statement(view: str, segments: Sequence[Segment]) -> str:
    """CREATE VIEW over exactly the live segments; typed and empty when there are none."""
    kind, derived, expression = VIEWS[view]
    source = view_source(kind, segments)
    if source is None:
        nothing = ", ".join(f"CAST(NULL AS {field.type}) AS {quoted(field.name)}" for field in view_fields(view))
        return f"CREATE VIEW {view} AS SELECT {nothing} WHERE false"
    return f"CREATE VIEW {view} AS SELECT *, {expression} AS {quoted(derived.name)} FROM ({source})"


def name_current(root: Path, generation: int, replaced: Callable[[], None]) -> None:
    """Make a generation the one that readers open; `replaced` is called the moment they do, before it is durable. Raises OSError."""
    temporary = root / f"{TEMPORARY}{CURRENT}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(catalog_name(generation) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, root / CURRENT)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    replaced()
    sync_folder(root)
