"""Revision 0001: decisions and their log, as books of version 1 had them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    version = op.create_table("books_version", sa.Column("version", sa.Integer, primary_key=True, autoincrement=False))
    op.bulk_insert(version, [{"version": 1}])
    text, number = sa.String, sa.BigInteger
    op.create_table(
        "decisions",
        sa.Column("id", text, primary_key=True),
        *(sa.Column(name, text, nullable=False) for name in ("node", "allocation_id", "device_uuid")),
        *(sa.Column(name, number, nullable=False) for name in ("generation", "sequence", "created_us", "expires_us")),
        *(sa.Column(name, text, nullable=False) for name in ("rule", "reason", "input_hash")),
        *(sa.Column(name, number) for name in ("memory_bytes", "compute_ppm", "memory_before_bytes", "compute_before_ppm")),
        sa.Column("state", text, nullable=False),
        *(sa.Column(name, text) for name in ("signature", "state_reason", "decided_by")),
        sa.Column("decided_at_us", number),
        *(sa.Column(name, text) for name in ("outcome", "outcome_reason")),
        sa.Column("outcome_at_us", number),
        sa.UniqueConstraint("node", "sequence", name="decisions_sequence"),
    )
    op.create_index("decisions_by_state", "decisions", ["state", "node", "sequence"])
    op.create_table(
        "decision_log",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("decision_id", text, nullable=False),
        sa.Column("at_us", number, nullable=False),
        sa.Column("by", text, nullable=False),
        sa.Column("from_state", text),
        sa.Column("to_state", text, nullable=False),
        sa.Column("reason", text),
    )
    op.create_index("ix_decision_log_decision_id", "decision_log", ["decision_id"])
