"""The register's CSV file: read and checked whole, so that a file with a fault changes nothing."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from poolmeter.accounting.plans.currencies import MINOR_DIGITS
from poolmeter.books.assets import FIELDS, Row, Value, row_fault, value_fault
from poolmeter.errors import BadInput

MOST_TOLD = 20


def read_sheet(path: Path, register: Sequence[Row], seen: Collection[str], allow_unknown: bool = False) -> list[Row]:
    """The rows of a file, to be entered in the register that has `register`. `seen` are the uuids that the store knows.

    An empty cell says that the field is not known; a field without a column is left as it is. Raises BadInput with every fault's file,
    line and column, the first 20 in words.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 at byte {error.start}") from None
    rows, faults = parse_sheet(text, {str(row["uuid"]): row for row in register}, seen, allow_unknown)
    if faults:
        told = "; ".join(f"{path}:{fault}" for fault in faults[:MOST_TOLD])
        more = f"; and {len(faults) - MOST_TOLD} more faults" if len(faults) > MOST_TOLD else ""
        raise BadInput(f"{told}{more}: nothing was changed")
    return rows


def parse_sheet(text: str, register: Mapping[str, Row], seen: Collection[str], allow_unknown: bool = False) -> tuple[list[Row], list[str]]:
    """The rows of a CSV text and its faults, each `LINE: column NAME: what is wrong`."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    faults: list[str] = []
    lines: dict[str, int] = {}
    try:
        header = next(reader, [])
        known = ("uuid", *FIELDS)
        for index, name in enumerate(header):
            if name not in known:
                faults.append(f"1: column {name!r:.40} is unknown, expected columns of {', '.join(known)}")
            elif name in header[:index]:
                faults.append(f"1: column {name} is there twice, expected once")
        if "uuid" not in header:
            faults.append("1: column uuid is absent, expected a header that has it")
        if faults:
            return [], faults
        line = reader.line_num + 1
        for cells in reader:
            at, line = line, reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                faults.append(f"{at}: has {len(cells)} cells, expected {len(header)}")
                continue
            row, wrong = _row(dict(zip(header, cells, strict=True)))
            uuid = str(row.get("uuid"))
            if not wrong:
                if uuid in lines:
                    wrong.append(f"column uuid: uuid is {uuid!r}, which line {lines[uuid]} has too, expected each once")
                elif uuid not in seen and uuid not in register and not allow_unknown:
                    wrong.append(f"column uuid: uuid is {uuid!r}, which the store has never seen, expected one it has or --allow-unknown")
                elif (fault := row_fault({**register.get(uuid, {}), **row})) is not None:
                    wrong.append(f"column {fault.split()[0]}: {fault}")
                lines.setdefault(uuid, at)
            faults += [f"{at}: {fault}" for fault in wrong]
            rows.append(row)
    except csv.Error as error:
        faults.append(f"{reader.line_num}: is no CSV: {error}")
    return ([], faults) if faults else (rows, [])


def _row(cells: Mapping[str, str]) -> tuple[Row, list[str]]:
    row: dict[str, Value] = {}
    faults = []
    for name, text in cells.items():
        value: Value = text or None
        if name == "life_months" and text.isascii() and text.isdigit() and len(text) < 10:
            value = int(text)
        if name == "uuid" and not text:
            faults.append("column uuid: uuid is '', expected a device's")
        elif value is not None and (fault := value_fault(name, value)) is not None:
            faults.append(f"column {name}: {fault}")
        elif name == "currency" and value is not None and value not in MINOR_DIGITS:
            faults.append(f"column currency: currency is {value!r}, expected one of ISO 4217 such as EUR")
        row[name] = value
    currency = row.get("currency")
    for name in ("price", "residual"):
        places = len(str(row.get(name) or "").partition(".")[2].rstrip("0"))
        if not faults and isinstance(currency, str) and places > MINOR_DIGITS[currency]:
            faults.append(f"column {name}: {name} is {row[name]} {currency}, expected at most {MINOR_DIGITS[currency]} decimals")
    return row, faults
