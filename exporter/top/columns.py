"""The columns of each pane, and which of them a width has room for. A cell is pieces of text, each with a role that a palette colours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from poolmeter.exporter.top.words import bar, cut, width_of

Cell = tuple[tuple[str, str], ...]
R = TypeVar("R")
GAP = 1


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column. `rank`: the lower, the longer it stays when the terminal is narrow; `stretch`: takes what width is left over."""

    key: str
    title: str
    cell: Callable[[R, int], Cell]
    least: int
    most: int
    rank: int
    right: bool = False
    stretch: bool = False


@dataclass(frozen=True)
class Placed(Generic[R]):
    """A column and the width it has got."""

    column: Column[R]
    width: int


def text(value: str, role: str = "") -> Cell:
    """A cell of one piece; an empty one has none."""
    return ((value, role),) if value else ()


def gauge(part: int | None, whole: int | None, width: int, role: str) -> Cell:
    """A bar as a cell."""
    full, rest = bar(part, whole, width)
    return ((full, role), (rest, "dim"))


def place(columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> list[Placed[R]]:
    """The columns that fit into `width`, in their order, with their widths.

    A column that has nothing to say in any row is left out. Widths follow what is in the rows, so they do not depend on the order of them.
    """
    natural: dict[str, int] = {}
    for column in columns:
        longest = max((width_of("".join(piece for piece, _ in column.cell(row, column.most))) for row in rows), default=0)
        if longest or not rows:
            natural[column.key] = max(column.least, min(column.most, max(longest, width_of(column.title))))
    chosen: dict[str, int] = {}
    left = width
    for column in sorted((column for column in columns if column.key in natural), key=lambda column: column.rank):
        needed = column.least + (GAP if chosen else 0)
        if needed <= left:
            chosen[column.key] = column.least
            left -= needed
    for column in sorted((column for column in columns if column.key in chosen), key=lambda column: column.rank):
        more = min(left, natural[column.key] - chosen[column.key])
        chosen[column.key] += max(0, more)
        left -= max(0, more)
    stretchy = [column for column in columns if column.key in chosen and column.stretch]
    for number, column in enumerate(stretchy):
        more = left // (len(stretchy) - number)
        chosen[column.key] += more
        left -= more
    return [Placed(column, chosen[column.key]) for column in columns if column.key in chosen]


def line(placed: Sequence[Placed[R]], row: R) -> list[tuple[str, str]]:
    """The row as pieces, each cell in exactly its width."""
    pieces: list[tuple[str, str]] = []
    for number, item in enumerate(placed):
        if number:
            pieces.append((" " * GAP, ""))
        pieces += _cell(item.column.cell(row, item.width), item.width, item.column.right)
    return pieces


def heading(placed: Sequence[Placed[R]], sorted_by: str | None = None, down: bool = True) -> list[tuple[str, str]]:
    """The titles; that of the column sorted by is marked."""
    pieces: list[tuple[str, str]] = []
    for number, item in enumerate(placed):
        if number:
            pieces.append((" " * GAP, "title"))
        mark = item.column.key == sorted_by
        word = cut(item.column.title, item.width - 1) + ("▼" if down else "▲") if mark else item.column.title
        pieces += _cell(((word, "sorted" if mark else "title"),), item.width, item.column.right, "title")
    return pieces


def _cell(cell: Cell, width: int, right: bool, role: str = "") -> list[tuple[str, str]]:
    pieces: list[tuple[str, str]] = []
    used = 0
    for word, kind in cell:
        word = cut(word, width - used)
        if word:
            pieces.append((word, kind))
            used += width_of(word)
    if used < width:
        pieces.insert(0 if right else len(pieces), (" " * (width - used), role))
    return pieces
