"""Publishing: a fresh catalog beside the old ones, then `CURRENT` replaced. Readers see one state or the other, never between."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.catalog import CURRENT
from poolmeter.collector.rollup import read_segments, view_source
from poolmeter.collector.segments import TEMPORARY, Segment, sync_folder
from poolmeter.collector.tables import TABLES, VIEWS, SegmentKind, literal, quoted, view_fields
from poolmeter.model.now import NOW_PARTS

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


# The smallest that DuckDB knows: each table takes blocks of its own, and a catalog of small tables is a tenth as large, and as slow to sync.
BLOCK_BYTES = 16384


def catalog_name(generation: int) -> str:
    """File name of a generation's catalog."""
    return f"catalog-{generation}.duckdb"


class CatalogWriter:
    """Writes catalogs, one after the other, of one thread at a time; keeps one DuckDB instance, since starting one costs as much as writing a catalog."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._engine: duckdb.DuckDBPyConnection | None = None

    def write(self, generation: int, segments: Sequence[Segment], tables: Mapping[str, "pa.Table"], damaged: Mapping[str, str]) -> Path:
        """A durable catalog that nothing names yet. `tables` holds every table of `TABLES` but the `now_*` ones. Raises OSError, duckdb.Error.

        `damaged` names segments that cannot be read, and why: the views name them last.
        """
        temporary = self._root / f"{TEMPORARY}catalog-{generation}.duckdb"
        temporary.unlink(missing_ok=True)
        try:
            self._fill(temporary, segments, tables, damaged)
            handle = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            final = self._root / catalog_name(generation)
            os.rename(temporary, final)
        except Exception:
            # What an instance that has failed once still holds is not worth finding out.
            self.close()
            for left in (temporary, temporary.with_name(temporary.name + ".wal")):
                left.unlink(missing_ok=True)
            raise
        sync_folder(self._root)
        return final

    def close(self) -> None:
        """Let go of the instance."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _fill(self, path: Path, segments: Sequence[Segment], tables: Mapping[str, "pa.Table"], damaged: Mapping[str, str]) -> None:
        engine = self._engine = self._engine or self._start()
        engine.execute(f"ATTACH {literal(str(path))} AS next (BLOCK_SIZE {BLOCK_BYTES})")
        engine.execute("USE next")
        engine.execute("BEGIN")
        for name, columns in TABLES.items():
            if name in NOW_PARTS:
                engine.execute(now_statement(name, segments, damaged))
                continue
            if not tables[name].num_rows:
                engine.execute(f"CREATE TABLE {name} ({', '.join(f'{quoted(column.name)} {column.type}' for column in columns)})")
                continue
            engine.register("incoming", tables[name])
            engine.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
            engine.unregister("incoming")
        for view in VIEWS:
            engine.execute(view_statement(view, segments, damaged))
        engine.execute("COMMIT")
        engine.execute("USE memory")
        # Detaching writes the last pages and closes the file.
        engine.execute("DETACH next")

    def _start(self) -> "duckdb.DuckDBPyConnection":
        import duckdb

        engine = duckdb.connect(config={"threads": 1})
        engine.execute(f"SET file_search_path = {literal(str(self._root.absolute()))}")
        return engine


def view_statement(view: str, segments: Sequence[Segment], damaged: Mapping[str, str]) -> str:
    """CREATE VIEW over exactly the live segments; typed and empty when there are none."""
    kind, derived, expression = VIEWS[view]
    source = view_source(kind, segments, damaged)
    if source is None:
        nothing = ", ".join(f"CAST(NULL AS {field.type}) AS {quoted(field.name)}" for field in view_fields(view))
        return f"CREATE VIEW {view} AS SELECT {nothing} WHERE false"
    return f"CREATE VIEW {view} AS SELECT *, {expression} AS {quoted(derived.name)} FROM ({source})"


def now_statement(name: str, segments: Sequence[Segment], damaged: Mapping[str, str]) -> str:
    """CREATE VIEW of one of the `now_*` names over the live segment of newest snapshots; typed and empty when there is none.

    A damaged one raises its sentence when it is asked.
    """
    live = [segment for segment in segments if segment.kind is SegmentKind.NOW]
    torn = next((damaged[segment.file] for segment in live if segment.file in damaged), None)
    if not live or torn is not None:
        nothing = ", ".join(f"CAST(NULL AS {field.type}) AS {quoted(field.name)}" for field in TABLES[name])
        return f"CREATE VIEW {name} AS SELECT {nothing} WHERE {'false' if torn is None else f'error({literal(torn)}) IS NOT NULL'}"
    columns = ", ".join(quoted(field.name) for field in TABLES[name])
    return f"CREATE VIEW {name} AS SELECT {columns} FROM {read_segments(live)} WHERE part = {literal(NOW_PARTS[name])}"


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
