"""The tables of the books. A change here is a new `BOOKS_VERSION`."""

from sqlalchemy import BigInteger, Index, Integer, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BOOKS_VERSION = 1


class Base(DeclarativeBase):
    """All tables of the books."""

    type_annotation_map = {int: BigInteger, str: String}


class VersionRow(Base):
    """One row: the version of these tables."""

    __tablename__ = "books_version"

    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)


class DecisionRow(Base):
    """A resizing decision (every field of model.decision.Decision), where it stands, who put it there, and what became of it."""

    __tablename__ = "decisions"
    __table_args__ = (UniqueConstraint("node", "sequence"), Index("decisions_by_state", "state", "node", "sequence"))

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


class LogRow(Base):
    """One change of a decision: who, when, from what to what, why. Only ever added to."""

    __tablename__ = "decision_log"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    decision_id: Mapped[str] = mapped_column(index=True)
    at_us: Mapped[int]
    by: Mapped[str]
    from_state: Mapped[str | None]
    to_state: Mapped[str]
    reason: Mapped[str | None]
