"""The tables of the books. A change here is a new revision in `migrations/versions` and the end of `REVISIONS`."""

from sqlalchemy import BigInteger, Index, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

REVISIONS = ("0001", "0002", "0003")
REVISION = REVISIONS[-1]
# Not Alembic's own name: that one may be another program's.
REVISION_TABLE = "books_revision"


class Base(DeclarativeBase):
    """All tables of the books."""

    type_annotation_map = {int: BigInteger, str: String}


class DecisionRow(Base):
    """A resizing decision (every field of model.decision.Decision), where it stands, who put it there, and what became of it."""

    __tablename__ = "decisions"
    __table_args__ = (
        UniqueConstraint("node", "sequence", name="decisions_sequence"),
        Index("decisions_by_state", "state", "node", "sequence"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    node: Mapped[str]
    allocation_id: Mapped[str]
    device_uuid: Mapped[str]
    generation: Mapped[int]
    sequence: Mapped[int]
    created_us: Mapped[int]
    expires_us: Mapped[int]
    rule: Mapped[str]
    reason: Mapped[str]
    input_hash: Mapped[str]
    memory_bytes: Mapped[int | None]
    compute_ppm: Mapped[int | None]
    memory_before_bytes: Mapped[int | None]
    compute_before_ppm: Mapped[int | None]
    state: Mapped[str]
    signature: Mapped[str | None]
    state_reason: Mapped[str | None]
    decided_by: Mapped[str | None]
    decided_at_us: Mapped[int | None]
    outcome: Mapped[str | None]
    outcome_reason: Mapped[str | None]
    outcome_at_us: Mapped[int | None]


class TokenRow(Base):
    """A token of the API: what its holder may do, for whom, how long. Of the secret only its SHA-256 is kept."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    tenant: Mapped[str | None]
    node: Mapped[str | None]
    secret_sha256: Mapped[str]
    created_us: Mapped[int]
    expires_us: Mapped[int | None]
    revoked_us: Mapped[int | None]
    last_used_us: Mapped[int | None]


class AssetRow(Base):
    """What people say of a device, by its uuid. Dates are ISO, amounts exact decimals, both as text; None is not known."""

    __tablename__ = "assets"

    id: Mapped[str] = mapped_column(primary_key=True)
    serial: Mapped[str | None]
    model: Mapped[str | None]
    vendor: Mapped[str | None]
    owner: Mapped[str | None]
    cost_centre: Mapped[str | None]
    bought: Mapped[str | None]
    price: Mapped[str | None]
    currency: Mapped[str | None]
    warranty_until: Mapped[str | None]
    life_months: Mapped[int | None]
    residual: Mapped[str | None]
    device_class: Mapped[str | None] = mapped_column("class")
    weight: Mapped[str | None]
    weight_source: Mapped[str | None]
    note: Mapped[str | None]


class ChangeRow(Base):
    """One row of another table that was added or changed: by whom, when, why, and the row before and after as JSON.

    Only ever added to: triggers refuse anything else. Numbers have no gaps.
    """

    __tablename__ = "change_log"
    __table_args__ = (Index("change_log_by_subject", "subject", "key", "number"),)

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    transaction_id: Mapped[str] = mapped_column(index=True)
    at_us: Mapped[int]
    by: Mapped[str]
    subject: Mapped[str]
    key: Mapped[str]
    reason: Mapped[str | None]
    before: Mapped[str | None]
    after: Mapped[str]
