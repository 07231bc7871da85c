"""What of a snapshot the collector keeps, as tables: one for the node and one for each kind of part, and the wide one that carries all.

Columns are read off the snapshot's classes. The wide table has a `part` column first, then those of every part; a part leaves the others'
columns empty. `poolmeter.now` turns this into Arrow; nothing here needs it.
"""

import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache

from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, SourceHealth
from poolmeter.model.wire import Column

NOW_MAJOR = 1
NOW_MINOR = 0
NOW_VERSION = f"{NOW_MAJOR}.{NOW_MINOR}"
NOW_TYPES: dict[str, type] = {
    "now_devices": DeviceSnapshot,
    "now_slices": SliceSnapshot,
    "now_processes": ProcessSnapshot,
    "now_sources": SourceHealth,
}
NOW_PARTS = {
    "now_nodes": "node",
    "now_devices": "device",
    "now_slices": "slice",
    "now_processes": "process",
    "now_sources": "source",
}
NOW_FIELDS = {"now_devices": "devices", "now_slices": "slices", "now_processes": "processes", "now_sources": "sources"}
_HEAD = (Column("node", "utf8", False), Column("taken_us", "int64", False))
_NODE = (
    Column("epoch", "utf8", False),
    Column("sequence", "int64", False),
    Column("simulated", "bool", False),
    Column("pool", "utf8", True),
)
_TYPES: dict[type, str] = {int: "int64", str: "utf8", bool: "bool"}


@cache
def now_columns(name: str) -> tuple[Column, ...]:
    """The columns of one of the tables (`NOW_PARTS`); a record within a part (the hardware of a device) has none."""
    if name not in NOW_TYPES:
        return (*_HEAD, *_NODE)
    hints = typing.get_type_hints(NOW_TYPES[name])
    columns = list(_HEAD)
    for field in fields(NOW_TYPES[name]):
        hint = hints[field.name]
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        base = next(part for part in parts if part is not type(None))
        if not is_dataclass(base):
            columns.append(Column(field.name, _TYPES[base], type(None) in parts))
    return tuple(columns)


@cache
def wide_now_columns() -> tuple[Column, ...]:
    """The columns of the wide table."""
    wide = {"part": Column("part", "utf8", False)}
    for name in NOW_PARTS:
        for column in now_columns(name):
            known = wide.setdefault(column.name, Column(column.name, column.type, column not in _HEAD))
            if known.type != column.type:
                raise TypeError(f"column {column.name} has different types in different parts of a snapshot")
    return tuple(wide.values())
