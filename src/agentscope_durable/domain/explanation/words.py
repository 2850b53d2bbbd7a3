"""How an explanation counts, lists and measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["NAMED_MAX", "ago", "count", "lasting", "named"]

NAMED_MAX: Final = 5
"""Things a sentence names before it only counts them."""


def named(names: Iterable[str]) -> str:
    given = list(names)
    more = len(given) - NAMED_MAX
    return "; ".join(given[:NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")


def count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def lasting(milliseconds: int) -> str:
    seconds = max(0, milliseconds) // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def ago(milliseconds: int) -> str:
    return f"{lasting(milliseconds)} ago"
