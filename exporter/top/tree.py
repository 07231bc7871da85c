"""The process pane as a tree by tenant: a branch with sums above each tenant's processes."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from poolmeter.exporter.top.columns import Cell, Column, text
from poolmeter.exporter.top.panes import process_columns
from poolmeter.exporter.top.rows import UNACCOUNTED, ProcessRow
from poolmeter.exporter.top.words import clean, percent, size


@dataclass(frozen=True)
class Branch:
    """A tenant's line: sums over the processes shown; a sum with an unknown part is None. `use_ppm` counts 1,000,000 a card."""

    tenant: str
    processes: int
    use_ppm: int | None
    memory_bytes: int | None
    stale: bool


Line = Branch | ProcessRow


def by_tenant(rows: Sequence[ProcessRow]) -> list[Line]:
    """The rows under their tenants; tenants in the order of their first row, what is accounted to nobody last."""
    groups: dict[str, list[ProcessRow]] = {}
    for row in rows:
        groups.setdefault(row.tenant, []).append(row)
    lines: list[Line] = []
    for tenant in sorted(groups, key=lambda name: name == UNACCOUNTED):
        group = groups[tenant]
        uses = [row.use_ppm for row in group]
        memories = [row.process.memory_used_bytes for row in group]
        lines.append(
            Branch(
                tenant,
                len(group),
                None if None in uses else sum(use or 0 for use in uses),
                None if None in memories else sum(memory or 0 for memory in memories),
                all(row.stale for row in group),
            )
        )
        lines += group
    return lines


def key(line: Line) -> Hashable:
    """What names a line for as long as it lives."""
    return line.tenant if isinstance(line, Branch) else line.key


def faded(line: Line) -> bool:
    """Whether its values are old."""
    return line.stale


def _branch(line: Branch, column: str) -> Cell:
    if column == "tenant":
        return text(clean(line.tenant), "bad" if line.tenant == UNACCOUNTED else "card")
    if column == "use":
        return text(percent(line.use_ppm), "unknown" if line.use_ppm is None else "card")
    if column == "memory":
        return text(size(line.memory_bytes), "unknown" if line.memory_bytes is None else "card")
    if column == "command":
        return text(f"{line.processes} process{'es' * (line.processes != 1)}", "dim")
    return ()


def columns(many_nodes: bool) -> list[Column[Line]]:
    """The columns of processes, which branches share."""
    return [_shared(column) for column in process_columns(many_nodes)]


def _shared(column: Column[ProcessRow]) -> Column[Line]:
    def cell(line: Line, width: int) -> Cell:
        return _branch(line, column.key) if isinstance(line, Branch) else column.cell(line, width)

    made: Callable[[Line, int], Cell] = cell
    return Column(column.key, column.title, made, column.least, column.most, column.rank, column.right, column.stretch)
