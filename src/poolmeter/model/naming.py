"""Text that others chose (command names, cgroup paths, labels), made safe to show: escaped where it could fool a reader, cut and marked where it is long."""

import hashlib

LIMIT = 128  # characters; the longest name Kubernetes allows has 253, and a page of 10,000 series should not carry it
_CUT = "…"


def printable(value: str | bytes, limit: int = LIMIT) -> str:
    r"""`value` in at most `limit` characters, all of them visible.

    Bytes that are no UTF-8 come out as `\xNN`, characters that do not show as `\xNN` or `\uNNNN`. What is too long is cut and ends in
    `…` and eight hexadecimal digits of its SHA-256, so that two long names do not become one.
    """
    # Only so much is looked at: a name may have megabytes.
    head = value[: 4 * limit + 4]
    text = head.decode("utf-8", "backslashreplace") if isinstance(head, bytes) else head
    if not text.isprintable():
        # Control, format (what turns the writing direction is among them), surrogate, private, unassigned, separators but the space.
        text = "".join(character if character.isprintable() else _escape(character) for character in text)
    if len(text) <= limit and len(head) == len(value):
        return text
    whole = value if isinstance(value, bytes) else value.encode("utf-8", "backslashreplace")
    mark = f"{_CUT}{hashlib.sha256(whole).hexdigest()[:8]}"
    return text[: limit - len(mark)] + mark


def _escape(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
