"""The rule `memory-limit`: a slice whose memory limit is far above its peak gets a lower one. Pure, and replayable bit by bit.

It only ever lowers. It says nothing about a slice of which something it needs is unknown, that was refused memory, whose records are
too few or too incomplete, or whose page was tampered with.
"""

import hashlib
from dataclasses import dataclass

from poolmeter.model.allocation import SliceState
from poolmeter.model.decision import Decision
from poolmeter.model.plain import canonical_json
from poolmeter.model.units import HOUR_US, MICROSECONDS, format_size

RULE = "memory-limit"
GRANULE_BYTES = 64 << 20
MINIMUM_COMPLETENESS_PPM = 900_000
NEWEST_US = 300 * MICROSECONDS  # a snapshot older than this says nothing about now
_LIVE = frozenset({SliceState.HELD.value, SliceState.ACTIVE.value, SliceState.ALLOCATED.value})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How far above its peak a limit may stand; percentages as in the section `recommend` of the configuration."""

    headroom_percent: int
    resident_percent: int
    dead_band_percent: int
    minimum_minutes: int
    expires_hours: int


@dataclass(frozen=True, kw_only=True)
class SliceEvidence:
    """What is known of a live slice: its grant now, and its records over the window. None: unknown.

    `minutes` counts its minute records, `unknown_minutes` those of unknown state; `peak_bytes` is the highest of all of them and of
    the last snapshot, taken at `taken_us`; `completeness_ppm` is weighted by span, None without records.
    """

    node: str
    allocation_id: str
    device_uuid: str
    tenant: str
    generation: int
    state: str
    taken_us: int
    limit_bytes: int | None
    resident_bytes: int | None
    peak_bytes: int | None
    denied_allocations: int | None
    minutes: int
    unknown_minutes: int
    completeness_ppm: int | None
    tampered: bool


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything a run of the rule looks at besides its settings."""

    now_us: int
    window_start_us: int
    slices: tuple[SliceEvidence, ...]


def target_bytes(evidence: SliceEvidence, settings: Settings) -> int | None:
    """The limit the slice should have: peak and resident memory with their headroom, rounded up to 64 MiB; None when unknown."""
    if not evidence.peak_bytes or evidence.resident_bytes is None:
        return None
    wanted = max(
        _with_margin(evidence.peak_bytes, settings.headroom_percent), _with_margin(evidence.resident_bytes, settings.resident_percent)
    )
    return -(-wanted // GRANULE_BYTES) * GRANULE_BYTES


def obstacle(evidence: SliceEvidence, now_us: int, settings: Settings) -> str | None:
    """Why nothing is proposed for a slice, in words; None when its evidence allows a proposal."""
    if evidence.state not in _LIVE:
        return f"state is {evidence.state}"
    if now_us - evidence.taken_us > NEWEST_US:
        return f"its newest snapshot is {(now_us - evidence.taken_us) // MICROSECONDS} s old, expected at most {NEWEST_US // MICROSECONDS}"
    if evidence.limit_bytes is None:
        return "no memory limit is in force"
    if evidence.tampered:
        return "its page was tampered with"
    if evidence.unknown_minutes:
        return f"{evidence.unknown_minutes} of its minutes are unknown"
    if evidence.minutes < settings.minimum_minutes:
        return f"{evidence.minutes} minutes are recorded, expected {settings.minimum_minutes}"
    if evidence.completeness_ppm is not None and evidence.completeness_ppm < MINIMUM_COMPLETENESS_PPM:
        return f"completeness is {evidence.completeness_ppm} ppm, expected {MINIMUM_COMPLETENESS_PPM}"
    if evidence.denied_allocations is None:
        return "refused allocations are unknown"
    if evidence.denied_allocations:
        return f"{evidence.denied_allocations} allocations were refused"
    target = target_bytes(evidence, settings)
    if target is None:
        return "its peak or its resident memory is unknown, or it has used none yet"
    if target * 100 >= evidence.limit_bytes * (100 - settings.dead_band_percent):
        return f"the limit {format_size(evidence.limit_bytes)} is within the dead band of {format_size(target)}"
    return None


def propose(inputs: Inputs, settings: Settings) -> list[Decision]:
    """The decisions, at most one per allocation (the next must wait for the grant's new generation): the one that frees most.

    Ordered by node, allocation; `sequence` is 0, given by the books. The same inputs give the same decisions, ids and hashes
    included, in whatever order the slices come.
    """
    best: dict[tuple[str, str], Decision] = {}
    for evidence in sorted(inputs.slices, key=lambda part: (part.node, part.allocation_id, part.device_uuid)):
        if obstacle(evidence, inputs.now_us, settings) is not None:
            continue
        decision = _decision(evidence, inputs, settings)
        key = (evidence.node, evidence.allocation_id)
        if key not in best or _freed(decision) > _freed(best[key]):
            best[key] = decision
    return list(best.values())


def input_hash(evidence: SliceEvidence, inputs: Inputs, settings: Settings) -> str:
    """SHA-256 of the canonical JSON of everything the decision for one slice follows from."""
    whole = {
        "rule": RULE,
        "now_us": inputs.now_us,
        "window_start_us": inputs.window_start_us,
        "settings": settings,
        "slice": evidence,
    }
    return hashlib.sha256(canonical_json(whole).encode()).hexdigest()


def _decision(evidence: SliceEvidence, inputs: Inputs, settings: Settings) -> Decision:
    target, limit, peak = target_bytes(evidence, settings), evidence.limit_bytes, evidence.peak_bytes
    assert target is not None and limit is not None and peak is not None
    digest = input_hash(evidence, inputs, settings)
    name = f"{digest}/{evidence.node}/{evidence.allocation_id}/{evidence.device_uuid}/{evidence.generation}"
    return Decision(
        id=f"d-{hashlib.sha256(name.encode()).hexdigest()[:16]}",
        node=evidence.node,
        allocation_id=evidence.allocation_id,
        device_uuid=evidence.device_uuid,
        generation=evidence.generation,
        sequence=0,
        created_us=inputs.now_us,
        expires_us=inputs.now_us + settings.expires_hours * HOUR_US,
        rule=RULE,
        reason=f"memory peak {format_size(peak)} {_over(evidence.minutes)} under a limit of {format_size(limit)}",
        input_hash=digest,
        memory_bytes=target,
        memory_before_bytes=limit,
    )


def _over(minutes: int) -> str:
    return "so far" if minutes == 0 else "in 1 minute" if minutes == 1 else f"in {minutes} minutes"


def _freed(decision: Decision) -> int:
    assert decision.memory_bytes is not None and decision.memory_before_bytes is not None
    return decision.memory_before_bytes - decision.memory_bytes


def _with_margin(size: int, percent: int) -> int:
    return -(-size * (100 + percent) // 100)
