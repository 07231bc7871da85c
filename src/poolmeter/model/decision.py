"""A resizing decision: made by the recommender, carried out by the enforcer, journalled by both."""

from dataclasses import dataclass
from enum import StrEnum


class DecisionState(StrEnum):
    """Where a decision stands in the books."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    REJECTED = "rejected"
    APPLIED = "applied"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Decision:
    """One change to one slice.

    `generation` is the grant generation the decision was made against: the enforcer refuses it when the grant has moved on.
    `sequence` orders the decisions of a node; `expires_us` is wall time, after which it is refused; `input_hash` is the SHA-256
    of the canonical JSON of the inputs, so that it can be replayed; `signature` is absent until signing exists.
    A field that is not to change (`compute_ppm`, `memory_bytes`) is None.
    """

    id: str
    node: str
    allocation_id: str
    device_uuid: str
    generation: int
    sequence: int
    created_us: int
    expires_us: int
    rule: str
    reason: str
    input_hash: str
    memory_bytes: int | None = None
    compute_ppm: int | None = None
    memory_before_bytes: int | None = None
    compute_before_ppm: int | None = None
    state: DecisionState = DecisionState.PROPOSED
    signature: str | None = None


@dataclass(frozen=True)
class JournalEvent:
    """One line of a node's enforcement journal (JSON lines, oldest first).

    kind: created | resized | suspended | resumed | released | refused | decision, or compacted: a mark in place of events that are
    no longer in the file (the first line, sequence 0, and where they ended). `sequence` grows by one per node and survives restarts. `allocation` is the allocation after the event as plain JSON (None for refusals); `demand` the refused shape;
    `decision_id`, `outcome` (applied | refused | expired) and `reason` tell what became of a decision or a request.
    """

    sequence: int
    at_us: int
    kind: str
    allocation_id: str | None = None
    allocation: dict[str, object] | None = None
    tenant: str | None = None
    decision_id: str | None = None
    outcome: str | None = None
    reason: str | None = None
    demand: dict[str, object] | None = None
