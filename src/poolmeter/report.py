"""A result and its five formats: table for people, JSON, CSV, Parquet and Arrow for programs, one number in all of them.

JSON: `{"schema":"poolmeter.NAME/1","from":"…Z","to":"…Z","rows":[…],"totals":{…},"warnings":[…]}`. An absent value is left out in
JSON, empty in CSV and the table, null in Parquet and Arrow; never 0. Quantities and money arrive as Decimal; in JSON a quantity is a
number with exactly its digits, money (the keys in `MONEY`) a string.
"""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from poolmeter.errors import BadInput, Unavailable

FORMATS = ("table", "json", "csv", "parquet", "arrow")
# Keys of rows and totals that hold money; they leave as decimal strings, so that no reader makes a float of them unasked.
MONEY = frozenset(
    {"cost", "unit_price", "tenants", "idle", "unallocated", "overhead", "adjustments", "shared", "shared_cost", "total_cost"}
) | {f"shared_{part}" for part in ("idle", "unallocated", "reserved", "suspended", "down", "switching", "unattributed")}
# What FOCUS calls money; in Parquet and Arrow it is a decimal, as FOCUS has it.
_FOCUS_MONEY = frozenset(
    {"BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "ListUnitPrice", "ContractedUnitPrice", "x_SplitOriginCost"}
)


@dataclass(frozen=True)
class Report:
    """Rows of one question. `columns` fixes their order; a row may leave a column out (absent)."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, object], ...]
    start: str | None = None
    end: str | None = None
    totals: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


def plain(value: object, money: bool = False) -> object:
    """A JSON value; None fields of an object left out, a Decimal as text where it is money, else marked as a number (`_numbers`)."""
    if isinstance(value, Decimal):
        return format(value, "f") if money else f"\0{value:f}\0"
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")  # no text passes for a marked number
    if isinstance(value, Mapping):
        return {key: plain(item, money or key in MONEY or key in _FOCUS_MONEY) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item, money) for item in value]
    return value


def dumps(value: object) -> str:
    """JSON text of a value that may hold Decimals: numbers with exactly their digits, which a float would lose; money as strings."""
    return re.sub(r'"\\u0000(-?[0-9.]+)\\u0000"', r"\1", json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def as_json(report: Report) -> str:
    """The contract's JSON object, one line per row."""
    body: dict[str, object] = {"schema": f"poolmeter.{report.name}/1"}
    if report.start is not None:
        body["from"] = report.start
    if report.end is not None:
        body["to"] = report.end
    body["rows"] = report.rows
    body["totals"] = report.totals
    body["warnings"] = report.warnings
    body.update(report.extra)
    return dumps(body) + "\n"


def cell(value: object) -> str:
    """Text of one value in CSV and the table; empty for absent."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (list, tuple, dict)):
        return dumps(value)
    return str(value)


def as_csv(report: Report) -> str:
    """RFC 4180 with a header. Text that a spreadsheet would run as a formula is prefixed by an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(report.columns)
    for row in report.rows:
        writer.writerow([_defused(row.get(column)) for column in report.columns])
    return out.getvalue()


def _defused(value: object) -> str:
    text = cell(value)
    return "'" + text if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def as_table(report: Report, width: int | None = None) -> str:
    """Aligned text: numbers to the right, then totals and warnings.

    In a `width` of so many characters a table that is too wide goes on below itself, each part with the first columns again.
    """
    lines = [[_printable(cell(row.get(column))) for column in report.columns] for row in report.rows]
    right = [all(isinstance(row.get(column), (int, float, Decimal, type(None))) for row in report.rows) for column in report.columns]
    widths = [max([len(column), *(len(line[i]) for line in lines)]) for i, column in enumerate(report.columns)]
    out: list[str] = []
    for part in _parts(widths, right, width):
        out += [""] if out else []
        for line in [list(report.columns), *lines]:
            out.append("  ".join(line[i].rjust(widths[i]) if right[i] else line[i].ljust(widths[i]) for i in part).rstrip())
    if not lines:
        out.append("(no rows)")
    totals = [(key, cell(value)) for key, value in report.totals.items() if value is not None]
    for name, value in report.extra.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        totals += [(f"{name} {key}".strip(), cell(item)) for key, item in inner if item is not None]
    if totals:
        width = max(len(key) for key, _ in totals)
        out += [""] + [f"{key.ljust(width)}  {_printable(text)}" for key, text in totals]
    out += [f"warning: {_printable(warning)}" for warning in report.warnings]
    return "\n".join(out) + "\n"


def _parts(widths: Sequence[int], right: Sequence[bool], width: int | None) -> list[list[int]]:
    # Which columns stand side by side. The first ones say what a row is about: all before the first number, in half of the width.
    every = list(range(len(widths)))
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return [every]
    head: list[int] = []
    for i in every:
        if right[i] or sum(widths[j] + 2 for j in [*head, i]) > width // 2:
            break
        head.append(i)
    parts = [head]
    for i in every[len(head) :]:
        if len(parts[-1]) > len(head) and sum(widths[j] + 2 for j in [*parts[-1], i]) - 2 > width:
            parts.append(list(head))
        parts[-1] = [*parts[-1], i]
    return parts


def _printable(text: str) -> str:
    # A tenant names its own workload: no control character of it reaches an operator's terminal.
    return "".join(char if char.isprintable() else "�" for char in text)


def as_arrow(report: Report, parquet: bool) -> bytes:
    """One Arrow IPC file, or one Parquet file; money as text, other Decimals as decimals, absent as null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = []
    for column in report.columns:
        values = [row.get(column) for row in report.rows]
        if column in MONEY or any(isinstance(value, (str, list, tuple, dict)) for value in values):
            values = [None if value is None else cell(value) for value in values]
        array = pa.array(values)
        arrays.append(array if array.type != pa.null() else pa.array(values, pa.utf8()))
    # Period, totals and warnings travel as metadata, so that a file answers the same question as the JSON.
    head = {key: json.dumps(value) for key, value in json.loads(as_json(report)).items() if key != "rows"}
    table = pa.Table.from_arrays(arrays, names=list(report.columns)).replace_schema_metadata({f"poolmeter.{k}": v for k, v in head.items()})
    sink = pa.BufferOutputStream()
    if parquet:
        pq.write_table(table, sink, compression="zstd")
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def render(report: Report, fmt: str, width: int | None = None) -> bytes:
    """The report in a format of `FORMATS`; `width` is a terminal's, for the table."""
    if fmt == "json":
        return as_json(report).encode()
    if fmt == "csv":
        return as_csv(report).encode()
    if fmt == "table":
        return as_table(report, width).encode()
    return as_arrow(report, parquet=fmt == "parquet")


def write(report: Report, fmt: str, output: str | None) -> None:
    """Render to `output` (whole or not at all) or stdout. Raises BadInput for binary on a terminal, Unavailable when not writable."""
    if output is not None and output != "-":
        write_whole(Path(output), render(report, fmt))
        return
    terminal = sys.stdout.isatty()
    body = render(report, fmt, shutil.get_terminal_size().columns if terminal else None)
    if fmt in ("parquet", "arrow") and terminal:
        raise BadInput(f"--format {fmt} writes binary data, expected --output FILE or a pipe")
    sys.stdout.buffer.write(body)
    sys.stdout.buffer.flush()


def write_whole(path: Path, body: bytes) -> None:
    """Replace `path` by `body` atomically, so that a reader or a full disk never leaves half a file. Raises Unavailable."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(body)  # a device or a pipe: there is nothing to replace
            return
        handle, name = tempfile.mkstemp(dir=path.parent or Path("."), prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from None


def table_of(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """A bare table, for verbs that print a list."""
    return as_table(Report("list", tuple(columns), tuple(rows)))
