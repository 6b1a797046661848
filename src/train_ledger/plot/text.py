"""Small words for figures and tables."""

from __future__ import annotations


def shorten(text: str, limit: int) -> str:
    """`text`, cut in its middle if it is longer than `limit`; control characters become blanks."""
    text = "".join(c if c.isprintable() else " " for c in text)
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def plural(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `8 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
