"""The register of devices: what people say of a card; what the store knows of it is not here, so nothing of theirs is overwritten."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import cast

from sqlalchemy import Connection, Table, select

from poolmeter.books.database import Database
from poolmeter.books.ledger import Writing, is_text
from poolmeter.books.models import AssetRow
from poolmeter.errors import BadInput

FIELDS = (
    "serial", "model", "vendor", "owner", "cost_centre", "bought", "price", "currency", "warranty_until", "life_months", "residual",
    "class", "weight", "weight_source", "note",
)  # fmt: skip
DATES = frozenset({"bought", "warranty_until"})
AMOUNTS = frozenset({"price", "residual", "weight"})
FRAMEWORKS = ("CUDA", "CANN", "DTK")
MAX_TEXT = 256
MAX_MONTHS = 600
_AMOUNT = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?", re.ASCII)
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)


Value = str | int | None
Row = Mapping[str, Value]  # `uuid` and any of `FIELDS`; None: not known. Dates are ISO, amounts exact decimals as text

_assets = cast(Table, AssetRow.__table__)


@dataclass(frozen=True)
class Entered:
    """What entering rows did, or would do: uuids that were added, changed, and as they were already."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]


class Assets:
    """The register in one set of books (`Books.assets`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> Sequence[Row]:
        """All devices that somebody wrote something of, by uuid; each row has `uuid` and all of `FIELDS`."""
        found = self._database.read(_all)
        return [found[uuid] for uuid in sorted(found)]

    def enter(self, rows: Sequence[Row], by: str, reason: str, dry_run: bool = False) -> Entered:
        """Write rows, all or none. A field that a row does not name stays; None takes it away; what is there already is no change.

        Raises BadInput: a uuid twice, a value or combination that cannot be (`value_fault`, `row_fault`), no reason.
        """
        if not reason.strip():
            raise BadInput("reason is empty, expected why the register is changed")
        uuids: set[str] = set()
        for row in rows:
            uuid = row.get("uuid")
            if not isinstance(uuid, str) or (fault := value_fault("uuid", uuid)) is not None:
                raise BadInput(f"uuid of an asset is {uuid!r:.60}, expected text without spaces")
            if uuid in uuids:
                raise BadInput(f"asset {uuid} is given twice, expected each once")
            uuids.add(uuid)
            for name, value in row.items():
                if name not in ("uuid", *FIELDS):
                    raise BadInput(f"asset {uuid} has {name!r:.40}, expected fields of {', '.join(FIELDS)}")
                if value is not None and (fault := value_fault(name, value)) is not None:
                    raise BadInput(f"asset {uuid}: {fault}")

        def compare(connection: Connection) -> tuple[list[tuple[str, Row, bool]], list[str]]:
            known = _all(connection)
            changes: list[tuple[str, Row, bool]] = []
            same = []
            for row in rows:
                uuid = str(row["uuid"])
                before = known.get(uuid)
                merged = {**dict.fromkeys(FIELDS), **(before or {}), **row}
                if (fault := row_fault(merged)) is not None:
                    raise BadInput(f"asset {uuid}: {fault}")
                if before is not None and merged == before:
                    same.append(uuid)
                else:
                    changes.append((uuid, {name: merged[name] for name in FIELDS}, before is None))
            return changes, same

        def write(writing: Writing) -> Entered:
            changes, same = compare(writing.connection)
            for uuid, values, new in changes:
                if new:
                    writing.add(_assets, {"id": uuid, **values}, by, reason)
                else:
                    writing.change(_assets, uuid, values, by, reason)
            return _entered(changes, same)

        if dry_run:
            return self._database.read(lambda connection: _entered(*compare(connection)))
        return self._database.write(write)


def value_fault(name: str, value: object) -> str | None:
    """What is wrong with one value of a row, in words; None when nothing is."""
    if name == "life_months":
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_MONTHS
        return None if whole else f"life_months is {value!r:.40}, expected a whole number of 1 to {MAX_MONTHS}"
    if not isinstance(value, str):
        return f"{name} is {value!r:.40}, expected text"
    if name in DATES:
        try:
            good = _DATE.fullmatch(value) is not None and bool(date.fromisoformat(value))
        except ValueError:
            good = False
        return None if good else f"{name} is {value!r:.40}, expected a date such as 2026-01-31"
    if name in AMOUNTS:
        good = _AMOUNT.fullmatch(value) is not None and (name != "weight" or Decimal(value) > 0)
        least = "above 0" if name == "weight" else "of at least 0"
        return None if good else f"{name} is {value!r:.40}, expected a decimal {least} with at most 9 places"
    if name == "currency":
        return None if _CURRENCY.fullmatch(value) else f"currency is {value!r:.40}, expected three letters such as EUR"
    if not 0 < len(value) <= MAX_TEXT or not value.isprintable() or value != value.strip() or not is_text(value):
        return f"{name} is {value!r:.60}, expected 1 to {MAX_TEXT} printable characters without outer spaces"
    if name == "uuid" and " " in value:
        return f"uuid is {value!r:.60}, expected no spaces"
    if name == "class":
        parts = value.split("/")
        if len(parts) != 3 or not all(parts) or parts[1] not in FRAMEWORKS:
            return f"class is {value!r:.60}, expected VENDOR/FRAMEWORK/MODEL with a framework of {', '.join(FRAMEWORKS)}"
    return None


def row_fault(row: Row) -> str | None:
    """What is wrong with the fields of a whole row together; None when nothing is."""
    price, residual = row.get("price"), row.get("residual")
    if (price is None) != (row.get("currency") is None):
        return f"price is {price or 'absent'} and currency {row.get('currency') or 'absent'}, expected both or neither"
    if residual is not None and (price is None or Decimal(str(residual)) > Decimal(str(price))):
        return f"residual is {residual} and price {price or 'absent'}, expected a residual of at most the price"
    if (row.get("weight") is None) != (row.get("weight_source") is None):
        weight, source = row.get("weight") or "absent", row.get("weight_source") or "absent"
        return f"weight is {weight} and weight_source {source}, expected both or neither"
    return None


def _all(connection: Connection) -> dict[str, dict[str, Value]]:
    found = {}
    for row in connection.execute(select(_assets)).mappings():
        uuid = str(row[_assets.c.id])
        found[uuid] = {"uuid": uuid, **{name: row[_assets.c[name]] for name in FIELDS}}
    return found


def _entered(changes: Sequence[tuple[str, Row, bool]], same: Sequence[str]) -> Entered:
    added = tuple(uuid for uuid, _, new in changes if new)
    return Entered(added, tuple(uuid for uuid, _, new in changes if not new), tuple(same))
