"""The parts of a pool's cost that are nobody's, the line each stands on, and the ways to share them among tenants.

docs/decisions/rating-parts.md says how time falls into parts, docs/decisions/shared-cost.md how they are shared.
"""

OVERHEAD_PARTS = ("reserved", "suspended", "down", "switching", "unattributed")
PARTS = ("idle", "unallocated", *OVERHEAD_PARTS)
OWN = "own"  # the part of what is a tenant's by itself
LINE_OF: dict[str, str] = {part: "overhead" if part in OVERHEAD_PARTS else part for part in PARTS}
OWN_LINE = "own-line"
METHODS = ("even", "by-allocation", "by-use")
