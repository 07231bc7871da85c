"""The commands of the recommender: recommend, approve, reject, apply, history."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poolmeter.clock import SystemClock
from poolmeter.config import load_config
from poolmeter.errors import BadInput, Refused, Unavailable
from poolmeter.model.decision import DecisionState
from poolmeter.period import rfc3339
from poolmeter.places import CollectorData, data_folder
from poolmeter.report import Report, write

if TYPE_CHECKING:
    from poolmeter.accounting.recommend.decision_store import DecisionStore
    from poolmeter.books.writer import Booked

COLUMNS = (
    "id",
    "state",
    "node",
    "allocation",
    "device",
    "rule",
    "memory_before_bytes",
    "memory_bytes",
    "compute_before_ppm",
    "compute_ppm",
    "reason",
    "generation",
    "sequence",
    "created",
    "expires",
    "decided_by",
    "decided",
    "state_reason",
    "outcome",
    "outcome_reason",
    "outcome_at",
    "input_hash",
)
_OPEN = (DecisionState.PROPOSED, DecisionState.APPROVED)
_POLL_S = 0.2


def row_of(entry: "Booked") -> dict[str, object]:
    """A decision as a row of `COLUMNS`; what is not there yet is left out."""
    decision = entry.decision
    row = {
        "id": decision.id,
        "state": decision.state.value,
        "node": decision.node,
        "allocation": decision.allocation_id,
        "device": decision.device_uuid,
        "rule": decision.rule,
        "memory_before_bytes": decision.memory_before_bytes,
        "memory_bytes": decision.memory_bytes,
        "compute_before_ppm": decision.compute_before_ppm,
        "compute_ppm": decision.compute_ppm,
        "reason": decision.reason,
        "generation": decision.generation,
        "sequence": decision.sequence,
        "created": rfc3339(decision.created_us),
        "expires": rfc3339(decision.expires_us),
        "decided_by": entry.decided_by,
        "decided": None if entry.decided_at_us is None else rfc3339(entry.decided_at_us),
        "state_reason": entry.state_reason,
        "outcome": entry.outcome,
        "outcome_reason": entry.outcome_reason,
        "outcome_at": None if entry.outcome_at_us is None else rfc3339(entry.outcome_at_us),
        "input_hash": decision.input_hash,
    }
    return {name: value for name, value in row.items() if value is not None}


def report_of(name: str, entries: "Sequence[Booked]", warnings: tuple[str, ...] = ()) -> Report:
    """Decisions as a report."""
    return Report(name, COLUMNS, tuple(row_of(entry) for entry in entries), totals={"decisions": len(entries)}, warnings=warnings)


class Recommend:
    """Propose resizing decisions from the usage kept so far, and enter them in the books.

    One rule: memory-limit, for a slice whose memory limit is far above its peak. The same evidence proposes nothing twice; a newer
    proposal for an allocation replaces its open one. Prints the decisions that stand.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--minimum-minutes", type=int, metavar="N", help="minute records that a slice needs (recommend.minimum_minutes)"
        )
        parser.add_argument("--why", action="store_true", help="say on stderr why nothing is proposed for the other slices")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.recommend.decision_store import open_store
        from poolmeter.accounting.recommend.evidence import read_inputs, settings_of
        from poolmeter.accounting.recommend.memory_limit import obstacle, propose
        from poolmeter.accounting.recommend.proposals import enter

        if args.minimum_minutes is not None and args.minimum_minutes < 0:
            raise BadInput(f"--minimum-minutes is {args.minimum_minutes}, expected 0 or more")
        config, data, now_us = load_config(args.config), data_folder(args.data), SystemClock().wall_us()
        settings = settings_of(config.recommend, args.minimum_minutes)
        inputs = read_inputs(CollectorData(data).store, config.recommend.memory_window_days, now_us)
        proposals = propose(inputs, settings)
        if args.why:
            for evidence in inputs.slices:
                reason = obstacle(evidence, now_us, settings)
                if reason is not None:
                    sys.stderr.write(f"{evidence.node} {evidence.allocation_id} {evidence.device_uuid}: {reason}\n")
        with open_store(data, config.collector) as store:
            entered = enter(store, proposals, now_us)
        warnings = (f"superseded {', '.join(entered.superseded)}",) if entered.superseded else ()
        write(report_of("recommend", entered.standing, warnings), args.format, args.output)
        return 0


