"""One question over the roots of several collectors: the views and tables of one catalog, each record counted once.

A node that was handed from one collector to another has rows in both roots, and those that one stored and could not acknowledge any more are
in both. The positions each root holds (`sequences`) say which these may be; they are few, and the rest is read as it is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.collector.catalog import current_name, open_catalog, unreadable
from poolmeter.collector.rollup import rollup_select
from poolmeter.collector.tables import ROLLUPS, TABLES, VIEWS, SegmentKind, literal, quoted, view_fields
from poolmeter.errors import BadInput
from poolmeter.model.now import NOW_PARTS
from poolmeter.model.units import DAY_US

if TYPE_CHECKING:
    import duckdb

_KEYED = ("device_minutes", "slice_minutes", "process_minutes", "event_log")
# Of what several collectors say of one thing the newest counts.
_NEWEST = {"nodes": ("coalesce(node, url)", "last_pull_us"), "devices": ("node, uuid", "last_seen_us")}
# A range that two roots hold of one spool. Each range starts an interval; it overlaps when another root's is open there.
_TWICE = """
CREATE TEMP TABLE twice AS
SELECT DISTINCT a.node, a.epoch, greatest(a.first_sequence, b.first_sequence) AS first_sequence,
       least(a.last_sequence, b.last_sequence) AS last_sequence
FROM held a JOIN held b ON a.node = b.node AND a.epoch = b.epoch AND a.root < b.root
     AND a.first_sequence <= b.last_sequence AND b.first_sequence <= a.last_sequence
"""


def open_roots(roots: Sequence[Path]) -> "duckdb.DuckDBPyConnection":
    """See `poolmeter.collector.catalog.open_catalogs`."""
    import duckdb

    if not roots:
        raise BadInput("no store is named, expected the roots of one or more collectors")
    names = []
    for root in roots:
        with open_catalog(root):  # its version, and that it can be read
            names.append(current_name(root))
    connection = duckdb.connect(config={"threads": 2})
    try:
        for number, (root, name) in enumerate(zip(roots, names, strict=True)):
            connection.execute(f"ATTACH {literal(str(root / str(name)))} AS root_{number} (READ_ONLY)")
        # Names of segments are random: each is in one root alone.
        connection.execute(f"SET file_search_path = {literal(','.join(str(root.absolute()) for root in roots))}")
        connection.execute("SET TimeZone = 'UTC'")
        _define(connection, len(roots))
    except duckdb.Error as error:
        connection.close()
        raise unreadable(roots[0], error) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _define(connection: "duckdb.DuckDBPyConnection", count: int) -> None:
    def every(name: str, columns: str = "*") -> str:
        return " UNION ALL ".join(f"SELECT {columns} FROM root_{number}.{name}" for number in range(count))

    held = " UNION ALL ".join(f"SELECT {number} AS root, * FROM root_{number}.sequences" for number in range(count))
    connection.execute(f"CREATE TEMP TABLE held AS {held}")
    connection.execute(_TWICE)
    doubled = connection.execute("SELECT count(*) FROM twice").fetchall()[0][0] > 0
    for view in _KEYED:
        connection.execute(f"CREATE TEMP VIEW {view} AS {_once(every(view)) if doubled else every(view)}")
    for view, (kind, derived, expression) in VIEWS.items():
        if view in _KEYED:
            continue
        if kind not in ROLLUPS or not doubled:
            connection.execute(f"CREATE TEMP VIEW {view} AS {every(view)}")
            continue
        # A rollup of a day knows its own root's rows alone: the days of rows that are there twice are summed anew. A root whose minutes of
        # such a day are over is told by what it has stored of it, and the others' minutes by what it does not have.
        minutes, day = _minutes_of(ROLLUPS[kind].source), f"{ROLLUPS[kind].start} // {DAY_US}"
        days = f"(SELECT DISTINCT minute_us // {DAY_US} FROM ({every(minutes)}) m SEMI JOIN twice t ON {_MATCH})"
        over = " UNION ALL ".join(
            f"SELECT {number} AS root, day FROM (SELECT {day} AS day FROM root_{number}.{view} "
            f"EXCEPT SELECT minute_us // {DAY_US} FROM root_{number}.{minutes})"
            for number in range(count)
        )
        told = " UNION ALL ".join(f"SELECT *, {number} AS root FROM root_{number}.{view}" for number in range(count))
        columns = ", ".join(quoted(field.name) for field in view_fields(view))
        source = (
            f"(SELECT * FROM {minutes} m WHERE minute_us // {DAY_US} IN {days} AND NOT EXISTS (SELECT 1 FROM held t JOIN ({over}) o USING (root)"
            f" WHERE o.day = m.minute_us // {DAY_US} AND {_MATCH}))"
        )
        connection.execute(
            f"CREATE TEMP VIEW {view} AS SELECT {columns} FROM ({told}) WHERE {day} NOT IN {days} OR (root, {day}) IN ({over}) "
            f"UNION ALL SELECT {columns} FROM (SELECT *, {expression} AS {quoted(derived.name)} FROM ({rollup_select(kind, source)}))"
        )
    for table in TABLES:
        key, when = ("node", "taken_us") if table in NOW_PARTS else _NEWEST.get(table, ("", ""))
        # All rows of the newest moment: a snapshot has many.
        newest = f" QUALIFY rank() OVER (PARTITION BY {key} ORDER BY {when} DESC NULLS LAST) = 1" if key else ""
        connection.execute(f"CREATE TEMP VIEW {table} AS SELECT DISTINCT * FROM ({every(table)}){newest}")


_MATCH = "m.node = t.node AND m.epoch = t.epoch AND m.sequence BETWEEN t.first_sequence AND t.last_sequence"


def _once(every: str) -> str:
    """Every row, those that may be there twice by their key."""
    alone = f"SELECT m.* FROM ({every}) m ANTI JOIN twice t ON {_MATCH}"
    both = f"SELECT m.* FROM ({every}) m SEMI JOIN twice t ON {_MATCH} QUALIFY row_number() OVER (PARTITION BY m.node, m.epoch, m.sequence) = 1"
    return f"({alone}) UNION ALL ({both})"


def _minutes_of(kind: SegmentKind) -> str:
    return next(view for view, (found, _, _) in VIEWS.items() if found is kind)
