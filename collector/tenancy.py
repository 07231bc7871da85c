"""The one place that says what a caller may see of usage, snapshots and decisions: a tenant its own rows, everybody else all of them.

A tenant sees nothing that tells of another: no name, node, device, process or count. So it gets no device records, no positions in a node's
spool (their gaps count what others have), of a device no more than its uuid and model, of an event not the free text (a refusal may say
what others hold), and of decisions those of allocations that are its own alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolmeter.books.writer import Booked
from poolmeter.collector.auth import Caller, Role
from poolmeter.collector.catalog import query
from poolmeter.errors import Refused
from poolmeter.model.usage import RecordKind


class Forbidden(Refused):
    """Asked by somebody who may ask this endpoint, and not this of it."""


_POSITION = frozenset({"epoch", "sequence"})
_HIDDEN: Mapping[RecordKind, frozenset[str]] = {
    RecordKind.SLICE: _POSITION,
    RecordKind.PROCESS: _POSITION,
    RecordKind.EVENT: _POSITION | {"reason", "detail"},
}
_DEVICE = ("uuid", "model")
_NODE = ("node", "taken_us", "simulated", "pool")
# `reason` is the recommender's, of this slice alone; what the enforcer and people said of it may tell of its neighbours.
_DECISION_HIDDEN = frozenset({"sequence", "input_hash", "signature", "state_reason", "outcome_reason", "decided_by"})


@dataclass(frozen=True)
class Scope:
    """What of a kind of records a caller sees: rows with `tenant` (None: all rows), without the `hidden` columns."""

    tenant: str | None
    hidden: Collection[str]


def usage_scope(caller: Caller, kind: RecordKind) -> Scope:
    """Raises Forbidden for a kind that is no tenant's."""
    if caller.role is not Role.TENANT:
        return Scope(None, ())
    if kind not in _HIDDEN:
        raise Forbidden(f"kind is {kind.value!r}, expected one of {', '.join(_HIDDEN)}: a device's records are no tenant's")
    return Scope(_tenant(caller), _HIDDEN[kind])


def snapshots_for(caller: Caller, snapshots: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Snapshots as plain objects, of which a tenant gets the nodes where it has a slice or a process."""
    if caller.role is not Role.TENANT:
        return list(snapshots)
    tenant, found = _tenant(caller), []
    for node in snapshots:
        slices = [part for part in node["slices"] if part["tenant"] == tenant]
        processes = [part for part in node["processes"] if part.get("tenant") == tenant]
        if not slices and not processes:
            continue
        own = {part["device_uuid"] for part in (*slices, *processes)}
        devices = [{name: part[name] for name in _DEVICE} for part in node["devices"] if part["uuid"] in own]
        found.append(
            {
                **{name: node[name] for name in _NODE if name in node},
                "devices": devices,
                "slices": slices,
                "processes": processes,
                "sources": [],
            }
        )
    return found


def decisions_for(caller: Caller, root: Path, booked: Sequence[Booked]) -> list[Booked]:
    """The decisions that a caller may see, by what the store says whose allocations are; waits for the store."""
    if caller.role is not Role.TENANT:
        return list(booked)
    ids = sorted({entry.decision.allocation_id for entry in booked})
    if not ids:
        return []
    # An allocation that two tenants are said to have had is neither's to see.
    sql = f"""SELECT node, allocation_id FROM slice_days WHERE allocation_id IN ({", ".join("?" * len(ids))})
    GROUP BY node, allocation_id HAVING MIN(tenant) = ? AND MAX(tenant) = ?"""
    tenant = _tenant(caller)
    own = {(row["node"], row["allocation_id"]) for row in query(root, sql, [*ids, tenant, tenant]).to_pylist()}
    return [entry for entry in booked if (entry.decision.node, entry.decision.allocation_id) in own]


def decision_fields(caller: Caller, plain: Mapping[str, Any]) -> dict[str, Any]:
    """A decision's fields that a caller sees."""
    hidden = _DECISION_HIDDEN if caller.role is Role.TENANT else frozenset()
    return {name: value for name, value in plain.items() if name not in hidden}


def report_tenant(caller: Caller) -> str | None:
    """The tenant that a report is for, which tells nothing of others then; None for callers who may see all of it."""
    return _tenant(caller) if caller.role is Role.TENANT else None


def _tenant(caller: Caller) -> str:
    if caller.tenant is None:
        raise Forbidden(f"the token of {caller.name} names no tenant, expected one that does")
    return caller.tenant
