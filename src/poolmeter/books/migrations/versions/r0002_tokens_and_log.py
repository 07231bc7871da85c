"""Revision 0002: tokens with roles, and one log of every change, into which that of the decisions goes."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

SENTENCE = "the log of the books is only added to"
# An INSERT OR REPLACE deletes without its trigger, so that an insert over another row is refused as well.
SQLITE = (
    f"CREATE TRIGGER change_log_kept_update BEFORE UPDATE ON change_log BEGIN SELECT RAISE(ABORT, '{SENTENCE}'); END",
    f"CREATE TRIGGER change_log_kept_delete BEFORE DELETE ON change_log BEGIN SELECT RAISE(ABORT, '{SENTENCE}'); END",
    f"""CREATE TRIGGER change_log_kept_insert BEFORE INSERT ON change_log
    WHEN EXISTS (SELECT 1 FROM change_log WHERE number = NEW.number) BEGIN SELECT RAISE(ABORT, '{SENTENCE}'); END""",
)
POSTGRESQL = (
    f"CREATE FUNCTION change_log_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{SENTENCE}'; END $$",
    "CREATE TRIGGER change_log_kept BEFORE UPDATE OR DELETE ON change_log FOR EACH ROW EXECUTE FUNCTION change_log_kept()",
    "CREATE TRIGGER change_log_kept_whole BEFORE TRUNCATE ON change_log FOR EACH STATEMENT EXECUTE FUNCTION change_log_kept()",
)


def upgrade() -> None:
    """Make the tables, carry the decisions' log over, and close the log to all but inserts."""
    text, number = sa.String, sa.BigInteger
    op.create_table(
        "tokens",
        sa.Column("id", text, primary_key=True),
        *(sa.Column(name, text, nullable=False) for name in ("name", "role")),
        *(sa.Column(name, text) for name in ("tenant", "node")),
        sa.Column("secret_sha256", text, nullable=False),
        sa.Column("created_us", number, nullable=False),
        *(sa.Column(name, number) for name in ("expires_us", "revoked_us", "last_used_us")),
    )
    log = op.create_table(
        "change_log",
        sa.Column("number", number, primary_key=True, autoincrement=False),
        sa.Column("transaction_id", text, nullable=False),
        sa.Column("at_us", number, nullable=False),
        *(sa.Column(name, text, nullable=False) for name in ("by", "subject", "key")),
        *(sa.Column(name, text) for name in ("reason", "before")),
        sa.Column("after", text, nullable=False),
    )
    op.create_index("change_log_by_subject", "change_log", ["subject", "key", "number"])
    op.create_index("ix_change_log_transaction_id", "change_log", ["transaction_id"])
    old = sa.table(
        "decision_log", *(sa.column(name) for name in ("number", "decision_id", "at_us", "by", "from_state", "to_state", "reason"))
    )
    for row in op.get_bind().execute(sa.select(old).order_by(old.c.number)).mappings().all():
        state = {"before": row["from_state"] and _state(row["from_state"]), "after": _state(row["to_state"])}
        kept = {name: row[name] for name in ("number", "at_us", "by", "reason")}
        op.get_bind().execute(
            log.insert().values(**kept, **state, transaction_id=f"0001-{row['number']}", subject="decisions", key=row["decision_id"])
        )
    op.drop_table("decision_log")
    op.drop_table("books_version")
    for statement in SQLITE if op.get_bind().dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement)


def _state(text: str) -> str:
    return json.dumps({"state": text}, separators=(",", ":"))
