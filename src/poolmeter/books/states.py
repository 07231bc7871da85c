"""Which state of a decision may follow which."""

from poolmeter.errors import Refused
from poolmeter.model.decision import DecisionState

_S = DecisionState
NEXT: dict[DecisionState, frozenset[DecisionState]] = {
    _S.PROPOSED: frozenset({_S.APPROVED, _S.REJECTED, _S.EXPIRED}),
    _S.APPROVED: frozenset({_S.APPLIED, _S.REFUSED, _S.EXPIRED}),
    _S.REJECTED: frozenset(),
    _S.APPLIED: frozenset(),
    _S.REFUSED: frozenset(),
    _S.EXPIRED: frozenset(),
}
OUTCOMES = frozenset({_S.APPLIED, _S.REFUSED, _S.EXPIRED})


def check_transition(decision_id: str, found: DecisionState, wanted: DecisionState) -> None:
    """Raises Refused unless `wanted` may follow `found`."""
    if wanted not in NEXT[found]:
        expected = " or ".join(sorted(state.value for state in NEXT[found])) or "no further change"
        raise Refused(f"decision {decision_id} is {found.value} and cannot become {wanted.value}, expected {expected}")


def outcome_moves(found: DecisionState, outcome: DecisionState) -> bool:
    """Whether the enforcer's word moves the state.

    Also out of `expired`: the enforcer may have acted in time and its event come after we gave up waiting.
    """
    return outcome in NEXT[found] or (found is _S.EXPIRED and outcome in (_S.APPLIED, _S.REFUSED))
