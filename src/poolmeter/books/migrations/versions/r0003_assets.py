"""Revision 0003: the register of devices."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    text = sa.String
    op.create_table(
        "assets",
        sa.Column("id", text, primary_key=True),
        *(sa.Column(name, text) for name in ("serial", "model", "vendor", "owner", "cost_centre", "bought", "price", "currency")),
        sa.Column("warranty_until", text),
        sa.Column("life_months", sa.BigInteger),
        *(sa.Column(name, text) for name in ("residual", "class", "weight", "weight_source", "note")),
    )
