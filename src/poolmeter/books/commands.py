"""`poolmeter token create | list | revoke` and `poolmeter books log`: the books' own commands.

They work on the books themselves, beside a running collector: whoever may write those is an administrator already.
"""

import argparse
import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from poolmeter.clock import SystemClock
from poolmeter.config import load_config
from poolmeter.errors import BadInput, Unavailable
from poolmeter.model.units import MICROSECONDS
from poolmeter.period import parse_period, rfc3339
from poolmeter.places import CollectorData, data_folder
from poolmeter.report import Report, write

if TYPE_CHECKING:
    from poolmeter.books.ledger import Change
    from poolmeter.books.tokens import Token
    from poolmeter.books.writer import Books

ROLES = ("admin", "finance", "operator", "tenant", "node")
TOKEN_COLUMNS = ("id", "name", "role", "tenant", "node", "created", "expires", "revoked", "last_used")
LOG_COLUMNS = ("number", "at", "by", "subject", "key", "reason", "before", "after")
MAX_DAYS = 3660
DAY_US = 86_400 * MICROSECONDS


def user_name() -> str:
    """Who runs this program, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


@contextmanager
def open_books(args: argparse.Namespace) -> "Iterator[Books]":
    """The books that the flags and the configuration name. Raises Unavailable when a file of books is not there: none is made."""
    from poolmeter.books.place import place
    from poolmeter.books.writer import Books

    configured = load_config(args.config).collector.books
    file = CollectorData(data_folder(args.data)).books
    if configured is None and not file.exists():
        raise Unavailable(f"books {file} are not there, expected the data folder of a collector that has run")
    with Books(place(configured, file)) as books:
        yield books


class TokenCreate:
    """Make a token for the API of the collector, and print it, once.

    What follows "Bearer" in the Authorization header is the column `token`; the books keep only its hash. A file of --output is readable
    for its owner alone.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--name", required=True, help="what people call it; no two valid tokens have the same")
        parser.add_argument("--role", required=True, choices=ROLES, help="what its holder may do")
        parser.add_argument("--tenant", metavar="T", help="whose rows the role tenant sees")
        parser.add_argument("--node", metavar="N", help="whose records the role node sends")
        parser.add_argument("--days", type=int, metavar="N", help="days after which it opens nothing (it does not end)")
        parser.add_argument("--reason", metavar="WHY", help="why, for the log")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.books.tokens import Role

        if args.days is not None and not 1 <= args.days <= MAX_DAYS:
            raise BadInput(f"--days is {args.days}, expected 1 to {MAX_DAYS}")
        expires_us = None if args.days is None else SystemClock().wall_us() + args.days * DAY_US
        with open_books(args) as books:
            token, text = books.tokens.add(args.name, Role(args.role), user_name(), args.tenant, args.node, expires_us, args.reason)
        before = os.umask(0o077)
        try:
            write(Report("token", (*TOKEN_COLUMNS, "token"), ({**token_row(token), "token": text},)), args.format, args.output)
        finally:
            os.umask(before)
        return 0


class TokenList:
    """List the tokens of the API, those that open nothing any more too. What their holders send is nowhere kept."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        with open_books(args) as books:
            tokens = books.tokens.list()
        write(_tokens(tokens), args.format, args.output)
        return 0


class TokenRevoke:
    """Have a token open nothing from now on."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the token's id, as poolmeter token list shows it")
        parser.add_argument("--reason", metavar="WHY", help="why, for the log")

    def run(self, args: argparse.Namespace) -> int:
        with open_books(args) as books:
            token = books.tokens.revoke(args.id, user_name(), args.reason)
        write(_tokens([token]), args.format, args.output)
        return 0


class BooksLog:
    """Who changed what in the books, when and why, oldest first: decisions, tokens and assets.

    `before` and `after` hold the columns that changed; `before` is absent where a row was added.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--subject", metavar="TABLE[/KEY]", help="changes of decisions, tokens or assets alone, or of one: decisions/ID"
        )
        parser.add_argument("--from", dest="start", metavar="TIME", help="start, inclusive: RFC 3339, a date, 7d, last-month (the first)")
        parser.add_argument("--to", dest="end", metavar="TIME", help="end, exclusive (now)")
        parser.add_argument("--limit", type=int, metavar="N", help="the newest N of them (all)")

    def run(self, args: argparse.Namespace) -> int:
        if args.limit is not None and args.limit < 1:
            raise BadInput(f"--limit is {args.limit}, expected 1 or more")
        subject, _, key = (args.subject or "").partition("/")
        if args.subject is not None and subject not in ("decisions", "tokens", "assets"):
            raise BadInput(f"--subject is {args.subject!r:.60}, expected decisions, tokens or assets, or one of them as decisions/ID")
        start_us = end_us = None
        if args.start is not None or args.end is not None:
            period = parse_period(args.start or "1970-01-01", args.end, "UTC", SystemClock().wall_us())
            start_us, end_us = period.start_us, period.end_us
        with open_books(args) as books:
            found = books.changes(subject or None, key or None, start_us, end_us)
        rows = [change_row(change) for change in found][-(args.limit or 0) :]
        start, end = (None if us is None else rfc3339(us) for us in (start_us, end_us))
        write(Report("changes", LOG_COLUMNS, tuple(rows), start, end, {"changes": len(rows)}), args.format, args.output)
        return 0


def token_row(token: "Token") -> dict[str, object]:
    """A token as a row of `TOKEN_COLUMNS`; what is not there is left out."""
    times = {"expires": token.expires_us, "revoked": token.revoked_us, "last_used": token.last_used_us}
    row = {"id": token.id, "name": token.name, "role": token.role.value, "tenant": token.tenant, "node": token.node}
    row |= {"created": rfc3339(token.created_us)} | {name: None if us is None else rfc3339(us) for name, us in times.items()}
    return {name: value for name, value in row.items() if value is not None}


def change_row(change: "Change") -> dict[str, object]:
    """A change as a row of `LOG_COLUMNS`: of the rows before and after only what differs, and nothing that is unknown."""
    before = change.before or {}
    differ = [name for name, value in change.after.items() if name not in before or before[name] != value]
    row: dict[str, object] = {
        "number": change.number,
        "at": rfc3339(change.at_us),
        "by": change.by,
        "subject": change.subject,
        "key": change.key,
        "reason": change.reason,
        "before": None if change.before is None else {name: before[name] for name in differ if before.get(name) is not None},
        "after": {name: change.after[name] for name in differ if change.after[name] is not None},
    }
    return {name: value for name, value in row.items() if value is not None}


def _tokens(tokens: "Sequence[Token]") -> Report:
    return Report("tokens", TOKEN_COLUMNS, tuple(token_row(token) for token in tokens), totals={"tokens": len(tokens)})
