"""The usage records on the wire: one wide table, a `kind` column first, a column per field of any kind.

Columns and nullability are read off the record classes, so that the wire cannot drift from them. A column that some kind lacks
is nullable. `poolmeter.arrow` turns this into Arrow; nothing here needs it.
"""

import types
import typing
from dataclasses import dataclass, fields
from functools import cache

from poolmeter.model.usage import RECORD_TYPES, RecordKind, UsageRecord

SCHEMA_NAME = "poolmeter.usage"
SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA_VERSION = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"


@dataclass(frozen=True)
class Column:
    """One column: `type` is int64, utf8 or bool."""

    name: str
    type: str
    nullable: bool


_TYPES: dict[type, str] = {int: "int64", str: "utf8", bool: "bool"}


@cache
def columns_of(kind: RecordKind) -> tuple[Column, ...]:
    """The columns of one kind, in field order, without `kind` itself."""
    record_type = RECORD_TYPES[kind]
    hints = typing.get_type_hints(record_type)
    columns = []
    for field in fields(record_type):
        hint = hints[field.name]
        nullable = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
        base = next(part for part in typing.get_args(hint) if part is not type(None)) if nullable else hint
        columns.append(Column(field.name, _TYPES[base], nullable))
    return tuple(columns)


@cache
def wire_columns() -> tuple[Column, ...]:
    """The columns of the wide table."""
    per_kind = {kind: {column.name: column for column in columns_of(kind)} for kind in RecordKind}
    names = dict.fromkeys(name for columns in per_kind.values() for name in columns)
    wide = [Column("kind", "utf8", False)]
    for name in names:
        found = [columns[name] for columns in per_kind.values() if name in columns]
        if len({column.type for column in found}) != 1:
            raise TypeError(f"column {name} has different types in different kinds of record")
        wide.append(Column(name, found[0].type, len(found) < len(per_kind) or any(column.nullable for column in found)))
    return tuple(wide)


def record_from(kind: RecordKind, values: dict[str, object]) -> UsageRecord:
    """A record of `kind` from a row of the wide table; columns of other kinds are ignored, unknown ones too."""
    return RECORD_TYPES[kind](**{column.name: values.get(column.name) for column in columns_of(kind)})  # type: ignore[arg-type]