class Approve:
    """Approve a proposed decision; the node's enforcer fetches it and carries it out."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="a decision of poolmeter history")

    def run(self, args: argparse.Namespace) -> int:
        return _move(args, "approve", DecisionState.APPROVED, None)


class Reject:
    """Reject a proposed decision; the same is not proposed again before it would have expired."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="a decision of poolmeter history")
        parser.add_argument("--reason", required=True, help="why, for the history")

    def run(self, args: argparse.Namespace) -> int:
        if not args.reason.strip():
            raise BadInput("--reason is empty, expected why the decision is rejected")
        return _move(args, "reject", DecisionState.REJECTED, args.reason)


def _move(args: argparse.Namespace, name: str, state: DecisionState, reason: str | None) -> int:
    from poolmeter.accounting.recommend.decision_store import open_store
    from poolmeter.books.commands import user_name

    with open_store(data_folder(args.data), load_config(args.config).collector) as store:
        entry = store.move(args.id, state, user_name(), reason)
    write(report_of(name, [entry]), args.format, args.output)
    return 0


class Apply:
    """Approve decisions and wait until their enforcers have said what became of them.

    Exits 0 when all are applied; 1 when one was refused, has expired, or has no outcome in time; 3 when no collector serves the
    books, because no enforcer sees them then.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("id", metavar="ID", nargs="?", help="a decision of poolmeter history")
        group.add_argument("--all", action="store_true", help="every decision that is proposed or approved")
        parser.add_argument("--dry-run", action="store_true", help="print what would be applied, and change nothing")
        parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="seconds to wait for the outcomes (30; 0: do not wait)")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.recommend.decision_store import open_store

        if not 0 <= args.wait <= 86_400:
            raise BadInput(f"--wait is {args.wait:g}, expected 0 to 86400 seconds")
        now_us = SystemClock().wall_us()
        with open_store(data_folder(args.data), load_config(args.config).collector) as store:
            if args.all:
                chosen = [entry for entry in store.list() if entry.decision.state in _OPEN and entry.decision.expires_us > now_us]
            else:
                chosen = [store.get(args.id)]
                if chosen[0].decision.state not in _OPEN:
                    raise Refused(f"decision {args.id} is {chosen[0].decision.state.value}, expected one that is proposed or approved")
            if args.dry_run:
                write(report_of("apply", chosen, ("dry run: nothing was changed",)), args.format, args.output)
                return 0
            refusals = self._approve(store, chosen)
            entries = self._wait(store, [entry.decision.id for entry in chosen], args.wait if store.served else 0.0)
            served = store.served
        waiting = [entry.decision.id for entry in entries if entry.decision.state is DecisionState.APPROVED]
        warnings = list(refusals)
        if waiting and args.wait and served:
            warnings.append(f"no outcome after {args.wait:g} s: {', '.join(waiting)}")
        write(report_of("apply", entries, tuple(warnings)), args.format, args.output)
        if waiting and not served:
            raise Unavailable(
                f"decision {waiting[0]} is approved, and no collector serves {data_folder(args.data)}, expected one for its enforcer to ask"
            )
        bad = [entry for entry in entries if entry.decision.state not in (DecisionState.APPLIED, DecisionState.APPROVED)]
        return 1 if bad or refusals or (waiting and args.wait) else 0

    def _approve(self, store: "DecisionStore", entries: "Sequence[Booked]") -> list[str]:
        """Approve what is proposed; the refusals, in words. One that is refused does not keep the others waiting."""
        from poolmeter.books.commands import user_name

        refusals = []
        for entry in entries:
            if entry.decision.state is DecisionState.PROPOSED:
                try:
                    store.move(entry.decision.id, DecisionState.APPROVED, user_name())
                except Refused as error:
                    refusals.append(str(error))
        return refusals

    def _wait(self, store: "DecisionStore", ids: list[str], seconds: float) -> "list[Booked]":
        deadline = time.monotonic() + seconds
        while True:
            entries = [store.get(decision_id) for decision_id in ids]
            if time.monotonic() >= deadline or all(entry.decision.state is not DecisionState.APPROVED for entry in entries):
                return entries
            time.sleep(_POLL_S)


class History:
    """What became of each decision: who decided, what the enforcer did with it, and why; by node, oldest first."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--state", choices=[state.value for state in DecisionState], help="only decisions in this state")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.recommend.decision_store import open_store

        with open_store(data_folder(args.data), load_config(args.config).collector) as store:
            entries = [entry for entry in store.list() if args.state in (None, entry.decision.state.value)]
        write(report_of("history", entries), args.format, args.output)
        return 0
