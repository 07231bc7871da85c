"""Entering proposals in the books without repeating or contradicting what stands there."""

from collections.abc import Sequence
from dataclasses import dataclass

from poolmeter.accounting.recommend.decision_store import RECOMMENDER, SUPERSEDED, DecisionStore
from poolmeter.books.writer import Booked
from poolmeter.model.decision import Decision, DecisionState


@dataclass(frozen=True)
class Entered:
    """What became of a run's proposals: `standing` are the open decisions that say it, new or from before."""

    standing: tuple[Booked, ...]
    new: tuple[str, ...]
    superseded: tuple[str, ...]


def enter(store: DecisionStore, proposals: Sequence[Decision], now_us: int) -> Entered:
    """Enter what is new. The same proposal again changes nothing; a newer one for the same allocation replaces an open one.

    An approved decision is waited for; one that somebody rejected or the enforcer refused is not proposed again before it expires.
    """
    booked = [entry for entry in store.list() if entry.decision.expires_us > now_us]
    standing: list[Booked] = []
    new: list[str] = []
    superseded: list[str] = []
    for proposal in proposals:
        known = [entry for entry in booked if _slot(entry.decision) == _slot(proposal)]
        approved = [entry for entry in known if entry.decision.state is DecisionState.APPROVED]
        if approved:
            standing += approved
            continue
        same = [entry for entry in known if _says(entry.decision) == _says(proposal)]
        opened = [entry for entry in same if entry.decision.state is DecisionState.PROPOSED]
        if opened:
            standing += opened[:1]
            continue
        if any(_turned_down(entry) for entry in same):
            continue
        standing += store.add([proposal])
        new.append(proposal.id)
        # Only now: were the new one not entered, the old one would still stand.
        for entry in known:
            if entry.decision.state is DecisionState.PROPOSED:
                store.move(entry.decision.id, DecisionState.REJECTED, RECOMMENDER, f"{SUPERSEDED}{proposal.id}")
                superseded.append(entry.decision.id)
    return Entered(tuple(standing), tuple(new), tuple(superseded))


def _slot(decision: Decision) -> tuple[str, str, str]:
    return (decision.rule, decision.node, decision.allocation_id)


def _says(decision: Decision) -> tuple[object, ...]:
    return (decision.device_uuid, decision.generation, decision.memory_bytes, decision.compute_ppm)


def _turned_down(entry: Booked) -> bool:
    if entry.decision.state is DecisionState.REJECTED:
        return not (entry.state_reason or "").startswith(SUPERSEDED)
    return entry.decision.state is DecisionState.REFUSED
