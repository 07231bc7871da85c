"""Units: whole numbers inside, the unit in the name, text only at the edge."""

import re
from decimal import Context, Decimal

from poolmeter.errors import BadInput

MICROSECONDS = 1_000_000  # in a second
MINUTE_US = 60 * MICROSECONDS
HOUR_US = 3600 * MICROSECONDS
DAY_US = 24 * HOUR_US
GIB = 1 << 30
EXACT = Context(prec=60)  # products of prices, amounts and microseconds lose no digit in it
FULL_SHARE_PPM = 1_000_000  # a whole card's device time, in parts per million

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([KMGTP])(?:i?B)?|B)?\s*$", re.IGNORECASE)
_POWER = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50}


def parse_size(text: str, what: str = "size") -> int:
    """Bytes of `512M`, `40GiB`, `1.5G`, `4096`; units are binary (1G = 1 GiB). Raises BadInput."""
    match = _SIZE.match(text)
    if match is None:
        raise BadInput(f"{what} is {text!r}, expected a number of bytes such as 512M, 40GiB or 4096")
    number, unit = match.groups()
    exact = Decimal(number) * (1 << _POWER[unit.upper()] if unit else 1)
    if exact != exact.to_integral_value():
        raise BadInput(f"{what} is {text!r}, expected a whole number of bytes")
    return int(exact)


def format_size(size: int) -> str:
    """`40.0 GiB` for people; never parsed back."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_percent(text: str, what: str = "share") -> int:
    """Parts per million of a percentage in (0, 100], exact to 0.0001 %. Raises BadInput."""
    stripped = text.strip().removesuffix("%").strip()
    if not re.fullmatch(r"\d+(\.\d+)?", stripped):
        raise BadInput(f"{what} is {text!r}, expected a percentage above 0 and at most 100")
    ppm = Decimal(stripped) * 10_000
    if ppm != ppm.to_integral_value() or not 0 < ppm <= FULL_SHARE_PPM:
        raise BadInput(f"{what} is {text!r}, expected a percentage above 0 and at most 100, with at most 4 decimals")
    return int(ppm)


def split_exactly(total: int, weights: list[int]) -> list[int]:
    """Parts of `total` in proportion to `weights`, summing to it exactly: largest remainder, ties to the earlier weight.

    All weights zero: every part is zero, and the caller keeps `total` visible elsewhere. Negative numbers raise ValueError.
    """
    if total < 0 or any(weight < 0 for weight in weights):
        raise ValueError("split_exactly takes no negative numbers")
    scale = sum(weights)
    if scale == 0:
        return [0] * len(weights)
    parts = [total * weight // scale for weight in weights]
    rests = [total * weight % scale for weight in weights]
    for index in sorted(range(len(weights)), key=lambda i: (-rests[i], i))[: total - sum(parts)]:
        parts[index] += 1
    return parts
