"""A decision to write into books."""

from dataclasses import replace

from poolmeter.model.decision import Decision

NOW = 1_800_000_000_000_000
HOUR = 3_600_000_000


def decision(number: int = 1, node: str = "n1", **changes: object) -> Decision:
    """Decision `d<number>`, proposed, without a sequence, for an hour."""
    plain = Decision(
        id=f"d{number}", node=node, allocation_id="a1", device_uuid="GPU-1", generation=3, sequence=0, created_us=NOW, expires_us=NOW + HOUR,
        rule="memory-peak", reason="limit far above peak", input_hash="ab" * 32, memory_bytes=1 << 30, memory_before_bytes=1 << 33,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]
