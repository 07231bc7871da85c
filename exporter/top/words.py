"""Values as short text: sizes, shares, durations, bars and trends. Unknown is `?`, what does not apply is empty; never 0 for either.

Names come from programs and tenants: `clean` takes out whatever could move the cursor or turn the text around.
"""

import unicodedata
from collections.abc import Sequence

from poolmeter.model.units import FULL_SHARE_PPM, MICROSECONDS

UNKNOWN = "?"
_EIGHTHS = "▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def clean(text: str) -> str:
    """The text with control, format and unassigned characters as `·`, so that it stays on its line and in its cell."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("·" if unicodedata.category(char)[0] == "C" or char in "\u2028\u2029" else char for char in text)


def width_of(text: str) -> int:
    """Columns of a terminal that the text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, width: int) -> str:
    """At most `width` columns of the text, an ellipsis where something is missing."""
    if width_of(text) <= width:
        return text
    if width <= 0:
        return ""
    kept, used = "", 0
    for char in text:
        used += _columns(char)
        if used > width - 1:
            break
        kept += char
    return kept + "…"


def fitted(text: str, width: int, right: bool = False) -> str:
    """The text in exactly `width` columns."""
    text = cut(text, width)
    space = " " * (width - width_of(text))
    return space + text if right else text + space


def percent(ppm: int | None) -> str:
    """`48%`; a use below half a percent that is not nothing is `<1%`."""
    if ppm is None:
        return UNKNOWN
    if 0 < ppm < 5_000:
        return "<1%"
    return f"{(ppm + 5_000) // 10_000}%"


def cards(ppm: int | None) -> str:
    """A sum of shares over cards: `1.25` cards."""
    return UNKNOWN if ppm is None else f"{ppm / FULL_SHARE_PPM:.2f}"


def size(value: int | None) -> str:
    """`41.2G`, `640M`, at most five columns; binary units."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    number = float(value)
    for unit in ("B", "K", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if number < 99.95 and unit in "GT" else f"{number:.0f}{unit}"
        number /= 1024
    return f"{number:.0f}P"


def duration(us: int | None) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`."""
    if us is None:
        return UNKNOWN
    seconds = max(0, us) // MICROSECONDS
    if seconds < 10:
        return f"{max(0, us) / MICROSECONDS:.1f}s"
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"


def bar(part: int | None, whole: int | None, width: int) -> tuple[str, str]:
    """The full and the empty part of a bar of `width` columns; of a value that is not known both are blank."""
    if part is None or not whole or width <= 0:
        return "", " " * max(0, width)
    eighths = min(width * 8, max(0, round(part * width * 8 / whole)))
    if part > 0 and eighths == 0:
        eighths = 1
    full = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")
    return full, "·" * (width - len(full))


def trend(values: Sequence[int | None], width: int) -> str:
    """The last `width` values (0 to 1,000,000) as a sparkline; a moment that is not known is blank."""
    shown = list(values)[-width:] if width > 0 else []
    marks = [" " if value is None else _LEVELS[min(7, max(0, value) * 8 // FULL_SHARE_PPM)] for value in shown]
    return "".join(marks).rjust(max(0, width))
