"""Tokens of the API with roles: who may ask, what for, how long. The secret is shown once; the books keep its hash."""

import contextlib
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from sqlalchemy import Table, select, update

from poolmeter.books.database import Database
from poolmeter.books.ledger import Row, Writing, is_text
from poolmeter.books.models import TokenRow
from poolmeter.clock import Clock
from poolmeter.errors import BadInput, Refused, Unavailable

PREFIX = "pm"
MAX_NAME = 128
# `last_used` is kept to the minute, so that asking does not mean writing each time.
USED_STEP_US = 60_000_000

_tokens = cast(Table, TokenRow.__table__)


class Role(StrEnum):
    """What the holder of a token may do; which role may do what is the API's to say."""

    ADMIN = "admin"
    FINANCE = "finance"
    OPERATOR = "operator"
    TENANT = "tenant"
    NODE = "node"


@dataclass(frozen=True)
class Token:
    """A token as the books know it. `tenant` is set for the role tenant alone, `node` for node alone; times are UTC, None: never."""

    id: str
    name: str
    role: Role
    tenant: str | None
    node: str | None
    created_us: int
    expires_us: int | None
    revoked_us: int | None
    last_used_us: int | None

    def valid(self, now_us: int) -> bool:
        """Whether it opens anything at that time."""
        return self.revoked_us is None and (self.expires_us is None or now_us < self.expires_us)


class Tokens:
    """The tokens of one set of books (`Books.tokens`)."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._noted: dict[str, int] = {}  # when the use of a token was last written, or tried to be

    def add(
        self,
        name: str,
        role: Role,
        by: str,
        tenant: str | None = None,
        node: str | None = None,
        expires_us: int | None = None,
        reason: str | None = None,
    ) -> tuple[Token, str]:
        """A new token and the text that its holder sends, which nobody can learn again.

        Raises BadInput (a role without its tenant or node, an end in the past), Refused when a valid token has that name.
        """
        for what, text in (("name", name), ("tenant", tenant), ("node", node)):
            if text is not None and (not 0 < len(text) <= MAX_NAME or not text.isprintable() or text != text.strip()):
                raise BadInput(f"{what} of the token is {text!r:.160}, expected 1 to {MAX_NAME} printable characters without outer spaces")
        for wanted, found, what in ((Role.TENANT, tenant, "tenant"), (Role.NODE, node, "node")):
            if (role is wanted) != (found is not None):
                expected = f"a {what}" if role is wanted else f"no {what}"
                raise BadInput(f"role of the token is {role.value} and its {what} {found!r}, expected {expected} with that role")
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)

        def enter(writing: Writing) -> Token:
            now = writing.now_us
            if expires_us is not None and expires_us <= now:
                raise BadInput(f"end of the token is {expires_us} us, expected a time after now, {now} us")
            same = writing.connection.execute(select(_tokens).where(_tokens.c.name == name)).mappings().all()
            if any(_token(row).valid(now) for row in same):
                raise Refused(f"token name is {name!r}, which a valid token has; expected another, or that one revoked")
            values: dict[str, object] = {"id": token_id, "name": name, "role": role.value, "tenant": tenant, "node": node}
            values |= {"secret_sha256": _hash(secret), "created_us": now, "expires_us": expires_us}
            return _token(writing.add(_tokens, values, by, reason))

        return self._database.write(enter), f"{PREFIX}_{token_id}_{secret}"

    def revoke(self, token_id: str, by: str, reason: str | None = None) -> Token:
        """The token, which opens nothing from now on. Raises BadInput for an unknown id, Refused for a revoked one."""

        def end(writing: Writing) -> Token:
            row = None
            if is_text(token_id):
                row = writing.connection.execute(select(_tokens).where(_tokens.c.id == token_id)).mappings().first()
            if row is None:
                raise BadInput(f"token {token_id!r:.60} is not in the books, expected an id of poolmeter token list")
            if row["revoked_us"] is not None:
                raise Refused(f"token {token_id} was revoked at {row['revoked_us']} us, expected one that is not")
            return _token(writing.change(_tokens, token_id, {"revoked_us": writing.now_us}, by, reason))

        return self._database.write(end)

    def list(self) -> Sequence[Token]:
        """All tokens, revoked and expired ones too, in the order in which they were made."""
        wanted = select(_tokens).order_by(_tokens.c.created_us, _tokens.c.id)
        return self._database.read(lambda connection: [_token(row) for row in connection.execute(wanted).mappings()])

    def find(self, text: str) -> Token | None:
        """The valid token that `text` is; None for anything else, at the same cost whatever part of it is right.

        Rows are looked up by the part that is no secret; the secret's hash is compared in constant time. Notes the use to the minute.
        """
        prefix, _, rest = text.partition("_")
        token_id, _, secret = rest.partition("_")
        known = prefix == PREFIX and is_text(token_id)
        row = None
        if known:
            wanted = select(_tokens).where(_tokens.c.id == token_id)
            row = self._database.read(lambda connection: connection.execute(wanted).mappings().first())
        kept = _hash("") if row is None else str(row["secret_sha256"])
        same = secrets.compare_digest(_hash(secret), kept)
        now = self._clock.wall_us()
        if row is None or not same or not _token(row).valid(now):
            return None
        if now - max(row["last_used_us"] or 0, self._noted.get(token_id, 0)) >= USED_STEP_US:
            self._noted[token_id] = now
            # Books that cannot be written, on a full disk perhaps, can still say whose a token is.
            with contextlib.suppress(Unavailable):
                self._used(token_id, now)
        return _token(row)

    def _used(self, token_id: str, now_us: int) -> None:
        # No change of the books by anybody, so it is not in their log.
        values = {"last_used_us": now_us}
        self._database.write(lambda writing: writing.connection.execute(update(_tokens).where(_tokens.c.id == token_id).values(**values)))


def _token(row: Row) -> Token:
    return Token(**{name: value for name, value in row.items() if name not in ("role", "secret_sha256")}, role=Role(row["role"]))


def _hash(secret: str) -> str:
    # 256 random bits need no slow hash.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
